"""Random numbers: Philox against the published vectors, and the same bits in every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import assert_distribution
from torch import Tensor

from specdec_kernels import RngKey, Sampling, race_noise, random_words, sample
from specdec_kernels import _random as definition

# Random123 (Salmon et al., SC 2011), file kat_vectors, philox4x32 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    words = definition.philox(
        tuple(torch.tensor([k]) for k in key),  # type: ignore[arg-type]
        tuple(torch.tensor([c]) for c in counter),  # type: ignore[arg-type]
    )
    assert tuple(int(w) for w in words) == result


def test_public_words_are_philox_of_the_documented_counter() -> None:
    counter, key, result = KNOWN[1]
    seed = key[0] | (key[1] << 32)
    seed = seed - 2**64 if seed >= 2**63 else seed
    purpose, lane = counter[3] & 3, counter[3] >> 2
    name = ("target", "coin", "residual", "draft")[purpose]
    rng = RngKey(*(torch.tensor([v]) for v in (seed, counter[1] + 5 * 2**32, counter[2])))
    index = 4 * counter[0] + torch.arange(4)
    assert random_words(rng, purpose=name, index=index, lane=lane)[0].tolist() == list(result)
    assert torch.equal(
        random_words(rng, purpose=name, index=index), random_words(rng, purpose=name, index=index, lane=0)
    )


def test_target_words_do_not_depend_on_the_step() -> None:
    rng = [RngKey(*(torch.tensor([v]) for v in (9, 4, step))) for step in (0, 3)]
    index = torch.arange(8)
    first, second = (random_words(n, purpose="target", index=index) for n in rng)
    assert torch.equal(first, second)
    first, second = (random_words(n, purpose="draft", index=index) for n in rng)
    assert not torch.equal(first, second)


def test_exponential_is_exact_where_races_are_won() -> None:
    word = torch.cat([torch.arange(4096), torch.randint(0, 2**31, (100_000,))])
    exact = -torch.log1p(-((word.double() + 0.5) * 2.0**-32))
    found = definition.exponential(word).double()
    assert float(((found - exact) / exact).abs().max()) < 4e-7


def test_exponential_is_finite_and_positive_at_both_ends() -> None:
    ends = definition.exponential(torch.tensor([0, 2**32 - 1]))
    assert ends.tolist() == pytest.approx([2.0**-33, 24 * 0.6931471805599453], rel=1e-6)


def test_log_is_within_two_ulp() -> None:
    x = torch.cat([torch.rand(100_000), 2.0 ** (250 * torch.rand(100_000) - 125)]).clamp(min=2.0**-126)
    exact = x.double().log()
    error = (definition.log(x).double() - exact).abs() / exact.abs().clamp(min=2.0**-20)
    assert float(error.max()) < 2.5e-7


def test_words_are_uniform() -> None:
    rng = RngKey(torch.arange(64), torch.arange(64) * 3)
    word = random_words(rng, purpose="draft", index=torch.arange(4096))
    counts = torch.bincount((word >> 24).flatten(), minlength=256)
    assert_distribution(counts, torch.full((256,), 1 / 256), "top byte of the words")


def keys(count: int, first: int = 0) -> RngKey:
    """Many streams."""
    return RngKey(torch.arange(first, first + count), torch.arange(count) * 5, torch.arange(count) % 3)


def distance(sample: Tensor) -> float:
    """sqrt(n) D of Kolmogorov and Smirnov against Exp(1); 1.95 is passed once in 1000 times."""
    cdf = -torch.expm1(-sample.double().flatten().sort().values)
    n = len(cdf)
    step = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum(cdf - step[:-1], step[1:] - cdf).max()) * n**0.5


def test_noise_is_made_of_the_documented_words() -> None:
    """Block by block, from `random_words` and float64 logarithms."""
    rng, vocab = keys(7), 301
    ids = torch.arange(vocab)

    def exponential(index: Tensor) -> Tensor:
        words = random_words(rng, purpose="residual", index=index, lane=9).double()
        return -torch.log1p(-((words + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24))

    block = ids // 64
    least = exponential(2**31 + block) / 64
    place = random_words(rng, purpose="residual", index=3 * 2**30 + block, lane=9) & 63
    want = torch.where(place == ids % 64, least, least + exponential(ids))
    found = race_noise(rng, ids, purpose="residual", lane=9)
    # 1 - x is rounded to a multiple of 2^-24 before its logarithm is taken.
    assert bool(((found - want).abs() <= 1e-6 * want + 2.0**-24 * want.exp()).all())
    shuffled = torch.randperm(vocab)
    assert torch.equal(race_noise(rng, shuffled, purpose="residual", lane=9), found[:, shuffled])


@pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65, 1000, 4096])
def test_noise_is_exponential(vocab: int) -> None:
    """In vocabularies below a block, with a partial last block, and of whole blocks."""
    noise = race_noise(keys(400_000 // vocab), torch.arange(vocab))
    assert bool((noise > 0).all()) and bool(noise.isfinite().all())
    assert distance(noise) < 1.95
    assert distance(noise[:, -1]) < 1.95  # one number a row: no two of them share a block
    assert distance(noise.amin(1) * vocab) < 1.95  # what wins on a flat row


def test_noise_of_two_ids_is_independent() -> None:
    """Inside a block and across blocks: 10 x 10 cells of equal probability."""
    noise = race_noise(keys(200_000), torch.tensor([64, 70, 127, 128, 400]))
    cell = (-torch.expm1(-noise.double()) * 10).long().clamp(max=9)
    for i, j in ((0, 1), (0, 2), (1, 2), (2, 3), (0, 4)):
        counts = torch.bincount(cell[:, i] * 10 + cell[:, j], minlength=100)
        assert_distribution(counts, torch.full((100,), 0.01), f"pair {i} {j}")


def test_the_smallest_of_a_block_is_anywhere_and_the_rest_exceeds_it_by_fresh_numbers() -> None:
    noise = race_noise(keys(20_000), torch.arange(64, 128))
    least = noise.min(1)
    assert_distribution(torch.bincount(least.indices, minlength=64), torch.full((64,), 1 / 64), "place")
    assert distance(least.values * 64) < 1.95
    rest = (noise - least.values[:, None])[torch.arange(64) != least.indices[:, None]]
    assert distance(rest) < 1.95


def test_small_vocabularies_hold_the_first_numbers_of_large_ones() -> None:
    rng = keys(3)
    wide = definition.vocab_noise(rng, 3, None, 1000)
    assert torch.equal(definition.vocab_noise(rng, 3, None, 130), wide[:, :130])
    assert torch.equal(definition.vocab_noise(rng, 3, None, 200, first=77), wide[:, 77:277])


@pytest.mark.parametrize("purpose", ["target", "residual", "draft"])
@pytest.mark.parametrize("vocab", [1, 3, 64, 301])
def test_every_backend_races_with_this_noise(backend: str, device: str, purpose: str, vocab: int) -> None:
    """On a flat row the order of the race is that of the noise: 64 winners in order are 64 numbers compared."""
    batch = 5
    rng = RngKey(
        torch.tensor([0, 1, -1, 2**40 + 7, -(2**63)]), torch.tensor([0, 2**31, 2**32 + 1, 5, 6]), torch.arange(5)
    )
    lane = torch.tensor([0, 1, 2, 77, 2**20])
    count = min(vocab, 64)
    found = sample(
        torch.zeros(batch, vocab, device=device),
        sampling=Sampling(),
        rng=RngKey(*(n.to(device) for n in rng)),
        purpose=purpose,
        num_samples=count,
        lane=lane.to(device),
    )
    for b in range(batch):
        own = RngKey(*(n[b : b + 1] for n in rng))
        noise = race_noise(own, torch.arange(vocab), purpose=purpose, lane=int(lane[b]))[0]
        order = noise.sort(stable=True).indices
        assert found.token_ids[b].tolist() == order[:count].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rng": 5}, r"rng must be an RngKey\(seed, position, step=None\), got int"),
        ({"rng": RngKey(1, 2, 3)}, "rng.seed must be a tensor of int64, got int"),  # type: ignore[arg-type]
        ({"rng": keys(2)._replace(position=None)}, "rng.position must be a tensor of int64, got NoneType"),
        ({"rng": keys(2)._replace(step=torch.zeros(2))}, "rng.step must be int64, got float32"),
        ({"rng": keys(2)._replace(step=torch.zeros(3).long())}, r"rng.step must be \[2\], got \[3\]"),
        ({"purpose": "coins"}, r"purpose must be one of \['coin', 'draft', 'residual', 'target'\], got 'coins'"),
        ({"ids": 5}, "ids must be a tensor of int32 or int64, got 5"),
        ({"ids": torch.tensor([1.5])}, "ids must be a tensor of int32 or int64, got torch.float32"),
        ({"lane": -1}, r"lane must be an int in \[0, 2\^30\), got -1"),
    ],
)
def test_wrong_arguments_say_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="race_noise: " + message):
        race_noise(**{"rng": keys(2), "ids": torch.arange(3), **change})
    if "rng" in change or "ids" in change:
        with pytest.raises(ValueError, match="random_words: " + message.replace("ids", "index")):
            random_words(change.get("rng", keys(2)), purpose="coin", index=change.get("ids", torch.arange(3)))
