"""Every random number of the package, in plain PyTorch: the definition that all backends match bit for bit.

A number is named, never consumed: Philox4x32-10 maps (seed, position, step, purpose, lane, index) to one
32-bit word. Nothing is stored, so the same request draws the same numbers in any batch, slot, graph or backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._check import Checker
from ._codes import COIN_PURPOSE, PURPOSES, TARGET_PURPOSE, Purpose
from ._types import RngKey

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

# log(1 + f) = f - f^2 / 2 + f^3 P(f) on [sqrt(1/2) - 1, sqrt(2) - 1]; P fitted by minimax, 8e-10 relative.
_LOG_POLYNOMIAL = (
    0.3333331346511841,
    -0.25000008940696716,
    0.2000211924314499,
    -0.1666799634695053,
    0.14219552278518677,
    -0.1240558922290802,
    0.11888162046670914,
    -0.11675652116537094,
    0.06746640801429749,
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011) on int64 tensors that hold unsigned 32-bit words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # int64 products wrap modulo 2^64; the two halves are still the right bits.
        wide0, wide1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (wide0 >> 32) & _LOW, (wide1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, wide1 & _LOW, high0 ^ c3 ^ k1, wide0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _blocks(rng: RngKey, purpose: int, lane: Tensor | None, block: Tensor) -> Tensor:
    """Philox blocks [batch, n, 4] of block [n] or [batch, n]; lane is int64 [batch]."""
    seed, position, step = rng
    zero = torch.zeros_like(seed)
    step = zero if step is None or purpose == TARGET_PURPOSE else step  # plain decoding knows no steps
    lane = zero if lane is None else lane
    key = ((seed & _LOW)[:, None], ((seed >> 32) & _LOW)[:, None])
    tag = (purpose + 4 * lane) & _LOW
    counter = (block.expand(len(seed), -1), (position & _LOW)[:, None], (step & _LOW)[:, None], tag[:, None])
    return torch.stack(torch.broadcast_tensors(*philox(key, counter)), dim=-1)


def words(rng: RngKey, purpose: int, lane: Tensor | None, index: Tensor) -> Tensor:
    """Words [batch, n] (int64, 0 .. 2^32 - 1) of arbitrary indices [n] or [batch, n]."""
    blocks = _blocks(rng, purpose, lane, index >> 2)
    return blocks.gather(-1, (index & 3).expand(len(rng.seed), -1)[..., None]).squeeze(-1)


def random_words(rng: RngKey, *, purpose: Purpose, index: Tensor, lane: int = 0) -> Tensor:
    """The random words that the ops use, to reproduce or audit an acceptance; `race_noise` gives those of a draw.

    Args:
        rng: seed, position and step of each request, int64 ``[batch]``. Draft token i uses ``position + i``.
        purpose: ``"target"``, ``"coin"``, ``"residual"`` or ``"draft"``.
        index: int64 ``[n]``: 0 for the coin of a chain.
        lane: 0 but for drafts of a tree.

    Returns:
        int64 ``[batch, n]`` with values in ``[0, 2^32)``.

    Example:
        >>> import torch
        >>> from specdec_kernels import RngKey, random_words
        >>> rng = RngKey(seed=torch.tensor([7]), position=torch.tensor([0]))
        >>> random_words(rng, purpose="coin", index=torch.zeros(1, dtype=torch.int64)).shape
        torch.Size([1, 1])
    """
    code, lanes = _checked("random_words", rng, purpose, "index", index, lane)
    return words(rng, code, lanes, index.to(torch.int64))


def race_noise(rng: RngKey, ids: Tensor, *, purpose: Purpose = "target", lane: int = 0) -> Tensor:
    """The noise of a draw, to reproduce or audit it: independent Exp(1) numbers E, one for each target token id.

    The id with the largest ``log p(id) - log E(id)`` is drawn, the lowest of those that are equal.

    Args:
        rng: seed, position and step of each request, int64 ``[batch]``. Draft token i uses ``position + i``.
        ids: int64 ``[n]``: target token ids.
        purpose: ``"target"`` for plain draws and rule ``match``, ``"residual"``, or ``"draft"``.
        lane: 0 but for drafts of a tree.

    Returns:
        float32 ``[batch, n]``.

    Example:
        >>> import torch
        >>> from specdec_kernels import RngKey, Sampling, race_noise, sample
        >>> rng, logits = RngKey(seed=torch.tensor([7]), position=torch.tensor([0])), torch.randn(1, 100)
        >>> drawn = (logits - race_noise(rng, torch.arange(100)).log()).argmax(1)
        >>> sample(logits, sampling=Sampling(), rng=rng, purpose="target").token_ids[:, 0] == drawn
        tensor([True])
    """
    code, lanes = _checked("race_noise", rng, purpose, "ids", ids, lane)
    return noise_of(rng, code, lanes, ids.to(torch.int64))


def _checked(op: str, rng: RngKey, purpose: str, name: str, value: Tensor, lane: int) -> tuple[int, Tensor]:
    """The code of a purpose, and the lane of each request."""
    if not isinstance(rng, RngKey):
        raise ValueError(f"{op}: rng must be an RngKey(seed, position, step=None), got {type(rng).__name__}")
    check = Checker.of(op, "rng.seed", rng.seed, "of int64")
    for field, part in zip(rng._fields, rng, strict=True):
        if part is not None or field != "step":
            check.tensor(f"rng.{field}", part, (torch.int64,), (rng.seed.numel(),))
    if not isinstance(purpose, str) or purpose not in PURPOSES:
        raise ValueError(f"{op}: purpose must be one of {sorted(PURPOSES)}, got {purpose!r}")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        got = value.dtype if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{op}: {name} must be a tensor of int32 or int64, got {got}")
    if not isinstance(lane, int) or not 0 <= lane < 2**30:
        raise ValueError(f"{op}: lane must be an int in [0, 2^30), got {lane!r}")
    return PURPOSES[purpose], torch.full_like(rng.seed, lane)


def coin(rng: RngKey, index: Tensor | None = None) -> Tensor:
    """Acceptance coin of each request: a float32 multiple of 2^-24 in [0, 1); index [batch] is 0 in a chain."""
    index = torch.zeros_like(rng.seed) if index is None else index
    word = words(rng, COIN_PURPOSE, None, index[:, None])
    return (word[:, 0] >> 8).float() * 2.0**-24


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e, m) with x = m 2^e and m in [sqrt(1/2), sqrt(2)); x positive and normal."""
    bits = x.view(torch.int32) + (0x3F800000 - _SQRT_HALF_BITS)
    exponent = (bits >> 23) - 127
    return exponent, ((bits & 0x007FFFFF) + _SQRT_HALF_BITS).view(torch.float32)


