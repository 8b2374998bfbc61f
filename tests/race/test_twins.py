"""The faults of `make race` fit the sources as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .cases import cases
from .twins import TWINS, Twin

SOURCES = Path(__file__).resolve().parents[2] / "csrc/cuda"


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_fault_has_one_place_and_a_switch(twin: Twin) -> None:
    assert (SOURCES / twin.file).read_text().count(twin.old) == 1
    assert re.search(r"\bTWIN\b", twin.new)


def test_every_fault_has_a_call() -> None:
    names = [name for name, _ in cases()]
    assert len(set(names)) == len(names)
    assert [twin.name for twin in TWINS if not any(name.startswith(twin.cases) for name in names)] == []
