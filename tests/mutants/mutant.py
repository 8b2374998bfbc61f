"""A fault to inject, and where faults come from: a table of patches, and cosmic-ray's operators on Python modules."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

# One replacement a kind of operator: `+` by each other operator would be the same fault seven times.
OPERATORS = [
    f"core/{name}"
    for name in (
        "ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add", "ReplaceBinaryOperator_Mul_Div",
        "ReplaceBinaryOperator_Div_Mul", "ReplaceBinaryOperator_FloorDiv_Mul", "ReplaceBinaryOperator_Mod_Mul",
        "ReplaceBinaryOperator_BitAnd_BitOr", "ReplaceBinaryOperator_BitOr_BitAnd",
        "ReplaceBinaryOperator_RShift_LShift", "ReplaceBinaryOperator_LShift_RShift",
        "ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_LtE_Lt", "ReplaceComparisonOperator_Gt_GtE",
        "ReplaceComparisonOperator_GtE_Gt", "ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq",
        "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_Invert",
        "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "NumberReplacer",
        "ZeroIterationForLoop",
    )
]  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: unique, the same in every run over the same sources.
        path: the file, relative to the repository.
        text: the file with the fault.
        tests: arguments of pytest that must fail.
        build: whether the native CPU library must be built.
    """

    name: str
    path: str
    text: str
    tests: tuple[str, ...]
    build: bool = False


def patches(root: Path, table: list[dict[str, Any]]) -> Iterator[Mutant]:
    """Mutants of the table `patches.toml`: `old` stands once in the file and becomes `new`."""
    for entry in table:
        path = root / entry["path"]
        text = path.read_text()
        if text.count(entry["old"]) != 1:
            raise ValueError(
                f"{entry['name']}: {entry['path']} holds {entry['old']!r} {text.count(entry['old'])} times"
            )
        is_native = entry["path"].startswith(("csrc/cpu", "csrc/common", "csrc/torch"))
        faulty = text.replace(entry["old"], entry["new"])
        yield Mutant(entry["name"], entry["path"], faulty, tuple(entry["tests"]), is_native)


def sampled(root: Path, target: dict[str, Any]) -> Iterator[Mutant]:
    """`count` mutants of a Python module, drawn by a seed that depends on its path alone."""
    path = target["path"]
    source = (root / path).read_text()
    same = _meaning(source)
    draw = random.Random(path)
    found = []
    for name, occurrence in _places(source):
        text = mutate_code(source, get_operator(name)(), occurrence)
        if text is not None and text != source:
            found.append((name.removeprefix("core/"), occurrence, text))
    draw.shuffle(found)
    left = int(target["count"])
    for name, occurrence, text in found:
        if left and _meaning(text) != same:
            left -= 1
            yield Mutant(f"{path}:{_line(source, text)} {name}#{occurrence}", path, text, tuple(target["tests"]))


def _places(source: str) -> Iterator[tuple[str, int]]:
    """Every operator with each of its occurrences."""
    nodes = list(_walk(get_ast(source)))
    for name in OPERATORS:
        operator = get_operator(name)()
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        yield from ((name, occurrence) for occurrence in range(count))


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def _meaning(source: str) -> str:
    """The syntax tree without annotations and docstrings: what never runs is no place for a fault."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Name("_") if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(tree)


def _line(before: str, after: str) -> int:
    """Number of the first line that differs."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((i for i, (a, b) in enumerate(pairs, 1) if a != b), 0)
