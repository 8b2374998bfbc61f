"""Text of tokens behind others: a tokenizer may drop a space in front of all that it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

UNFINISHED = "\ufffd"  # a character of which not all bytes are there
LEAST = 5  # tokens of a prompt, so that one of them is likely to have text
BYTES = 4  # of a character at most


def tail(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The last tokens of a text, or all of a short one, from the beginning of a character on; none: there is none."""
    if len(ids) < LEAST + BYTES:
        return list(ids)
    ends = (list(ids[-count:]) for count in range(LEAST, LEAST + BYTES))
    return next((end for end in ends if not tokenizer.decode(end).startswith(UNFINISHED)), [])


def text_behind(tokenizer: Any, before: Sequence[int], ids: Sequence[int], *, skip_special: bool = False) -> str:
    """What tokens add to the text of those before them; a character that they complete is theirs."""

    def decoded(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), skip_special_tokens=skip_special)) if part else ""

    whole = decoded([*before, *ids])
    return whole[len(commonprefix([decoded(before), whole])) :]
