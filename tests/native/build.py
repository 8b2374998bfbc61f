"""Build the CUDA sources for the host: `python tests/native/build.py [--sanitize]` prints the library's path."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
FLAGS = [
    "-std=c++20", "-fPIC", "-x", "c++", "-DSPECDEC_HOST=<cuda_on_host.h>", "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter",
    "-Wno-attributes",
    f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/native'}", "-isystem", str(TORCH / "include"),
]  # fmt: skip
MODES = {
    False: ["-O2", "-g1"],
    True: ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
}


def build(*, sanitize: bool = False) -> Path:
    """Path of the library `cuda_host`, compiled if a source, a header or a flag changed; one build at a time."""
    folder = ROOT / "build" / ("cuda_host_sanitized" if sanitize else "cuda_host")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder, sanitize)


def _build(folder: Path, sanitize: bool) -> Path:
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh"), ROOT / "tests/native/cuda_on_host.h"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = FLAGS + MODES[sanitize]
    shared = hashlib.sha256(repr([compiler, flags, torch.__version__]).encode())
    for header in sorted(headers):
        shared.update(header.read_bytes())

    def compile_one(source: Path) -> Path:
        digest = shared.copy()
        digest.update(source.read_bytes())
        target = folder / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not target.exists():
            for stale in folder.glob(f"{source.stem}-*.o"):
                stale.unlink()
            partial = target.with_suffix(f".{os.getpid()}")
            subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(partial)], check=True)
            partial.rename(target)
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        objects = list(pool.map(compile_one, sources))
    digest = hashlib.sha256("".join(o.name for o in objects).encode()).hexdigest()[:16]
    library = folder / f"libcuda_host-{digest}.so"
    if not library.exists():
        for stale in folder.glob("libcuda_host-*.so"):
            stale.unlink()
        partial = library.with_suffix(f".{os.getpid()}")
        link = [f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
        mode = [flag for flag in MODES[sanitize] if flag.startswith("-fsanitize")]
        subprocess.run([*compiler, "-shared", *mode, *map(str, objects), "-o", str(partial), *link], check=True)
        partial.rename(library)
    return library


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    print(build(sanitize=parser.parse_args().sanitize))
