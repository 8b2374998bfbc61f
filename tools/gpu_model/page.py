"""docs/gpu-model.md, from bench/results/gpu-model.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import collect, cuda, known, limits, model
from .machines import H100, H200, ISSUE, MACHINES, Machine, issue_slots
from .model import Kernel, Launch

VOCAB, BATCH = 128256, 64
_CASE = f"llama-3 {VOCAB}, batch {BATCH}, K 5, bf16"
# Calls of the model as bench/gpu.py names them.
MEASURED = {
    "verify_chain ratio bf16": _CASE,
    "verify_chain ratio bf16 filters": f"{_CASE}, top-k 50 + top-p .95",
    **{f"verify_chain {rule} bf16": f"{_CASE}, {rule}" for rule in ("block", "greedy", "match", "typical")},
}
# Cases of tree_attention: dims of a key and of a value that is none of its columns, bytes of an element, rows of a
# program.
ATTENTION = {
    "bf16 8 nodes": (128, 128, 2, 32), "bf16 dense": (128, 128, 2, 64), "bf16 paged": (128, 128, 2, 64),
    "bf16 1024 nodes, widest": (256, 256, 2, 32), "bf16 e4m3": (128, 128, 1, 32),
    "bf16 e5m2, widest": (256, 256, 1, 32), "bf16 latent": (576, 0, 2, 32), "bf16 latent e4m3": (576, 0, 1, 16),
    "fp32 paged": (128, 128, 4, 16), "fp32 1024 nodes, widest": (256, 256, 4, 16),
}  # fmt: skip
_INTRODUCTION = """# The GPU kernels, judged from their machine code

This page is made by `make gpu-model` from what the compilers produce: it counts the machine code of each kernel and
predicts its time by a simple model. It compares designs with each other, on GPUs that nobody has at hand too. It does
not replace a measurement; the figures that were measured are those that the model is checked against, on an H200 and
published ones.

## The model

A kernel takes the longest of three times: its bytes at the machine's copy rate; its issue slots at {efficiency:.0%} of
what a multiprocessor issues (128 a clock, fewer on a slower unit: 16 exponentials, 32 shuffles, 64 integer results);
and its waves of blocks, each as long as one block takes alone ({memory} us for each round of loads that miss the
caches, {cached} us for each that hits, {dependent} clocks an instruction). To it are added {memory} us for the first
load and the time of the merge behind the last ticket, where there is one. Kernels that look into a few blocks of their
rows take two turns of each of their loops; in a CUDA race the second one finds nothing to look into. A call is the sum
of its kernels, 2 us for the first launch and 1 us for each that follows. The share of the copy rate counts only the
bytes that the rule must read.

Counts are those of the longest path through the code that a streaming block runs up to its ticket. Slow paths of
divisions, rows that are not aligned, flat rows and other dtypes are left out. Where a CUDA kernel decides at run time
what a rule needs, `tools/gpu_model/cuda.py` names the source lines that a call does not reach, and the loops that turn
once; in Triton `tools/gpu_model/cold.py` says so of filters, whose lists decide the rows of a language model, and of
the edits of a tile. Calls ask for no log-probabilities, except those with `top`: there every draft is accepted, so that
the likeliest ids of all rows are listed. `mixed` is a batch with a third each of `greedy`, `match` and `ratio`. With
`kept`, a draft row holds 64 candidates.

Machines: {machines}.
"""
_LIMITS = """## What the model cannot see

* Loops whose number of turns depends on the data count once (sorting in registers, walking a tree). Kernels with
  filters are therefore better here than they would be on a GPU.
* Filters: top-k and top-p on rows of a language model, where the second pass finds nothing to do. Top-p alone can read
  a row again many times; the traffic meter (`make traffic`) counts that.
* Edits: a tile has a few; the loop over them turns once in CUDA and twice in Triton. `edit_rows` lists them before the
  call.
