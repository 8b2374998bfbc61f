"""Calls that look like an earlier one are replayed natively: same bits, same errors, never where someone listens."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_calls import BATCH, CALLS, VOCAB, Call, chain, gathered, numbers, parents, sampled
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels
from specdec_kernels import (
    CacheLayout,
    RngKey,
    _replay,
    compact_cache,
    gather_nodes,
    sample,
    tree_layout,
    use_backend,
    verify_chain,
)
from specdec_kernels._op import OPS


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    """The native library with an empty memory."""
    native = _replay.library()
    assert native, "this torch should show its tensors to C"
    native.forget()
    yield native
    native.forget()


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


def twice(front: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """So that the next call is replayed."""
    front(*args, **kwargs)
    return front(*args, **kwargs)


def by_dispatch(front: Callable[..., Any], call: Call, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(_replay, "_library", False)
        return front(*call[0], **call[1])


def test_every_native_op_is_replayed_here_but_those_whose_front_makes_tensors() -> None:
    makes_views = {"tree_attention"}
    assert set(CALLS) == {op for op in OPS if "cpu" in OPS[op].backends} - makes_views


@pytest.mark.parametrize("op", CALLS)
def test_a_replayed_call_gives_the_bits_of_the_long_way(op: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    front = getattr(specdec_kernels, op)
    args, kwargs = CALLS[op](0)
    front(*args, **kwargs)
    assert library.counts() == (0, 0), "a key that came once"
    front(*args, **kwargs)
    assert library.counts() == (1, 0)
    for seed in range(1, 5):
        call, other = CALLS[op](seed), CALLS[op](seed)
        found, want = front(*call[0], **call[1]), by_dispatch(front, other, monkeypatch)
        assert same(found, want)
        assert same(call[0], other[0]), "what the op writes in place"
    assert library.counts() == (1, 0), "calls of one look leave one plan"


@pytest.mark.parametrize("op", CALLS)
def test_the_replay_sees_other_numbers(op: str) -> None:
    """The twin: a replay of old results, or of old tensors, would pass where nothing changes."""
    front = getattr(specdec_kernels, op)
    outcomes = []
    for seed in range(6):
        args, kwargs = CALLS[op](seed)
        outcomes.append([t.tolist() for t in (*tensors(front(*args, **kwargs)), *tensors(args[0]))])
    assert len({str(x) for x in outcomes}) > 1


def test_preallocated_results_are_filled_and_returned() -> None:
    out = sample(*sampled(0)[0], **sampled(0)[1])
    for seed in range(1, 6):
        args, kwargs = sampled(seed)
        want = sample(*args, **kwargs)
        given = sample(*args, **kwargs, out=out)
        assert all(a is b for a, b in zip(given, out, strict=True))
        assert same(out, want)
    wrong = out._replace(status=out.status.long())
    with pytest.raises(ValueError, match=r"sample: out.status must be torch.int32 \[3\], got torch.int64 \[3\]"):
        sample(*args, **kwargs, out=wrong)


def test_one_tensor_in_two_places_says_nothing_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = sampled(0)
    both = torch.arange(BATCH)
    kwargs["rng"] = RngKey(both, both, both)
    twice(sample, args, kwargs)
    for seed in range(1, 6):
        call = sampled(seed)
        assert same(sample(*call[0], **call[1]), by_dispatch(sample, call, monkeypatch))


def test_arguments_of_another_look_are_checked_again(library: Any) -> None:
    args, kwargs = sampled(0)
    sample(*args, **kwargs)
    sample(*args, **kwargs)
    rng_of = kwargs["rng"]
    for change, message in (
        ({"rng": rng_of._replace(seed=rng_of.seed[:2])}, r"rng.seed must be \[3\]"),
        ({"rng": rng_of._replace(seed=rng_of.seed.int())}, "rng.seed must be int64"),
        ({"rng": tuple(rng_of)}, "noise must be an RngKey"),
        ({"purpose": "drafts"}, "purpose must be one of"),
        ({"num_samples": 3.0}, "num_samples must be an int"),
        ({"num_samples": 65}, "num_samples must be an int"),
        ({"lane": -1}, "lane must be"),
    ):
        for _ in range(2):  # a call that raised leaves no plan
            with pytest.raises(ValueError, match=message):
                sample(*args, **{**kwargs, **change})
    columns = torch.randn(VOCAB, BATCH).t()
    with pytest.raises(ValueError, match="dense in its last dimension"):
        sample(columns, **kwargs)
    assert library.counts() == (1, 0)


def test_logits_that_want_a_gradient_are_refused_after_others_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (logits,), kwargs = sampled(0)
    twice(sample, (logits,), kwargs)
    wanting = logits.clone().requires_grad_()
    with pytest.raises(ValueError, match="inference only"):
        sample(wanting, **kwargs)
    with torch.no_grad():
        assert same(sample(wanting, **kwargs), by_dispatch(sample, ((logits,), kwargs), monkeypatch))
    with pytest.raises(ValueError, match="inference only"):
        sample(wanting, **kwargs)


def test_strides_are_part_of_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        _, kwargs = sampled(seed)
        wide = torch.randn(2 * BATCH, VOCAB + 3, generator=numbers(seed))
        for logits in (wide[:BATCH, :VOCAB], wide[::2, 1 : 1 + VOCAB], wide[:1, :VOCAB].expand(BATCH, -1)):
            call = (logits,), kwargs
            assert same(sample(*call[0], **kwargs), by_dispatch(sample, call, monkeypatch))


class Listening(TorchDispatchMode):
    """Notes the ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_hears_every_call() -> None:
    args, kwargs = sampled(0)
    for _ in range(3):
        sample(*args, **kwargs)
        with Listening() as mode:
            sample(*args, **kwargs)
        assert "specdec_kernels.sample_out.cpu" in mode.heard


