"""Which rank holds which ids, and the collective through which ranks speak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._backends import named
from .._check import fail
from .._rows import Distribution
from .._vocabulary import Table, Vocabulary
from . import thresholds


def shards_of(op: str, group: Any, offsets: Sequence[int] | None, width: int, backend: str | None) -> Shards | None:
    """The shards of a call, None without a group."""
    if group is None:
        if offsets is not None:
            fail(op, "vocab_offsets", "None without a group", offsets)
        return None
    if named(backend) not in (None, "reference"):
        fail(op, "backend", "None with a group: its ranks run PyTorch operators", repr(named(backend)))
    return Shards(op, group, offsets, width)


class Shards(Vocabulary):
    """One run of ids a rank, and the group that exchanges numbers about them."""

    def __init__(self, op: str, group: Any, offsets: Sequence[int] | None, width: int) -> None:
        """Check what the caller says about its group; `width` is that of its target logits."""
        if not (hasattr(group, "size") and hasattr(group, "rank")):
            fail(op, "group", "a process group of torch.distributed", repr(group))
        self.group = group
        self.ranks, rank = group.size(), group.rank()
        expected = f"{self.ranks + 1} rising ints from 0: the first id of each rank, then the size of the vocabulary"
        if not isinstance(offsets, Sequence) or len(offsets) != self.ranks + 1:
            fail(op, "vocab_offsets", expected, offsets)
        self.widths = [last - first for first, last in pairwise(offsets)]
        if offsets[0] != 0 or min(self.widths) < 1:
            fail(op, "vocab_offsets", expected, offsets)
        self.first, self.end, self.size = offsets[rank], offsets[rank + 1], offsets[-1]
        self.widest = max(self.widths)  # rows are padded to it, so that messages have one shape
        if width != self.end - self.first:
            fail(op, "logits", f"[..., {self.end - self.first}] on rank {rank} by vocab_offsets", f"[..., {width}]")

    def send(self, *fields: Tensor) -> Callable[[], list[Tensor]]:
        """Start one all_gather of all fields; the function returned waits and gives each as [ranks, ...].

        The message is their bits as int32 words. With NCCL waiting holds up the stream, not the host.
        """
        import torch.distributed as dist

        parts = [field.contiguous().flatten().view(torch.int32) for field in fields]
        message = torch.cat(parts)
        everything = message.new_empty(self.ranks * len(message))
        # The newer name of the same collective, torch 2.13.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = all_gather(everything, message, group=self.group, async_op=True)

        def receive() -> list[Tensor]:
            if work is not None:
                work.wait()
            pieces = everything.view(self.ranks, -1).split([len(part) for part in parts], dim=1)
            return [  # copied: a view as float64 must begin at an even word
                piece.clone(memory_format=torch.contiguous_format)
                .flatten()  # rows of no words have a stride that float64 refuses
                .view(field.dtype)
                .view(self.ranks, *field.shape)
                for piece, field in zip(pieces, fields, strict=True)
            ]

        return receive

    def distributions(
        self, tables: list[Table], *more: Tensor
    ) -> Callable[[], tuple[list[Distribution], list[Tensor]]]:  # fmt: skip
        """Distributions of rows in one exchange, or three with filters."""
        return thresholds.begin(self, tables, *more)
