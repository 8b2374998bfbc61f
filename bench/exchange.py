"""Bytes that a rank sends to the others where the vocabulary is sharded: part of python -m bench.traffic.

The sizes of the messages follow from the shapes alone, so one process counts them: it plays every rank of a group, each
answering what this one said. Without filters a rank may send 64 bytes a row of logits, with them no more than half of
its part of a bfloat16 row; 2 exchanges without filters, 4 with, and for `recursive` and `traversal` one for each
further sibling or node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from specdec_kernels import RngKey, Sampling, sample, verify_chain, verify_tree

from .cases import BOTH, FILTERS

VOCAB, BATCH, DRAFT = 128256, 1, 4
BYTES_A_ROW, SHARE = 64, 0.5
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7]  # a tree of 10 nodes: at most 3 children, 4 deep
CHAIN_RULES = ("ratio", "block", "match", "greedy", "typical", "topm", "distance")
TREE_RULES = ("match", "typical", "target_only", "recursive", "greedy_multi_draft", "traversal")


class Pretended(NamedTuple):
    """A process group whose other ranks hold what this one holds."""

    ranks: int

    def size(self) -> int:
        """How many."""
        return self.ranks

    def rank(self) -> int:
        """The one that is counted."""
        return 0


@contextlib.contextmanager
def exchange_meter(ranks: int) -> Iterator[list[int]]:
    """Collect the bytes of each message that a collective sends, and answer it for all ranks."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    sent: list[int] = []

    def answer(out: Tensor, message: Tensor, **_: Any) -> None:
        sent.append(message.nbytes)
        out.view(ranks, -1).copy_(message.expand(ranks, -1))

    with mock.patch.object(dist, name, answer):
        yield sent


def meter(call: str, filters: str, ranks: int) -> bool:
    """Print the line of one call of one rank; whether it keeps both budgets."""
    kind, rule = call.split()
    first = -(-VOCAB // ranks)
    offsets = [min(first * rank, VOCAB) for rank in range(ranks + 1)]
    g = torch.Generator().manual_seed(0)
    nodes = {"sample": 1, "chain": DRAFT + 1, "tree": len(PARENTS)}[kind]
    target = torch.randn(BATCH, nodes, first, generator=g)
    draft = target + torch.randn(BATCH, nodes, first, generator=g)
    has_draft = rule in ("ratio", "block", "recursive", "greedy_multi_draft", "traversal")
    zero = torch.zeros(BATCH, dtype=torch.int64)
    sampling = FILTERS[filters].sampling(BATCH)
    shared: dict[str, Any] = {"rng": RngKey(zero, zero, zero), "group": Pretended(ranks), "vocab_offsets": offsets}
    drafted: dict[str, Any] = {"sampling": sampling, "draft_sampling": sampling if has_draft else Sampling()}
    with exchange_meter(ranks) as sent:
        if kind == "sample":
            sample(target[:, 0].contiguous(), sampling=sampling, purpose="target", **shared)
        elif kind == "chain":
            ids = torch.arange(DRAFT).expand(BATCH, -1).contiguous()
            verify_chain(ids, target, draft[:, :-1] if has_draft else None, rule=rule, **drafted, **shared)
        else:
            ids, parents = torch.arange(nodes)[None], torch.tensor([PARENTS])
            wide = {"max_children": 3} if rule == "recursive" else {}
            q = draft if has_draft else None
            verify_tree(ids, parents, target, q, max_depth=4, rule=rule, **drafted, **shared, **wide)
    rows = BATCH * (nodes + has_draft * (nodes - (kind == "chain")))
    exchanges = 2 if filters == "none" else 4
    exchanges += {"recursive": 2, "traversal": nodes - 1}.get(rule, 0)
    allowed = BYTES_A_ROW if filters == "none" else SHARE * 2 * first
    is_within = len(sent) <= exchanges and sum(sent) <= allowed * rows
    name = call if filters == "none" else f"{call}, {filters}"
    print(
        f"  {name:<50}{ranks:>6}{len(sent):>11}{sum(sent) / rows:>13.1f}"
        f"  <= {exchanges}, {allowed:.0f} {'' if is_within else 'OVER'}",
        flush=True,
    )
    return is_within


def report() -> int:
    """Print the table; how many lines are over budget."""
    calls = ["sample target", *(f"chain {rule}" for rule in CHAIN_RULES), *(f"tree {rule}" for rule in TREE_RULES)]
    wanted = [(call, "none", 8) for call in calls]
    wanted += [("chain ratio", filters, ranks) for filters in FILTERS if filters != "none" for ranks in (2, 8)]
    wanted += [("sample target", BOTH, 8), ("chain block", BOTH, 8), ("tree recursive", BOTH, 8)]
    print(f"sharded vocabulary {VOCAB}: what a rank sends")
    print(f"  {'':<50}{'ranks':>6}{'exchanges':>11}{'bytes a row':>13}  budget")
    return sum(not meter(*line) for line in wanted)
