"""A request: what it asks for, and its text, pages and drafter while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec_kernels import Sampling, explain_status

from ..drafters import Draft, Drafter, NoDrafter, Outcome
from ..grammar import DraftGrammars, Grammar, Matcher, advance
from ..sequences import BAD_ROW, Sequences
from ..statistics import Clock
from ..stops import Stops
from .pages import Lease

Reason = Literal["", "stop", "length", "cancelled", "failed"]
FADE = 0.9  # of what a request has accepted, by each further step
T = TypeVar("T")


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
        accepted: drafts that were kept in each step that had some.
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
    cached: int = field(default=0, init=False)  # tokens that have rows in the pages
    has_spoken: bool = field(default=False, init=False)  # the prompt is read, and a first token was drawn
    is_drafted: bool = field(default=False, init=False)  # its drafter follows the text
    slot: int = field(default=-1, init=False)
    lease: Lease = field(default_factory=lambda: Lease([], 0, 0, 0), init=False)

    @property
    def has_penalties(self) -> bool:
        """Whether its logits depend on its text."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and continuation."""
        return self.text.rows[0] if self.slot >= 0 else self.prompt

    @property
    def new(self) -> list[int]:
        """The continuation."""
        return self.tokens[len(self.prompt) :]

    @property
    def acceptance(self) -> float:
        """Share of its drafts that it accepts, of late."""
        return self._kept / self._looked_at

    def begin(
        self, slot: int, lease: Lease, drafter: Drafter, *, ends: Sequence[int], overhang: int, device: torch.device
    ) -> None:
        """It runs."""
        self.slot, self.lease, self.cached, self._drafter = slot, lease, lease.shared, drafter
        self.stops = Stops(ends) if self.stops is None else self.stops
        prompt = torch.tensor([self.prompt], device=device)
        count, seed = torch.tensor([len(self.prompt)], device=device), torch.tensor([self.seed], device=device)
        self.text = Sequences(prompt, count, seed=seed, limit=self.limit, stops=self.stops, overhang=overhang)
        self.matcher: Matcher | None = None if self.grammar is None else self.grammar.matcher()
        self._features: list[Tensor] = []  # of the prompt's pieces, where the drafter reads them
        self._kept, self._looked_at = 1.0, 2.0

    def draft(self, length: int, clock: Clock) -> Draft:
        """What its drafter proposes; nothing before the first token."""
        nothing = NoDrafter().draft(self.text, 0)
        if not self.has_spoken or length == 0:
            if self.has_spoken:
                self._ask("skip", lambda: self._drafter.skip(self.text))
            return nothing
        self._drafter.clock = clock
        return self._ask("draft", lambda: self._drafter.draft(self.text, length)) or nothing

    def read(self, features: Tensor) -> None:
        """Features ``[nodes, ...]`` of a piece of the prompt."""
        self._features.append(features)

    def follow(self, outcome: Outcome) -> None:
        """Tell the drafter what became of its draft."""
        self._ask("commit", lambda: self._drafter.commit(self.text, outcome))

    def speak(self, longest: int, vocab: int) -> None:
        """The first token is there: from now on there are drafts, of at most `longest` ids below `vocab`."""
        self.has_spoken = True
        self.is_drafted = not self.text.is_finished[0]
        if self.is_drafted:
            self._ask("begin", lambda: self._begin_drafts(longest, vocab))

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
        self.error = self.error or f"its grammar failed: {error}"

    def learn(self, drafted: int, accepted: int) -> None:
        """Note what a step with drafts accepted."""
        self.accepted.append(accepted)
        self._kept = FADE * self._kept + accepted
        self._looked_at = FADE * self._looked_at + min(drafted, accepted + 1)

    def state(self) -> Reason:
        """Why it is to leave now, if it is."""
        if self.text.status[0] & BAD_ROW:
            self.error = self.error or "; ".join(explain_status(self.text.status[0]))
        if self.error:
            return "failed"
        if not self.text.is_finished[0]:
            return ""
        assert self.stops is not None
        return "length" if self.stops.end(self.new, len(self.new) - 1) is None else "stop"

    def end(self, reason: Reason) -> None:
        """It has left."""
        if reason in ("stop", "length") and self.is_drafted:
            self._ask("end", lambda: self._drafter.end(self.text))
        self.reason, self._features = reason, []

    def _begin_drafts(self, longest: int, vocab: int) -> None:
        sampling = Sampling.full(
            1,
            temperature=self.temperature,
            top_k=self.top_k or None,
            top_p=self.top_p if self.top_p < 1 else None,
            min_p=self.min_p or None,
            device=self.text.tokens.device,
        )
        self._drafter.grammars = DraftGrammars([self.matcher], vocab)
        self._drafter.begin(self.text, rule="match", sampling=sampling, longest=longest)
        if self._features:
            self._drafter.prefill(self.text, torch.cat(self._features)[None])
            self._features = []

    def _ask(self, method: str, call: Callable[[], T]) -> T | None:
        """Call the drafter; what it raises ends this request and no other."""
        try:
            return call()
        except Exception as error:
            self.error = f"{type(self._drafter).__name__}.{method} failed: {error}"
            return None