* `top` and mixed rules: PyTorch's operations between our launches are not counted.
* `ratio` and `block`: every request is rejected once and reads one pair of rows again.
* Caches, the memory's page and bank conflicts, clocks that fall under load, the cost of fences.
* Trees have machine-code facts but no prediction: their levels depend on the tree.
* A rival's operations in PyTorch around its kernels (casts, softmax, allocation) are not counted: what stands here is
  the most that its kernels allow. vLLM's filters, SGLang's chain sampler (it is given probabilities) and FlashInfer's
  kernels have machine-code facts but no prediction.
* Throughputs of units are those of NVIDIA's programming guide; the ones of sm_100 and sm_120 were not verified.
"""


class Row(NamedTuple):
    """A call of one contender at one vocabulary."""

    contender: str
    call: str
    rows: float  # of logits a request that it must read; 0: no prediction
    item: int
    vocab: int
    arch: int
    stored: list[Any]

    def launches(self, batch: int) -> list[Launch]:
        """At a batch."""
        if self.contender == "CUDA":
            return collect.cuda_launches(self.call, self.stored, batch, self.vocab)
        return collect.triton_launches(self.stored, batch, self.vocab)

    def share(self, machine: Machine, batch: int) -> float:
        """Of the copy rate."""
        return model.share(machine, self.launches(batch), self.rows * self.item * self.vocab * batch)


def rows(content: dict[str, Any], arch: int, vocab: int) -> list[Row]:
    """Every call that has a prediction, the backends and rivals of a call side by side."""
    from . import rivals, triton_calls

    place, found = f"cuda:{arch} {vocab}", []
    for call in cuda.CALLS:
        stored = content["cuda"].get(str(arch), {}).get("calls", {}).get(call.name)
        if stored:
            found.append(Row("CUDA", call.name, call.rows, 2, vocab, arch, stored))
    for case in triton_calls.ROW_CASES:
        stored = content["triton"].get(place, {}).get(case.name)
        if stored and case.rows:
            found.append(Row("Triton", case.name, case.rows, 4 if "fp32" in case.name else 2, vocab, arch, stored))
    order = {name: i for i, name in enumerate(dict.fromkeys(row.call for row in found))}
    found.sort(key=lambda row: order[row.call])
    for name, stored in content["rivals"].get(place, {}).items():
        found.append(Row("rival", name, rivals.ROWS if name in rivals.PREDICTED else 0, 2, vocab, arch, stored))
    return found


def table(head: list[str], lines: Iterator[list[Any]]) -> str:
    """A Markdown table; the first column is text."""
    cells = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in cells) + "\n"


def percent(value: float) -> str:
    """`12 %`."""
    return f"{100 * value:.0f} %"


def predictions(content: dict[str, Any], machine: Machine) -> str:
    """Shares of the copy rate by batch."""

    def lines() -> Iterator[list[Any]]:
        for row in filter(lambda row: row.rows, rows(content, machine.arch, VOCAB)):
            launches = row.launches(BATCH)
            slowest = max((model.kernel_time(machine, one) for one in launches), key=lambda t: t.total)
            shares = [percent(row.share(machine, batch)) for batch in collect.BATCHES]
            seconds = model.call_time(machine, launches)
            yield [f"{row.contender}: {row.call}", *shares, f"{seconds * 1e6:.0f}", len(launches), slowest.bound]

    head = ["call", *(f"batch {b}" for b in collect.BATCHES), f"us at {BATCH}", "launches", "bound by"]
    return f"### {machine.name}, {VOCAB} ids, draft 5\n\n" + table(head, lines())


def shares(content: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Predicted shares of the copy rate by call and machine."""
    made: dict[str, dict[str, float]] = {}
    for machine in MACHINES:
        for row in rows(content, machine.arch, VOCAB):
            if row.rows and row.contender != "rival":
                made.setdefault(f"{row.contender}: {row.call}", {})[machine.name] = row.share(machine, BATCH)
    return made


