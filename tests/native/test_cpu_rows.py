"""The cpu backend against itself: instruction sets, threads and batch slots must not change a result."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specdec_kernels import Edits, RngKey, Sampling, Status, _native, edit_rows, sample
from specdec_kernels._edits import packed
from specdec_kernels.ops.sample import op as sample_op
from specdec_kernels.ops.verify_chain import op as verify_op

pytestmark = pytest.mark.skipif(_native.cpu_reason() is not None, reason=str(_native.cpu_reason()))
ISAS = {"portable": 0, "avx2": 1, "avx512": 2, "amx": 3}
# one tile and a bit; ends inside a vector; several tiles; beyond what top-p sorts at once
VOCABS = [2050, 4099, 40000]
FILTERS = {
    "none": (None, None, None),
    "top-k": (50, None, None),
    "top-p": (None, 0.95, None),
    "all": (200, 0.9, 0.01),
}


@pytest.fixture
def isa() -> Iterator[None]:
    """Puts back the instruction set of this machine."""
    best = torch.ops.specdec_kernels.cpu_isa()
    yield
    torch.ops.specdec_kernels.set_cpu_isa(best)


def _use(name: str) -> None:
    if torch.ops.specdec_kernels.set_cpu_isa(ISAS[name]) != ISAS[name]:
        pytest.skip(f"this machine has no {name}")


def _sampling(batch: int, name: str) -> Sampling:
    top_k, top_p, min_p = FILTERS[name]
    return Sampling(
        torch.full((batch,), 0.8),
        None if top_k is None else torch.full((batch,), top_k, dtype=torch.int32),
        None if top_p is None else torch.full((batch,), top_p),
        None if min_p is None else torch.full((batch,), min_p),
    )


def _sample(vocab: int, filters: str, dtype: torch.dtype, rows: slice = slice(None)) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(5, vocab, generator=generator)).to(dtype)[rows]
    batch = len(logits)
    seed = torch.arange(5)[rows]
    rng = (seed, seed * 3, None)
    return sample_op.overload("cpu")(logits, *_sampling(batch, filters), *rng, 3, 3, *[None] * 7, 1)


def _verify(vocab: int, filters: str, dtype: torch.dtype, rule: int, rows: slice = slice(None)) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(vocab)
    target = 3 * torch.randn(5, 4, vocab, generator=generator)
    draft = target[:, :3] + 0.5 * torch.randn(5, 3, vocab, generator=generator)
    ids = torch.multinomial((draft / 0.8).softmax(-1).flatten(0, 1), 1, generator=generator).view(5, 3)
    batch = len(ids[rows])
    distribution = _sampling(batch, filters)
    seed = torch.arange(5)[rows]
    return verify_op.overload("cpu")(
        ids[rows], target.to(dtype)[rows], draft.to(dtype)[rows], None, None, None, 3, *distribution, *distribution,
        seed, seed * 7, seed,
        rule, 0.0, None, False, *[None] * 10, 0.09, 0.3, None, None, 1, 0, 1, 1,
    )  # fmt: skip


def _same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for have, want in zip(results, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_avx2_and_avx512_give_the_same_bits(vocab: int, filters: str, dtype: torch.dtype, isa: None) -> None:
    _use("avx512")
    expected = _sample(vocab, filters, dtype), _verify(vocab, filters, dtype, 0), _verify(vocab, filters, dtype, 1)
    _use("avx2")
    _same(_sample(vocab, filters, dtype), expected[0])
    _same(_verify(vocab, filters, dtype, 0), expected[1])
    _same(_verify(vocab, filters, dtype, 1), expected[2])


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_portable_code_draws_the_same_tokens(vocab: int, filters: str, isa: None) -> None:
    # Without fma its row sums differ in the last bits, its races do not.
    expected = _sample(vocab, filters, torch.float32), _verify(vocab, filters, torch.float32, 0)
    _use("portable")
    results = _sample(vocab, filters, torch.float32), _verify(vocab, filters, torch.float32, 0)
    assert torch.equal(results[0][0], expected[0][0])
    torch.testing.assert_close(results[0][2], expected[0][2], rtol=1e-6, atol=1e-6)
    for have, want in zip(results[1][:3], expected[1][:3], strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.3, 1.0])  # less than one id of a block; one; many; all
@pytest.mark.parametrize("name", ISAS)
def test_edits_of_any_density_change_rows_alike(name: str, density: float, dtype: torch.dtype, isa: None) -> None:
    _use(name)
    g = torch.Generator().manual_seed(int(density * 10000))
    rows, vocab = 6, 3 * 2048 + 70
    logits = (3 * torch.randn(rows, vocab, generator=g)).to(dtype)
    logits[:, ::97] = -torch.inf
    listed = torch.rand(rows, vocab, generator=g) < density
    largest = logits.unfold(1, 64, 64).argmax(2) + 64 * torch.arange(vocab // 64)
    listed[:3] = listed[:3].scatter(1, largest[:3], True)  # every block loses its largest logit, or it rises
    planes = torch.stack([torch.randn(rows, vocab, generator=g) * 4, torch.full((rows, vocab), 1.3), listed * 0.5])
    planes[0][torch.rand(rows, vocab, generator=g) < 0.3] = -torch.inf
    edits = packed(listed, planes, vocab)
    for temperature, top_k in ((0.0, None), (0.8, None), (0.8, 50)):
        named = {
            "sampling": Sampling.full(rows, temperature=temperature, top_k=top_k), "purpose": "target",
            "rng": RngKey(*torch.arange(2 * rows).view(2, rows)), "num_samples": 3, "backend": "cpu",
        }  # fmt: skip
        got, want = sample(logits, edits=edits, **named), sample(edits.apply(logits), **named)
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)
        logits[4, 100] = torch.nan
        assert sample(logits, edits=edits, **named).status.tolist() == [0, 0, 0, 0, Status.BAD_TARGET, 0]
        logits[4, 100] = 0.0


@pytest.mark.parametrize("rule", [0, 1, 2])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_threads_and_batch_do_not_change_a_bit(vocab: int, filters: str, rule: int, threads: None) -> None:
    torch.set_num_threads(1)
    sampled, verified = _sample(vocab, filters, torch.bfloat16), _verify(vocab, filters, torch.bfloat16, rule)
    for count in (2, 3):  # five requests one by one to threads; each alone, split over the threads
        torch.set_num_threads(count)
        _same(_sample(vocab, filters, torch.bfloat16), sampled)
        _same(_verify(vocab, filters, torch.bfloat16, rule), verified)
        for b in range(0, 5, 2):
            row = slice(b, b + 1)
            _same(_sample(vocab, filters, torch.bfloat16, row), tuple(r[row] for r in sampled))
            _same(_verify(vocab, filters, torch.bfloat16, rule, row), tuple(r[row] for r in verified))


@pytest.mark.parametrize("name", ISAS)
def test_top_p_near_1_keeps_what_weighs_anything(name: str, isa: None) -> None:
    _use(name)
    for vocab, top_p in ((4096, 0.999999), (32000, 0.9999985), (128256, 0.999999)):
        found = sample(
            torch.ones(1, vocab), sampling=Sampling.full(1, top_p=top_p), purpose="target",
            rng=RngKey(torch.zeros(1).long(), torch.zeros(1).long()), num_samples=1, backend="cpu",
        )  # fmt: skip
        assert found.threshold.item() == 1 and abs(found.logsumexp.item() - 1 - math.log(vocab)) < 1e-5
    generator = torch.Generator().manual_seed(11)
    rng = RngKey(*torch.arange(96).view(2, 48))
    for count, vocab in ((20, 2048), (40, 32000), (300, 32000)):
        logits = torch.randn(48, vocab, generator=generator)
        few = torch.rand(48, vocab, generator=generator).argsort(1) < count
        temperature = 0.1 + 3 * torch.rand(48, generator=generator)
        sampling = Sampling(temperature, top_p=torch.full((48,), 0.9999999))
        for rest in (-torch.inf, -1e4):
            rows = logits.where(few, rest)
            found = sample(rows, sampling=sampling, purpose="target", rng=rng, backend="cpu")
            p = (rows.double() / temperature[:, None]).softmax(1)
            kept = rows >= found.threshold[:, None]
            assert not (kept & ~few).any() and bool(((p * kept).sum(1) > 1 - 1e-6).all())


def test_threads_agree_whose_rows_are_that_two_requests_claim(threads: None) -> None:
    torch.set_num_threads(4)
    ids = torch.arange(160).where(torch.arange(160) < 40 * torch.arange(1, 5)[:, None], -1).int()
    edits = Edits(bias_ids=ids, bias=torch.arange(1.0, 5.0)[:, None].expand(4, 160).contiguous())
    cu, drafts = torch.tensor([0, 100, 0, 100, 2], dtype=torch.int32), torch.zeros(100, dtype=torch.int64)
    for _ in range(20):
        found = edit_rows(edits, drafts, vocab=200, cu_draft=cu, max_draft=100, backend="cpu")
        rows = found.apply(torch.zeros(104, 200))
        assert rows.max(1).values.tolist() == [1.0, 1.0, *[3.0] * 101, 4.0]
        assert (rows > 0).sum(1).tolist() == [40, 40, *[120] * 101, 160]
