"""Random numbers: Philox against the published vectors, and the same bits in every backend."""

from __future__ import annotations

import pytest
import torch
from check import assert_distribution

from specdec_kernels import RngKey, Sampling, random_words, sample
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


@pytest.mark.parametrize("purpose", ["target", "residual", "draft"])
@pytest.mark.parametrize("vocab", [1, 3, 64, 301])
def test_every_backend_races_with_these_words(backend: str, device: str, purpose: str, vocab: int) -> None:
    """On a flat row the order of the race is the order of the words: 64 winners in order are 64 words compared."""
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
        word = random_words(own, purpose=purpose, index=torch.arange(vocab), lane=int(lane[b]))[0]
        order = definition.exponential(word).sort(stable=True).indices
        assert found.token_ids[b].tolist() == order[:count].tolist()