def against_first(content: dict[str, Any], first: dict[str, dict[str, float]]) -> str:
    """What `shares` gave for the first design's kernels, beside what it gives now."""
    now = shares(content)

    def cell(call: str, machine: Machine) -> str:
        before, after = (found.get(call, {}).get(machine.name) for found in (first, now))
        if before is None and after is None:
            return ""
        return " → ".join("?" if share is None else percent(share) for share in (before, after))

    lines = ([call, *(cell(call, machine) for machine in MACHINES)] for call in first | now)
    head = ["call", *(machine.name for machine in MACHINES)]
    return f"### The first design and this one, {VOCAB} ids, batch {BATCH}\n\n" + table(head, lines)


def vocabularies(content: dict[str, Any]) -> str:
    """Shares by vocabulary on one machine."""
    have = [v for v in (32000, 128256, 151936, 262144) if f"cuda:{H100.arch} {v}" in content["triton"]]
    shares: dict[str, dict[int, str]] = {}
    for vocab in have:
        for row in filter(lambda row: row.rows, rows(content, H100.arch, vocab)):
            shares.setdefault(f"{row.contender}: {row.call}", {})[vocab] = percent(row.share(H100, BATCH))
    lines = ([name, *(found.get(v, "") for v in have)] for name, found in shares.items())
    return f"### By vocabulary: H100, batch {BATCH}\n\n" + table(["call", *map(str, have)], lines)


def attention(content: dict[str, Any]) -> str:
    """What the main loop of tree_attention allows on each machine."""
    from specdec_kernels.ops.tree_attention.triton_kernel import blocks_of

    def share(case: str, machine: Machine) -> str:
        launches = content["triton"].get(f"cuda:{machine.arch} 0", {}).get(f"tree_attention {case}")
        if not launches:
            return ""
        dim, value_dim, size, rows = ATTENTION[case]
        kernel = collect.from_json(launches[0]["kernel"])
        loops = [s for s in kernel.counts.streams if s.work.exponentials]
        if len(loops) != 2:
            return "?"
        loop = loops[0]  # over cached keys; the other one is over nodes
        _, keys, _ = blocks_of(size, max(n for n in (128, 256, 512) if n <= dim), rows)
        slots = issue_slots(kernel.arch, loop.work.issued, loop.work.units) * kernel.threads
        seconds = slots / (ISSUE * model.EFFICIENCY * machine.clock * machine.processors)
        return percent(min(keys * (dim + value_dim) * size / seconds / machine.copy, 1.0))

    head = (
        "## Attention\n\n"
        "The share of the copy rate that the main loop of `tree_attention` allows by its instructions, for one block\n"
        "of rows: nodes times query heads of a key head. What tensor cores take is not in it. `?`: the loop was not\n"
        "told from the code around it.\n\n"
    )
    lines = ([case, ATTENTION[case][3], *(share(case, machine) for machine in MACHINES)] for case in ATTENTION)
    return head + table(["case", "rows", *(machine.name for machine in MACHINES)], lines)


def facts_of(kernel: Kernel, call: str, size: int) -> list[Any]:
    """One line of machine-code facts; elements have `size` bytes."""
    instructions, slots = kernel.per_element(size)
    streams = kernel.counts.streams
    elements = sum(s.read for s in streams) / size
    exponentials = sum(s.work.exponentials for s in streams) / elements
    barriers = (
        sum(s.work.barriers + s.work.fences for s in streams) + kernel.counts.once.barriers + kernel.counts.once.fences
    )
    used = f"{kernel.registers}" + (f", {kernel.spilled} B spilled" if kernel.spilled else "")
    return [
        f"{call}: `{kernel.name}`", f"{instructions:.1f}", f"{slots:.1f}", f"{exponentials:.1f}",
        f"{kernel.in_flight / 1024:.0f}", used, kernel.resident, barriers,
    ]  # fmt: skip


