"""Every example in a docstring and in the README runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import specdec_kernels
import specdec_loop

ROOT = Path(__file__).parent.parent
MODULES = [
    m.name
    for package in (specdec_kernels, specdec_loop)
    for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if "triton" not in m.name.lower()
]


def test_docstring_examples_give_what_they_say() -> None:
    attempted = 0
    for name in MODULES:
        if name.rpartition(".")[2].startswith(("_cpu", "_cuda")):
            continue
        result = doctest.testmod(importlib.import_module(name))
        assert result.failed == 0, name
        attempted += result.attempted
    assert attempted >= 12


@pytest.mark.parametrize("page", ["README.md", "docs/trees.md"])
def test_python_blocks_run_in_order(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