def test_a_profiler_sees_every_call() -> None:
    args, kwargs = sampled(0)
    twice(sample, args, kwargs)
    with torch.autograd.profiler.profile() as seen:
        sample(*args, **kwargs)
    assert any("sample_out" in event.name for event in seen.function_events)


def test_fake_tensors_stay_fake() -> None:
    args, kwargs = sampled(0)
    twice(sample, args, kwargs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = sample(mode.from_tensor(args[0]), **kwargs)
    assert type(fake.token_ids).__name__ == "FakeTensor"


@pytest.mark.filterwarnings("ignore:.*TracerWarning|.torch.jit.trace. is deprecated|Converting a tensor")
def test_a_traced_call_is_in_the_graph() -> None:
    args, _kwargs = gathered(0)
    twice(gather_nodes, args, {})
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda v, p: gather_nodes(v, p).values)(*args)
    assert "gather_nodes" in graph.code
    assert torch.equal(graph(*gathered(1)[0]), gather_nodes(*gathered(1)[0]).values)
    traced = torch.jit.trace(lambda v, p: gather_nodes(v, p).values, args)
    assert "gather_nodes" in str(traced.graph)


def test_transforms_go_through_the_dispatcher() -> None:
    """Their wrappers look like tensors and have no memory."""
    values, path = gathered(0)[0]
    twice(gather_nodes, (values, path), {})
    with pytest.raises(RuntimeError, match="functionalizing operators"):
        torch.func.functionalize(lambda v: gather_nodes(v, path).values)(values)
    with pytest.raises(RuntimeError, match=r"[Bb]atching rule"):
        torch.vmap(lambda v: gather_nodes(v, path).values)(values[None])


def test_subclasses_are_not_read_as_tensors(library: Any) -> None:
    (logits,), kwargs = sampled(0)
    twice(sample, (logits,), kwargs)
    weight = torch.nn.Parameter(logits, requires_grad=False)
    assert same(sample(weight, **kwargs), sample(logits, **kwargs))
    assert library.counts() == (1, 0)


def test_another_backend_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = sampled(0)
    twice(sample, args, kwargs)
    ran: list[int] = []
    plain = OPS["sample"].reference
    monkeypatch.setattr(OPS["sample"], "reference", lambda *a: (ran.append(1), plain(*a))[1])
    for _ in range(2):
        sample(*args, **kwargs)
        with use_backend("reference"):
            sample(*args, **kwargs)
        sample(*args, **kwargs, backend="reference")
    assert len(ran) == 4
    with pytest.raises(RuntimeError, match="backend 'cuda' cannot run"):
        sample(*args, **kwargs, backend="cuda")


def test_a_front_that_makes_tensors_is_remembered_as_such(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = sampled(0)
    for lane in (1, 2, 1, 2, 1):
        call = args, {**kwargs, "lane": lane}
        assert same(sample(*call[0], **call[1]), by_dispatch(sample, call, monkeypatch))
    assert library.counts() == (0, 2)


def test_plans_do_not_pile_up(library: Any) -> None:
    tree_of = parents(0)
    for leaves in range(1, 8400):
        twice(tree_layout, (tree_of,), {"max_depth": 1, "max_leaves": leaves})
    replayed, never = library.counts()
    assert 0 < replayed <= 8192 and never == 0


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


def test_results_outlive_the_call_and_their_neighbours() -> None:
    args, kwargs = sampled(0)
    twice(sample, args, kwargs)
    kept = [sample(*sampled(seed)[0], **sampled(seed)[1]).token_ids for seed in range(50)]
    again = [sample(*sampled(seed)[0], **sampled(seed)[1]).token_ids for seed in range(50)]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert kept[0].is_contiguous() and kept[0].data_ptr() % 64 == 0
    assert torch.equal((kept[0] + 1).clone() - 1, kept[0])


def test_threads_do_not_mix_their_calls() -> None:
    wanted = {seed: verify_chain(*chain(seed)[0], **chain(seed)[1]) for seed in range(4)}
    faults: list[int] = []

    def work(seed: int) -> None:
        args, kwargs = chain(seed)
        for _ in range(50):
            if not same(verify_chain(*args, **kwargs), wanted[seed]):
                faults.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_compiled_code_does_not_replay() -> None:
    values, path = gathered(0)[0]
    twice(gather_nodes, (values, path), {})
    compiled = torch.compile(lambda v, p: gather_nodes(v, p).values * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(values, path), gather_nodes(values, path).values * 2)
