"""The ids that may follow a text at every position of a draft."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..sequences import Sequences


class Matcher(Protocol):
    """The place of a growing text in its grammar."""

    def fill(self, row: Tensor) -> None:
        """Write int32 ``[ceil(vocab / 32)]`` on the host: bit v % 32 of word v // 32 says that id v may come next."""

    def accept(self, token: int) -> bool:
        """Take a token; False: the grammar forbids it, and nothing has changed."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""

    def is_terminated(self) -> bool:
        """Whether an end token was taken. The grammar says nothing of what follows it."""


class Grammar(Protocol):
    """A grammar, compiled for a tokenizer."""

    def matcher(self) -> Matcher:
        """A matcher of a new text."""


# --- positions of drafts


def fill_masks(matcher: Matcher, ids: Sequence[int], parents: Sequence[int], rows: Tensor) -> None:
    """Masks of a tree's nodes, each after its path; the matcher ends where it began.

    Behind a draft that the grammar forbids, and behind an end token, rows stay as they are: such a draft has
    probability 0, so no rule accepts it, and the text ends with an end token.

    Args:
        matcher: after the committed text.
        ids: of the nodes; node 0 stands for the committed text, -1: the node is not there.
        parents: of the nodes, each before its children.
        rows: int32 ``[nodes, ceil(vocab / 32)]``, all ones.
    """
    children: list[list[int]] = [[] for _ in ids]
    for node in range(1, len(ids)):
        if ids[node] >= 0 and 0 <= parents[node] < node:
            children[parents[node]].append(node)
    taken, waiting = 0, [(0, 0)]
    while waiting:  # depth first
        node, depth = waiting.pop()
        if node > 0:
            matcher.rollback(taken - depth + 1)
            taken = depth - 1
            if not matcher.accept(ids[node]):
                continue
            taken = depth
        if not matcher.is_terminated():
            matcher.fill(rows[node])
            waiting += [(child, depth + 1) for child in children[node]]
    matcher.rollback(taken)


def advance(matcher: Matcher, tokens: Sequence[int]) -> None:
    """Take committed tokens up to the first end token.

    Raises:
        RuntimeError: the grammar forbids one.
    """
    for token in tokens:
        if matcher.is_terminated():
            return
        if not matcher.accept(token):
            raise RuntimeError(f"the grammar forbids token {token}, which its own mask allowed")


class Walk(NamedTuple):
    """The draft of a request.

    Attributes:
        matcher: after the committed text; no other thread may use it until the masks are there.
        ids: int64 ``[nodes]`` of a tree, ``[draft]`` of a chain.
        parents: int32 ``[nodes]``; None: a chain.
        row: of the mask of the next token; those of the draft lie behind it.
    """

    matcher: Matcher
    ids: Tensor
    parents: Tensor | None
    row: int


class Masks:
    """Bitmasks of drafts, filled by a thread while the target runs."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        """Prepare for logits of so many ids on a device."""
        self._words, self._device = -(-vocab // 32), device
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._filled: Future[tuple[Tensor, dict[int, Exception]]] | None = None

    def begin(self, walks: Sequence[Walk], rows: int) -> None:
        """Begin to fill so many rows; those of no walk allow every id. The drafts are copied before this returns."""
        self._filled = None  # those of a step that failed
        if not walks:
            return
        drafts = [
            (w.ids.to("cpu", non_blocking=True), None if w.parents is None else w.parents.to("cpu", non_blocking=True))
            for w in walks
        ]
        copied = None
        if self._device.type != "cpu":
            copied = torch.Event(self._device)
            copied.record()
        self._filled = self._thread.submit(self._fill, walks, drafts, rows, copied)

    def end(self) -> tuple[Tensor | None, dict[int, Exception]]:
        """int32 ``[rows, ceil(vocab / 32)]``, None if there was no walk; and what matchers raised, by walk."""
        if self._filled is None:
            return None, {}
        masks, failed = self._filled.result()
        self._filled = None
        return masks.to(self._device, non_blocking=True), failed

    def _fill(
        self, walks: Sequence[Walk], drafts: Sequence[tuple[Tensor, Tensor | None]], rows: int, copied: Any
    ) -> tuple[Tensor, dict[int, Exception]]:
        if copied is not None:
            copied.synchronize()
        masks, failed = torch.full((rows, self._words), -1, dtype=torch.int32), {}
        for i, (walk, (drafted, links)) in enumerate(zip(walks, drafts, strict=True)):
            ids = drafted.tolist() if links is not None else [-1, *drafted.tolist()]
            parents = links.tolist() if links is not None else range(-1, len(ids) - 1)
            try:
                fill_masks(walk.matcher, ids, parents, masks[walk.row : walk.row + len(ids)])
            except Exception as error:  # a grammar too complex for its library: of one request
                failed[i] = error
        return masks, failed


class DraftGrammars:
    """Keeps chains inside their grammars while they are drafted: any other draft would be rejected.

    Each drafted token is read from the device. A chain whose matcher raises goes on without it: the same mask is made
    again to verify the chain, and there it ends the request.
    """

    def __init__(self, matchers: Sequence[Matcher | None], vocab: int) -> None:
        """Follow matchers of each request; a drafter may have them between two steps."""
        self._matchers, self._vocab, self._is_idle = matchers, vocab, not any(m is not None for m in matchers)
        self._taken: list[int] = []  # tokens of each chain
        self._is_inside: list[bool] = []

    @contextmanager
    def chain(self) -> Iterator[None]:
        """A chain of each request; the matchers end where they began."""
        self._taken, self._is_inside = [0] * len(self._matchers), [True] * len(self._matchers)
        try:
            yield
        finally:
            for matcher, count in zip(self._matchers, self._taken, strict=True):
                if matcher is not None:
                    matcher.rollback(count)

    def restrict(self, logits: Tensor, token_map: Tensor | None = None) -> Tensor:
        """Logits ``[batch, draft_vocab]`` with -inf where the grammar forbids an id; `token_map` as `Draft` has it."""
        if self._is_idle:
            return logits
        rows = torch.full((len(self._matchers), -(-self._vocab // 32)), -1, dtype=torch.int32)
        for b, (matcher, row) in enumerate(zip(self._matchers, rows, strict=True)):
            if matcher is not None and self._is_inside[b] and not matcher.is_terminated():
                try:
                    matcher.fill(row)
                except Exception:  # its request fails when the mask is made again
                    self._is_inside[b] = False
                    row.fill_(-1)
        bits = (rows.to(logits.device)[:, :, None] >> torch.arange(32, device=logits.device)) & 1
        is_allowed = bits.flatten(1)[:, : self._vocab] == 1
        return logits.masked_fill(~(is_allowed if token_map is None else is_allowed[:, token_map]), -math.inf)

    def follow(self, token_ids: Tensor) -> None:
        """Take the tokens ``[batch, 1]`` that were drafted."""
        if self._is_idle:
            return
        for b, (token,) in enumerate(token_ids.tolist()):
            matcher = self._matchers[b]
            if matcher is not None and self._is_inside[b]:
                try:
                    self._is_inside[b] = token >= 0 and matcher.accept(token)  # -1: no draft is allowed
                except Exception:  # as in `restrict`
                    self._is_inside[b] = False
                self._taken[b] += self._is_inside[b]


class TextGrammars:
    """The grammars of a batch of growing texts."""

    def __init__(self, grammars: Grammar | Sequence[Grammar | None] | None, sequences: Sequences, vocab: int) -> None:
        """Begin texts.

        Args:
            grammars: of all requests or of each; None: no grammar.
            sequences: the texts, of which nothing but prompts is there yet.
            vocab: ids of a row of logits.

        Raises:
            ValueError: another number of grammars than of requests.
        """
        if not isinstance(grammars, Sequence):
            grammars = [grammars] * sequences.batch
        if len(grammars) != sequences.batch:
            raise ValueError(
                f"generate: grammar must be one, or one of each of {sequences.batch} requests, got {len(grammars)}"
            )
        self.matchers = [None if grammar is None else grammar.matcher() for grammar in grammars]
        self._masks, self._sequences = Masks(vocab, sequences.tokens.device), sequences
        self.drafts = DraftGrammars(self.matchers, vocab)

    def begin(self, ids: Tensor, parents: Tensor | None) -> None:
        """Begin the masks of drafts, ``[batch, draft]`` or a tree's ``[batch, nodes]``."""
        nodes = ids.shape[1] + (parents is None)
        walks = [
            Walk(matcher, ids[b], None if parents is None else parents[b], b * nodes)
            for b, matcher in enumerate(self.matchers)
            if matcher is not None and not self._sequences.is_finished[b]
        ]
        self._masks.begin(walks, len(self.matchers) * nodes)

    def allowed(self) -> Tensor | None:
        """Masks of the rows that verify these drafts; None: no grammar restricts them.

        Raises:
            RuntimeError: a matcher failed.
        """
        masks, failed = self._masks.end()
        for error in failed.values():
            raise RuntimeError(f"generate: a grammar failed: {error}") from error
        return masks

    def grown(self, new: Sequence[Sequence[int]]) -> None:
        """Take the new tokens of each request."""
        for matcher, tokens in zip(self.matchers, new, strict=True):
            if matcher is not None:
                advance(matcher, tokens)