def facts(content: dict[str, Any], arch: int) -> str:
    """Machine code of every kernel that streams, for bf16."""

    def lines() -> Iterator[list[Any]]:
        seen = set()
        for row in rows(content, arch, VOCAB):
            for launch in row.launches(BATCH):
                kernel, size = launch.kernel, 4 if row.contender == "rival" else 2
                key = (kernel.name, str(kernel.counts), kernel.registers)
                if row.item == 2 and kernel.counts.streams and key not in seen:
                    seen.add(key)
                    yield facts_of(kernel, f"{row.contender} {row.call.removeprefix('verify_chain ')}", size)
        for stored in content["cuda"].get(str(arch), {}).get("flashinfer", {}).values():
            yield facts_of(collect.from_json(stored), "FlashInfer", 4)

    head = ["kernel", "instructions", "issue slots", "exponentials", "KB in flight", "registers", "blocks", "barriers"]
    return f"### sm_{arch}, {VOCAB} ids\n\n" + table(head, lines())


def registers(content: dict[str, Any]) -> str:
    """Largest number of registers of each Triton case and CUDA kernel, by architecture."""
    places = {p: found for p, found in content["triton"].items() if p.endswith((f" {VOCAB}", " 0"))}
    targets = [
        t
        for t in ("cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942")
        if any(p.startswith(f"{t} ") for p in places)
    ]
    used: dict[str, dict[str, str]] = {}
    for place, found in places.items():
        for case, launches in found.items():
            most = max((one["kernel"] for one in launches), key=lambda kernel: kernel[3])
            used.setdefault(f"Triton {case}", {})[place.split()[0]] = f"{most[3]}"
    for arch, made in content["cuda"].items():
        for kernels in made["kernels"].values():
            for name, kernel in kernels.items():
                used.setdefault(f"CUDA `{name}`", {})[f"cuda:{arch}"] = f"{kernel[3]}"
    lines = ([name, *(by.get(t, "") for t in targets)] for name, by in used.items())
    names = [t.replace("cuda:", "sm_").replace("hip:", "") for t in targets]
    return "## Registers\n\nOf the kernel of each call that has most.\n\n" + table(["call", *names], lines)


def spills(content: dict[str, Any]) -> str:
    """What spills."""
    found = list(dict.fromkeys(limits.spilled(content)))
    if not found:
        return "No kernel spills.\n"
    rows_ = ([f"{s.backend} {s.case}: `{s.kernel}`", s.target, s.vocab or "any", s.bytes] for s in found)
    return "Kernels that spill, known and to be removed by the redesign:\n\n" + table(
        ["kernel", "target", "ids", "bytes"], rows_
    )


def amd(content: dict[str, Any]) -> str:
    """Registers and waits of gfx942."""
    found = content["triton"].get(f"hip:gfx942 {VOCAB}", {})
    if not found:
        return ""
    lines = (
        [f"{case}: `{k[0]}`", k[3], k[5], k[4], k[6]]
        for case, launches in found.items()
        for k in [one["kernel"] for one in launches]
    )
    return "## gfx942\n\n" + table(["kernel", "registers", "bytes spilled", "shared memory", "waits"], lines)


