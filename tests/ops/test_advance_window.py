"""advance_window beside lists of numbers, in windows that hold other requests too."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from caches import counts, leaf_paths, padded, random_tree
from torch import Tensor

from specdec_kernels import advance_window
from specdec_kernels.ops.advance_window import op

LAYERS, NODES, BATCH, SLOTS, CHANNELS = 2, 5, 4, 6, 300  # channels: a whole block, and a part of one


def made(width: int, dtype: torch.dtype = torch.float32, channels: int = CHANNELS) -> tuple[Tensor, Tensor]:
    """Windows of the slots and the inputs of a step; every number is another one, as far as the dtype goes."""
    window = torch.randperm(LAYERS * SLOTS * channels * width).view(LAYERS, SLOTS, channels, width)
    inputs = -torch.randperm(LAYERS * BATCH * NODES * channels).view(LAYERS, BATCH, NODES, channels) - 1
    return window.to(dtype), inputs.to(dtype)


def shifted(window: Tensor, inputs: Tensor, nodes: list[list[int]], slots: list[int]) -> Tensor:
    """The windows after these nodes of each request, one number pushed in at a time."""
    want = window.clone()
    for b, path in enumerate(nodes):
        for node in path:
            want[:, slots[b], :, :-1] = want[:, slots[b], :, 1:].clone()
            want[:, slots[b], :, -1] = inputs[:, b, node]
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 11])
def test_the_root_and_the_accepted_drafts_enter_the_window(
    backend: str, device: str, width: int, dtype: torch.dtype
) -> None:
    """A ragged batch with one request that takes no part, in slots of its own; some windows keep numbers, some none."""
    window, inputs = made(width, dtype)
    accepted, slots = [2, 0, -1, NODES - 1], [4, 0, 3, 1]
    ours = window.clone().to(device)
    status = advance_window(ours, inputs.to(device), counts(accepted, device), slots=counts(slots, device))
    assert status.tolist() == [0] * BATCH
    assert torch.equal(ours.cpu(), shifted(window, inputs, [list(range(n + 1)) for n in accepted], slots))


@pytest.mark.parametrize("width", [2, 3])
def test_paths_of_trees(backend: str, device: str, width: int) -> None:
    paths = (leaf_paths(random_tree(NODES, random.Random(3))) * BATCH)[:BATCH]
    window, inputs = made(width)
    want = shifted(window, inputs, [[0, *path] for path in paths], list(range(BATCH)))
    for dtype in (torch.int32, torch.int64):
        ours, lengths = window.clone().to(device), counts([len(p) for p in paths], device)
        path = padded(paths, NODES, dtype, device)
        assert advance_window(ours, inputs.to(device), lengths, path=path).tolist() == [0] * BATCH
        assert torch.equal(ours.cpu(), want)


def test_bad_counts_paths_and_slots_are_flagged_and_harm_nobody(backend: str, device: str) -> None:
    window, inputs = made(3, channels=6)
    slots, path = [0, 1, 2, 3], [[1, 2, 4, -1]] * BATCH
    want = shifted(window, inputs, [[0, 1, 2], [], [0], [0, 1, 2, 4]], slots)
    for count, slot, second in (
        (-2, 1, 2),
        (5, 1, 2),
        (2**31 - 1, 1, 2),
        (2, SLOTS, 2),
        (2, -2, 2),
        (2, 1, 1),
        (2, 1, NODES),
        (2, 1, -1),
        (4, 1, 2),  # over the path's end
    ):
        given = [row[:] for row in path]
        given[1][1] = second
        ours = window.clone().to(device)
        accepted, named = counts([2, count, 0, 3], device), counts([0, slot, 2, 3], device)
        status = advance_window(ours, inputs.to(device), accepted, path=torch.tensor(given, device=device), slots=named)
        assert status.tolist() == [0, 32, 0, 0]
        assert torch.equal(ours.cpu(), want)
    nobody = counts([-1, 2, -1, -1], device), counts([0, -1, 2, 3], device)
    assert advance_window(ours, inputs.to(device), nobody[0], slots=nobody[1]).tolist() == [0] * BATCH
    assert torch.equal(ours.cpu(), want)


def test_layouts_of_engines_and_empty_batches(backend: str, device: str) -> None:
    """Channels last, inputs by channel, every second layer of a pool, the first requests of larger buffers."""
    window, inputs = made(3, torch.bfloat16)
    pool = torch.zeros(2 * LAYERS, SLOTS, 3, CHANNELS, dtype=torch.bfloat16, device=device)
    ours = pool[::2].mT
    ours.copy_(window)
    by_channel = inputs.mT.contiguous().to(device).mT
    for batch in (0, 2):
        want = shifted(ours.cpu(), inputs, [[0, 1]] * batch, list(range(batch)))
        assert advance_window(ours, by_channel[:, :batch], counts([1] * batch, device)).tolist() == [0] * batch
        assert torch.equal(ours.cpu(), want)
    assert not pool[1::2].any()


def test_opcheck_compile_and_out(backend: str, device: str) -> None:
    window, inputs = (x.to(device) for x in made(3, channels=6))
    ours, accepted = window.clone(), counts([3, 0, -1, 1], device)
    out = torch.full_like(accepted, 99)
    assert advance_window(ours, inputs, accepted, out=out) is out
    assert out.tolist() == [0] * BATCH
    if backend != "reference":
        given = (window.clone(), inputs, accepted, None, None)
        torch.library.opcheck(op.overload(backend), given)
        torch.library.opcheck(op.overload(backend, out=True), (*given, torch.empty_like(accepted)))
        again = window.clone()
        step = torch.compile(advance_window, fullgraph=True, backend="aot_eager")
        assert step(again, inputs, accepted).tolist() == [0] * BATCH
        assert torch.equal(again, ours)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": [1.0]}, r"window must be a tensor \[layers, slots, channels, width\], got list"),
        ({"window": torch.zeros(2, 4, 6, 3).double()}, "window must be float32 or bfloat16 or float16, got float64"),
        ({"window": torch.zeros(2, 4, 6, 65)}, "window must be of at least one layer and channel, and width of 1 to"),
        ({"window": torch.zeros(2, 1, 6, 3).expand(2, 4, 6, 3)}, "window must be of slots with memory of their own"),
        ({"window": torch.zeros(2, 3, 6, 3)}, "slots must be given where the state has fewer slots than requests"),
        ({"inputs": torch.zeros(2, 4, 5, 6).half()}, "inputs must be float32, got float16"),
        ({"inputs": torch.zeros(2, 4, 0, 6)}, "inputs must be of a root at least"),
        ({"inputs": torch.zeros(2, 4, 5, 7)}, r"inputs must be \[2, batch, nodes, 6\]"),
        ({"num_accepted": torch.zeros(4)}, "num_accepted must be int32, got float32"),
        ({"path": torch.zeros(3, 2).long()}, "path must be"),
        ({"slots": torch.zeros(4).long()}, "slots must be int32, got int64"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    given = {"window": torch.zeros(2, 4, 6, 3), "inputs": torch.zeros(2, 4, 5, 6), "num_accepted": counts([0] * 4)}
    with pytest.raises(ValueError, match="advance_window: " + message):
        advance_window(**{**given, **change})
