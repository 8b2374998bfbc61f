"""The methods under test, each as one decode step: how candidates are drawn, and which rule decides on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specdec_kernels import (
    ChainRule,
    DrawPurpose,
    Edits,
    RngKey,
    RowEdits,
    Sampling,
    TreeRule,
    allocate_drafts,
    batch_sd,
    edit_rows,
    sample,
    verify_chain,
    verify_tree,
)

from .edits import StepEdits, step_edits
from .exact import Filters, Table, sampling_of


class Step(NamedTuple):
    """Input of a verifier.

    Attributes:
        token_ids: int64: a chain ``[batch, draft]``, -1 behind its end; a tree ``[batch, nodes]``, -1 at its root.
        target: logits of every node, ``[batch, draft + 1 or nodes, vocab]``.
        draft: the rows the candidates were drawn from, ``[batch, draft or nodes, vocab]``.
        filters: of the target, and of the drafts as far as the verifier knows.
        rng: of the step.
        edits: of target rows and draft rows.
    """

    token_ids: Tensor
    target: Tensor
    draft: Tensor
    filters: Filters
    rng: RngKey
    edits: StepEdits = StepEdits()


Verdict = tuple[Tensor, Tensor]  # token ids [batch, depth + 1], of which the first accepted + 1 count; accepted [batch]


@dataclass(frozen=True)
class Procedure:
    """A method. What breaks one on purpose is a field too: every fault of `faults.py` is a method with one changed.

    Attributes:
        name: shown.
        rule: of `verify_chain`, `verify_tree`, or "batch".
        widths: children of each node, level by level: a chain of two drafts is (1, 1).
        siblings: "chain", "distinct" (drawn without replacement), "independent", "top" (deterministic), "mixed" (all
            but the last deterministic, as greedy multi-draft wants them) or "shared" (one race for all of them).
        replacement: `verify_tree` is told that siblings are independent.
        has_rows: the verifier is given the rows that the candidates were drawn from; else they are point masses to it.
        purpose: whose noise a draft is drawn with.
        drawn: overrides the filters that the drafts are drawn with, unknown to the verifier.
        has_step: the noise is named by the decode step.
        is_block: all drafts are drawn at once, and know the text before the step alone.
        keep: which drafted ids ``[batch, draft]`` of a chain are offered at all.
        has_one_edit: the target's rows of a step all have the edits of the first one.
        verify: decides in place of the kernels.
        propose: draws a draft in place of the kernels: ids ``[batch]`` from rows ``[batch, vocab]``.
    """

    name: str
    rule: str
    widths: tuple[int, ...] = (1, 1)
    siblings: str = "chain"
    replacement: bool = False
    has_rows: bool = True
    purpose: DrawPurpose = "draft"
    drawn: Filters | None = None
    has_step: bool = True
    is_block: bool = False
    keep: Callable[[Procedure, Step], Tensor] | None = None
    has_one_edit: bool = False
    verify: Callable[[Procedure, Step], Verdict] | None = None
    propose: Callable[[Tensor, Filters], Tensor] | None = None

    @property
    def is_chain(self) -> bool:
        """Whether `verify_chain` serves it."""
        return self.siblings == "chain"

    @property
    def depth(self) -> int:
        """Most tokens that a step accepts."""
        return len(self.widths)

    def parents(self) -> list[int]:
        """Of the nodes of a tree in order of depth; the drafts of a batch one after the other."""
        if self.rule == "batch":
            branches, depth = self.widths[0], self.depth
            return [-1, *(0 if n % depth == 0 else n for n in range(branches * depth))]
        parents, level = [-1], [0]
        for width in self.widths:
            first = len(parents)
            parents += [parent for parent in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return parents


def within_budget(ids: Tensor, confidence: Tensor) -> Tensor:
    """Which drafts ``[batch, draft]`` one budget keeps: a draft for each request of the batch."""
    kept = allocate_drafts(ids, confidence.float(), budget=len(ids))
    return torch.arange(ids.shape[1], device=ids.device) < kept.num_draft[:, None]


def allocated(method: Procedure, step: Step) -> Tensor:
    """The budget goes to rows with a likely id, whichever was drawn."""
    return within_budget(step.token_ids, (step.draft.amax(-1) - step.draft.logsumexp(-1)).exp())


PROCEDURES = [
    Procedure("ratio", "ratio"),
    Procedure("block", "block"),
    Procedure("match", "match", purpose="target"),
    Procedure("ratio, argmax drafts", "ratio", has_rows=False, drawn={"temperature": 0.0}),
    Procedure("block, argmax drafts", "block", has_rows=False, drawn={"temperature": 0.0}),
    Procedure("ratio, drafts at once", "ratio", is_block=True),
    Procedure("block, drafts at once", "block", is_block=True),
    Procedure("ratio, one budget", "ratio", keep=allocated),
    Procedure("block, one budget", "block", keep=allocated),
    Procedure("tree recursive", "recursive", (2, 2), "distinct"),
    Procedure("tree recursive, with replacement", "recursive", (2, 2), "independent", replacement=True),
    Procedure("tree greedy multi-draft", "greedy_multi_draft", (2, 2), "mixed"),
    Procedure("tree traversal", "traversal", (2, 2), "distinct"),
    Procedure("tree target only", "target_only", (2, 2), "top", has_rows=False),
    Procedure("tree match", "match", (2, 2), "top", has_rows=False),
    Procedure("batch of 3 drafts", "batch", (3, 1), "independent"),
]


def draft(
    method: Procedure, table: Table, context: Tensor, rng: RngKey, filters: Filters, edits: Edits | None = None
) -> tuple[Tensor, Tensor]:
    """(ids, context of each node): node 0 is the root; a chain is a tree of one branch. Both ``[batch, nodes]``."""
    parents = method.parents()
    depth, ranks = [0], [0]
    for n in range(1, len(parents)):
        depth.append(depth[parents[n]] + 1)
        ranks.append(depth[:-1].count(depth[n]))
    ids = [torch.full_like(context, -1)] * len(parents)
    contexts, paths = [context] * len(parents), [context.new_empty(len(context), 0)] * len(parents)
    drawn = sampling_of(method.drawn if method.drawn is not None else filters, len(context), context.device)
    for node in range(len(parents)):
        children = [n for n, parent in enumerate(parents) if parent == node]
        if not children:
            continue
        row = table.rows(table.draft, (context if method.is_block else contexts[node])[:, None])[:, 0]
        at = rng._replace(position=rng.position + depth[node])
        if method.propose is not None:
            found = method.propose(row, filters)[:, None]
        else:
            here = None if edits is None else edit_rows(edits, paths[node], vocab=table.vocab, only_last=True)
            found = _children(method, row, drawn, at, ranks[node], [ranks[n] for n in children], here)
        for n, x in zip(children, found.unbind(1), strict=True):
            ids[n] = torch.where(ids[node] < 0, -1, x) if node else x
            paths[n] = torch.cat([paths[node], ids[n][:, None]], 1)
            contexts[n] = table.after[contexts[node], x.clamp(min=0)]
    return torch.stack(ids, 1), torch.stack(contexts, 1)


def _children(
    method: Procedure, row: Tensor, drawn: Sampling, rng: RngKey, rank: int, lanes: list[int], edits: RowEdits | None
) -> Tensor:
    """Ids of the children of one node, ``[batch, children]``; lanes as docs/design.md names them."""

    def draw(lane: int = 0, count: int = 1, without: Tensor | None = None) -> Tensor:
        return sample(
            row, sampling=drawn, rng=rng, purpose=method.purpose, num_samples=count, lane=lane, exclude_ids=without,
            edits=edits,
        ).token_ids  # fmt: skip

    count = len(lanes)
    if method.siblings == "distinct":
        return draw(lane=rank, count=count)
    if method.siblings == "independent":
        return torch.cat([draw(lane=lane) for lane in lanes], 1)
    if method.siblings == "shared":
        return draw(lane=rank).expand(-1, count)
    if method.siblings == "chain":
        return draw()
    ranked = row if edits is None else edits.apply(row)
    best = ranked if ranked.stride(0) else ranked[:1]  # the same row for all
    top = best.topk(count, dim=-1).indices.expand(len(row), -1)
    if method.siblings == "top":
        return top
    certain = top[:, :-1].contiguous()
    return torch.cat([certain, draw(lane=rank, without=certain)], 1)


def decode_step(
    method: Procedure, table: Table, context: Tensor, rng: RngKey, filters: Filters, edits: Edits | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, accepted, contexts after 0, 1, .. of the ids) of one step of every text."""
    named = rng if method.has_step else rng._replace(step=torch.zeros_like(rng.position))
    ids, contexts = draft(method, table, context, named, filters, edits)
    target = table.rows(table.target, contexts)
    rows = table.rows(table.draft, contexts[:, :1].expand_as(contexts) if method.is_block else contexts)
    if method.is_chain:
        ids, rows = ids[:, 1:], rows[:, :-1]
    ids, parents = ids.contiguous(), None if method.is_chain else method.parents()
    changed = step_edits(edits, ids, table.vocab, parents, only_first=method.has_one_edit)
    step = Step(ids, target, rows, filters, named, changed)
    if method.keep is not None:
        step = step._replace(token_ids=torch.where(method.keep(method, step), ids, -1))
    emitted, accepted = (method.verify or verify)(method, step)
    path = [context]
    for x in emitted.unbind(1):
        path.append(table.after[path[-1], x.clamp(min=0)])
    return emitted, accepted, torch.stack(path, 1)


