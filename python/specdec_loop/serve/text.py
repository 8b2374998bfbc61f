"""Text of a continuation as its tokens come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..continuation import UNFINISHED, tail, text_behind


class Piece(NamedTuple):
    """A piece of text; is_accepted: its token was an accepted draft."""

    text: str
    is_accepted: bool


class GrowingText:
    """Turns tokens to pieces of text; joined, these are the text up to the first stop string."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), *, before: Sequence[int] = (), has_special: bool = False
    ) -> None:
        """Begin.

        Args:
            tokenizer: of the model.
            stops: strings, none of them empty.
            before: tokens that the text continues; none: it begins anew.
            has_special: end tokens and their like are text too.
        """
        self._tokenizer, self._stops, self._has_special = tokenizer, stops, has_special
        self._ids = tail(tokenizer, before)
        self._begin, self._end = 0, len(self._ids)  # between them: decoded before the new ones, for what joins them
        self._held: list[Piece] = []  # may be the beginning of a stop
        self.is_stopped = False

    def push(self, tokens: Sequence[int], accepted: int) -> list[Piece]:
        """Take the tokens of a step, of which the first ones were accepted drafts."""
        for i, token in enumerate(tokens):
            self._ids.append(token)
            text = self._new()
            if text and not text.endswith(UNFINISHED):
                self._held.append(Piece(text, i < accepted))
                self._begin, self._end = self._end, len(self._ids)
        return self._released(is_last=False)

    def finish(self) -> list[Piece]:
        """What was held back; bytes that make no character are shown as such."""
        if rest := self._new():
            self._held.append(Piece(rest, False))
        return self._released(is_last=True)

    def _new(self) -> str:
        """Text of the tokens that are in no piece yet."""
        before, ids = self._ids[self._begin : self._end], self._ids[self._end :]
        return text_behind(self._tokenizer, before, ids, skip_special=not self._has_special)

    def _released(self, *, is_last: bool) -> list[Piece]:
        """The pieces that no stop can begin in."""
        text = "".join(piece.text for piece in self._held)
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        free = len(text)
        if self.is_stopped or found:
            free = 0 if self.is_stopped else min(found)
            self.is_stopped = True
        elif not is_last:
            free -= max((_overlap(text, stop) for stop in self._stops), default=0)
        released = []
        for piece in self._held:
            if free and (part := piece.text[:free]):
                released.append(piece._replace(text=part))
                free -= len(part)
        shown = sum(len(piece.text) for piece in released)
        self._held = _behind(self._held, len(text) if self.is_stopped else shown)
        return released


def _behind(pieces: Sequence[Piece], shown: int) -> list[Piece]:
    """What is left of pieces behind their first characters."""
    rest = []
    for piece in pieces:
        if part := piece.text[shown:]:
            rest.append(piece._replace(text=part))
        shown = max(shown - len(piece.text), 0)
    return rest


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
