"""token_logprobs: against softmax and sort in float64, and what bad rows, ids and parameters give."""

from __future__ import annotations

import pytest
import torch
from cases import FILTERS, make_rng, mixed_sampling
from check import assert_same, of_the_reference
from edit_cases import make_edits
from torch import Tensor

from specdec_kernels import Sampling, TokenLogprobs, edit_rows, sample, token_logprobs, verify_chain
from specdec_kernels.ops.token_logprobs import op  # noqa: F401 - the backends of this file's tests

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One id; less than a block of 64; a block and one; two tiles of the CPU, the last not full.
SIZES = [1, 41, 65, 2300]


def brute(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, list[list[int]], list[list[float]]]:
    """Log-probabilities, ranks and lists of plain rows, one id at a time."""
    exact = logits.double().log_softmax(1)
    own = exact.gather(1, ids.long()[:, None])[:, 0]
    rank, best, values = [], [], []
    for row, logprob, token in zip(logits.float().tolist(), exact.tolist(), ids.tolist(), strict=True):
        rank.append(1 + sum(x > row[token] for x in row))
        order = sorted((v for v in range(len(row)) if row[v] > -INF), key=lambda v: (-row[v], v))[:top]
        best.append(order + [-1] * (top - len(order)))
        values.append([logprob[v] for v in order] + [-INF] * (top - len(order)))
    return own, torch.tensor(rank), best, values


def assert_plain(got: TokenLogprobs, logits: Tensor, ids: Tensor, top: int) -> None:
    own, rank, best, values = brute(logits.cpu(), ids.cpu(), top)
    torch.testing.assert_close(got.logprobs.cpu().double(), own, rtol=1e-5, atol=2e-5)
    assert got.ranks.tolist() == rank.tolist()
    assert got.top_ids.tolist() == best
    torch.testing.assert_close(
        got.top_logprobs.cpu().double(), torch.tensor(values).double().view(len(ids), top), rtol=1e-5, atol=2e-5
    )
    assert not got.status.any()


def compare(logits: Tensor, ids: Tensor, device: str, **keywords: object) -> TokenLogprobs:
    """Ids, ranks and status exactly as the reference's, log-probabilities within rounding."""
    ours = token_logprobs(logits.to(device), ids.to(device), **_on(keywords, device))
    theirs = of_the_reference(ours, lambda: token_logprobs(logits, ids, **keywords))  # type: ignore[arg-type]
    for name in ("ranks", "top_ids", "status"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name).cpu()), name
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(
            getattr(ours, name).cpu(), getattr(theirs, name).cpu(), rtol=1e-5, atol=2e-5, equal_nan=True
        )
    return ours


def _on(value, device: str):  # type: ignore[no-untyped-def]
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _on(v, device) for name, v in value.items()}
    return type(value)(*(_on(v, device) for v in value)) if hasattr(value, "_fields") else value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", SIZES)
