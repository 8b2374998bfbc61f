"""A command's --help in a fresh process."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "rich", "matplotlib", "specdec_kernels")


def assert_light(module: str, words: list[str]) -> None:
    """Check that `module.main` prints the help of a command without an import that takes seconds."""
    code = (
        f"import sys; from {module} import main\n"
        f"try: main({[*words, '--help']})\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"print('heavy:', sorted(set({HEAVY}) & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "usage: python -m" in out and out.endswith("heavy: []\n")
