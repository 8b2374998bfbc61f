"""Suffix drafts: time to read a token and to draft, and memory. Prints the table of docs/drafters.md.

python -m bench.suffixes
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from specdec_kernels import SuffixIndex, draft_suffixes

from .machine import ROOT

LENGTH, STEP, STEPS = 8, 3, 200  # drafts; tokens that a request gets in a step; steps


def words(count: int) -> Tensor:
    """Words, blanks and signs of this repository's Python files, numbered."""
    text = "".join(path.read_text() for path in sorted((ROOT / "python").rglob("*.py")))
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|\s+|[^\w\s]", text)]
    return torch.tensor((ids * (1 + count // len(ids)))[:count])


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def measure(batch: int, tokens: int) -> tuple[float, ...]:
    """Microseconds a token of the prompts, and a step of the batch with and without new tokens; bytes a token."""
    ids = words(1 << 18)
    memory, running = SuffixIndex(), [SuffixIndex() for _ in range(batch)]
    memory.append(ids[-(1 << 17) :])
    at = [b * len(ids) // (2 * batch) for b in range(batch)]
    read = sum(
        microseconds(lambda index=index, i=i: index.append(ids[i : i + tokens]))  # type: ignore[misc]
        for index, i in zip(running, at, strict=True)
    )
    full, empty = [], []
    for step in range(STEPS):
        places = [i + tokens + STEP * step for i in at]
        new = torch.cat([ids[i : i + STEP] for i in places])
        cu = torch.arange(batch + 1) * STEP
        none = torch.zeros_like(new[:0]), torch.zeros_like(cu)
        full.append(microseconds(lambda: draft_suffixes(running, new, cu, length=LENGTH, memory=memory)))  # noqa: B023
        empty.append(microseconds(lambda: draft_suffixes(running, *none, length=LENGTH, memory=memory)))  # noqa: B023
    size = sum(index.num_bytes for index in running) / (batch * tokens)
    return read / (batch * tokens), statistics.median(full), statistics.median(empty), size


def main() -> None:
    columns = ("us a token of a prompt", f"us a step, {STEP} new tokens a request", "us a step, none", "bytes a token")
    print("| requests, tokens of each |", " | ".join(columns), "|")
    print("|---|--:|--:|--:|--:|")
    for batch, tokens in ((1, 32768), (32, 4096), (32, 32768)):
        read, full, empty, size = measure(batch, tokens)
        print(f"| {batch}, {tokens} | {read:.2f} | {full:.0f} | {empty:.0f} | {size:.0f} |")
    ids = words(1 << 18)
    memory = SuffixIndex()
    memory.append(ids[: 1 << 17])
    forgetting = microseconds(lambda: memory.append(ids[1 << 17 :])) / (1 << 17)
    size = memory.num_bytes >> 20
    print(f"\nA token of a full memory of {1 << 17}: {forgetting:.2f} us, with forgetting; {size} MiB.")


if __name__ == "__main__":
    main()
