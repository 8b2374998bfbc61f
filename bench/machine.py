"""Machine, versions and commit of a measured number."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import specdec_kernels

ROOT = Path(__file__).parent.parent


def _cpu_field(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def machine() -> dict[str, object]:
    """The machine, in words; no host name and no path."""
    cpu = _cpu_field("model name") or platform.processor() or platform.machine()
    model = _cpu_field("model")
    facts: dict[str, object] = {
        "cpu": re.sub(r"\((R|TM)\)", "", cpu) + (f" (model {model})" if model else ""),
        "cores": cores(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30)
        facts["multiprocessors"] = properties.multi_processor_count
    return facts


def slug() -> str:
    """Name of this machine's result file."""
    facts = machine()
    words = str(facts.get("gpu") or f"{facts['cpu']} {facts['cores']} cores")
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of everything whose speed is shown."""
    found = {"python": platform.python_version(), "specdec_kernels": specdec_kernels.__version__}
    for package in ("torch", "triton", "transformers", "vllm", "flashinfer-python", "sglang"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


@functools.cache
def commit() -> str:
    """Short hash of the measured sources, with a + if files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        sources = "specdec_kernels", "csrc", "python", "bench/*.py"
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    except OSError:
        return "unknown"
    return (head or os.environ.get("BENCH_COMMIT", "unknown")) + ("+" if changed else "")


def progress(text: str) -> None:
    """One line on stderr, so that a table on stdout stays clean."""
    print(text, file=sys.stderr, flush=True)