def checked(content: dict[str, Any]) -> str:
    """The model against published figures."""
    errors = known.errors(content)
    mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
    lines = ([n, c, f"{p:.0f}", f"{o:.0f}", f"{100 * (o / p - 1):+.0f} %"] for n, c, p, o in known.predicted(content))
    copies = []
    for arch, stored in content["known"]["copy"].items():
        kernel = collect.from_json(stored)
        machine = next(m for m in MACHINES if m.arch == int(arch))
        n = (1 << 28) * 4
        seconds = model.call_time(machine, [Launch(kernel, n // 4 // 8192)])
        copies.append(f"{machine.name} {percent(2 * n / machine.copy / seconds)}")
    return (
        "## Checked against published figures\n\n"
        "The persistent softmax of Triton's tutorial 02 on 4096 float32 rows, GB/s read and written.\n"
        "The published tables do not name their GPU; the plateaus are those of an A100 (40 GB) and of an H100 SXM.\n"
        "The copy rate of that A100, 1.45 TB/s, was taken from the table; all else stands in tools/gpu_model.\n"
        f"The model's mean error is {percent(mean)}, the largest {100 * worst:+.0f} %. It is optimistic: it knows no "
        "conflict of banks, no cache that is too small.\n"
        f"A copy of 1 GiB, which should reach the copy rate: {', '.join(copies)} of it.\n\n"
        + table(["kernel, machine", "columns", "published", "predicted", "error"], lines)
    )


def measured(content: dict[str, Any]) -> str:
    """The model against what `bench/gpu.sh` has measured on an H200."""
    file = cuda.ROOT / "bench/results/nvidia-h200.json"
    timed = [row for row in json.loads(file.read_text())["rows"] if "p50_us" in row]
    found = {(row["case"], row["contender"]): row["p50_us"] for row in timed if row["op"] == "verify_chain"}

    def lines() -> Iterator[list[Any]]:
        for row in rows(content, H200.arch, VOCAB):
            case = MEASURED.get(row.call)
            us = found.get((case, row.contender.lower())) if case else None
            if us:
                seconds = model.call_time(H200, row.launches(BATCH))
                error = f"{100 * (seconds * 1e6 / us - 1):+.0f} %"
                yield [f"{row.contender}: {row.call}", f"{us:.0f}", f"{seconds * 1e6:.0f}", error]

    return (
        "## Checked against an H200\n\n"
        f"Microseconds of a call, {VOCAB} ids, batch {BATCH}: [Benchmarks](benchmarks.md) and the model. Nothing in "
        "the model was fitted to these figures. Triton's calls were timed with 3.6 and are predicted from the code of "
        "the pinned version. The kernels have changed since they were timed, Triton's most.\n\n"
        + table(["call", "measured", "predicted", "error"], lines())
    )


def coverage(content: dict[str, Any]) -> str:
    """What was compiled, and what was not."""
    made_of = content["made_of"]
    lines = ([place.removesuffix(" 0"), len(names)] for place, names in sorted(made_of.items()))
    lacking = ", ".join(f"`{name}`" for name in limits.missing(content)) or "nothing"
    head = "Compiled: Triton by target and vocabulary (calls), CUDA by architecture (sources).\n\n"
    return f"## Coverage\n\n{head}{table(['place', 'compiled'], lines)}\nNot compiled anywhere yet: {lacking}.\n"


def text(content: dict[str, Any], first: dict[str, dict[str, float]]) -> str:
    """The page; `first`: `shares` of the first design, whose kernels are in the history of the repository."""
    machines = "; ".join(
        f"{m.name} copies {m.copy / 1e12:g} TB/s, {m.processors} x {m.clock / 1e9:g} GHz" for m in MACHINES
    )
    opening = _INTRODUCTION.format(
        efficiency=model.EFFICIENCY, memory=model.MEMORY * 1e6, cached=model.CACHED * 1e6, dependent=model.DEPENDENT,
        machines=machines,
    )  # fmt: skip
    arches = [a for a in (80, 90, 100) if f"cuda:{a} {VOCAB}" in content["triton"]]
    parts = [
        opening,
        coverage(content),
        checked(content),
        measured(content),
        "## Predicted share of the copy rate\n",
        *(predictions(content, m) for m in MACHINES if m.arch in arches),
        against_first(content, first),
        vocabularies(content),
        "## Machine code\n\n"
        "Thread instructions and issue slots for each streamed element (bf16; rivals fp32), with set-up and merge of a "
        "tile;\n"
        "bytes in flight a multiprocessor before the first use; blocks that a multiprocessor holds.\n",
        *(facts(content, arch) for arch in arches),
        attention(content),
        registers(content),
        "## Spills\n\n" + spills(content),
        amd(content),
        _LIMITS,
    ]
    return "\n".join(part for part in parts if part)
