"""How a call of an op looks to torch: modes, profilers and traces see it, results are tensors like any others."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_calls import CALLS, Call, chain, gathered, sampled
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels
from specdec_kernels import CacheLayout, Sampling, compact_cache, gather_nodes, sample, verify_chain
from specdec_kernels._op import OPS


def run(op: str, call: Call, **more: Any) -> Any:
    return getattr(specdec_kernels, op)(*call[0], **call[1], **more)


def tensors(value: Any) -> list[Tensor]:
    """The results, and what a cache holds."""
    if isinstance(value, CacheLayout):
        return list(value.tensors)
    if isinstance(value, tuple | list):
        return [t for part in value for t in tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def same(a: Any, b: Any) -> bool:
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return type(a) is type(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_every_native_op_has_a_call_here() -> None:
    """An op with `top` or `Edits` has an operator of its own: test_listed_tokens.py and test_wanted_edits.py."""
    assert set(CALLS) == {op for op in OPS if "cpu" in OPS[op].backends and not op.endswith(("_listed", "_edited"))}


@pytest.mark.parametrize("op", CALLS)
def test_preallocated_results_are_filled_and_returned(op: str) -> None:
    results = run(op, CALLS[op](0))
    kept = [t.clone() for t in tensors(results)]
    outcomes = [str([t.tolist() for t in kept])]
    for seed in range(1, 6):
        call, other = CALLS[op](seed), CALLS[op](seed)
        want = run(op, call)
        given = run(op, other, out=results)
        assert all(a is b for a, b in zip(tensors(given), tensors(results), strict=True))
        assert same(given, want)
        assert same(call[0], other[0]), "what the op writes in place"
        outcomes.append(str([t.tolist() for t in (*tensors(want), *tensors(call[0][0]))]))
    assert len(set(outcomes)) > 1, "other numbers, other results"


def elsewhere(results: Any) -> Any:
    """The same results on another device."""
    if isinstance(results, Tensor):
        return results.to("meta")
    return type(results)(*(None if t is None else t.to("meta") for t in results))


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize("op", CALLS)
def test_results_on_another_device_are_refused(op: str, on: str) -> None:
    out = elsewhere(run(op, CALLS[op](0)))
    with pytest.raises(ValueError, match=rf"{op}: out\.\w+ must be on cpu, got meta"):
        run(op, CALLS[op](0), out=out, backend=on)


@pytest.mark.parametrize("op", CALLS)
def test_results_of_another_kind_are_refused(op: str) -> None:
    with pytest.raises(ValueError, match=rf"{op}: out(\.status)? must be .*, got int"):
        run(op, CALLS[op](0), out=5)


@pytest.mark.parametrize("op", CALLS)
def test_results_own_their_memory_and_can_be_resized(op: str) -> None:
    first, second = tensors(run(op, CALLS[op](0))), tensors(run(op, CALLS[op](0)))
    want = [t.clone() for t in second]
    for t in first:
        t.resize_(t.numel() + 5).zero_()
    assert all(torch.equal(a, b) for a, b in zip(second, want, strict=True))


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize("op", CALLS)
def test_the_default_dtype_changes_nothing(op: str, on: str, default_dtype: torch.dtype) -> None:
    call, other = CALLS[op](1), CALLS[op](1)
    want = run(op, call, backend=on)
    torch.set_default_dtype(default_dtype)
    assert same(run(op, other, backend=on), want)
    assert same(call[0], other[0]), "what the op writes in place"


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize("op", CALLS)
def test_the_default_device_changes_nothing(op: str, on: str) -> None:
    call, other = CALLS[op](1), CALLS[op](1)
    want = run(op, call, backend=on)
    with torch.device("meta"):  # a tensor that is made there has no values
        got = run(op, other, backend=on)
    assert same(got, want) and same(call[0], other[0])


@pytest.mark.parametrize("on", ["reference", "cpu"])
@pytest.mark.parametrize("op", ["residual_probs", "residual_sample"])
def test_weights_that_are_numbers_do_not_follow_the_default_dtype(op: str, on: str, default_dtype: torch.dtype) -> None:
    rows, options = CALLS[op](1)
    call = rows, options | {"a": 0.75, "b": 0.5, "sampling": Sampling()}
    want = run(op, call, backend=on)
    torch.set_default_dtype(default_dtype)
    assert same(run(op, call, backend=on), want)


class Listening(TorchDispatchMode):
    """Notes the ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", CALLS)
def test_a_mode_hears_every_call(op: str) -> None:
    for _ in range(2):
        with Listening() as mode:
            run(op, CALLS[op](0))
        assert f"specdec_kernels.{op}_out.cpu" in mode.heard


def test_a_profiler_sees_a_call() -> None:
    with torch.autograd.profiler.profile() as seen:
        run("sample", sampled(0))
    assert any("sample_out" in event.name for event in seen.function_events)


def test_fake_tensors_stay_fake() -> None:
    args, kwargs = sampled(0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = sample(mode.from_tensor(args[0]), **kwargs)
    assert type(fake.token_ids).__name__ == "FakeTensor"


@pytest.mark.filterwarnings("ignore:.*TracerWarning|.torch.jit.trace. is deprecated|Converting a tensor")
def test_a_traced_call_is_in_the_graph() -> None:
    args, _ = gathered(0)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda v, p: gather_nodes(v, p).values)(*args)
    assert "gather_nodes" in graph.code
    assert torch.equal(graph(*gathered(1)[0]), gather_nodes(*gathered(1)[0]).values)
    traced = torch.jit.trace(lambda v, p: gather_nodes(v, p).values, args)
    assert "gather_nodes" in str(traced.graph)


def test_a_parameter_is_read_as_a_tensor() -> None:
    (logits,), kwargs = sampled(0)
    weight = torch.nn.Parameter(logits, requires_grad=False)
    assert same(sample(weight, **kwargs), sample(logits, **kwargs))


def test_logits_that_want_a_gradient_are_refused() -> None:
    (logits,), kwargs = sampled(0)
    wanting = logits.clone().requires_grad_()
    with pytest.raises(ValueError, match="inference only"):
        sample(wanting, **kwargs)
    with torch.no_grad():
        assert same(sample(wanting, **kwargs), sample(logits, **kwargs))


def test_nothing_leaks() -> None:
    """2 GB of results, were they kept."""
    values, path = torch.randn(1, 4, 4096), torch.tensor([[1, 2, -1]])
    cache = CacheLayout([torch.randn(1, 1, 8, 4)], "bhld")
    one = torch.ones(1, dtype=torch.int32)
    for count in (100, 40_000):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(count):
            gather_nodes(values, path)
            compact_cache(cache, path, one, one)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_threads_do_not_mix_their_calls() -> None:
    calls = [chain(seed) for seed in range(4)]  # made here: they are drawn by the reference, for all threads
    wanted = [verify_chain(*args, **kwargs) for args, kwargs in calls]
    faults: list[int] = []

    def work(seed: int) -> None:
        args, kwargs = calls[seed]
        for _ in range(50):
            if not same(verify_chain(*args, **kwargs), wanted[seed]):
                faults.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
