"""Loads vLLM's own sampler files from an installed or unpacked wheel without importing the rest of vLLM.

`import vllm` needs some sixty packages; the samplers need torch and triton. Parent packages become bare modules that
point into the wheel, heavy leaves become stubs, the kernel files themselves are vLLM's, unmodified. Tried with 0.33.0.
Get the files: pip install --no-deps vllm==0.33.0 (or unzip the wheel's *.py where Python looks).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "vllm v1 v1.sample v1.sample.ops v1.spec_decode v1.worker v1.worker.gpu v1.worker.gpu.sample "
    "v1.worker.gpu.spec_decode v1.worker.gpu.metrics utils model_executor "
    "model_executor.warmup config v1.watermarking v1.watermarking.prfs"
)


def version() -> str:
    """Of the rival."""
    try:
        return f"vllm {metadata.version('vllm')}"
    except metadata.PackageNotFoundError:
        return "vllm, version unknown"


@functools.cache
def folder() -> Path | None:
    """Where vLLM's files lie, without running any of them."""
    spec = importlib.util.find_spec("vllm")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


@functools.cache
def available() -> str | None:
    """None, or why its kernels cannot run here."""
    if "vllm" not in sys.modules and folder() is None:
        return "vllm is not installed (pip install --no-deps vllm==0.33.0; its files suffice)"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "its sampler is Triton: timed on a GPU only, metered by python -m bench.traffic"
    try:
        install()
    except Exception as error:
        return f"its sampler files do not load: {type(error).__name__}: {error}"
    return None


def _module(name: str, path: list[str] | None = None, **names: Any) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    if path is not None:
        made.__path__ = path
        made.__package__ = name
    sys.modules[name] = made
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, made)


class _Anything:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def _dispatcher(kernel: Any, warmup_inputs: Any = None, **_: Any) -> Any:
    """Stands for vLLM's warm-up decorator: fills in the kernel's pointers and strides by name and launches it."""
    names = getattr(kernel, "arg_names", None) or list(inspect.signature(kernel.fn).parameters)

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            spec = function(*args, **kwargs)
            grid, given = spec[0], dict(spec[1])
            for name, value in bound.arguments.items():
                found = [c for c in (name, f"{name}_ptr", name.upper(), f"{name.upper()}_PTR") if c in names]
                for candidate in [c for c in found if c not in given][:1]:
                    given[candidate] = value
            for name in names:
                for separator, suffix in (("_stride", "_ptr"), ("_STRIDE", "_PTR")):
                    base, found_separator, dimension = name.rpartition(separator)
                    source = base if base in given else base + suffix
                    if name not in given and found_separator and source in given:
                        given[name] = given[source].stride(int(dimension.lstrip("_") or 0))
            kernel[grid](**given)

        call.register_warmup = lambda **_: None  # type: ignore[attr-defined]
        return call

    return decorate


@functools.cache
def install() -> None:
    """Put the stubs in place; vLLM's sampler modules can be imported afterwards."""
    root = folder()
    assert root is not None
    for suffix in PACKAGES.split():
        name = suffix if suffix == "vllm" else f"vllm.{suffix}"
        _module(name, [str(root.joinpath(*name.split(".")[1:]))])
    _stub_platform()
    _stub_machinery()
    _stub_sampling()


def _stub_platform() -> None:
    import triton
    import triton.language as tl
    import triton.language.extra.libdevice as libdevice

    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        from ._interpreted import log1p  # the interpreter has no libdevice

        libdevice = types.SimpleNamespace(log1p=log1p)

    class Platform:
        simple_compile_backend = "eager"
        device_type = "cuda" if has_cuda else "cpu"
        is_cpu = is_cuda = is_rocm = is_xpu = staticmethod(lambda: False)  # Triton paths, no FlashInfer
        is_cuda_alike = staticmethod(lambda: has_cuda)

    units = torch.cuda.get_device_properties(0).multi_processor_count if has_cuda else 8
    _module("vllm.triton_utils", HAS_TRITON=True, triton=triton, tl=tl, tldevice=libdevice, LOG2E=1.4426950408889634,
            LOGE2=0.6931471805599453)  # fmt: skip
    _module("vllm.platforms", [], current_platform=Platform(), CpuArchEnum=enum.Enum("CpuArchEnum", "X86"))
    _module("vllm.platforms.interface", DeviceCapability=object)
    _module("vllm.envs", VLLM_USE_FLASHINFER_SAMPLER=False, VLLM_XPU_USE_SAMPLER_KERNEL=False,
            VLLM_COMPUTE_NANS_IN_LOGITS=False, VLLM_TRITON_JIT_WARMUP_NUM_THREADS=1,
            is_set=lambda _: False)  # fmt: skip
    _module("vllm._aiter_ops", rocm_aiter_ops=types.SimpleNamespace(is_enabled=lambda: False))
    _module("vllm.utils.platform_utils", num_compute_units=lambda _=None: units)


def _stub_machinery() -> None:
    class Logger(logging.Logger):
        info_once = warning_once = debug_once = lambda self, *a, **k: None

    @contextlib.contextmanager
    def allowed(*_: Any, **__: Any) -> Any:
        yield

    _module("vllm.logger", init_logger=Logger)
    sys.modules["vllm.config"].__dict__.update(SpeculativeConfig=object, VllmConfig=object)
    _module("vllm.config.model", PROCESSED_LOGPROBS_MODES=("processed_logprobs", "processed_logits"), LogprobsMode=str)
    warmup = "vllm.model_executor.warmup.jit_warmup"
    _module(warmup, WarmupChoices=_Anything, WarmupIntRange=_Anything, _when=lambda *a, **k: None)
    _module(f"{warmup}_triton_helper", DispatchSpec=tuple, TritonWarmupTensor=_Anything,
            triton_kernel_dispatcher_with_warmup=_dispatcher)  # fmt: skip
    _module("vllm.utils.torch_utils", async_tensor_h2d=lambda x, device, **_: x.to(device), PIN_MEMORY=False)
    _module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=allowed)
    _module("vllm.utils.math_utils", cdiv=lambda a, b: -(-a // b),
            next_power_of_2=lambda n: 1 << max(n - 1, 0).bit_length())  # fmt: skip


def _stub_sampling() -> None:
    _module("vllm.v1.outputs", SamplerOutput=_Anything, LogprobsTensors=tuple, LogprobsLists=object,
            SamplingMaskLists=object)  # fmt: skip
    _module("vllm.v1.sample.logits_processor", [], LogitsProcessors=_Anything)
    _module("vllm.v1.sample.logits_processor.builtin", MinTokensLogitsProcessor=_Anything)
    _module("vllm.v1.sample.thinking_budget_state", ThinkingBudgetStateHolder=object)
    _module("vllm.v1.spec_decode.utils", unconditional_to_conditional_rates=list)
    _module("vllm.v1.sample.ops.penalties", apply_all_penalties=None)
    _module("vllm.v1.sample.ops.bad_words", apply_bad_words=None, apply_bad_words_with_drafts=None)
    _module("vllm.v1.sample.ops.logprobs", batched_count_greater_than=lambda x, v: (x >= v).sum(-1))


def load(name: str) -> Any:
    """A module of vLLM."""
    install()
    return importlib.import_module(f"vllm.{name}")