def test_raw_rows_equal_softmax_and_sort(backend: str, device: str, vocab: int, dtype: torch.dtype) -> None:
    """Random, tied (few values), flat, and masked rows; more ids asked for than there are."""
    is_slow = backend == "triton" and device == "cpu"  # interpreted
    rows = 3 * torch.randn(5, vocab)
    rows[1] = torch.randint(0, 3, (vocab,)).float()
    rows[2] = -7.0
    rows[3, torch.rand(vocab) < 0.9] = -INF
    rows[3, vocab // 2] = 1.0
    rows[4, 1::2] = -0.0
    logits, ids = rows.to(dtype).to(device), torch.randint(0, vocab, (5,), device=device)
    for top in (20, 128) if is_slow else (0, 1, 20, 128):
        assert_plain(token_logprobs(logits, ids, top=top), logits, ids, top)


def test_ranks_of_every_id(backend: str, device: str) -> None:
    """From the largest logit to one below all others, of several tiles."""
    vocab, some = (300, 6) if backend in ("triton", "cuda_host") else (5000, 30)
    row = torch.randn(vocab).round(decimals=1)
    ids = torch.cat([torch.randint(0, vocab, (some,)), row.argmax()[None], row.argmin()[None]])
    logits = row.expand(len(ids), -1).contiguous()
    got = token_logprobs(logits.to(device), ids.to(device))
    assert got.ranks.tolist() == (1 + (logits > row[ids][:, None]).sum(1)).tolist()


def test_ties_are_listed_by_id_however_many(backend: str, device: str) -> None:
    """A row of one value over several tiles lists its first ids; one larger logit at its end comes before them."""
    logits = torch.full((2, 4500), 2.0, device=device)
    logits[1, -1] = 3.0
    got = token_logprobs(logits, torch.tensor([4499, 0], device=device), top=100)
    assert got.top_ids.tolist() == [list(range(100)), [4499, *range(99)]]
    assert got.ranks.tolist() == [1, 2]


def test_rows_of_more_blocks_than_are_looked_at_at_once(backend: str, device: str) -> None:
    """More than 4096 blocks of 64: sorted rows, whose best ids share blocks, random and tied ones."""
    vocab = 4096 * 64 + 2 * 4096 + 5
    rows = torch.randn(4, vocab)
    rows[1] = torch.arange(vocab) / 1024
    rows[2] = rows[1].flip(0)
    rows[3] = (rows[3] > 3).float()
    logits = rows.to(torch.bfloat16)
    ids = torch.tensor([int(rows[0].argmin()), vocab - 700, 900, vocab - 1])
    compare(logits, ids, device, top=128)


def test_strided_rows_and_both_id_types(backend: str, device: str) -> None:
    whole = torch.randn(4, 3, 130, device=device)
    logits, ids = whole[:, 1, :97], torch.tensor([0, 96, 5, 40], device=device)
    for dtype in (torch.int32, torch.int64):
        got = token_logprobs(logits, ids.to(dtype), top=3)
        assert got.top_ids.dtype == dtype
        assert_plain(got, logits, ids, 3)


@pytest.mark.parametrize("filters", FILTERS)
def test_processed_rows_equal_the_reference(backend: str, device: str, filters: str) -> None:
    """Edits, mask and filters at once; every third row is greedy."""
    vocab, rows = 333, 4
    logits = 3 * torch.randn(rows, vocab)
    words = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32)).int()
    words[:, 0] |= 1
    edits = edit_rows(make_edits(rows, vocab, seed=3), None, vocab=vocab, backend="reference")
    best = logits.argmax(1)
    keywords = {"sampling": mixed_sampling(rows, FILTERS[filters], 3), "logprobs": "processed", "top": 12}
    for more in ({}, {"allowed": words}, {"edits": edits}, {"allowed": words, "edits": edits}):
        for ids in (best, torch.randint(0, vocab, (rows,))):
            compare(logits, ids, device, **keywords, **more)


def test_processed_logprobs_are_those_of_sample(backend: str, device: str) -> None:
    """Of the ids that it draws, in the same rows."""
    logits = 2 * torch.randn(6, 200, device=device)
    sampling = _on(mixed_sampling(6, FILTERS["all"]), device)
    drawn = sample(logits, sampling=sampling, rng=_on(make_rng(6), device), purpose="target", backend="reference")
    got = token_logprobs(logits, drawn.token_ids[:, 0], sampling=sampling, logprobs="processed")
    torch.testing.assert_close(got.logprobs, drawn.logprobs[:, 0], rtol=1e-5, atol=2e-5)
    assert bool((got.ranks >= 1).all())


def test_a_removed_token_ranks_behind_all_that_is_kept(backend: str, device: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 3, device=device)
    sampling = Sampling(torch.tensor([1.0, 0.0, 1.0], device=device), torch.tensor([2, 0, 0], device=device).int())
    got = token_logprobs(
        logits, torch.tensor([0, 2, 0], device=device), sampling=sampling, logprobs="processed", top=3,
        allowed=torch.tensor([[15], [15], [6]], device=device).int(),
    )  # fmt: skip
    assert got.logprobs.tolist() == [-INF] * 3
    assert got.ranks.tolist() == [3, 2, 3]
    assert got.top_ids.tolist() == [[1, 2, -1], [1, -1, -1], [1, 2, -1]]
    assert got.top_logprobs[:, 2].tolist() == [-INF] * 3
    assert got.top_logprobs[1, 0] == 0


