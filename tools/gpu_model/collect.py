"""Compiles and counts: what goes into bench/results/gpu-model.json. What was counted before is not counted again."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import cold, cuda
from .count import Counts, Stream, Work, count
from .model import Kernel, Launch
from .rivals import READS
from .sass import Graph, functions
from .triton_calls import IDLE, OTHER_CASES, ROW_CASES, Case, Size
from .triton_run import TARGETS, disassemble, front_end_only, resources, run

BATCHES = (1, 16, 64, 256)
COUNTED = cuda.BUILD / "counted"
HERE = Path(__file__).parent


@functools.cache
def code_version() -> str:
    """Of the files that decide what is counted."""
    return cuda.digest([HERE / name for name in ("sass.py", "count.py", "machines.py")])


@functools.cache
def triton_sources(op: str) -> list[Path]:
    """Files that the Triton kernels of an op are made of: its own, and of `_triton` what is imported from there on."""
    package = cuda.ROOT / "specdec_kernels"
    shared = {path.stem: path for path in (package / "_triton").glob("*.py")}
    waiting, found = [package / "ops" / op / "triton_kernel.py"], set[Path]()
    while waiting:
        path = waiting.pop()
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                waiting += [shared[name] for name in names if name in shared and shared[name] not in found]
    return sorted(found)


def to_json(kernel: Kernel) -> list[Any]:
    """A kernel as nested lists, numbers rounded."""
    plain = json.loads(json.dumps(kernel), parse_float=lambda text: round(float(text), 3))
    assert isinstance(plain, list)
    return plain


def from_json(values: list[Any]) -> Kernel:
    """The inverse."""
    streams, once, after, *rest = values[6]
    made = [Stream(Work(*s[0]), *s[1:]) for s in streams]
    return Kernel(*values[:6], Counts(made, Work(*once), Work(*after), *rest))


def remembered(key: str, make: Callable[[], Any]) -> Any:
    """A value that is made once for a key."""
    path = COUNTED / f"{hashlib.sha256((key + code_version()).encode()).hexdigest()[:20]}.json"
    if not path.exists():
        value = make()
        COUNTED.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(f".{os.getpid()}")  # other processes read what is whole
        begun.write_text(json.dumps(value))
        begun.replace(path)
    return json.loads(path.read_text())


def triton_kernel(compiled: Any, target: str, threads: int) -> list[Any]:
    """[name, ...] of a compiled Triton kernel."""
    used, name = resources(compiled, target), compiled.name
    if TARGETS[target].backend == "hip":
        waits = len(re.findall(r"^\s*s_waitcnt\b", compiled.asm["amdgcn"], re.MULTILINE))
        return [name, 942, threads, used.registers, used.shared, used.spilled, waits]
    text = disassemble(compiled.asm["cubin"])
    graph = next(Graph(code, labels) for found, code, labels in functions(text) if found == name)
    never = cold.cold_code(name, graph)
    counts = count(graph, lambda one: one.address in never, cuda.is_cold_path, threads // 32, cold.turns_once)
    if name == "digest_kernel":
        counts = counts._replace(streams=[cold.digest_writes(stream, threads) for stream in counts.streams])
    arch = int(target.removeprefix("cuda:"))
    return to_json(Kernel(name, arch, threads, used.registers, used.shared, used.spilled, counts))


def grids(target: str, call: Callable[[Size], None], vocab: int) -> list[list[list[int]]]:
    """For each launch and batch: [blocks, bytes of its large arguments]."""
    of_batch = [
        run(target, lambda b=batch: call(Size(b, vocab)), is_compiled=False, row=vocab)  # type: ignore[misc]
        for batch in BATCHES
    ]
    return [[[one.blocks, one.large] for one in launches] for launches in zip(*of_batch, strict=True)]


def triton_case(target: str, case: Case, vocab: int, kernels: list[list[Any]] | None = None) -> list[dict[str, Any]]:
    """Launches of a case: the kernel, and its grids at every batch. `kernels`: the former, if they are known."""
    made = kernels or []
    for one in run(target, lambda: case.call(Size(64, vocab)), row=vocab) if kernels is None else []:
        key = f"{target} {one.compiled.hash} {one.threads} {cold.version()}"
        compiled, threads = one.compiled, one.threads
        made.append(remembered(key, lambda c=compiled, t=threads: triton_kernel(c, target, t)))  # type: ignore[misc]
    at = grids(target, case.call, vocab) if case.rows else [[] for _ in made]
    return [{"kernel": k, "at": g} for k, g in zip(made, at, strict=True)]


def named(name: str) -> Case:
    """A Triton case. Its functions go to no other process: those import this module, never `__main__`."""
    return next(case for case in ROW_CASES + OTHER_CASES if case.name == name)


def named_case(work: tuple[str, int, str, list[list[Any]] | None]) -> list[dict[str, Any]]:
    """`triton_case` of target, vocabulary, name and known kernels."""
    target, vocab, name, kernels = work
    return triton_case(target, named(name), vocab, kernels)


def translation(work: tuple[str, int, str]) -> str:
    """Digest of what Triton's front end makes of a case: its machine code is another only where this is another."""
    target, vocab, name = work
    call = named(name).call
    with front_end_only() as texts:
        run(target, lambda: call(Size(64, vocab)))
    return hashlib.sha256("".join([*texts, *cold.cold_lines()]).encode()).hexdigest()[:16]


