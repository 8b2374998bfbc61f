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
from specdec_loop import drafters
from specdec_loop.drafters.base import CHAIN_RULES

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


@pytest.mark.parametrize("page", ["README.md", "docs/trees.md", "docs/drafters.md"])
def test_python_blocks_run_in_order(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # they name the repository's models
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_every_drafter_is_on_its_page_with_its_rules() -> None:
    short = {"chains": CHAIN_RULES, "trees": ("match", "greedy", "typical", "target_only", "recursive")}
    page, told = (ROOT / "docs/drafters.md").read_text(), {}
    for name, rules in re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.M):
        words = re.findall(r"chains|trees|`\w+`", rules.partition(" but ")[0])
        some = {rule for word in words for rule in short.get(word, (word.strip("`"),))}
        told[name] = some - set(re.findall(r"`(\w+)`", rules.partition(" but ")[2]))
    classes = [getattr(drafters, name) for name in drafters.__all__]
    ours = {c.__name__: set(c.rules) for c in classes if issubclass(c, drafters.Drafter)}
    assert told == {name: rules for name, rules in ours.items() if name not in ("Drafter", "NoDrafter")}
