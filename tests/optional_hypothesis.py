"""hypothesis, or stand-ins that skip its tests: a machine with a GPU need not have it for the other tests of a file."""

from __future__ import annotations

from typing import Any

import pytest

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ImportError:

    class _Anything:
        """Every attribute, call and union of it is the same."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def __or__(self, other: Any) -> Any:
            return self

    HealthCheck = st = _Anything()  # type: ignore[assignment, misc]

    def given(*args: Any, **kwargs: Any) -> Any:  # type: ignore[no-redef]
        """Skip the test."""
        return pytest.mark.skip(reason="needs hypothesis")

    def settings(*args: Any, **kwargs: Any) -> Any:  # type: ignore[no-redef]
        """Leave the test as it is."""
        return lambda test: test


__all__ = ["HealthCheck", "given", "settings", "st"]
