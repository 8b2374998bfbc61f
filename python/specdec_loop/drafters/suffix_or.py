"""Suffix decoding where the text repeats itself, and another drafter elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import Sampling

from ..sequences import Sequences
from .base import ARGMAX_RULES, Draft, Drafter, Outcome, Part, padded
from .suffix import SuffixDecoding

FADE = 0.9  # of what was accepted, by each further step
MARGIN = 2.0  # a text that repeats itself is easy for a model too


class SuffixOr(Drafter):
    """Copies what followed the same suffix where that promises more accepted tokens than another drafter's chain.

    A frequency promises too much: copies are credited with the share of their promise that they have kept of late, the
    other with the tokens of its chains that were accepted. Both are known before a draft. A copy costs no forward, so
    it may be longer.
    """

    rules = ("match", *ARGMAX_RULES)  # a copy is deterministic

    def __init__(self, drafter: Drafter, suffixes: SuffixDecoding | None = None) -> None:
        """Draft with `suffixes`, or with a `drafter` of chains.

        Raises:
            ValueError: a drafter that drafts no chains under these rules.
        """
        if missing := sorted(set(self.rules) - set(drafter.rules)):
            raise ValueError(
                f"SuffixOr: drafter must be one of chains under {', '.join(self.rules)}, "
                f"got {type(drafter).__name__}, which lacks {', '.join(missing)}"
            )
        self.drafter, self.features, self.networks = drafter, drafter.features, drafter.networks
        self.vocab = drafter.vocab
        self.suffixes = SuffixDecoding(factor=2.0) if suffixes is None else suffixes

    def begin(self, sequences: Sequences, *, rule: str, sampling: Sampling, longest: int) -> None:
        """Both begin."""
        self.drafter.clock, self.drafter.grammars = self.clock, self.grammars
        for drafter in (self.drafter, self.suffixes):
            drafter.begin(sequences, rule=rule, sampling=sampling, longest=longest)
        self._kept, self._promised = 1.0, 2.0  # tokens of copies
        self._drafted, self._chains = 2.0, 2.0  # tokens of the other's chains, and chains
        self._asked: list[tuple[float, int]] = []  # of each request: a copy's promise or 0, and where the text ended

    def prefill(self, sequences: Sequences, hidden: Tensor | None) -> None:
        """For the other drafter."""
        self.drafter.prefill(sequences, hidden)

    def join(self, sequences: Sequences, parts: Sequence[Part]) -> None:
        """Both take what was followed; the credits are those of the first part."""
        for name in ("drafter", "suffixes"):
            getattr(self, name).join(sequences, [part._replace(drafter=getattr(part.drafter, name)) for part in parts])
        first: SuffixOr = parts[0].drafter
        first._learn(parts[0].sequences)
        self._kept, self._promised = first._kept, first._promised
        self._drafted, self._chains = first._drafted, first._chains

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Copy for the requests for which that promises more; no draft of the other where it does for all."""
        self._learn(sequences)
        found = self.suffixes.propose(sequences, length)
        worth, bar = self._kept / self._promised, self._drafted / self._chains
        promises = [
            promise if promise * worth >= MARGIN * bar and not is_finished else 0.0
            for (promise, _), is_finished in zip(found, sequences.is_finished, strict=True)
        ]
        self._asked = list(zip(promises, map(len, sequences.rows), strict=True))
        copies = [tokens if promise else [] for promise, (_, tokens) in zip(promises, found, strict=True)]
        running = sequences.running
        if all(promises[b] for b in running):
            self.drafter.skip(sequences)
            return Draft(padded(copies, sequences.tokens.device), lengths=list(map(len, copies)))
        draft = self.drafter.draft(sequences, length)
        if draft.parents is not None:
            raise ValueError(f"SuffixOr: drafter must draft chains, but {type(self.drafter).__name__} drafts trees")
        ids = draft.token_ids
        known = draft.lengths or [ids.shape[1]] * len(copies)
        lengths = [len(copy) or length for copy, length in zip(copies, known, strict=True)]
        if any(promises[b] for b in running):
            width = max(ids.shape[1], *map(len, copies))
            ids = torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)
            copied = padded(copies, ids.device, width)
            ids = torch.where(copied[:, :1] >= 0, copied, ids)
        return Draft(ids, lengths=lengths)

    def skip(self, sequences: Sequences) -> None:
        """The other drafter follows; what another step drafted is nobody's credit here."""
        self._learn(sequences)
        self._asked = []
        self.drafter.skip(sequences)

    def commit(self, sequences: Sequences, outcome: Outcome) -> None:
        """For the other drafter; suffixes follow when they are asked."""
        self.drafter.commit(sequences, outcome)

    def end(self, sequences: Sequences, numbers: Sequence[int]) -> None:
        """Both end: continuations are remembered for later texts."""
        self.drafter.clock = self.clock
        self.drafter.end(sequences, numbers)
        self.suffixes.end(sequences, numbers)

    def share(self, other: Drafter) -> None:
        """Both of these with both of those."""
        assert isinstance(other, SuffixOr)
        self.drafter.share(other.drafter)
        self.suffixes.share(other.suffixes)

    def _learn(self, sequences: Sequences) -> None:
        """Credit both with what was accepted of the last drafts."""
        for b, (promise, before) in enumerate(self._asked):
            accepted = len(sequences.rows[b]) - before - 1
            if accepted < 0:
                continue  # the request was finished
            if promise:
                self._kept, self._promised = FADE * self._kept + accepted, FADE * self._promised + promise
            else:
                self._drafted, self._chains = FADE * self._drafted + accepted, FADE * self._chains + 1
