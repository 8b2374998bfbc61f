"""Errors that the user can correct: one line, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """An error that the user can correct; its message says how."""


@contextmanager
def one_line() -> Iterator[None]:
    """Turn the errors of a call into a `UserError` of one line."""
    try:
        yield
    except (UserError, BrokenPipeError):  # a reader of standard output that is gone is no error
        raise
    except (MemoryError, ValueError, OSError, RuntimeError) as error:
        text = str(error).strip()
        if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
            raise UserError("out of memory: give a smaller --batch, --max-new-tokens or model") from error
        raise UserError(text.splitlines()[0] if text else type(error).__name__) from error
