"""Every op on tensors of the second GPU while the first one is the current device."""

from __future__ import annotations

import pytest
import torch
from op_calls import CALLS
from other_device import BACKENDS, agrees

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("op", CALLS)
def test_an_op_runs_where_its_tensors_are(op: str, kernels: str) -> None:
    assert torch.cuda.current_device() == 0
    assert agrees(op, kernels, "cuda:1")
    assert torch.cuda.current_device() == 0
