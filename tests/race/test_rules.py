"""What creates order between the threads of a kernel, and what does not: one small kernel for each rule."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from native.build import DETECTOR, MODES

HERE = Path(__file__).parent
SILENT = (
    "each thread stores its word",
    "each thread stores its byte",
    "a barrier lies between store and load",
    "shared memory is reused behind a barrier",
    "a warp barrier lies between store and load of a warp",
    "two warps meet at a barrier after their own",
    "blocks add to a word atomically",
    "ticket: stores, barrier, fence of one thread",
    "ticket: stores, fence of every thread, barrier",
    "ticket: every thread's fence after",
)
RACING = (
    "two threads store a word",
    "a byte of a wide load is stored",
    "no barrier lies between store and load",
    "shared memory is reused without a barrier",
    "a shuffle lies between store and load",
    "a warp barrier lies between store and load of two warps",
    "a thread that has left stored before a barrier of the others",
    "a block reads what another stored",
    "a block reads what others add to",
    "a structure is stored as a function returns it",
    "a structure is read as a function takes it",
    "ticket: stores, fence of one thread, barrier",
    "ticket: stores, fence, no barrier",
    "ticket: fence, stores, barrier",
    "ticket: no fence before",
    "ticket: no fence after",
)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled as the CUDA sources are for `make race`."""
    folder = tmp_path_factory.mktemp("race")
    compiler = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-Wno-attributes"]
    for name, flags in {"rules": MODES["race"].flags, "detector": DETECTOR}.items():
        include = f"-I{HERE.parent / 'native'}"
        made = [*compiler, *flags, include, "-c", str(HERE / f"{name}.cpp"), "-o", str(folder / f"{name}.o")]
        subprocess.run(made, check=True)
    subprocess.run([*compiler, folder / "rules.o", folder / "detector.o", "-o", folder / "rules"], check=True)
    return folder / "rules"


def said(rules: Path, *name: str) -> str:
    return subprocess.run([rules, *name], capture_output=True, text=True, check=True).stdout


def test_every_kernel_is_judged_here(rules: Path) -> None:
    assert sorted(said(rules).splitlines()) == sorted(SILENT + RACING)


@pytest.mark.parametrize("name", SILENT)
def test_no_race_is_reported_where_order_is(rules: Path, name: str) -> None:
    assert said(rules, name) == ""


@pytest.mark.parametrize("name", RACING)
def test_a_race_is_reported_with_both_lines(rules: Path, name: str) -> None:
    text = said(rules, name)
    assert text.startswith("data race in ")
    assert len(re.findall(r"of thread \d+, block \d+", text)) == 2
    assert len(re.findall(r"rules\.cpp:\d+", text)) >= 2, text
