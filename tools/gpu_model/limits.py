"""The limits that `make gpu-model-check` enforces, and what is known to be wrong with the kernels as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import collect, cuda, triton_calls
from .model import Kernel

# The architectures and vocabularies, and the Triton calls, that are compiled again by every check.
ARCH, VOCABULARIES = 90, (128256, 151936)
SLICE = re.compile(r"verify_chain (ratio|match|greedy) bf16( filters)?$|sample bf16( filters)?$")
CUDA_SLICE = (
    "digest",
    "settle",
    "verify_chain",
    "pair",
    "acceptance_ratios",
    "residual_probs",
    "residual_sample",
    "token_logprobs",
    "verify_tree",
)


class Spill(NamedTuple):
    """A kernel that is known to spill: a finding, to be removed by the redesign. Larger or elsewhere fails."""

    backend: str
    target: str
    vocab: int
    case: str
    kernel: str
    bytes: int


SPILLS: tuple[Spill, ...] = ()

# Most instructions an element, and least bytes in flight a multiprocessor, of the streaming part of a kernel on sm_90,
# bf16: what they are now, so that they do not get worse. In Triton that is the digest of each row, all included.
STREAMS: dict[str, tuple[float, int]] = {
    "triton verify_chain ratio bf16: digest_kernel": (12.5, 64 * 1024),
    "triton verify_chain greedy bf16: digest_kernel": (5, 64 * 1024),
    "triton verify_chain match bf16: digest_kernel": (5, 64 * 1024),
    "cuda verify_chain ratio bf16: digest_kernel<1,1>": (10.5, 128 * 1024),
    "cuda verify_chain match bf16: digest_kernel<1,0>": (5, 128 * 1024),
    "cuda verify_chain ratio bf16 edits: digest_kernel<1,17>": (19, 128 * 1024),
}


def fields(kernel: list[Any]) -> tuple[str, int]:
    """(name, bytes spilled) of a stored kernel, of either kind of GPU."""
    return kernel[0], kernel[5]


def spilled(content: dict[str, Any]) -> Iterator[Spill]:
    """Every spill in the results."""
    for place, found in content["triton"].items():
        target, vocab = place.split()
        for case, launches in found.items():
            for one in launches:
                name, amount = fields(one["kernel"])
                if amount:
                    yield Spill("triton", target, int(vocab), case, name, amount)
    for arch, made in content["cuda"].items():
        for source, kernels in made["kernels"].items():
            for name, kernel in kernels.items():
                if kernel[5]:
                    yield Spill("cuda", f"sm_{arch}", 0, source, name, kernel[5])


def faults(content: dict[str, Any]) -> list[str]:
    """Broken limits."""
    known = {spill[:5]: spill.bytes for spill in SPILLS}
    found = [
        f"{one.kernel} of {one.case or one.backend} spills {one.bytes} bytes ({one.target}, {one.vocab} ids)"
        for one in dict.fromkeys(spilled(content))
        if one.bytes > known.get(one[:5], 0)
    ]
    for name, (most, least) in STREAMS.items():
        for kernel in stored(content, name):
            instructions, _ = kernel.per_element(2)
            if instructions > most:
                found.append(f"{name}: {instructions:.1f} instructions an element, at most {most} are allowed")
            if kernel.in_flight < least:
                found.append(f"{name}: {kernel.in_flight} bytes in flight, at least {least} are wanted")
    return found


def stored(content: dict[str, Any], name: str) -> Iterator[Kernel]:
    """Kernels of a row of STREAMS: `<backend> <call>: <kernel>`, at every vocabulary that was compiled for sm_90."""
    backend, _, rest = name.partition(" ")
    call, _, wanted = rest.partition(": ")
    if backend == "cuda":
        rows = [content["cuda"].get(str(ARCH), {}).get("calls", {}).get(call, [])]
    else:
        places = [found for place, found in content["triton"].items() if place.startswith(f"cuda:{ARCH} ")]
        rows = [[one["kernel"] for one in found.get(call, [])] for found in places]
    for row in rows:
        yield from (collect.from_json(kernel) for kernel in row if kernel[0] == wanted)


def slice_of(content: dict[str, Any]) -> dict[str, Any]:
    """The part that every check compiles again, as far as the results hold it."""
    made: dict[str, Any] = {"triton": {}, "cuda": {}}
    for vocab in VOCABULARIES:
        held = content["triton"].get(f"cuda:{ARCH} {vocab}", {})
        chosen = [case for case in triton_calls.ROW_CASES if SLICE.match(case.name) and case.name in held]
        made["triton"][f"cuda:{ARCH} {vocab}"] = {
            case.name: collect.triton_case(f"cuda:{ARCH}", case, vocab) for case in chosen
        }
    if cuda.nvcc() is not None:
        sources = [path for path in cuda.sources() if path.stem in CUDA_SLICE]
        kernels = {path.name: collect.cuda_kernels(ARCH, [path]) for path in sources}
        made["cuda"][str(ARCH)] = {"kernels": kernels, "calls": collect.cuda_calls(ARCH, sources)}
    return made


def digests() -> dict[str, str]:
    """Of what every Triton case and CUDA source is made of now."""
    cases = triton_calls.ROW_CASES + triton_calls.OTHER_CASES
    found = {case.name: cuda.digest(collect.triton_sources(case.op)) for case in cases}
    return found | {path.name: cuda.digest(cuda.included(path)) for path in cuda.sources()}


def stale(content: dict[str, Any]) -> list[str]:
    """Results that are older than what they were made of. What was never compiled stands on the page."""
    now = digests()
    return [
        f"bench/results/gpu-model.json is old: {place}: {name} has changed (make gpu-model)"
        for place, made_of in content["made_of"].items()
        for name, digest in made_of.items()
        if now.get(name) != digest
    ]


def missing(content: dict[str, Any]) -> list[str]:
    """Cases and sources that no part of the results holds."""
    return sorted(digests().keys() - {name for made_of in content["made_of"].values() for name in made_of})


def check(content: dict[str, Any]) -> list[str]:
    """Everything that is wrong with the committed results, and with a slice that is compiled now."""
    return stale(content) + faults(content) + [f"now: {fault}" for fault in faults(slice_of(content))]
