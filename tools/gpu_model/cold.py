"""Code of Triton kernels that a block of a long row does not run: it is not counted."""

from __future__ import annotations

import functools
from pathlib import Path

from . import cuda
from .count import Stream
from .sass import Graph, Instruction
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
def _text(line: str) -> str:
    """A source line of `_triton`, known by the name of its file and its number."""
    file, _, number = line.rpartition(":")
    path = cuda.ROOT / "specdec_kernels" / "_triton" / file
    return path.read_text().splitlines()[int(number) - 1] if path.exists() else ""


# A tile has a few dozen edits: those of 1000 tokens among 128256 ids. Programs of one warp take 32 at once.
ONE_TURN = "range(first, end, EDITS)"


def turns_once(one: Instruction) -> bool:
    """Whether it stands in a loop that turns once."""
    return any(line.startswith("rows.py:") and ONE_TURN in _text(line) for line in one.lines)


def digest_writes(stream: Stream, threads: int) -> Stream:
    """A turn of the digest's loop over tiles, in which a few threads write: the maximum of each 64 ids, two numbers."""
    return stream._replace(written=-(-(stream.read * threads // 64 + 8) // threads))


# Rows of a language model are settled by lists: none is bracketed, and none settled again (IDLE).
NEVER_RUN = {
    "settle_kernel": ("gather.py:",),
    "settle_again_kernel": ("gather.py:", "thresholds.py:", "visit.py:", "race.py:", "noise.py:"),
}


def cold_code(name: str, graph: Graph) -> set[int]:
    """Addresses of the blocks of a Triton kernel that a block of a long row does not run."""

    def is_cold_line(line: str) -> bool:
        return COLD in _text(line) if name == "digest_kernel" else line.startswith(NEVER_RUN.get(name, ("?",)))

    is_cold = [any(is_cold_line(line) for one in block.code for line in one.lines) for block in graph.blocks]
    return {one.address for block, cold in zip(graph.blocks, is_cold, strict=True) if cold for one in block.code}
