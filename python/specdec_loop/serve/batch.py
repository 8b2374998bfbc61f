"""The requests whose texts grow, as one batch of the decoding loop: one drafter drafts for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..drafters import Draft, Drafter, NoDrafter, Outcome, Part
from ..grammar import DraftGrammars
from ..sequences import Sequences
from ..statistics import Clock
from .request import Reason, Request
from .verification import sampling_of


class Batch:
    """Requests behind their first tokens, and their drafter.

    A drafter's batch does not change while it drafts. When requests have come or gone, a new drafter begins the batch
    as it is now, and takes over what the batch's drafter, and those that read the new prompts, know of their texts.
    What a drafter raises is raised here too; then call `lose`.

    Attributes:
        requests: in the order of their texts.
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
        self._text: Sequences | None = None  # None: no requests
        self._coming: list[tuple[Request, Drafter]] = []  # those of the next step, each with the reader of its text

    def welcome(self, request: Request) -> None:
        """A drafter reads its text, and the next step drafts for it."""
        drafter = self._new()
        features, request.features = request.features, []
        self._begin(drafter, request.text, [request])
        drafter.prefill(request.text, torch.cat(features)[None] if features else None)
        self._coming.append((request, drafter))

    def leave(self, request: Request, reason: Reason) -> bool:
        """Let it go if it is here; returns whether its text was complete."""
        self._coming = [(other, drafter) for other, drafter in self._coming if other is not request]
        if request not in self.requests:
            return False
        self.requests.remove(request)
        is_complete = reason in ("stop", "length")
        if is_complete:
            self._drafter.end(request.text, [request.number])
        return is_complete

    def lose(self) -> list[Request]:
        """All requests leave, and the drafter is replaced by a new one, which knows nothing; returns them."""
        lost = [*self.requests, *(request for request, _ in self._coming)]
        self.requests, self._coming, self._text = [], [], None
        self._drafter = self._make()
        return lost

    def draft(self, length: int) -> list[Draft]:
        """What the drafter proposes, for each of the requests."""
        self._regroup()
        if self._text is None:
            return []
        if length == 0:
            self._drafter.skip(self._text)
            return _of_each(NoDrafter().draft(self._text, 0))
        return _of_each(self._drafter.draft(self._text, length))

    def commit(self, outcome: Outcome) -> None:
        """Tell the drafter what became of its drafts."""
        assert self._text is not None
        self._drafter.commit(self._text, outcome)

    def _regroup(self) -> None:
        """Make the batch anew if requests have come or gone."""
        before, known = self._text, self._drafter
        if not self._coming and len(self.requests) == (0 if before is None else before.batch):
            return
        parts = [Part(drafter, request.text, [request.number]) for request, drafter in self._coming]
        if self.requests:
            assert before is not None
            parts.insert(0, Part(known, before, [request.number for request in self.requests]))
        self.requests += [request for request, _ in self._coming]
        self._coming, self._drafter = [], self._new()
        if not self.requests:
            self._text = None
            return
        text = Sequences.joined([(request.text, request.number) for request in self.requests], self._overhang)
        for number, request in enumerate(self.requests):
            request.place(text, number)
        self._text = text
        self._begin(self._drafter, text, self.requests)
        self._drafter.join(text, parts)

    def _new(self) -> Drafter:
        drafter = self._make()
        drafter.share(self._drafter)
        drafter.clock = self._clock
        return drafter

    def _begin(self, drafter: Drafter, text: Sequences, requests: Sequence[Request]) -> None:
        drafter.grammars = DraftGrammars([request.matcher for request in requests], self._vocab)
        sampling = sampling_of(requests, self._device)
        drafter.begin(text, rule="match", sampling=sampling, longest=self._longest)


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
