"""The plan: its numbers against brute force, and what it says when numbers are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_lab import plan
from specdec_lab.cli import main
from specdec_lab.plan import Measured, best_tree, constant, improvements, levels, measured


@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("draft_time", [0.0, 0.001, 0.02])
def test_three_numbers_give_the_plan_of_the_theory(acceptance: float, draft_time: float) -> None:
    now = constant(acceptance, draft_time, 0.02)
    for n in range(plan.LONGEST + 1):
        tokens = sum(acceptance**k for k in range(n + 1))
        assert now.speed(n) == pytest.approx(tokens / (n * draft_time + 0.02))
    assert now.speed(now.best()) == max(map(now.speed, range(plan.LONGEST + 1)))


def test_speed_by_hand() -> None:
    now = constant(0.8, 0.001, 0.01)
    assert now.speed(4) == pytest.approx(3.3616 / 0.014)
    assert now.speed(0) == pytest.approx(100)
    # A third of the steps drafts one token only, and each further token makes verification longer.
    early = Measured((0.6, 0.3), (1.0, 2 / 3), 0.001, 0.01, 0.002, (0.6,), "")
    assert early.speed(1) == pytest.approx(1.6 / (0.001 + 0.012))
    assert early.speed(2) == pytest.approx(1.9 / (0.001 * 5 / 3 + 0.01 + 0.002 * 5 / 3))


def test_improvements_are_sorted_and_never_harm() -> None:
    now = constant(0.7, 0.002, 0.02)
    found = improvements(now)
    assert [i.speed for i in found] == sorted((i.speed for i in found), reverse=True)
    assert all(i.speed >= now.speed(now.best()) for i in found)
    fewer = constant(0.7, 0.002, 0.02).with_fewer_rejections()
    assert fewer.accepted == pytest.approx(constant(0.73, 0.002, 0.02).accepted)
    capped = Measured((0.9,), (0.9,), 0.001, 0.01, 0.0, (1.0,), "").with_fewer_rejections()
    assert capped.accepted == (0.9,)  # nothing more was drafted


SECONDS = {"draft": 0.4, "target": 1.0, "verify": 0.1, "commit": 0.1}
ROW = {"method": "medusa", "temperature": 0.0, "batch": 1, "acceptance": 0.6, "acceptance_by_child": [0.4, 0.2],
       "accepted_at_least": [0.6, 0.36], "drafted_at_least": [1.0, 1.0], "verified_per_step": 5.0,
       "seconds": SECONDS}  # fmt: skip
PLAIN = {"method": "plain", "temperature": 0.0, "batch": 1, "acceptance": None, "seconds": {**SECONDS, "target": 0.6}}


def test_numbers_of_a_comparison() -> None:
    other = {**ROW, "method": "other", "acceptance_by_child": [0.9], "accepted_at_least": [0.9, 0.5]}
    run = {"rows": [{**PLAIN, "temperature": 1.0}, ROW, PLAIN, other]}
    found = measured(run)
    # Of a chain, the first child alone is there to be accepted: two thirds of the accepted ones.
    assert found.accepted == pytest.approx((0.4, 0.16)) and found.drafted == (1.0, 1.0)
    # 0.8 s for 1 token, 1.2 s for 5.
    assert found[2:5] == pytest.approx((0.2, 0.8, 0.1))
    assert found.children == (0.4, 0.2)
    assert "800 ms for 1 token and 1.2e+03 ms for 5.0" in found.assumption
    assert measured(run, "other").accepted == (0.9, 0.5)
    assert measured({"rows": [ROW]}).token_time == 0.0
    with pytest.raises(ValueError, match="holds no method absent: it has medusa, other"):
        measured(run, "absent")
    old = {name: value for name, value in ROW.items() if name != "drafted_at_least"}
    with pytest.raises(ValueError, match="run compare --json again"):
        measured({"rows": [old]})
    with pytest.raises(ValueError, match="must hold what compare --json wrote"):
        measured({"drafted": []})


def test_a_plan_promises_no_more_than_the_run_measured() -> None:
    """Drafts that end early: with every acceptance near 1, the longest draft is still the run's."""
    row = {**ROW, "acceptance": 0.95, "acceptance_by_child": [0.95], "accepted_at_least": [0.8, 0.5, 0.3],
           "drafted_at_least": [0.9, 0.6, 0.4], "verified_per_step": 2.9}  # fmt: skip
    now = measured({"rows": [PLAIN, row]})
    assert now.longest == 3
    steps = 1.0 / (0.4 + 1.2)  # a second, as measured
    assert now.speed(3) == pytest.approx(2.6 * steps)
    assert max(now.speed(n) for n in range(now.longest + 1)) == now.speed(now.best())
    assert len(levels(best_tree(now, 32).parents)) - 1 <= 3


def test_the_best_tree_is_no_slower_than_the_best_chain() -> None:
    now = constant(0.7, 0.002, 0.02)._replace(children=(0.7, 0.1, 0.05))
    tree = best_tree(now, 17)
    assert tree.speed >= now.speed(now.best())
    assert tree.speed == pytest.approx(tree.tokens / ((len(levels(tree.parents)) - 1) * 0.002 + 0.02))
    chain = best_tree(now._replace(children=(0.7,)), 17)  # a single child: a chain of the best length
    assert len(levels(chain.parents)) - 1 == now.best()
    assert chain.speed == pytest.approx(now.speed(now.best()))
    assert best_tree(now._replace(children=(0.0,)), 4)[1:] == (1.0, pytest.approx(50))


def test_the_command_reports(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--acceptance", ".7", "--draft-ms", "2", "--verify-ms", "20", "--nodes", "8", "--children", ".7"]
    assert main([*words, ".1"]) == 0
    said = capsys.readouterr().out
    assert "4        2.773      99.0    1.981x  best" in said
    assert "assumption: acceptance and verification time are taken as constant" in said
    assert (
        "best static tree of at most 8 nodes, children accepted 0.700, 0.100 at every depth: levels [1, 2, 3, 2]"
        in said
    )


def test_the_command_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        **ROW,
        "acceptance": 0.0,
        "acceptance_by_child": [0.0],
        "accepted_at_least": [0.0],
        "drafted_at_least": [1.0],
    }
    (tmp_path / "run.json").write_text(json.dumps({"rows": [row]}))
    assert main(["plan", "--run", str(tmp_path / "run.json")]) == 0
    assert "no draft pays" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give --run, or all of --acceptance, --draft-ms and --verify-ms"),
        ("--acceptance 2 --draft-ms 1 --verify-ms 1", "--acceptance: must be a number in [0, 1], got '2'"),
        ("--run no-such-file.json", "--run: there is no file no-such-file.json"),
        ("--run broken.json", "--run: broken.json is no JSON"),
        ("--run binary.json", "--run: binary.json is no JSON"),
        ("--run empty.json", "--run must hold what compare --json wrote"),
        ("--acceptance .5 --draft-ms 1 --verify-ms 1 --children 2", "--children: must be a number in [0, 1], got '2'"),
    ],
)
def test_missing_numbers_are_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("binary.json").write_bytes(b"\xff")
    Path("empty.json").write_text("{}")
    assert main(["plan", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
