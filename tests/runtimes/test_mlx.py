"""Arrays of MLX as arguments: they are read where they lie, through DLPack."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import RngKey, Sampling, sample, verify_chain

mx = pytest.importorskip("mlx.core", reason="make test-runtimes installs it in an environment of its own")
BATCH, DRAFTS, VOCAB = 3, 4, 1000


def key() -> RngKey:
    return RngKey(seed=torch.arange(BATCH), position=torch.full((BATCH,), 7))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_tensor_of_an_array_is_no_copy(dtype: str) -> None:
    array = mx.zeros((4,), dtype=getattr(mx, dtype))
    mx.eval(array)
    tensor = torch.from_dlpack(array)
    tensor[1] = 3  # for the proof alone: an array of MLX must not change
    assert tensor.dtype == getattr(torch, dtype) and array.tolist() == [0, 3, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_drafts_and_decisions_are_those_of_equal_tensors(dtype: str, backend: str) -> None:
    mx.random.seed(1)
    draft_rows = (3 * mx.random.normal((BATCH, VOCAB))).astype(getattr(mx, dtype))
    target_rows = (3 * mx.random.normal((BATCH, DRAFTS + 1, VOCAB))).astype(getattr(mx, dtype))
    sampling = Sampling.full(BATCH, temperature=0.9, top_p=0.95)
    drawn = sample(torch.from_dlpack(draft_rows), sampling=sampling, rng=key(), purpose="target", backend=backend)
    copied = torch.tensor(draft_rows.astype(mx.float32).tolist()).to(getattr(torch, dtype))
    want = sample(copied, sampling=sampling, rng=key(), purpose="target", backend=backend)
    assert torch.equal(drawn.token_ids, want.token_ids)

    drafts = mx.argmax(target_rows[:, :-1], -1).astype(mx.int32)
    how = {"sampling": sampling, "rng": key(), "rule": "match", "backend": backend}
    result = verify_chain(torch.from_dlpack(drafts), torch.from_dlpack(target_rows), **how)
    rows = torch.tensor(target_rows.astype(mx.float32).tolist()).to(getattr(torch, dtype))
    want_result = verify_chain(torch.tensor(drafts.tolist(), dtype=torch.int32), rows, **how)
    assert torch.equal(result.token_ids, want_result.token_ids)
    assert mx.array(result.token_ids).tolist() == result.token_ids.tolist()
    assert 0 < int(result.num_accepted.sum()) < BATCH * DRAFTS