def cuda_source(work: tuple[int, Path]) -> dict[str, list[Any]]:
    """`cuda_kernels` of an architecture and a source."""
    return cuda_kernels(work[0], [work[1]])


def cuda_kernels(arch: int, chosen: Iterable[Path]) -> dict[str, list[Any]]:
    """Every kernel of the sources, everything that it may run counted."""
    found = {}
    for source in chosen:
        key = f"{source.name} {arch} {cuda.digest(cuda.included(source))}"

        def make(source: Path = source) -> dict[str, Any]:
            made = cuda.compiled(source, arch)
            return {
                cuda.plain_name(name): to_json(cuda.kernel_of(use, made.graphs[name], (), cuda.threads()))
                for name, use in made.usage.items()
            }

        found.update(remembered(key, make))
    return found


def cuda_calls(arch: int, chosen: Iterable[Path]) -> dict[str, list[list[Any]]]:
    """Kernels of every call of CALLS, without the code that the call does not run."""
    by_name: dict[str, tuple[Path, str]] = {}
    for source in chosen:
        for name in cuda.compiled(source, arch).usage:
            by_name[cuda.plain_name(name)] = (source, name)

    def kernel(part: cuda.Part) -> list[Any]:
        source, name = by_name[part.kernel]
        made = cuda.compiled(source, arch)
        key = f"{part.kernel} {part.cold} {arch} {cuda.digest(cuda.included(source))}"
        use, graph = made.usage[name], made.graphs[name]
        found = remembered(key, lambda: to_json(cuda.kernel_of(use, graph, part.cold, cuda.threads())))
        assert isinstance(found, list)
        return found

    return {call.name: [kernel(part) for part in call.parts] for call in cuda.CALLS}


# Kernels that look into digests and a few blocks of each row, however long it is.
LOOKS = re.compile(
    r"listed|look_kernel|settle|stats|decide|plan|tree|chain_kernel|block_kernel|draw_kernel|ratios|kept"
)


def triton_launches(case: list[dict[str, Any]], batch: int, vocab: int) -> list[Launch]:
    """Launches of a stored case at a batch."""
    at = BATCHES.index(batch)
    made = []
    for one in case:
        kernel, (blocks, large) = from_json(one["kernel"]), one["at"][at]
        is_idle = re.search(IDLE, kernel.name) is not None
        if kernel.name in READS:
            large = READS[kernel.name] * batch * vocab * 4
        made.append(Launch(kernel, blocks, 0 if is_idle else large, is_idle, LOOKS.search(kernel.name) is not None))
    return made


def cuda_launches(name: str, kernels: list[list[Any]], batch: int, vocab: int) -> list[Launch]:
    """Launches of a stored CUDA call."""
    call = next(c for c in cuda.CALLS if c.name == name)
    return [
        Launch(from_json(k), part.blocks(batch, vocab), 0, part.is_idle, LOOKS.search(k[0]) is not None)
        for part, k in zip(call.parts, kernels, strict=True)
    ]
