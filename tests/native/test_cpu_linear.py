"""linear: sums as exact as their type allows, the same bits whatever the rows and threads, and no byte beyond."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec_kernels import _native

pytestmark = pytest.mark.skipif(_native.cpu_reason() is not None, reason=str(_native.cpu_reason()))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.specdec_kernels.linear.cpu(x, weight, bias)
    return out


def _layer(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rows + inputs + outputs)
    sizes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [*range(1, 15), 16, 23, 64])
@pytest.mark.parametrize("inputs", [16, 272])
def test_sums_are_as_exact_as_their_type(inputs: int, rows: int, dtype: torch.dtype, isa: str) -> None:
    for outputs in (1, 3, 4, 6, 45, 130):
        x, weight, bias = _layer(rows, inputs, outputs, dtype)
        # Of n products: n roundings in float32, then one of the result's type.
        size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        want = x.double() @ weight.double().T
        for b, exact in ((None, want), (bias, want + bias.double())):
            got = linear(x, weight, b)
            assert got.dtype == dtype
            bound = (inputs + 1) * 2.0**-24 * size + exact.abs() * torch.finfo(dtype).eps / 2
            assert ((got.double() - exact).abs() <= bound * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "rows", "least"),
    [(528, 40, 1), (256, 15, 1), (256, 40, 16)],  # of few inputs, 16 rows or more are summed in another order
)
def test_a_row_is_the_same_in_any_company_and_on_any_threads(
    inputs: int, rows: int, least: int, dtype: torch.dtype, isa: str, threads: None
) -> None:
    x, weight, bias = _layer(rows, inputs, 1030, dtype)
    torch.set_num_threads(2)
    want = linear(x, weight, bias)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for first, size in (
            (0, rows),
            (0, least),
            (rows - least, least),
            (3, least + 2),
            (rows - least - 5, least + 5),
        ):
            part = slice(max(first, 0), max(first, 0) + size)
            assert torch.equal(linear(x[part].contiguous(), weight, bias), want[part])


def test_other_dimensions_of_the_rows_stay(isa: str) -> None:
    x, weight, _ = _layer(6, 32, 8, torch.float32)
    flat = linear(x, weight)
    assert torch.equal(linear(x.view(2, 3, 32), weight), flat.view(2, 3, 8))
    assert torch.equal(linear(x[0], weight), flat[0])
    assert linear(x[:0], weight).shape == (0, 8)
    assert linear(x, weight[:0]).shape == (6, 0)


def test_numbers_that_are_none_stay_in_their_row(isa: str) -> None:
    x, weight, _ = _layer(5, 32, 9, torch.float32)
    want = linear(x, weight)
    x[1, 4], x[3, 31] = torch.nan, torch.inf
    got = linear(x, weight)
    assert got[1].isnan().all()
    assert (~got[3].isfinite()).all()
    assert torch.equal(got[[0, 2, 4]], want[[0, 2, 4]])


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(2, 32), torch.ones(4, 16), None),
        (torch.ones(2, 8), torch.ones(4, 8), None),
        (torch.ones(2, 32), torch.ones(4, 32), torch.ones(3)),
        (torch.ones(2, 32), torch.ones(4, 32, dtype=torch.bfloat16), None),
        (torch.ones(2, 32), torch.ones(4, 32), torch.ones(4, dtype=torch.float64)),
        (torch.ones(2, 64)[:, ::2], torch.ones(4, 32), None),
        (torch.ones(2, 32, dtype=torch.int32), torch.ones(4, 32, dtype=torch.int32), None),
        (torch.tensor(1.0), torch.ones(4, 32), None),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(RuntimeError, match=r"linear|logits"):
        linear(x, weight, bias)
