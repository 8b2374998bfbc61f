"""Kernels of other packages, compiled as ours are: vLLM's and SGLang's Triton kernels, FlashInfer's CUDA headers.

SPECDEC_RIVALS names a folder with the unpacked wheels (pip download --no-deps vllm sglang flashinfer-python
nvidia-curand; unzip).
Without it this part of the results stays as it was. What a rival runs in PyTorch around its kernels is not counted:
its prediction is a lower bound of its time.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from . import cuda
from .model import Kernel
from .triton_calls import BF16, DRAFT, Case, Size

FLASHINFER = """
#include <flashinfer/sampling.cuh>
namespace flashinfer::sampling {
template __global__ void OnlineSoftmaxFusedKernel<1024, 4, float, true>(float*, float*, float*, float, uint32_t);
template __global__ void TopPRenormProbKernel<1024, BLOCK_REDUCE_WARP_REDUCTIONS, 4, float>(
  float*, float*, float*, float, uint32_t);
template __global__ void ChainSpeculativeSampling<1024, BLOCK_SCAN_WARP_SCANS, BLOCK_REDUCE_WARP_REDUCTIONS, 4, true,
  float, int32_t>(float*, int32_t*, float*, int32_t*, int32_t*, int32_t*, uint32_t, uint32_t, uint64_t*, uint64_t,
  uint64_t*, uint64_t, uint32_t, uint32_t);
}
"""
ROWS = 2 * DRAFT + 1  # of logits a request that every call of this file verifies
# Calls whose time can be compared. The loops of vLLM's filters turn as the data says; SGLang's kernel is given
# probabilities, and PyTorch's softmax over all rows before it is not counted.
PREDICTED = ("vLLM MRV2 ratio bf16",)
# float32 rows a request that a kernel with a loop reads, where it does not read all that it is given.
READS = {"_rejection_kernel": 0, "speculative_sampling_classic_kernel": 2}


def folder() -> Path | None:
    """Where the wheels are unpacked."""
    named = os.environ.get("SPECDEC_RIVALS")
    return Path(named) if named else None


def cases(vocab: int) -> list[Case]:
    """Calls of rivals; none where their files are not there."""
    place = folder()
    if place is None:
        return []
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))
    return [
        Case("vLLM MRV2", "ratio bf16", _mrv2(False), 2 * DRAFT + 1),
        Case("vLLM MRV2", "ratio bf16 filters", _mrv2(True), 2 * DRAFT + 1, True),
        Case("SGLang chain", "ratio of probabilities", _sglang, 2 * DRAFT + 1),
    ]


class _Properties(types.SimpleNamespace):
    multi_processor_count, major, minor = 132, 9, 0


def _mrv2(filters: bool) -> Callable[[Size], None]:
    def call(s: Size) -> None:
        fake = {"is_available": lambda: True, "get_device_properties": lambda *_: _Properties()}
        with mock.patch.multiple(torch.cuda, **fake):
            from bench.rivals import _vllm

            _vllm.install()
            sys.modules["vllm.platforms"].current_platform.device_type = "cpu"  # type: ignore[attr-defined]
            for name in ("sample.gumbel", "sample.min_p", "spec_decode.rejection_sampler_utils"):
                _vllm.load(f"v1.worker.gpu.{name}")
        load = _vllm.load
        rows = s.batch * (DRAFT + 1)
        request = torch.arange(s.batch).repeat_interleave(DRAFT + 1)
        local = torch.arange(DRAFT + 1, dtype=torch.int32).repeat(s.batch)
        starts = torch.arange(s.batch + 1, dtype=torch.int32) * (DRAFT + 1)
        sampled = torch.zeros(rows, dtype=torch.int32)
        x = torch.empty(rows, s.vocab)  # never touched
        drafts = torch.empty(s.batch, DRAFT, s.vocab, dtype=BF16)
        temperature, seed = torch.ones(s.batch), torch.arange(s.batch)
        load("v1.worker.gpu.sample.gumbel").apply_temperature(x, request, temperature)
        if filters:
            load("v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton(
                x, torch.full((rows,), 50, dtype=torch.int32), torch.full((rows,), 0.9)
            )
        load("v1.worker.gpu.spec_decode.rejection_sampler_utils").rejection_sample(
            x, drafts, sampled, starts, local.long(), torch.arange(s.batch), request, local, temperature, seed, DRAFT
        )

    return call


def _sglang(s: Size) -> None:
    from bench.rivals import _sglang as files

    slots = DRAFT + 1
    ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)  # noqa: E731
    index = torch.arange(s.batch * slots).view(s.batch, slots)
    probs, drafts = torch.empty(s.batch, slots, s.vocab), torch.empty(s.batch, DRAFT, s.vocab)
    files.load("kernels/ops/speculative/reject_sampling.py").chain_speculative_sampling_triton(
        ints(s.batch * slots), ints(s.batch, slots), ints(s.batch), torch.zeros(s.batch, slots, dtype=torch.int64),
        index, index, index, torch.rand(s.batch, slots), torch.rand(s.batch), probs, drafts, 1.0, 1.0, True,
    )  # fmt: skip


def flashinfer(arch: int) -> dict[str, Kernel]:
    """FlashInfer's kernels for one architecture; none where its headers are not there."""
    place = folder()
    headers = place / "flashinfer/data/include" if place else None
    if headers is None or not headers.exists() or cuda.nvcc() is None:
        return {}
    source = cuda.BUILD / "flashinfer_sampling.cu"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(FLASHINFER)
    includes = [headers, *place.glob("nvidia/**/include")] if place else []
    try:
        made = cuda.compiled(source, arch, tuple(f"-I{path}" for path in includes))
    except RuntimeError as error:  # another release, or a header that is not there
        print(f"FlashInfer's headers do not compile: {error}", file=sys.stderr)
        return {}
    found = {}
    for name, use in made.usage.items():
        plain = re.sub(r"^.*?(\w*Kernel|Chain\w+)<.*", r"\1", cuda.plain_name(name))
        if plain in FLASHINFER:
            found[plain] = cuda.kernel_of(use, made.graphs[name], (), 1024, plain)
    return found
