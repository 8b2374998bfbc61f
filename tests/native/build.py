"""Build the CUDA sources for the host: `python tests/native/build.py [mode]` prints the library's path."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(torch.__file__).parent
FLAGS = [
    "-std=c++20", "-fPIC", "-x", "c++", "-DSPECDEC_HOST=<cuda_on_host.h>", "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter",
    "-Wno-attributes",
    f"-I{ROOT / 'tests/native'}", "-isystem", str(TORCH / "include"),
]  # fmt: skip


class Mode(NamedTuple):
    """How the sources are compiled.

    Attributes:
        flags: of the compiler.
        link: of the linker.
        runtime: more sources, compiled without these flags.
    """

    flags: tuple[str, ...]
    link: tuple[str, ...] = ()
    runtime: tuple[Path, ...] = ()


_MEMORY = "-fsanitize=address,undefined"
MODES = {
    "plain": Mode(("-O2", "-g1")),
    "sanitized": Mode(("-O1", "-g", _MEMORY, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"), (_MEMORY,)),
    # The compiler's pass alone: what it calls is the detector. It does not see a structure that a call returns into
    # memory or takes out of it; one that is copied it sees.
    "race": Mode(
        ("-O1", "-g", "-fsanitize=thread", "-fno-elide-constructors", "-DSPECDEC_RACE"),
        runtime=(ROOT / "tests/race/detector.cpp",),
    ),
}
DETECTOR = ("-O2", "-g", "-DSPECDEC_RACE")


def made_of(source: Path) -> list[Path]:
    """A source, the header that stands in for CUDA, and what they include of this repository."""
    found: set[Path] = set()
    waiting = [source, ROOT / "tests/native/cuda_on_host.h"]
    while waiting:
        path = waiting.pop().resolve()
        if path not in found:
            found.add(path)
            waiting += [path.parent / name for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)]
    return sorted(found)


def build(mode: str = "plain", csrc: Path = ROOT / "csrc") -> Path:
    """Path of the library `cuda_host`, compiled if a source, a header or a flag changed; one build at a time.

    `csrc` may be a copy of the sources: its library has a folder of its own, beside that copy.
    """
    folder = ROOT / "build" / ("cuda_host" if mode == "plain" else f"cuda_host_{mode}")
    if csrc != ROOT / "csrc":
        folder = csrc.parent / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder, MODES[mode], csrc)


def _build(folder: Path, mode: Mode, csrc: Path) -> Path:
    compiler = shlex.split(os.environ.get("CXX", "c++"))

    def compile_one(source: Path) -> Path:
        flags = [*FLAGS, *(DETECTOR if source in mode.runtime else (*mode.flags, f"-I{csrc}"))]
        digest = hashlib.sha256(repr([compiler, flags, torch.__version__]).encode())
        for path in made_of(source):
            digest.update(path.read_bytes())
        target = folder / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not target.exists():
            for stale in folder.glob(f"{source.stem}-*.o"):
                stale.unlink()
            partial = target.with_suffix(f".{os.getpid()}")
            subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(partial)], check=True)
            partial.rename(target)
        return target

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        objects = list(pool.map(compile_one, [*sorted((csrc / "cuda").glob("*.cu")), *mode.runtime]))
    digest = hashlib.sha256("".join(o.name for o in objects).encode()).hexdigest()[:16]
    library = folder / f"libcuda_host-{digest}.so"
    if not library.exists():
        for stale in folder.glob("libcuda_host-*.so"):
            stale.unlink()
        partial = library.with_suffix(f".{os.getpid()}")
        link = [*mode.link, f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run([*compiler, "-shared", *map(str, objects), "-o", str(partial), *link], check=True)
        partial.rename(library)
    return library


def load_backend(library: Path) -> None:
    """Make the library the backend `cuda_host` of every op that has `cuda`, once."""
    from specdec_kernels import _native, _op

    if "cuda_host" in _native.test_backends:
        return
    for op in _op.OPS.values():
        if "cuda" in op.backends:
            op.declare("cuda_host")
    torch.ops.load_library(library)
    _native.test_backends.append("cuda_host")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", nargs="?", default="plain", choices=MODES)
    print(build(parser.parse_args().mode))
