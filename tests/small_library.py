"""A small standard library for the corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXT = """
def function_{0}(argument):
    value = argument + {0}
    for item in range(value):
        print(item)
    return value
"""


def small_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources that stands for the standard library."""
    for n in range(150):
        path = root / ("encodings" if n % 30 == 7 else "package") / f"module_{n}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(TEXT.format(n + i) for i in range(4)))
    (root / "latin.py").write_bytes(b"# \xe9\n" * 10)
    (root / "table.py").write_text("x = [" + "1, " * 500 + "]\n" * 10)
    (root / "short.py").write_text("x = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    return root
