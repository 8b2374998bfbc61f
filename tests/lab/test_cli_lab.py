"""The command line of the laboratory: what it writes, and its one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
from command_help import assert_light
from model_folders import save_model

from specdec_lab.cli import arguments, main
from specdec_lab.cli import lossless as command
from specdec_lab.lossless import loop, report
from specdec_lab.lossless.family import Job
from specdec_lab.lossless.models import first_tokens, load
from specdec_lab.lossless.procedures import PROCEDURES
from specdec_lab.lossless.texts import Texts
from specdec_lab.lossless.tradeoff import example, front


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_model(made / "target")
    save_model(made / "draft", layers=1, seed=1)
    return made


def test_lossless_passes_what_is_right_and_writes_json_and_page(tmp_path: Path) -> None:
    words = ["--experiments", "streams", "--method", "ratio", "--texts", "200", "--workers", "1"]
    paths = ["--json", str(tmp_path / "run.json"), "--page", str(tmp_path / "page.md")]
    assert main(["lossless", *words, *paths]) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert len(run["findings"]) == 17
    assert run["timings"]["streams"] > 0
    assert "| ratio | pass | 16 |" in (tmp_path / "page.md").read_text()


def test_lossless_decodes_with_edits_and_in_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TARGETS", {"Mamba 2": loop.TARGETS["Mamba 2"]})
    monkeypatch.setattr(loop, "DRAFTERS", {"suffixes": loop.DRAFTERS["suffixes"]})
    words = ["--experiments", "edits", "loop", "--method", "ratio", "--texts", "200", "--workers", "1"]
    paths = ["--json", str(tmp_path / "run.json"), "--page", str(tmp_path / "page.md")]
    assert main(["lossless", *words, *paths]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| ratio | pass | 10 |" in page
    assert "| suffixes (ratio) | pass | 1 |" in page


def test_methods_that_could_not_run_do_not_count_as_passed() -> None:
    texts = [
        Texts("mtp, match, greedy", 32, 1536, 0, 0, 1.7, drafts=900).row(),
        Texts("eagle", 0, 0, 0, 0, 0.0, 0.0, "no head").row(),
    ]
    nothing: dict[str, list[str]] = {name: [] for name in ("findings", "faults", "front", "win_rates")}
    run = {**nothing, "texts": texts, "batch": {}, "seconds": 1.0}
    assert report.summary(run) == "1 experiments, 0 draws: 0 failed, 1 left out; 1 s"
    assert report.succeeded(run)


def test_a_method_that_drafts_nothing_fails() -> None:
    texts = Texts("suffixes, match, greedy", 32, 1536, 0, 0, 1.0)
    nothing: dict[str, list[str]] = {name: [] for name in ("findings", "faults", "front", "win_rates")}
    run = {**nothing, "texts": [texts.row()], "batch": {}, "seconds": 1.0}
    assert not report.succeeded(run)
    assert command.said(texts) == "FAIL  texts, suffixes, match, greedy: drafted nothing  0.0 s"
    assert "| suffixes, match, greedy, which drafted nothing | **fail** |" in "\n".join(report._texts(run["texts"]))  # type: ignore[arg-type]


def test_an_injected_fault_gives_exit_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lossless", "--inject", "target-residual", "--texts", "1000", "--workers", "1"]) == 1
    assert capsys.readouterr().out.strip().endswith("caught")
    assert main(["lossless", "--inject", "g7", "--workers", "1"]) == 1


def running(group: int) -> list[str]:
    """Commands of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name, rest = stat.read_text().rsplit(")", 1)
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(name)
    return found


def test_an_interrupt_ends_all_workers_at_once_and_prints_no_traceback() -> None:
    words = ["lossless", "--experiments", "streams", "--texts", "20000", "--workers", "2"]
    command = [sys.executable, "-m", "specdec_lab", *words]
    # A job in the background of a shell ignores SIGINT, and so would this command.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True, preexec_fn=heeds)
    try:
        assert run.stdout is not None and "/" in run.stdout.readline()  # the first of hundreds of jobs is done
        os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to the command and to its workers
        _, err = run.communicate(timeout=120)
        assert run.returncode == 130
        assert err == "\n"
        deadline = time.monotonic() + 10
        while running(run.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not running(run.pid)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--experiments", "first"], "holds no config.json"),
        (["--sampler", "no.such.module"], "must be a module that imports"),
        (["--method", "block, argmax"], "'block', 'match', 'ratio, argmax drafts'"),
        (["--inject", "nonsense"], "--inject: must be one of 'g"),
        (["--workers", "0"], "--workers: must be a whole number of at least 1, got '0'"),
        (["--samples", "-3"], "--samples: must be a whole number of at least 1, got '-3'"),
    ],
)
def test_mistakes_in_the_laboratory_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["lossless", "--target", str(tmp_path), *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [[], ["lossless"], ["theory"], ["plan"], ["train"], ["train", "target"], ["train", "texts"], ["train", "drafters"]],
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    assert_light("specdec_lab.cli", words)


@pytest.mark.slow  # three figures: five seconds
def test_figures_are_drawn_and_the_page_shows_them(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib (requirements/dev.txt)")
    parser = argparse.ArgumentParser()
    arguments.lossless(parser)
    args = parser.parse_args(["--method", "ratio"])
    pair = load(str(folder / "target"), str(folder / "draft"))
    plan = command.Plan(args, [], pair)
    ratio = replace(PROCEDURES[0], widths=(1,))
    table = first_tokens(pair, pair.prompts[0])
    plan.groups["first"] = [Job("first token", "prompt 1", ratio, table, {}, 300, 1)] * 4
    plan.groups["front"] = front(example(), 100)
    run = plan.result([job.run() for group in plan.groups.values() for job in group])
    run |= {"drawn": plan.draw(tmp_path), "seconds": 1.0}
    page = report.page(run, "figures")
    for name in ("first_tokens", "proof", "front"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert f"](figures/{name}.png)" in page
    assert "rejections.png" not in page


@pytest.mark.slow  # simulated texts, and figures: five seconds
def test_theory_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib (requirements/dev.txt)")
    words = ["--folder", str(tmp_path), "--texts", "20", "--draws", "1000", "--workers", "1"]
    assert main(["theory", "figures", *words, "--json", str(tmp_path / "numbers.json")]) == 0
    assert {path.stem for path in tmp_path.glob("*.png")} == {"rejections", "pareto"}
    assert len(json.loads((tmp_path / "numbers.json").read_text())["front"]) == 12