def _log_core(f: Tensor, exponent: Tensor) -> Tensor:
    """log(1 + f) + exponent log 2, each operation rounded to float32 in this order: no fused multiply-add."""
    e = exponent.float()
    p = torch.full_like(f, _LOG_POLYNOMIAL[-1])
    for coefficient in _LOG_POLYNOMIAL[-2::-1]:
        p = p * f + coefficient
    z = f * f
    r = f * z * p
    r = r + e * _LN2_LOW
    r = r - z * 0.5
    r = r + f
    return r + e * _LN2_HIGH


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float32, the same bits in every backend."""
    exponent, mantissa = _split(x)
    return _log_core(mantissa - 1.0, exponent)


def exponential(word: Tensor) -> Tensor:
    """E = -log1p(-x), x = (word + 1/2) 2^-32: an Exp(1) number, finest where a race is won (near 0)."""
    x = ((word.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    exponent, mantissa = _split(1.0 - x)
    # Where 1 - x lies next to 1 its rounding would eat x; there -x itself is the argument.
    f = torch.where(exponent == 0, -x, mantissa - 1.0)
    return -_log_core(f, exponent)


# The noise of a race, made block by block. Of n iid Exp(1) numbers the smallest is Exp(1) / n, its place is uniform and
# independent of it, and what the others exceed it by is iid Exp(1) again: exponentials have no memory. So a block of 64
# ids has a minimum m, a place for it, and m plus a fresh number at every other id. Nothing in a block can beat its
# largest log-weight - log m, so a block that is beaten already needs none of its other numbers.
BLOCK = 64
MINIMA, PLACES = 2**31, 3 * 2**30  # a block's words have its index behind these; token ids lie below


def block_minima(rng: RngKey, purpose: int, lane: Tensor | None, block: Tensor) -> tuple[Tensor, Tensor]:
    """(smallest number, its place) of blocks [n] or [batch, n]: float32 and int64 [batch, n]."""
    least = exponential(words(rng, purpose, lane, MINIMA + block)) / BLOCK
    return least, words(rng, purpose, lane, PLACES + block) % BLOCK


def noise_of(rng: RngKey, purpose: int, lane: Tensor | None, ids: Tensor) -> Tensor:
    """Exp(1) numbers [batch, n] of arbitrary target ids [n] or [batch, n]."""
    least, place = block_minima(rng, purpose, lane, ids // BLOCK)
    rest = exponential(words(rng, purpose, lane, ids))
    return torch.where(place == ids % BLOCK, least, least + rest)


def vocab_noise(rng: RngKey, purpose: int, lane: Tensor | None, vocab: int, first: int = 0) -> Tensor:
    """Exp(1) numbers [batch, vocab] of `vocab` target ids from `first`, each Philox block evaluated once."""
    begin, end = first // BLOCK, (first + vocab + BLOCK - 1) // BLOCK
    device = rng.seed.device
    least, place = block_minima(rng, purpose, lane, torch.arange(begin, end, device=device))
    quad = torch.arange(begin * BLOCK // 4, end * BLOCK // 4, device=device)
    rest = exponential(_blocks(rng, purpose, lane, quad).flatten(1)).unflatten(1, (end - begin, BLOCK))
    is_least = torch.arange(BLOCK, device=device) == place[..., None]
    noise = torch.where(is_least, least[..., None], least[..., None] + rest).flatten(1)
    return noise[:, first - begin * BLOCK :][:, :vocab]
