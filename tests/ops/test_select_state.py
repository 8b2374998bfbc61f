"""select_state: every byte against states copied one by one, in poisoned memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from caches import Cache, assert_bits, counts, make_cache
from torch import Tensor

from specdec_kernels import CacheLayout, select_state
from specdec_kernels.ops.select_state import op


def selected(cache: Cache, accepted: list[int]) -> list[Tensor]:
    """Bits after state accepted[b] of request b came to slot 0."""
    twin = cache.twin()
    for tensor in twin.tensors:
        for b, n in enumerate(accepted):
            if n > 0:
                twin.row(tensor, b, 0).copy_(twin.row(tensor, b, n))
    return twin.buffers


def test_the_state_of_the_last_accepted_token_comes_to_slot_0(backend: str, device: str) -> None:
    states = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], device=device)[..., None]
    layout = CacheLayout([states], "blhd")
    assert select_state(layout, counts([2, 0, -1], device)).tolist() == [0, 0, 0]
    assert states[..., 0].tolist() == [[3, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize("format", ["blhd", "slots"])
def test_states_of_every_size(backend: str, device: str, is_slow: bool, format: str) -> None:
    """A convolution state, one odd, one of several kernel tiles."""
    large = 5_000 if is_slow else 100_003
    rng = random.Random(format)
    for batch in (0, 1, 5):
        cache = make_cache(
            format, batch=batch, capacity=6, heads=(4, 3, 1), dims=(64, 5, large), dtype=torch.float32, device=device
        )
        accepted = [rng.randrange(-1, 6) for _ in range(batch)]
        want = selected(cache, accepted)
        assert select_state(cache.layout(), counts(accepted, device)).tolist() == [0] * batch
        assert_bits(cache, want)


def test_states_that_do_not_exist_are_flagged_and_harm_nobody(backend: str, device: str) -> None:
    for format, accepted, entry in (
        ("blhd", 6, 0),
        ("blhd", -2, 0),
        ("slots", 2, -1),
        ("slots", 2, 99),
        ("slots", 2**31 - 1, 0),
    ):
        cache = make_cache(format, capacity=6, device=device)
        if format == "slots":
            cache.block_table[1, 2] = entry  # type: ignore[index]
        want = selected(cache, [3, 0, 5])
        assert select_state(cache.layout(), counts([3, accepted, 5], device)).tolist() == [0, 32, 0]
        assert_bits(cache, want)


def test_opcheck_compile_and_out(backend: str, device: str) -> None:
    accepted = counts([3, 0, 5], device)
    cache = make_cache("slots", capacity=6, device=device)
    want, layout = selected(cache, [3, 0, 5]), cache.layout()
    if backend != "reference":
        tensors = [t.clone() for t in layout.tensors]
        given = (tensors, layout.table, layout.block_table, layout.page_size, layout.num_pages, accepted)
        torch.library.opcheck(op.overload(backend), given)
        torch.library.opcheck(op.overload(backend, out=True), (*given, torch.empty_like(accepted)))
        step = torch.compile(lambda a: select_state(layout, a), fullgraph=True, backend="aot_eager")
        assert step(accepted).tolist() == [0, 0, 0]
        assert_bits(cache, want)
    out = torch.full_like(accepted, 99)
    assert select_state(layout, 0 * accepted, out=out) is out
    assert out.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": torch.zeros(1)}, "layout must be a CacheLayout, got Tensor"),
        ({"num_accepted": torch.zeros(2)}, "num_accepted must be int32, got float32"),
        ({"num_accepted": torch.zeros(3).int()}, r"num_accepted must be \[2\], got \[3\]"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    arguments = {"layout": CacheLayout([torch.zeros(2, 3, 4)], "blhd"), "num_accepted": counts([0, 0]), **change}
    with pytest.raises(ValueError, match="select_state: " + message):
        select_state(**arguments)
