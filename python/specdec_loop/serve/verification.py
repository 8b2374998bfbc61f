"""Verify the drafts of all requests in one call, each with its own sampling, random numbers, penalties and biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import (
    ChainResult,
    Edits,
    RngKey,
    Sampling,
    TokenCounts,
    TreeResult,
    count_tokens,
    verify_chain,
    verify_tree,
)

from ..drafters import Draft
from ..grammar import Masks, Walk
from .request import Logprob, Request


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

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft], logits: Tensor) -> ChainResult | TreeResult:
        """Accept drafts and draw a token behind them, under rule ``match``.

        Args:
            requests: token i of one is drawn with the random numbers of its seed and position i.
            drafts: of each, ``[1, ...]``; chains, or trees and chains of no drafts.
            logits: ``[nodes, vocab]``: of each last token and of all drafts behind it.
        """
        rng = RngKey(self._ints([r.seed for r in requests]), self._ints([len(r.tokens) for r in requests]))
        allowed, failed = self._masks.end()
        for i, error in failed.items():
            self._restricted[i].fail_grammar(error)
        tops = [r.top_logprobs for r in requests if r.top_logprobs is not None]
        arguments = {
            "sampling": sampling_of(requests, self._device),
            "rng": rng,
            "rule": "match",
            "allowed": allowed,
            "edits": self._edits(requests),
            "logprobs": "raw" if tops else None,
            "top": max(tops, default=None),
        }
        are_chains = all(draft.parents is None for draft in drafts)
        verdict = self._chains(drafts, logits, arguments) if are_chains else self._trees(drafts, logits, arguments)
        if self._counts is not None and any(r.has_penalties for r in requests):
            slots = self._ints([r.slot if r.has_penalties else -1 for r in requests]).int()
            count_tokens(self._counts, verdict.token_ids, slots=slots)
        return verdict

    def _chains(self, drafts: Sequence[Draft], logits: Tensor, arguments: Mapping[str, Any]) -> ChainResult:
        counts = [draft.token_ids.shape[1] for draft in drafts]
        flat = torch.cat([draft.token_ids[0] for draft in drafts])
        ends = self._ints([0, *counts]).cumsum(0).int()
        return verify_chain(flat, logits, cu_draft=ends, max_draft=max(counts), **arguments)

    def _trees(self, drafts: Sequence[Draft], logits: Tensor, arguments: Mapping[str, Any]) -> TreeResult:
        kept = list(map(_candidates_of, drafts))
        width = max(kept)
        ids = torch.full((len(kept), width), -1, device=self._device)
        parents = ids.int()
        rows = logits.new_zeros(len(kept), width, self._vocab)
        first = 0
        for b, (draft, count) in enumerate(zip(drafts, kept, strict=True)):
            if draft.parents is not None:
                ids[b, :count], parents[b, :count] = draft.token_ids[0, :count], draft.parents[0, :count]
            else:
                ids[b, 1:count] = draft.token_ids[0]
                parents[b, 1:count] = torch.arange(count - 1, device=self._device)
            rows[b, :count] = logits[first : first + count]
            first += nodes_of(draft)
        return verify_tree(ids, parents, rows, max_depth=max(map(depth_of, drafts)), **arguments)

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

    def _ints(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _floats(self, numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)


def listed(requests: Sequence[Request], verdict: ChainResult | TreeResult) -> list[list[Logprob]]:
    """Log-probabilities of each place of the requests that want them; waits for the device."""
    found: list[list[Logprob]] = [[] for _ in requests]
    if verdict.logprobs is None or verdict.top_ids is None or verdict.top_logprobs is None:
        return found
    own, top, best = verdict.logprobs.tolist(), verdict.top_ids.tolist(), verdict.top_logprobs.tolist()
    for b, request in enumerate(requests):
        wanted = request.top_logprobs
        if wanted is not None:
            places = zip(own[b], top[b], best[b], strict=True)
            found[b] = [Logprob(x, list(zip(i[:wanted], p[:wanted], strict=True))) for x, i, p in places]
    return found


def sampling_of(requests: Sequence[Request], device: torch.device) -> Sampling:
    """How each of them draws."""

    def floats(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=device)

    top_k = [r.top_k for r in requests]
    return Sampling(
        floats([r.temperature for r in requests]),
        torch.tensor(top_k, dtype=torch.int32, device=device) if any(top_k) else None,
        floats([r.top_p for r in requests]) if any(r.top_p < 1 for r in requests) else None,
        floats([r.min_p for r in requests]) if any(r.min_p for r in requests) else None,
    )


def nodes_of(draft: Draft) -> int:
    """Rows of logits of a draft and the token before it."""
    return draft.token_ids.shape[1] + (draft.parents is None)


def _candidates_of(draft: Draft) -> int:
    """Nodes that may be accepted, and the token before them."""
    return nodes_of(draft) if draft.candidates is None else draft.candidates


def depth_of(draft: Draft) -> int:
    """Most drafts that may be accepted."""
    return draft.token_ids.shape[1] if draft.parents is None else draft.max_depth
