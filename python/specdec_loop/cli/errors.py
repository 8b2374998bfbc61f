"""Errors that the user can correct: one line, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """An error that the user can correct; its message says how."""


def read_text(option: str, file: Path) -> str:
    """The text of a file.

    Raises:
        UserError: there is none, or it is no text.
    """
    if not file.is_file():
        raise UserError(f"{option}: there is no file {file}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {file} is no text in UTF-8: byte {error.start} is wrong") from error
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be read: {error.strerror}") from error


def check_output(option: str, file: Path) -> None:
    """Check that a file can be written, before anything is measured for it; makes its folder.

    Raises:
        UserError: it cannot.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        with file.open("ab"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be written: {error.strerror}") from error


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
