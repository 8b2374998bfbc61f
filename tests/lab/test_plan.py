"""The plan: its numbers against brute force, and what it says when numbers are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_lab import plan
from specdec_lab.cli import main
from specdec_lab.plan import Measured, best_tree, improvements, levels, measured


@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("draft_time", [0.0, 0.001, 0.02])
def test_the_best_length_is_that_of_brute_force(acceptance: float, draft_time: float) -> None:
    now = Measured(acceptance, draft_time, 0.02, (acceptance,))
    speeds = [now.speed(n) for n in range(plan.LONGEST + 1)]
    assert now.speed(now.best()) == pytest.approx(max(speeds))


def test_speed_by_hand() -> None:
    assert Measured(0.8, 0.001, 0.01, ()).speed(4) == pytest.approx(3.3616 / 0.014)
    assert Measured(0.8, 0.001, 0.01, ()).speed(0) == pytest.approx(100)


def test_improvements_are_sorted_and_never_harm() -> None:
    now = Measured(0.7, 0.002, 0.02, (0.7,))
    found = improvements(now)
    assert [i.speed for i in found] == sorted((i.speed for i in found), reverse=True)
    assert all(i.speed >= now.speed(now.best()) for i in found)


def test_numbers_of_a_run() -> None:
    run = {
        "drafted": [4, 4, 2],
        "accepted": [4, 1, 0],
        "seconds": {"draft": 1.0, "target": 2.0, "verify": 0.6, "commit": 0.4},
    }
    found = measured(run)
    assert found.acceptance == pytest.approx(5 / 7)  # looked at: 4, 2, 1
    assert found.draft_time == pytest.approx(0.1)
    assert found.verify_time == pytest.approx(1.0)
    with pytest.raises(ValueError, match="must hold acceptance"):
        measured({"drafted": []})


def test_numbers_of_a_comparison() -> None:
    seconds = {"draft": 0.4, "target": 1.0, "verify": 0.1, "commit": 0.1}
    row = {"method": "medusa", "acceptance": 0.6, "acceptance_by_position": [0.7, 0.5],
           "acceptance_by_child": [0.4, 0.2], "seconds": seconds}  # fmt: skip
    run = {
        "rows": [{"method": "plain", "acceptance": None}, row, {**row, "method": "other", "acceptance_by_child": [0.9]}]
    }
    found = measured(run)
    assert found[:3] == pytest.approx((0.4, 0.2, 1.2))
    assert found.children == (0.4, 0.2)
    assert measured(run, "other").acceptance == 0.9
    with pytest.raises(ValueError, match="holds no method absent: it has medusa, other"):
        measured(run, "absent")


def test_the_best_tree_is_no_slower_than_the_best_chain() -> None:
    now = Measured(0.7, 0.002, 0.02, (0.7, 0.1, 0.05))
    tree = best_tree(now, 16)
    assert tree.speed >= now.speed(now.best())
    assert tree.speed == pytest.approx(tree.tokens / ((len(levels(tree.parents)) - 1) * 0.002 + 0.02))
    chain = best_tree(now._replace(children=(0.7,)), 16)  # a single child: a chain of the best length
    assert len(levels(chain.parents)) - 1 == now.best()
    assert chain.speed == pytest.approx(now.speed(now.best()))
    assert best_tree(now._replace(children=(0.0,)), 4)[1:] == (1.0, pytest.approx(50))


def test_the_command_reports_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib (requirements/dev.txt)")
    words = ["plan", "--acceptance", ".7", "--draft-ms", "2", "--verify-ms", "20", "--nodes", "8", "--children", ".7"]
    words += [".1", "--figure"]
    assert main([*words, str(tmp_path / "plan.png")]) == 0
    said = capsys.readouterr().out
    assert "4        2.773      99.0    1.981x  best" in said
    assert "best static tree of at most 8 nodes, children accepted 0.700, 0.100: levels [1, 2, 3, 2]" in said
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_command_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"draft": 1.0, "target": 2.0, "verify": 0.0, "commit": 0.0}
    (tmp_path / "run.json").write_text(json.dumps({"drafted": [1, 1], "accepted": [0, 0], "seconds": seconds}))
    assert main(["plan", "--run", str(tmp_path / "run.json")]) == 0
    assert "no draft pays" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give --run, or all of --acceptance, --draft-ms and --verify-ms"),
        ("--acceptance 2 --draft-ms 1 --verify-ms 1", "--acceptance: must be a number in [0, 1], got '2'"),
        ("--run no-such-file.json", "--run: there is no file no-such-file.json"),
        ("--run broken.json", "--run: broken.json is no JSON"),
        ("--run empty.json", "--run must hold acceptance and seconds"),
        ("--acceptance .5 --draft-ms 1 --verify-ms 1 --children 2", "--children: must be a number in [0, 1], got '2'"),
    ],
)
def test_missing_numbers_are_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("empty.json").write_text("{}")
    assert main(["plan", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
