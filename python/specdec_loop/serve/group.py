"""Drafts are optional: requests whose drafter fails go on without it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..drafters import Draft, Outcome
from .batch import Batch
from .request import Reason, Request

logger = logging.getLogger(__name__)
MOST_FAULTS = 3  # in a row: no text was completed between them. Then drafting rests
REST = 60.0  # seconds
T = TypeVar("T")


class Group:
    """The requests whose texts grow: a batch with the drafter, and one of requests whose drafter has failed.

    A drafter that raises may have lost track of every text of its batch, so all of them go on without drafts; requests
    that come later get a new one. If it raises while it reads one prompt, only that request goes without.

    Attributes:
        drafted: requests of the drafter.
        plain: the others.
        faults: of drafters, so far.
    """

    def __init__(self, drafted: Batch, plain: Batch) -> None:
        """Begin with two batches without requests; that of `plain` has a `NoDrafter`."""
        self.drafted, self.plain = drafted, plain
        self.faults = self._in_a_row = 0
        self._rests_until = 0.0

    @property
    def requests(self) -> list[Request]:
        """In the order of `draft`."""
        return [*self.drafted.requests, *self.plain.requests]

    def welcome(self, request: Request) -> None:
        """Its first token is there."""
        if time.monotonic() >= self._rests_until:
            try:
                self.drafted.welcome(request)
            except Exception:
                self._note_fault([request])
            else:
                return
        self.plain.welcome(request)

    def leave(self, request: Request, reason: Reason) -> None:
        """It is complete, or goes as it is."""
        self.plain.leave(request, reason)
        if self._ask(lambda: self.drafted.leave(request, reason)):
            self._in_a_row = 0

    def draft(self, length: int) -> list[Draft]:
        """A draft of each of the requests."""
        return [*(self._ask(lambda: self.drafted.draft(length)) or []), *self.plain.draft(0)]

    def commit(self, outcome: Outcome) -> None:
        """Tell the drafter what became of its drafts."""
        self._ask(lambda: self.drafted.commit(outcome))

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Ask the drafter; if it raises, its requests go on without it."""
        try:
            return call()
        except Exception:
            lost = self.drafted.lose()
            self._note_fault(lost)
            for request in lost:
                self.plain.welcome(request)
            return None

    def _note_fault(self, lost: Sequence[Request]) -> None:
        """Log the error that is being handled, and let drafting rest if it is one of many."""
        self.faults, self._in_a_row = self.faults + 1, self._in_a_row + 1
        logger.exception("the drafter failed: %d requests go on without drafts", len(lost))
        if self._in_a_row >= MOST_FAULTS:
            self._rests_until = time.monotonic() + REST
            logger.error("%d faults of the drafter in a row: no drafts for %g s", self._in_a_row, REST)
