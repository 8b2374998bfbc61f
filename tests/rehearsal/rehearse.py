"""make rehearse: runs bench/gpu.sh on two GPUs that are none (tests/fake_gpu.py), in a copy of the tree.

The CUDA kernels are those compiled for the host, Triton's are interpreted, compute-sanitizer, ncu and nvidia-smi are
scripts. It fails where a part of gpu.sh ends otherwise than planned, or where a Python line of bench/gpu*.py was never
run. Under two minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from native.build import build  # noqa: E402

KEPT_TESTS = (  # test_devices.py of tests/gpu runs in the fast tier, as test_other_device.py
    "tests/gpu/test_caches.py",
    "tests/gpu/test_repeats.py",
    "tests/ops/test_gather_nodes.py",
)
PLANTED = """
import pytest

def test_that_passes(): pass
def test_that_fails(): assert 1 == 2, "planned"
def test_that_is_skipped(): pytest.skip("planned")
@pytest.fixture
def broken(): raise RuntimeError("planned")
def test_whose_fixture_fails(broken): pass
"""
SANITIZER = """#!/usr/bin/env bash
[ "$2" != synccheck ] || { echo "========= Error: Device not supported. planned"; exit 1; }
[ "$2" != racecheck ] || { echo "========= ERROR SUMMARY: 1 error, planned"; exit 86; }
while [ "$1" != -m ]; do last=$1; shift; done
exec "$last" "$@"
"""
NCU = """#!/usr/bin/env bash
while [ "$1" != -m ]; do [ "$1" != --log-file ] || log=$2; last=$1; shift; done
printf '%s\\n' '==PROF== connected' '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"' \\
  '"0","rows_kernel(int)","gpu__time_duration.sum","ns","1,234"' '"0","rows_kernel(int)","other","","1"' > "$log"
exec "$last" "$@"
"""
TOOLS = {"compute-sanitizer": SANITIZER, "ncu": NCU, "nvidia-smi": "#!/bin/sh\necho 580.0\n", "nvcc": "#!/bin/sh\n"}
# Text of the copy that is replaced: fewer repeats, fewer ids, the GPUs in every test process.
CHANGES = {
    "tests/gpu/test_repeats.py": [
        ("REPEATS = 1000", "REPEATS = 10"),
        ("VOCAB = 128256", "VOCAB = 2400"),
        ("[1, 7, 256]", "[1, 2]"),
    ],
    "tests/gpu/test_caches.py": [("REPEATS = 1000", "REPEATS = 1"), ("range(20)", "range(1)")],
    "tests/conftest.py": [("import os\n", "import os\nfrom rehearsal.start import enter\n\nenter()\n")],
    "bench/gpu_small.py": [("VOCAB = 9001", "VOCAB = 700")],
    "bench/gpu.sh": [
        ('-m "not slow"', '-m "not slow" -k "not opcheck"'),  # torch.compile wants a real GPU
        ("gpu_small --seconds 80 2>&1", "gpu_small --seconds 2 2>&1"),
        ("tests cuda 4", "tests cuda 0"),
        ("tests triton 8", "tests triton 2"),
        ("small --seconds 80\n", "small --seconds 8\n"),
    ],
}


def copy_tree(to: Path) -> None:
    """The files that git knows, changed as CHANGES says, the kernels for the host, fake tools and planted tests."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        is_test = name.startswith("tests/") and Path(name).name.startswith("test_")
        if (ROOT / name).exists() and (not is_test or name in KEPT_TESTS):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "build/cuda_host").mkdir(parents=True)
    shutil.copy2(build(), to / "build/cuda_host")
    for library in (ROOT / "specdec_kernels").glob("*.so"):
        shutil.copy2(library, to / "specdec_kernels")
    for name, changes in CHANGES.items():
        text = (to / name).read_text()
        for old, new in changes:
            if old not in text:
                sys.exit(f"rehearse: {name} has no {old!r} any more")
            text = text.replace(old, new, 1)
        (to / name).write_text(text)
    (to / "tests/gpu/test_planted.py").write_text(PLANTED)
    (to / "tests/gpu/test_broken.py").write_text("import no_such_module\n")
    for name, script in TOOLS.items():
        path = to / "cuda/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)
    python = f'#!/bin/sh\nexec {sys.executable} -m coverage run -p tests/rehearsal/start.py "$@"\n'
    (to / "cuda/bin/python").write_text(python)
    (to / "cuda/bin/python").chmod(0o755)


