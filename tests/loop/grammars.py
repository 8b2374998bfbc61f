"""A schema, what obeys it, and a grammar that needs no library."""

from __future__ import annotations

import json
import re
from typing import Any

from torch import Tensor

from specdec_loop.grammar import Matcher

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{0,6}$"},
        "kind": {"enum": ["cat", "cow", "crow"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "tags", "age"],
    "additionalProperties": False,
}


def obeys(text: str) -> bool:
    """Whether a text is JSON of `SCHEMA`."""
    value = json.loads(text)
    tags = value["tags"]
    return (
        list(value) == list(SCHEMA["properties"])
        and re.fullmatch("[a-z]{0,6}", value["name"]) is not None
        and value["kind"] in ("cat", "cow", "crow")
        and 1 <= len(tags) <= 3 and all(isinstance(tag, bool) for tag in tags)
        and type(value["age"]) is int and 0 <= value["age"] <= 99
    )  # fmt: skip


class Letters:
    """A toy grammar over ids 1 to 9: each is larger than the one before; 0 ends a text that has one."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def matcher(self) -> Matcher:
        return Letters()

    def fill(self, row: Tensor) -> None:
        last = self.taken[-1] if self.taken else 0
        row.zero_()
        row[0] = sum(1 << v for v in range(last + 1, 10)) | bool(self.taken)

    def accept(self, token: int) -> bool:
        last = self.taken[-1] if self.taken else 0
        is_allowed = not self.is_terminated() and (token > last or (token == 0 and bool(self.taken)))
        self.taken += [token] * is_allowed
        return is_allowed

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def is_terminated(self) -> bool:
        return self.taken[-1:] == [0]
