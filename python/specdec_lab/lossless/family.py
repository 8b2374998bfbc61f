"""The whole family: which method meets which rows under which filters, how often, and the pool that runs it."""

from __future__ import annotations

import pickle
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from typing import Any

import torch

from specdec_kernels import Edits

from .edits import EDITS, LEAST_IDS
from .exact import Filters, Table, constant_table, flat_table, random_table
from .experiments import Finding, follow
from .faults import Fault, coins_of_zero
from .goodness import fit
from .models import Pair, first_tokens, next_tokens, quiet
from .procedures import Procedure, decode_step

SMALL: dict[str, Filters] = {
    "no filter": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 0.9, "top_k": 2},
    "top-p": {"temperature": 1.1, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.2},
    "all": {"temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.05},
}
REAL: dict[str, Filters] = {
    "top-k 4": {"top_k": 4},
    "top-k 4, temperature": {"temperature": 0.7, "top_k": 4},
    "top-k 4, top-p": {"top_k": 4, "top_p": 0.9},
    "top-k 4, min-p": {"temperature": 1.2, "top_k": 4, "min_p": 0.1},
}
WIDE: dict[str, Filters] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 0.9, "top_k": 40},
    "top-p": {"top_p": 0.9},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
}
TELLING = ("two ids", "eight ids", "history of 3 ids")  # every known fault shows in one of them
# A first token is decided at the root: what lies deeper costs time and matters to the rules that look ahead alone.
FIRST = {
    "block": (1, 1), "block, argmax drafts": (1, 1), "block, drafts at once": (1, 1), "tree traversal": (2, 1),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One experiment that is to be run."""

    experiment: str
    case: str
    method: Procedure
    table: Table
    filters: Filters
    texts: int
    length: int
    seconds: float = float("inf")
    edits: Edits | None = None

    def run(self) -> Finding:
        """Run it; equal jobs have equal random numbers."""
        seed = zlib.crc32(f"{self.experiment} {self.case} {self.method.name}".encode())
        torch.manual_seed(seed)  # for samplers of others, which draw from the global generator
        return follow(
            self.method, self.table, self.filters, experiment=self.experiment, case=self.case, texts=self.texts,
            length=self.length, seconds=self.seconds, seed=seed, edits=self.edits,
        )  # fmt: skip


def small_tables() -> dict[str, tuple[Table, int]]:
    """(table, tokens) by name."""
    g = torch.Generator().manual_seed(3)
    eight = torch.randn(2, 8, generator=g).softmax(-1)
    return {
        "two ids": (constant_table(torch.tensor([1.0, 2.0]) / 3, torch.tensor([2.0, 1.0]) / 3), 6),
        "three ids": (constant_table(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.15, 0.35, 0.5])), 6),
        "eight ids": (constant_table(eight[0], eight[1]), 2),
        "history of 2 ids": (random_table(2, 6, 11), 6),
        "history of 3 ids": (random_table(3, 6, 12, 1.6), 6),
        "history of 4 ids": (random_table(4, 6, 13, 2.0), 6),
    }


def stream_jobs(methods: Sequence[Procedure], texts: int) -> Iterator[Job]:
    """Six tokens of texts of several steps: every table without a filter, the histories with each."""
    for name, (table, length) in small_tables().items():
        for label, filters in SMALL.items():
            if label == "no filter" or name in ("history of 3 ids", "history of 4 ids"):
                for method in methods:
                    yield Job("streams", f"{name}, {label}", method, table, filters, texts, length)


def edit_jobs(methods: Sequence[Procedure], texts: int) -> Iterator[Job]:
    """Four tokens of texts with biases, penalties and bans, and drafts that know them."""
    tables = small_tables()
    for name, filters in (("history of 3 ids", {}), ("history of 4 ids", SMALL["all"])):
        table, _ = tables[name]
        for label, edits in EDITS.items():
            for method in methods:
                if method.rule != "batch" and not method.is_block:  # whose drafts know no edits
                    yield Job("edits", f"{name}, {label}", method, table, filters, texts, 4, edits=edits)


def first_jobs(pair: Pair, methods: Sequence[Procedure], texts: int, filtered: int) -> Iterator[Job]:
    """First tokens of each prompt over the whole vocabulary; with filters, fewer of them on the first prompt."""
    for number, prompt in enumerate(pair.prompts):
        table = first_tokens(pair, prompt)
        for method in methods:
            if method.keep is not None:
                continue  # one draft a request is within the budget
            narrow = replace(method, widths=FIRST.get(method.name, method.widths[:1]))
            yield Job("first token", f"prompt {number + 1}", narrow, table, {}, texts, 1)
            for label, filters in WIDE.items() if number == 0 and filtered else ():
                yield Job("first token", f"prompt {number + 1}, {label}", narrow, table, filters, filtered, 1)


def joint_jobs(pair: Pair, methods: Sequence[Procedure], texts: int) -> Iterator[Job]:
    """The joint distribution of the next three tokens on real rows; a filter a prompt."""
    for (number, prompt), (label, filters) in zip(enumerate(pair.prompts), REAL.items(), strict=False):
        table = next_tokens(pair, prompt)
        for method in methods:
            yield Job("next three", f"prompt {number + 1}, {label}", method, table, filters, texts, 3)


def fault_jobs(fault: Fault, texts: int) -> Iterator[Job]:
    """A broken method on the tables that tell most."""
    for name, (table, length) in small_tables().items():
        if name in TELLING and (fault.edits is None or table.vocab >= LEAST_IDS):
            about = f"fault {fault.name}"
            yield Job(about, name, fault.method, table, fault.filters, texts, length, edits=fault.edits)


def impossible(method: Procedure) -> Finding:
    """Where the coin is exactly 0 and the draft proposes what the target excludes: the one place where G7 shows."""
    rows = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    table = flat_table(rows[:1].expand(3, 2), torch.tensor([[-torch.inf, 0.0]]).expand(3, 2))
    rng = coins_of_zero()
    ids, _, _ = decode_step(method, table, torch.zeros_like(rng.seed), rng, {})
    found = fit(torch.bincount(ids[:, 0], minlength=2), torch.tensor([1.0, 0.0]))
    return Finding("coin 0", "a draft that the target excludes", method.name, found, 1.0, None, 1.0, 0.0, 0.0)


def caught(fault: Fault, texts: int) -> list[Finding]:
    """Findings about a broken method."""
    if fault.impossible:
        return [impossible(fault.method)]
    return [job.run() for job in fault_jobs(fault, texts)]


@dataclass(frozen=True)
class Call:
    """A call of a function that can be pickled, as a job."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> tuple[Any, float]:
        """(what it returns, seconds of a processor)."""
        started = time.process_time()
        return self.function(*self.arguments), time.process_time() - started


def _run(job: bytes) -> bytes:
    """Run a pickled job. Tensors travel by value: sharing their memory takes a thread that an interrupt would break."""
    return pickle.dumps(pickle.loads(job).run())


def _alone() -> None:
    """A worker's share of the machine, and none of its noise."""
    torch.set_num_threads(1)
    quiet()


def run_all(jobs: Sequence[Any], workers: int, progress: Callable[[int, Any], None]) -> list[Any]:
    """What `run` of each job returns, in their order; each worker is a process with one thread."""
    if workers == 1 or len(jobs) < 2:
        findings = []
        for number, job in enumerate(jobs):
            findings.append(job.run())
            progress(number + 1, findings[-1])
        return findings
    found: dict[int, Any] = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers inherit it: Ctrl-C is for this process
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _alone)
    try:
        futures = {pool.submit(_run, pickle.dumps(job)): number for number, job in enumerate(jobs)}
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for future in as_completed(futures):
            found[futures[future]] = pickle.loads(future.result())
            progress(len(found), found[futures[future]])
    except BaseException:  # neither queued nor running jobs are waited for
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in active_children():
            worker.terminate()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    pool.shutdown()
    return [found[number] for number in range(len(jobs))]