def verify(method: Procedure, step: Step) -> Verdict:
    """By the kernels."""
    batch = len(step.token_ids)
    device = step.token_ids.device
    sampling = drafted = sampling_of(step.filters, batch, device)
    rows, edits = (step.draft, step.edits) if method.has_rows else (None, step.edits._replace(draft=None))
    if method.is_chain:
        chain = verify_chain(
            step.token_ids, step.target, rows, sampling=sampling, draft_sampling=drafted, rng=step.rng,
            rule=cast(ChainRule, method.rule), edits=edits.target, draft_edits=edits.draft,
        )  # fmt: skip
        return chain.token_ids, chain.num_accepted
    if method.rule == "batch":
        branches = step.token_ids[:, 1:].unflatten(1, (method.widths[0], method.depth))
        several = batch_sd(branches, step.target, step.draft, sampling=sampling, draft_sampling=drafted, rng=step.rng)
        return several.token_ids, several.num_accepted
    tree = verify_tree(
        step.token_ids, torch.tensor(method.parents(), device=device).repeat(batch, 1), step.target, rows,
        max_depth=method.depth, sampling=sampling, draft_sampling=drafted, rng=step.rng,
        rule=cast(TreeRule, method.rule), replacement=method.replacement, edits=edits.target,
        draft_edits=edits.draft,
    )  # fmt: skip
    return tree.token_ids, tree.num_accepted