def test_bad_rows_ids_and_parameters_set_bits_and_touch_no_neighbour(backend: str, device: str) -> None:
    logits = torch.randn(7, 150)
    logits[0, 140], logits[1], logits[2, 3] = NAN, -INF, INF
    ids = torch.tensor([4, 4, 4, -1, 150, -2, 7])
    temperature = torch.ones(7)
    temperature[6] = -1
    got = compare(logits, ids, device, top=2, sampling=Sampling(temperature=temperature), logprobs="processed")
    assert got.status.tolist() == [1, 1, 1, 0, 4, 4, 64]
    assert got.logprobs[:3].isnan().all() and got.top_ids[:3].tolist() == [[-1, -1]] * 3
    assert got.logprobs[3:6].tolist() == [0, 0, 0] and got.ranks[:6].tolist() == [0] * 6
    assert bool((got.top_ids[3:6] >= 0).all()), "the list of a row does not need a token"
    assert got.top_ids[6].tolist() == [int(logits[6].argmax()), -1], "a bad temperature is greedy"


def test_rows_that_are_not_active_are_not_read(backend: str, device: str) -> None:
    logits = torch.randn(3, 70)
    logits[1] = NAN
    sampling = Sampling(active=torch.tensor([True, False, True]))
    for mode in ("raw", "processed"):
        got = compare(logits, torch.tensor([3, 99, 5]), device, top=2, sampling=sampling, logprobs=mode)
        assert got.status.tolist() == [0, 0, 0]
        assert (got.logprobs[1], got.ranks[1], got.top_ids[1].tolist()) == (0, 0, [-1, -1])
        assert got.top_logprobs[1].tolist() == [0, 0]


def test_no_rows_and_results_given(backend: str, device: str) -> None:
    got = token_logprobs(torch.randn(0, 9, device=device), torch.zeros(0, dtype=torch.int32, device=device), top=4)
    assert [tuple(part.shape) for part in got] == [(0,), (0,), (0, 4), (0, 4), (0,)]
    logits, ids = torch.randn(3, 80, device=device), torch.tensor([1, 2, 3], device=device)
    want = token_logprobs(logits, ids, top=4)
    out = TokenLogprobs(*(torch.full_like(part, 77) for part in want))
    token_logprobs(logits, ids, top=4, out=out)
    assert_same(out, want, TokenLogprobs._fields)


def test_tokens_of_a_chain(backend: str, device: str) -> None:
    """Flat target rows and the emitted tokens: those behind the last one are -1 and have no log-probability."""
    batch, draft, vocab = 3, 4, 90
    target, drafts = torch.randn(batch, draft + 1, vocab), torch.randint(0, vocab, (batch, draft))
    chain = verify_chain(
        drafts, target, sampling=Sampling.full(batch, temperature=0.7), rng=make_rng(batch), rule="match",
        logprobs="raw", backend="reference",
    )  # fmt: skip
    assert chain.logprobs is not None
    got = token_logprobs(target.flatten(0, 1).to(device), chain.token_ids.flatten().to(device), top=1)
    torch.testing.assert_close(got.logprobs.cpu(), chain.logprobs.flatten(), rtol=1e-5, atol=2e-5)


def test_results_do_not_depend_on_the_number_of_threads(threads: None) -> None:
    """One row is split over threads, many are not."""
    logits, ids = torch.randn(1, 40000), torch.tensor([11])
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(token_logprobs(logits, ids, top=50, backend="cpu"))
    assert_same(*results, TokenLogprobs._fields)


def test_wrong_arguments_are_refused(backend: str, device: str) -> None:
    logits, ids = torch.randn(2, 40, device=device), torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match=r"top must be an int in \[0, 128\], got 129"):
        token_logprobs(logits, ids, top=129)
    with pytest.raises(ValueError, match=r"token_ids must be \[2\]"):
        token_logprobs(logits, ids[:1])
    with pytest.raises(ValueError, match="allowed must be None with logprobs="):
        token_logprobs(logits, ids, allowed=torch.zeros(2, 2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="logprobs must be one of 'processed', 'raw'"):
        token_logprobs(logits, ids, logprobs="none")  # type: ignore[arg-type]
