"""Every example in docstrings, README, pages and the notebook runs, and the pages name everything that is public."""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import importlib.util
import json
import pkgutil
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import specdec_kernels
import specdec_kernels._op
import specdec_lab.cli
import specdec_loop.cli
import specdec_loop.heads
import specdec_loop.hf
from specdec_loop import drafters
from specdec_loop.drafters.base import CHAIN_RULES

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs/tour.ipynb"


def python_blocks(page: Path) -> list[str]:
    """The Python code blocks of a page, also those that are indented, each behind as many lines as in the page."""
    text = page.read_text()
    blocks = re.finditer(r"^( *)```python\n(.*?)^\1```", text, re.M | re.S)
    return ["\n" * text.count("\n", 0, block.start(2)) + textwrap.dedent(block[2]) for block in blocks]


PAGES = [
    str(p.relative_to(ROOT)) for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if python_blocks(p)
]
MODULES = [
    m.name
    for package in (specdec_kernels, specdec_loop, specdec_lab)
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


def repository_files(*suffixes: str) -> list[Path]:
    """Files that git tracks, with one of the suffixes."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("files are listed by git")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def run(blocks: list[str], page: str) -> None:
    """Run the blocks of a page in order, in one namespace."""
    names: dict[str, object] = {"__name__": "page"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # workers of pytest share the cores
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # they name the repository's models
    monkeypatch.setattr(specdec_kernels._op, "OPS", dict(specdec_kernels._op.OPS))  # adding-an-op.md declares one
    run(python_blocks(ROOT / page), page)


def test_python_stands_in_blocks_that_are_marked_python() -> None:
    """Others are not run."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for language, block in re.findall(r"^ *```(\S*)[^\n]*\n(.*?)^ *```$", page.read_text(), re.M | re.S):
            is_other = language not in ("python", "cpp") and re.search(
                r"^ *(import|from|def|class|assert) ", block, re.M
            )
            assert not is_other, f"{page.name}: {block}"


def test_the_notebook_runs_and_is_stored_without_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "docs")  # as myst-nb runs it
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    run(["".join(cell["source"]) for cell in cells], NOTEBOOK.name)


def test_command_lines_of_the_pages_are_valid() -> None:
    commands = {"specdec_loop": specdec_loop.cli.COMMANDS, "specdec_lab": specdec_lab.cli.COMMANDS}
    checked = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for package, line in re.findall(r"^python -m (specdec_loop|specdec_lab) ([^#\n]+)", page.read_text(), re.M):
            name, *arguments = shlex.split(line)
            parser = argparse.ArgumentParser(exit_on_error=False)
            commands[package][name].add_arguments(parser)
            with contextlib.suppress(SystemExit) if "--help" in arguments else contextlib.nullcontext():
                parser.parse_args(arguments)
            checked += 1
    assert checked >= 10


def test_the_api_reference_has_every_public_name() -> None:
    modules = {m.__name__: m for m in (specdec_kernels, specdec_loop, specdec_loop.heads, specdec_loop.hf)}
    documented, module = set(), ""
    for directive, name in re.findall(r"^\.\. (\w+):: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M):
        if directive == "currentmodule":
            module = name
        elif directive in ("autofunction", "autoclass", "autodata"):
            documented.add(name if name.startswith("specdec_") else f"{module}.{name}")
    for name in modules:
        public = {f"{name}.{public_name}" for public_name in modules[name].__all__}
        assert public <= documented, f"docs/api.md lacks {sorted(public - documented)}"


def test_references_to_pages_and_their_sections_exist() -> None:
    faults = []
    for path in repository_files(".py", ".cpp", ".cu", ".h", ".cuh", ".sh", ".yml", ""):
        text = re.sub(r"\n *(#|//)? *", " ", path.read_text())  # a reference may be broken over two lines
        for page, section in re.findall(r"docs/([\w-]+\.md)(?:, (?:section )?([A-Z][\w -]+))?", text):
            headings = [slug.lower() for slug in re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.M)]
            if section and not any(section.lower().startswith(heading) for heading in headings):
                faults.append(f"{path.relative_to(ROOT)} refers to docs/{page}, {section}")
    assert not faults, "\n".join(faults)


def test_the_pictures_are_drawn_by_their_script_and_shown(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/figures/draw.py")
    assert spec is not None and spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    draw.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs/pictures").iterdir()}
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert {name for name in drawn if f"(pictures/{name})" in pages} == drawn
    for name in drawn:  # a font of another version moves a few pixels
        fresh, kept = (plt.imread(folder / name) for folder in (tmp_path, ROOT / "docs/pictures"))
        assert fresh.shape == kept.shape and np.abs(fresh - kept).mean() < 0.01


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r"^([a-z-]+)$", (ROOT / "docs/index.md").read_text(), re.M))
    pages = {page.stem for page in (ROOT / "docs").glob("*.*") if page.suffix in (".md", ".ipynb")}
    assert listed == pages - {"index"}


def test_the_page_on_new_ops_lists_every_file_that_lists_the_ops() -> None:
    ops = {path.parent.name for path in (ROOT / "specdec_kernels/ops").glob("*/reference.py")}
    central, generated = set(), ("benchmarks.md", "gpu-model.md", "simulator.md")
    for path in repository_files(".py", ".md", ".h", ".cpp", ".cu", ".toml", ""):
        named = ops & set(re.findall(r"\w+", path.read_text()))
        if len(named) >= len(ops) - 2 and path.name not in generated:
            central.add(str(path.relative_to(ROOT)))
    table = (ROOT / "docs/adding-an-op.md").read_text().split("These files list every op")[1].split("\n\n")[1]
    assert central == {
        name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+\.\w+)`", row.split("|")[1])
    }


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
