"""The requests whose texts grow, as one batch of the decoding loop: one drafter drafts for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..drafters import Draft, Drafter, NoDrafter, Outcome, Part
from ..grammar import DraftGrammars
from ..sequences import Sequences
from ..statistics import Clock
from .request import Reason, Request
from .verification import sampling_of

T = TypeVar("T")


class Group:
    """Requests behind their first tokens, and their drafter.

    A drafter's batch does not change while it drafts. When requests have come or gone, a new drafter begins the batch
    as it is now, and takes over what the group's drafter, and those that read the new prompts, know of their texts.

    Attributes:
        requests: in the order of their texts.
        text: of the batch.
    """

    def __init__(
        self,
        make_drafter: Callable[[], Drafter],
        *,
        longest: int,
        vocab: int,
        overhang: int,
        device: torch.device,
        clock: Clock,
    ) -> None:
        """Begin without requests.

        Args:
            make_drafter: of a batch; all drafters share what they learn from complete texts.
            longest: no draft will be longer.
            vocab: ids of a row of the target's logits.
            overhang: most tokens that a step may offer to a text.
            device: of the target.
            clock: of the steps.
        """
        self._make, self._longest, self._vocab = make_drafter, longest, vocab
        self._overhang, self._device, self._clock = overhang, device, clock
        self._drafter = make_drafter()
        self.requests: list[Request] = []
        self.text: Sequences | None = None
        self._coming: list[tuple[Request, Drafter]] = []

    def welcome(self, request: Request) -> None:
        """Its first token is there: a drafter reads its prompt, and the next step drafts for it."""
        drafter = self._new()
        features, request.features = request.features, []
        try:
            self._begin(drafter, request.text, [request])
            drafter.prefill(request.text, torch.cat(features)[None] if features else None)
        except Exception as error:  # ends this request and no other
            self._fail([request], "begin", error)
        self._coming.append((request, drafter))

    def leave(self, request: Request, reason: Reason) -> None:
        """It is complete, or goes as it is."""
        self._coming = [(other, drafter) for other, drafter in self._coming if other is not request]
        if request not in self.requests:
            return
        self.requests.remove(request)
        if reason in ("stop", "length"):
            self._ask("end", lambda: self._drafter.end(request.text, [request.number]))

    def draft(self, length: int) -> list[Draft]:
        """What the drafter proposes, for each of the requests."""
        self._regroup()
        if not self.requests:
            return []
        assert self.text is not None
        text = self.text
        nothing = NoDrafter().draft(text, 0)
        if length == 0:
            self._ask("skip", lambda: self._drafter.skip(text))
            return _of_each(nothing)
        return _of_each(self._ask("draft", lambda: self._drafter.draft(text, length)) or nothing)

    def commit(self, outcome: Outcome) -> None:
        """Tell the drafter what became of its drafts."""
        assert self.text is not None
        text = self.text
        self._ask("commit", lambda: self._drafter.commit(text, outcome))

    def _regroup(self) -> None:
        """Make the batch anew if requests have come or gone."""
        if not self._coming and len(self.requests) == (0 if self.text is None else self.text.batch):
            return
        before, drafter = self.text, self._new()
        parts = [Part(drafter, request.text, [0]) for request, drafter in self._coming]
        if self.requests:
            assert before is not None
            parts.insert(0, Part(self._drafter, before, [request.number for request in self.requests]))
        self.requests += [request for request, _ in self._coming]
        self._coming = []
        if not self.requests:
            self.text, self._drafter = None, drafter
            return
        text = Sequences.joined([(request.text, request.number) for request in self.requests], self._overhang)
        for number, request in enumerate(self.requests):
            request.place(text, number)
        self.text, self._drafter = text, drafter

        def join() -> None:
            self._begin(drafter, text, self.requests)
            drafter.join(text, parts)

        self._ask("join", join)

    def _new(self) -> Drafter:
        drafter = self._make()
        drafter.share(self._drafter)
        drafter.clock = self._clock
        return drafter

    def _begin(self, drafter: Drafter, text: Sequences, requests: Sequence[Request]) -> None:
        drafter.grammars = DraftGrammars([request.matcher for request in requests], self._vocab)
        sampling = sampling_of(requests, self._device)
        drafter.begin(text, rule="match", sampling=sampling, longest=self._longest)

    def _ask(self, method: str, call: Callable[[], T]) -> T | None:
        """Call the drafter; what it raises ends all requests of the group."""
        try:
            return call()
        except Exception as error:
            self._fail(self.requests, method, error)
            return None

    def _fail(self, requests: Sequence[Request], method: str, error: Exception) -> None:
        for request in requests:
            request.error = request.error or f"{type(self._drafter).__name__}.{method} failed: {error}"


def _of_each(draft: Draft) -> list[Draft]:
    """The draft of each request, of its own length where the host knows that."""
    ids, parents = draft.token_ids, draft.parents
    counts = [ids.shape[1]] * len(ids) if draft.lengths is None else [n + (parents is not None) for n in draft.lengths]
    return [
        draft._replace(
            token_ids=ids[b : b + 1, :count],
            parents=None if parents is None else parents[b : b + 1, :count],
            lengths=None if draft.lengths is None else [draft.lengths[b]],
        )
        for b, count in enumerate(counts)
    ]
