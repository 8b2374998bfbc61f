"""Simulated cycles of streaming ops at 128256 ids beside a plain copy and rivals' Triton kernels.

A case is one request with one draft; each runs in a process of its own, so that its memory is cold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import torch

import specdec_kernels
from bench.rows import rows
from specdec_kernels import use_backend

from ..gpu_model import cuda, known, rivals
from ..gpu_model.triton_calls import Size
from . import results
from .cases import make_chain, make_rng
from .gpgpusim import Simulator
from .ptx import Unsupported

VOCAB, BATCH, DRAFT = 128256, 1, 1
CONFIGURATIONS = {"SM86_RTX3070": "RTX 3070", "A100_like": "like an A100"}


class Timed(NamedTuple):
    """A call; `item` bytes an element, `rows` of logits that it must read."""

    name: str
    backend: str  # "triton", "cuda", or "rival": its own launcher, compiled by Triton
    rows: int
    item: int
    call: Callable[[], Any]


def _chain(rule: str) -> Callable[[], Any]:
    def call() -> Callable[[], Any]:
        case = make_chain(BATCH, DRAFT, VOCAB, rule=rule, dtype=torch.bfloat16)
        drafts = case.draft_logits if rule == "ratio" else None
        keywords = (
            dict(case.keywords) if rule == "ratio" else {k: case.keywords[k] for k in ("sampling", "rng", "rule")}
        )
        return lambda: specdec_kernels.verify_chain(case.draft_ids, case.target_logits, drafts, **keywords)

    return call


def _sample() -> Callable[[], Any]:
    logits = (2.5 * torch.randn(BATCH, VOCAB)).bfloat16()
    sampling = specdec_kernels.Sampling.full(BATCH, temperature=0.8)
    return lambda: specdec_kernels.sample(logits, sampling=sampling, rng=make_rng(BATCH), purpose="target")


def _filtered() -> Callable[[], Any]:
    logits = rows(1, VOCAB, dtype=torch.bfloat16)[0]
    sampling = specdec_kernels.Sampling.full(BATCH, top_k=50, top_p=0.95)
    return lambda: specdec_kernels.sample(logits, sampling=sampling, rng=make_rng(BATCH), purpose="target")


def _copy(bytes_moved: int) -> Callable[[], Any]:
    def call() -> Any:
        count = bytes_moved // 8
        source, target = torch.arange(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
        return lambda: known.copy_kernel[(-(-count // 2048),)](source, target, count, BLOCK=2048, num_warps=8)

    return call


def _rival(number: int) -> Callable[[], Any]:
    """Rows of random numbers stand where the rival's case makes tensors without contents."""

    def random(*shape: Any, dtype: torch.dtype = torch.float32, **_: Any) -> Any:
        return torch.randn(*shape).to(dtype) if dtype.is_floating_point else torch.zeros(*shape, dtype=dtype)

    def call() -> Any:
        case = rivals.cases(VOCAB)[number]

        def run() -> None:
            with mock.patch.object(rivals, "DRAFT", DRAFT), mock.patch.object(torch, "empty", random):
                case.call(Size(BATCH, VOCAB))

        return run

    return call


BOTH = 2 * DRAFT + 1
OURS = [
    ("verify_chain greedy", DRAFT + 1, _chain("greedy")),
    ("sample", 1, _sample),
    ("verify_chain ratio", BOTH, _chain("ratio")),
    ("verify_chain match", DRAFT + 1, _chain("match")),
]


def cases() -> list[Timed]:
    """Most telling first: a run may be cut."""
    found = [Timed(name, backend, rows, 2, call) for name, rows, call in OURS for backend in ("triton", "cuda")]
    found.append(Timed("sample top-k 50 + top-p .95", "cuda", 1, 2, _filtered))  # rows like a language model's
    if rivals.folder() is not None:
        found.insert(4, Timed("vLLM MRV2 ratio", "rival", BOTH, 4, _rival(0)))
        found.insert(5, Timed("SGLang chain of probabilities", "rival", BOTH, 4, _rival(2)))
    small, large = (Timed(f"copy of {n} MiB in all", "rival", 0, 0, _copy(n << 20)) for n in (1, 8))
    return [small, *found, large]


def run_timed(number: int, configuration: str) -> dict[str, Any]:
    """In a process of its own."""
    case, started = cases()[number], time.monotonic()
    torch.manual_seed(0)
    gpu, call = Simulator(configuration), case.call()
    if case.backend == "cuda":
        from .cuda_gpu import load_host, simulated

        load_host()
    else:
        from .triton_gpu import simulated
    backend = {"rival": "cpu", "cuda": "cuda_host"}.get(case.backend, case.backend)
    with simulated(gpu, timed=True) as runs, use_backend(backend):
        call()
    launches = [
        [cuda.plain_name(run.kernel), run.blocks, run.threads, run.count, int(run.statistic("gpu_sim_insn"))]
        for run in runs
    ]
    bytes_ = case.item * case.rows * VOCAB or int(case.name.split()[2]) << 20
    return {"bytes": bytes_, "launches": launches, "seconds": round(time.monotonic() - started)}


def run_all(chosen: str) -> bool:
    """Print and note each case that is named; whether all ran."""
    good = True
    if rivals.folder() is None:
        print("rivals: skipped, SPECDEC_RIVALS names no folder with their wheels")
    for number, case in enumerate(cases()):
        for configuration in CONFIGURATIONS:
            name = f"{case.backend} {case.name}"
            if chosen not in f"{name} {configuration}":
                continue
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                try:
                    found = pool.submit(run_timed, number, configuration).result()
                except (BrokenProcessPool, Unsupported) as error:
                    print(f"{configuration:13} {name:40} {type(error).__name__}: {error}", flush=True)
                    good = False
                    continue
            results.note("timed", configuration, name, found)
            cycles = sum(launch[3] for launch in found["launches"])
            print(f"{configuration:13} {name:40} {cycles:9} cycles {found['seconds']:5} s", flush=True)
    return good
