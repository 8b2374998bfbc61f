"""The plan: its numbers against brute force, and what it says when numbers are missing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from specdec_loop import plan
from specdec_loop.plan import Measured, best_tree, improvements, levels, measured


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("draft_time", [0.0, 0.001, 0.02])
def test_the_best_length_is_that_of_brute_force(acceptance: float, draft_time: float) -> None:
    now = Measured(acceptance, draft_time, 0.02)
    speeds = [now.speed(n) for n in range(plan.LONGEST + 1)]
    assert now.speed(now.best()) == pytest.approx(max(speeds))


def test_speed_by_hand() -> None:
    assert Measured(0.8, 0.001, 0.01).speed(4) == pytest.approx(3.3616 / 0.014)
    assert Measured(0.8, 0.001, 0.01).speed(0) == pytest.approx(100)


def test_improvements_are_sorted_and_never_harm() -> None:
    now = Measured(0.7, 0.002, 0.02)
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
    row = {"method": "draft-model", "acceptance": 0.6, "acceptance_by_position": [0.7, 0.5], "seconds": seconds}
    run = {"rows": [{"method": "plain", "acceptance": None}, row, {**row, "method": "other", "acceptance": 0.9}]}
    assert measured(run) == pytest.approx((0.6, 0.2, 1.2))
    assert measured(run, "other").acceptance == 0.9
    with pytest.raises(ValueError, match="must hold acceptance"):
        measured(run, "absent")


def test_the_best_tree_is_no_slower_than_the_best_chain() -> None:
    now = Measured(0.7, 0.002, 0.02)
    parents, tokens, speed = best_tree([0.7, 0.1, 0.05], now, 16)
    assert speed >= now.speed(now.best())
    assert speed == pytest.approx(tokens / ((len(levels(parents)) - 1) * 0.002 + 0.02))
    chain, tokens, speed = best_tree([0.7], now, 16)  # a single child: a chain of the best length
    assert len(levels(chain)) - 1 == now.best()
    assert speed == pytest.approx(now.speed(now.best()))
    assert best_tree([0.0], now, 4)[1:] == (1.0, pytest.approx(50))


def test_the_command_reports_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib (requirements/bench.txt)")
    words = [
        "--acceptance",
        ".7",
        "--draft-ms",
        "2",
        "--verify-ms",
        "20",
        "--children",
        ".7",
        ".1",
        "--nodes",
        "8",
        "--figure",
    ]
    assert plan.run(arguments(*words, str(tmp_path / "plan.png"))) == 0
    said = capsys.readouterr().out
    assert "4        2.773      99.0    1.981x  best" in said
    assert "best static tree of 8 nodes" in said
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_command_reads_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"draft": 1.0, "target": 2.0, "verify": 0.0, "commit": 0.0}
    (tmp_path / "run.json").write_text(json.dumps({"drafted": [1, 1], "accepted": [0, 0], "seconds": seconds}))
    assert plan.run(arguments("--run", str(tmp_path / "run.json"))) == 0
    assert "no draft pays" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["", "--acceptance 2 --draft-ms 1 --verify-ms 1", "--run no-such-file.json"])
def test_missing_numbers_are_said_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(arguments(*words.split())) == 2
    assert capsys.readouterr().err.count("\n") == 1
