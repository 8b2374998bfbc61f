"""Stop conditions: token ids, sequences of them, and strings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from .continuation import tail, text_behind

SLACK = 4  # a tokenizer may drop a space, or half a character, at the front of what it decodes


class Stops:
    """Finds the first stop of a text; the token that completes it is the text's last."""

    def __init__(
        self, stop: Sequence[int | Sequence[int] | str], tokenizer: Any = None, *, before: Sequence[int] = ()
    ) -> None:
        """Compile the stops.

        Args:
            stop: token ids, token sequences, strings; or one string.
            tokenizer: of the target; strings need it.
            before: tokens that the text continues, which no string begins in; none: it begins anew.

        Raises:
            ValueError: an empty stop, or a string without a tokenizer.
        """
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, Iterable) or not all(isinstance(s, (int, Iterable)) for s in stop):
            raise ValueError(f"generate: stop must be a list of ids, sequences of ids and strings, got {stop!r}")
        self._tokenizer = tokenizer
        self._strings = [s for s in stop if isinstance(s, str)]
        sequences = [(s,) if isinstance(s, int) else tuple(s) for s in stop if not isinstance(s, str)]
        if not all(self._strings) or not all(sequences):
            raise ValueError(
                f"generate: stop must be ids, sequences of ids and strings, none of them empty, got {stop}"
            )
        if self._strings and tokenizer is None:
            raise ValueError("generate: tokenizer must be given with a stop string, got None")
        self._ids = {s[0] for s in sequences if len(s) == 1}
        self._sequences = [s for s in sequences if len(s) > 1]
        # A token stands for at least one byte, so that these last tokens hold any string that ends with the last one.
        self._window = max((len(s.encode()) for s in self._strings), default=0) + SLACK
        self._special = set(getattr(tokenizer, "all_special_ids", ())) if self._strings else set()
        self._before = tail(tokenizer, before) if self._strings else []

    def end(self, tokens: Sequence[int], first: int) -> int | None:
        """Tokens up to the end of the first stop, which is complete at place `first` or later; None: there is none."""
        for place in range(first, len(tokens)) if self._ids or self._sequences or self._strings else ():
            if tokens[place] in self._ids:
                return place + 1
            for sequence in self._sequences:
                if tuple(tokens[max(place + 1 - len(sequence), 0) : place + 1]) == sequence:
                    return place + 1
            if self._strings and any(s in text for text in self._texts(tokens, place + 1) for s in self._strings):
                return place + 1
        return None

    def _texts(self, tokens: Sequence[int], end: int) -> Iterator[str]:
        """The text of the last tokens before a place, with the special ones among them, and without."""
        for skipped in (set[int](), self._special):  # these do not count: any number of them may stand within a stop
            counted = (place for place in range(end - 1, -1, -1) if tokens[place] not in skipped)
            begin = next(islice(counted, self._window - 1, None), 0)
            before = [] if begin else self._before
            yield text_behind(self._tokenizer, before, tokens[begin:end], skip_special=skipped is self._special)
