"""Verify the drafts of all requests in one call, each with its own sampling, random numbers, penalties and biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import (
    Edits,
    RngKey,
    Sampling,
    TokenCounts,
    count_tokens,
    edit_rows,
    token_logprobs,
    verify_chain,
    verify_tree,
)

from ..drafters import Draft
from ..grammar import Masks, Walk
from .request import Logprob, Request


class Verdict(NamedTuple):
    """What was decided; see `ChainResult` and `TreeResult`.

    Attributes:
        token_ids: int64 ``[batch, draft + 1]``.
        num_accepted: int32 ``[batch]``.
        status: int32 ``[batch]``.
        path: int32 ``[batch, draft + 1]`` of trees; None: all drafts are chains.
    """

    token_ids: Tensor
    num_accepted: Tensor
    status: Tensor
    path: Tensor | None


class Step(NamedTuple):
    """What the verifying ops read.

    Attributes:
        drafts: of each request, ``[1, ...]``.
        logits: ``[nodes, vocab]``: of each last token and of all drafts behind it.
        sampling: of each request.
        rng: of the first token that each request gets.
        edits: of each request; None: none.
        allowed: int32 bit masks of the rows that may be accepted; None: all ids.
    """

    drafts: Sequence[Draft]
    logits: Tensor
    sampling: Sampling
    rng: RngKey
    edits: Edits | None
    allowed: Tensor | None


class Verifier:
    """Decides for the requests that have slots; keeps the tokens that penalties look at."""

    def __init__(self, slots: int, distinct: int, vocab: int, device: torch.device) -> None:
        """Make room.

        Args:
            slots: requests that run at once.
            distinct: most different ids of a text.
            vocab: ids of a row of logits.
            device: of the logits.
        """
        self._slots, self._distinct, self._vocab, self._device = slots, distinct, vocab, device
        self._counts: TokenCounts | None = None  # not before a request has penalties
        self._masks, self._restricted = Masks(vocab, device), list[Request]()

    def begin(self, request: Request) -> None:
        """A request has got its slot."""
        if request.has_penalties and self._counts is None:
            self._counts = TokenCounts.empty(self._slots, self._distinct, device=self._device)
        if self._counts is not None:
            self._counts.clear(self._ints([request.slot]))
        if self._counts is not None and request.has_penalties:
            slot = self._ints([request.slot]).int()
            count_tokens(self._counts, self._ints([request.prompt]), slots=slot, is_prompt=True)

    def begin_masks(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> None:
        """Fill the masks of grammars, of the rows that `verify` will look at, while the target runs."""
        walks, rows, counts = [], 0, list(map(_candidates_of, drafts))
        self._restricted = []
        width = max(counts, default=0) if any(draft.parents is not None for draft in drafts) else None
        for request, draft, count in zip(requests, drafts, counts, strict=True):
            if request.matcher is not None and not request.error:
                links = draft.parents if draft.parents is None else draft.parents[0, :count]
                self._restricted.append(request)
                walks.append(Walk(request.matcher, draft.token_ids[0, :count], links, rows))
            rows += count if width is None else width
        self._masks.begin(walks, rows)

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> Verdict:
        """Accept drafts and draw a token behind them, under rule ``match``.

        Args:
            requests: token i of one is drawn with the random numbers of its seed and position i.
            drafts: of each, ``[1, ...]``; chains, or trees and chains of no drafts.
            logits: ``[nodes, vocab]``: of each last token and of all drafts behind it.
        """
        sampling = Sampling(
            self._floats([r.temperature for r in requests]),
            self._ints([r.top_k for r in requests]).int() if any(r.top_k for r in requests) else None,
            self._floats([r.top_p for r in requests]) if any(r.top_p < 1 for r in requests) else None,
            self._floats([r.min_p for r in requests]) if any(r.min_p for r in requests) else None,
        )
        rng = RngKey(self._ints([r.seed for r in requests]), self._ints([len(r.tokens) for r in requests]))
        allowed, failed = self._masks.end()
        for i, error in failed.items():
            self._restricted[i].fail_grammar(error)
        step = Step(drafts, logits, sampling, rng, self._edits(requests), allowed)
        are_chains = all(draft.parents is None for draft in drafts)
        verdict = self._chains(step) if are_chains else self._trees(step)
        if self._counts is not None and any(r.has_penalties for r in requests):
            slots = self._ints([r.slot if r.has_penalties else -1 for r in requests]).int()
            count_tokens(self._counts, verdict.token_ids, slots=slots)
        return verdict

    def logprobs(
        self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor, verdict: Verdict
    ) -> Callable[[], list[list[Logprob]]]:
        """Log-probabilities of the new tokens of the requests that want them; calling the result waits for them."""
        rows, ids, first, counts = [], [], 0, [0] * len(requests)
        for b, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            nodes = nodes_of(draft)
            if request.top_logprobs is not None:
                behind = torch.arange(1, nodes, device=self._device)
                if verdict.path is not None:
                    behind = verdict.path[b, : depth_of(draft)].clamp(min=0)
                rows.append(torch.nn.functional.pad(behind, (1, 0)) + first)
                ids.append(verdict.token_ids[b, : len(behind) + 1])
                counts[b] = len(behind) + 1
            first += nodes
        if not rows:
            return lambda: [[] for _ in requests]
        top = max(request.top_logprobs or 0 for request in requests)
        found = token_logprobs(logits[torch.cat(rows)], torch.cat(ids), top=top)
        return lambda: self._listed(requests, counts, found.logprobs, found.top_ids, found.top_logprobs)

    def _chains(self, step: Step) -> Verdict:
        counts = [draft.token_ids.shape[1] for draft in step.drafts]
        flat = torch.cat([draft.token_ids[0] for draft in step.drafts])
        ends = self._ints([0, *counts]).cumsum(0).int()
        rows = None
        if step.edits is not None:
            rows = edit_rows(step.edits, flat, vocab=self._vocab, cu_draft=ends, max_draft=max(counts))
        verdict = verify_chain(
            flat,
            step.logits,
            cu_draft=ends,
            max_draft=max(counts),
            sampling=step.sampling,
            rng=step.rng,
            rule="match",
            allowed=step.allowed,
            edits=rows,
        )
        return Verdict(verdict.token_ids, verdict.num_accepted, verdict.status, None)

    def _trees(self, step: Step) -> Verdict:
        kept = list(map(_candidates_of, step.drafts))
        width = max(kept)
        ids = torch.full((len(kept), width), -1, device=self._device)
        parents = ids.int()
        rows = step.logits.new_zeros(len(kept), width, self._vocab)
        first = 0
        for b, (draft, count) in enumerate(zip(step.drafts, kept, strict=True)):
            if draft.parents is not None:
                ids[b, :count], parents[b, :count] = draft.token_ids[0, :count], draft.parents[0, :count]
            else:
                ids[b, 1:count] = draft.token_ids[0]
                parents[b, 1:count] = torch.arange(count - 1, device=self._device)
            rows[b, :count] = step.logits[first : first + count]
            first += nodes_of(draft)
        edits = None
        if step.edits is not None:
            edits = edit_rows(step.edits, ids, vocab=self._vocab, parents=parents)
        verdict = verify_tree(
            ids,
            parents,
            rows,
            max_depth=max(map(depth_of, step.drafts)),
            sampling=step.sampling,
            rng=step.rng,
            rule="match",
            allowed=step.allowed,
            edits=edits,
        )
        return Verdict(verdict.token_ids, verdict.num_accepted, verdict.status, verdict.path)

    def _edits(self, requests: Sequence[Request]) -> Edits | None:
        """What the requests change of their logits; None: nothing."""
        edits = Edits()
        most = max(len(r.bias) for r in requests)
        if most:
            rows = [[*r.bias, *[-1] * (most - len(r.bias))] for r in requests]
            values = [[*r.bias.values(), *[0.0] * (most - len(r.bias))] for r in requests]
            edits = edits._replace(bias_ids=self._ints(rows).int(), bias=self._floats(values))
        if any(r.has_penalties for r in requests):
            assert self._counts is not None
            edits = edits._replace(
                repetition=self._floats([r.repetition for r in requests]),
                frequency=self._floats([r.frequency for r in requests]),
                presence=self._floats([r.presence for r in requests]),
                counts=self._counts,
                slots=self._ints([r.slot for r in requests]).int(),
            )
        return None if edits == Edits() else edits

    def _listed(
        self, requests: Sequence[Request], counts: Sequence[int], own: Tensor, top: Tensor, best: Tensor
    ) -> list[list[Logprob]]:
        places = iter(zip(own.tolist(), top.tolist(), best.tolist(), strict=True))
        found: list[list[Logprob]] = []
        for request, count in zip(requests, counts, strict=True):
            wanted = request.top_logprobs or 0
            mine = [next(places) for _ in range(count)]
            found.append([Logprob(x, list(zip(i[:wanted], p[:wanted], strict=True))) for x, i, p in mine])
        return found

    def _ints(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _floats(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)


def nodes_of(draft: Draft) -> int:
    """Rows of logits of a draft and the token before it."""
    return draft.token_ids.shape[1] + (draft.parents is None)


def _candidates_of(draft: Draft) -> int:
    """Nodes that may be accepted, and the token before them."""
    return nodes_of(draft) if draft.candidates is None else draft.candidates


def depth_of(draft: Draft) -> int:
    """Most drafts that may be accepted."""
    return draft.token_ids.shape[1] if draft.parents is None else draft.max_depth