def run(tree: Path, *parts: str) -> int:
    """bench/gpu.sh in the copy; its exit status."""
    environment = os.environ | {
        "PATH": f"{tree}/cuda/bin:{os.environ['PATH']}",
        "CUDA_HOME": f"{tree}/cuda",
        "PYTHON": f"{tree}/cuda/bin/python",
        "PYTHONPATH": "",
        "OUT": f"{tree}/out",
        "BENCH_COMMIT": "0123456789",
        "SLOW": "5",
        "COVERAGE_FILE": f"{tree}/coverage/data",
        "COVERAGE_RCFILE": f"{tree}/coverage/rc",
    }
    return subprocess.run(["bash", "bench/gpu.sh", *parts], cwd=tree, env=environment).returncode


def check(content: dict[str, Any], status: int) -> None:
    """What the planned failures must leave, and nothing else wrong."""
    steps = {step["step"]: step for step in content["steps"]}
    verdicts = {name: step["verdict"] for name, step in steps.items()}
    planned = {"tests of GPUs": "failed (1)", "racecheck": "failed (86)", "synccheck": "skipped"}
    assert verdicts == dict.fromkeys(verdicts, "ok") | planned, verdicts
    assert status == 2, f"{status} failed steps"
    gpus = steps["tests of GPUs"]
    assert {f["test"].split("::")[-1] for f in gpus["failures"]} == {
        "test_that_fails", "test_whose_fixture_fails", "collection of tests/gpu/test_broken.py",
    }, gpus["failures"]  # fmt: skip
    assert gpus["passed"] > 10 and steps["tests of cuda"]["passed"] > 5 and steps["tests of triton"]["passed"] > 5
    assert "refuses" in steps["synccheck"]["reason"]
    assert content["machine"]["driver"] == "580.0" and content["commit"] == "0123456789"
    assert content["counters"] == [{"kernel": "rows_kernel", "ns": 1234.0}], content["counters"]
    rows = content["rows"]
    wrong = [r for r in rows if "left_out" in r and "planned" not in r["left_out"]]
    assert not wrong, "\n".join(f"{r['op']}, {r['case']}, {r['contender']}: {r['left_out']}" for r in wrong)
    by_note = {note: [r for r in rows if note in r.get("graph", "")] for note in ("reads values", "the capture failed")}
    assert all(by_note.values()), by_note
    assert all(r["timed"] == "launches" for found in by_note.values() for r in found)
    assert all("graph" not in r for r in rows if r["is_ours"]), "a call of ours cannot be captured"
    assert rows[0]["case"].endswith("greedy"), rows[0]["case"]


def uncovered(tree: Path) -> list[str]:
    """Lines of bench/gpu*.py that no process ran."""
    import coverage

    data = coverage.Coverage(data_file=f"{tree}/coverage/data", config_file=f"{tree}/coverage/rc")
    data.combine()
    found = []
    for path in sorted((tree / "bench").glob("gpu*.py")):
        *_, missing, text = data.analysis2(str(path))
        if missing:
            found.append(f"bench/{path.name}: lines {text} were never run")
    return found


def main() -> None:
    """Run it all, then look at what it left."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        copy_tree(tree)
        (tree / "coverage").mkdir()
        (tree / "coverage/rc").write_text(f"[run]\nsource = {tree}/bench\n[report]\nexclude_lines =\n    @triton.jit\n")
        assert run(tree, "no such part") == 2
        (tree / "dist").mkdir()
        with zipfile.ZipFile(tree / "dist/specdec_kernels-0.0-cp310-abi3-linux_x86_64.whl", "w") as wheel:
            wheel.writestr("specdec_kernels/_cuda.abi3.so", "")
        status = run(tree)
        file = tree / "out/fake-gpu.json"
        before = json.loads(file.read_text())
        check(before, status)
        missing = uncovered(tree)
        if missing:
            sys.exit("\n".join(missing))
    print("the rehearsal of bench/gpu.sh went as planned; every Python line of it ran")


if __name__ == "__main__":
    main()
