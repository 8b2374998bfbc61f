"""A request: what it asks for, and its text and pages while it runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import explain_status

from ..grammar import Grammar, Matcher, advance
from ..sequences import BAD_ROW, Sequences
from ..stops import Stops
from .pages import Lease

Reason = Literal["", "stop", "length", "cancelled", "failed"]
FADE = 0.95  # of what a request has accepted, by each further step
SHARED = 12.0  # as many of its own drafts, looked at, count as much as those of all requests


class Logprob(NamedTuple):
    """Log-probabilities at a place of a text, those of the logits as the model gave them.

    Attributes:
        logprob: of the token that stands there.
        top: the most likely ids and theirs, best first.
    """

    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(eq=False)
class Request:
    """A prompt and how it is continued.

    Attributes:
        prompt: token ids.
        limit: most new tokens.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        seed: of its random numbers.
        repetition: penalty of `Edits`; 1 is off.
        frequency: penalty of `Edits`; 0 is off.
        presence: penalty of `Edits`; 0 is off.
        bias: added to the logits of ids.
        stops: end the text; None: the model's end tokens.
        grammar: that the text obeys; None: any text.
        top_logprobs: how many of the most likely ids are listed beside each token; None: no log-probabilities.
        leader: another request with the same prompt, which is to be read first and shared.
        reason: why it has left; "": it has not.
        error: why it failed.
        accepted: drafts that were kept in each step behind the prompt.
        kept: of late.
        looked_at: of late: drafts that were accepted, or would have been next.
    """

    prompt: list[int]
    limit: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    stops: Stops | None = None
    grammar: Grammar | None = None
    top_logprobs: int | None = None
    leader: Request | None = None

    reason: Reason = field(default="", init=False)
    error: str = field(default="", init=False)
    accepted: list[int] = field(default_factory=list, init=False)
    kept: float = field(default=0.0, init=False)
    looked_at: float = field(default=0.0, init=False)
    begun: float = field(default=0.0, init=False)  # when it got its slot, on the clock `time.monotonic`
    cached: int = field(default=0, init=False)  # tokens that have rows in the pages
    has_spoken: bool = field(default=False, init=False)  # the prompt is read, and a first token was drawn
    slot: int = field(default=-1, init=False)
    features: list[Tensor] = field(default_factory=list, init=False)  # of the prompt's pieces, for the drafter
    lease: Lease = field(default_factory=lambda: Lease([], 0, 0, 0), init=False)

    @property
    def has_penalties(self) -> bool:
        """Whether its logits depend on its text."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and continuation."""
        return self.text.rows[self.number] if self.slot >= 0 else self.prompt

    @property
    def new(self) -> list[int]:
        """The continuation."""
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """Most tokens that it has to go."""
        return self.limit - len(self.new)

    def begin(self, slot: int, lease: Lease, *, ends: Sequence[int], overhang: int, device: torch.device) -> None:
        """It runs."""
        self.slot, self.lease, self.cached, self.begun = slot, lease, lease.shared, time.monotonic()
        self.stops = Stops(ends) if self.stops is None else self.stops
        prompt = torch.tensor([self.prompt], device=device)
        count, seed = torch.tensor([len(self.prompt)], device=device), torch.tensor([self.seed], device=device)
        text = Sequences(prompt, count, seed=seed, limits=[self.limit], stops=[self.stops], overhang=overhang)
        self.place(text, 0)
        self.matcher: Matcher | None = None if self.grammar is None else self.grammar.matcher()

    def place(self, text: Sequences, number: int) -> None:
        """Its text is now this one of a batch."""
        self.text, self.number = text, number

    def obey(self, tokens: Sequence[int]) -> None:
        """Take new tokens to the matcher."""
        if self.matcher is None or self.error:
            return
        try:
            advance(self.matcher, tokens)
        except Exception as error:
            self.fail_grammar(error)

    def fail_grammar(self, error: Exception) -> None:
        """Its grammar has failed, which ends this request and no other."""
        reason = str(error).strip().partition("\n")[0]  # llguidance adds its whole state
        self.error = self.error or f"its grammar failed: {reason}"

    def learn(self, drafted: int, accepted: int) -> None:
        """Note what a step accepted; without drafts what is known of it fades."""
        self.accepted.append(accepted)
        self.kept = FADE * self.kept + accepted
        self.looked_at = FADE * self.looked_at + min(drafted, accepted + 1)

    def state(self) -> Reason:
        """Why it is to leave now, if it is."""
        status = self.text.status[self.number]
        if status & BAD_ROW:
            self.error = self.error or "; ".join(explain_status(status))
        if self.error:
            return "failed"
        if not self.text.is_finished[self.number]:
            return ""
        assert self.stops is not None
        return "length" if self.stops.end(self.new, len(self.new) - 1) is None else "stop"


def pooled(requests: Sequence[Request]) -> float:
    """Share of their drafts that all of them accept."""
    return (1 + sum(r.kept for r in requests)) / (2 + sum(r.looked_at for r in requests))


def acceptances(requests: Sequence[Request]) -> list[float]:
    """Share of its drafts that each accepts; of one that few are known of, rather that of all requests."""
    shared = pooled(requests)
    return [(r.kept + SHARED * shared) / (r.looked_at + SHARED) for r in requests]
