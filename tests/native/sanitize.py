"""Run the tests of both native libraries under AddressSanitizer and UBSan: `python tests/native/sanitize.py [tests]`.

The CPU library is built as setup.py builds it; the CUDA sources run on the host. The first bad access or undefined
operation ends the run and names its line. As a pytest plugin this file puts the two sanitized libraries in place.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = ROOT / "build" / "sanitized"
REPORT = SANITIZED / "report"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"


def build_cpu() -> None:
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "-b", SANITIZED, "-t", SANITIZED / "objects"],
        cwd=ROOT,
        env={**os.environ, "CXX": f"{compiler} {FLAGS}", "SPECDEC_BUILD_CUDA": "0"},
        check=True,
    )


def runtime(library: str) -> str:
    """Path of a compiler's runtime library; Python itself is not sanitized, so it must be loaded first."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    found = subprocess.run([*compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main() -> None:
    from build import build

    build_cpu()
    build("sanitized")
    preload = " ".join(map(runtime, ("libasan.so", "libubsan.so", "libstdc++.so")))
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        # What Python never frees is no leak of ours. Reports go to files: pytest's capture would die with the process.
        "ASAN_OPTIONS": f"detect_leaks=0:abort_on_error=1:log_path={REPORT}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:log_path={REPORT}",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    files = ("test_chain_edges", "test_calls", "ops/test_sample", "native/test_cpu_bounds")
    usual = [f"tests/{name}.py" for name in files]
    chosen = sys.argv[1:] or [*usual, "-m", "not slow"]
    # ASan keeps freed memory for a while, so what a process holds says nothing of leaks.
    native = ["-k", "(cpu or cuda_host or test_calls) and not compile and not opcheck and not leaks"]
    command = [sys.executable, "-m", "pytest", "-p", "sanitize", "-n", "auto", *native, *chosen]
    for old in SANITIZED.glob("report.*"):
        old.unlink()
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    for report in sorted(SANITIZED.glob("report.*")):
        print(report.read_text()[:6000])
    sys.exit(status)


def pytest_sessionstart() -> None:
    """Load the sanitized libraries before a test asks for the plain ones."""
    from build import build, load_backend
    from specdec_kernels import _native

    _native._FOLDER = SANITIZED / "specdec_kernels"
    load_backend(build("sanitized"))


if __name__ == "__main__":
    main()
