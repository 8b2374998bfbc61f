"""Code of Triton kernels that a block of a long row does not run: it is not counted."""

from __future__ import annotations

import functools
from pathlib import Path

from . import cuda
from .sass import Graph
from .triton_calls import COLD


@functools.cache
def version() -> str:
    """Of this file."""
    return cuda.digest([Path(__file__)])


@functools.cache
def cold_lines() -> list[str]:
    """Lines that are marked as cold: they are counted apart, and no translation knows them."""
    paths = sorted((cuda.ROOT / "specdec_kernels" / "_triton").glob("*.py"))
    return [line for path in paths for line in path.read_text().splitlines() if COLD in line]


@functools.cache
def _is_cold_line(line: str) -> bool:
    """Whether a source line, known by the name of its file, is not run by a block of a long row."""
    file, _, number = line.rpartition(":")
    path = cuda.ROOT / "specdec_kernels" / "_triton" / file
    return path.exists() and COLD in path.read_text().splitlines()[int(number) - 1]


# Rows of a language model are settled by lists: none is bracketed, and none settled again (IDLE).
NEVER_RUN = {
    "settle_kernel": ("gather.py:",),
    "settle_again_kernel": ("gather.py:", "thresholds.py:", "visit.py:", "race.py:", "noise.py:"),
}


def cold_code(name: str, graph: Graph) -> set[int]:
    """Addresses of the blocks of a Triton kernel that a block of a long row does not run."""

    def is_cold_line(line: str) -> bool:
        return _is_cold_line(line) if name == "digest_kernel" else line.startswith(NEVER_RUN.get(name, ("?",)))

    is_cold = [any(is_cold_line(line) for one in block.code for line in one.lines) for block in graph.blocks]
    return {one.address for block, cold in zip(graph.blocks, is_cold, strict=True) if cold for one in block.code}
