"""Rows of logits shaped like a language model's, and drafts that are accepted at a stated rate. Everything is seeded.

Shape "llm". The logit of the id of rank r (0 the most likely) is

    -s log(r + 1) + N(0, 1) + [r = 0] Exp(mean 2),   s = exp(N(log 1.7, 0.3)), at least 1.1, one s a row,

less the row's mean: a Zipf tail, with an exponent and a lead of the first id that differ from row to row, as a model is
sure of some tokens and not of others. A draft row is the target row + N(0, 1) for each id. At vocabulary 128256:

                             T = 1              T = 0.8
    entropy, nats            2.0 to 2.3         1.0 to 1.3   mean; median 1.2 to 1.7 (T = 1)
    top-1 probability        0.6 to 0.7         0.7 to 0.8   mean
    nucleus of 0.95, ids     8 to 15 median     2 to 3       long upper tail: a tenth of the rows above 3500 at T = 1
    largest - mean logit     18 to 20
    overlap sum min(p, q)                       0.78         mean: 2.5 of 5 drafts accepted

Shape "flat": N(0, 0.01) an id, draft the same + N(0, 0.01): nothing to prune, nearly all accepted. Shape "peaked":
one id holds all of the mass but e^-20, the draft has the same id: everything accepted. Shapes that are hard on filters,
draft the same + N(0, 0.01): "normal", N(0, 1) an id; "equal", every logit 0; "capped", N(0, 3) with no logit above 6,
as a model that caps its logits has them: 2.3 % of the ids share the largest value.

Only POOL distinct pairs of rows are made for a vocabulary. A batch copies pairs drawn from the pool, each rolled by its
own offset along the vocabulary, so rows of a batch lie at distinct addresses with their peaks at distinct ids.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import RngKey, Sampling, random_words

POOL = 48
DRAFT_NOISE = 1.0
ACCEPTED = 0.5  # of the drafts of a request, on average, at temperature 0.8
TRIED_SEEDS = 64
SHAPES = ("llm", "flat", "peaked", "normal", "equal", "capped")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Filters(NamedTuple):
    """Sampling parameters of a case, the same for every request and for the draft."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def sampling(self, batch: int, device: str = "cpu") -> Sampling:
        """As the package takes them."""
        return _sampling(self, batch, device)

    @property
    def any(self) -> bool:
        """Whether more than the temperature is set."""
        return self[1:] != (None, None, None)


@functools.lru_cache(maxsize=64)
def _sampling(filters: Filters, batch: int, device: str) -> Sampling:
    return Sampling.full(batch, **filters._asdict(), device=device)  # made once: an engine keeps these tensors


class ChainInput(NamedTuple):
    """One call of verify_chain."""

    draft_ids: Tensor  # int64 [batch, draft]
    target: Tensor  # [batch, draft + 1, vocab]
    draft: Tensor  # [batch, draft, vocab]
    logsumexp: Tensor  # float32 [batch, draft], of the scaled kept draft logits
    threshold: Tensor  # float32 [batch, draft], smallest kept draft logit
    filters: Filters
    rng: RngKey
    num_accepted: Tensor  # int64 [batch], in float64 from the definition

    @property
    def sampling(self) -> Sampling:
        """As the package takes the filters."""
        return self.filters.sampling(len(self.target), str(self.target.device))


@functools.lru_cache(maxsize=2)
def pool(vocab: int, shape: str = "llm", seed: int = 0) -> tuple[Tensor, Tensor]:
    """(target, draft) float32 [POOL, vocab], row j of one belonging to row j of the other."""
    generator = torch.Generator().manual_seed(seed * 1000003 + vocab)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    if shape == "flat":
        target = normal(POOL, vocab) * 0.01
        return target, target + 0.01 * normal(POOL, vocab)
    if shape in ("normal", "equal", "capped"):
        spread = {"normal": 1.0, "equal": 0.0, "capped": 3.0}[shape]
        target = (normal(POOL, vocab) * spread).clamp(max=6.0)
        return target, target + 0.01 * normal(POOL, vocab)
    if shape == "peaked":
        target = normal(POOL, vocab)
        target[:, 0] = 20.0 + target[:, 1:].logsumexp(-1)
        return target, target + 0.01 * normal(POOL, vocab)
    if shape != "llm":
        raise ValueError(f"rows: shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    exponent = (math.log(1.7) + 0.3 * normal(POOL, 1)).exp().clamp(min=1.1)
    target = normal(POOL, vocab) - exponent * torch.log1p(torch.arange(vocab))
    target[:, 0] += 2.0 * torch.empty(POOL).exponential_(generator=generator)
    target -= target.mean(-1, keepdim=True)
    draft = target + DRAFT_NOISE * normal(POOL, vocab)
    order = torch.randperm(vocab, generator=generator)
    return target[:, order].contiguous(), draft[:, order].contiguous()


def rows(
    count: int, vocab: int, *, dtype: torch.dtype, shape: str = "llm", seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """`count` rolled pairs (target, draft) of the pool, [count, vocab] each, rolled on their device."""
    generator = torch.Generator().manual_seed(seed * 7919 + vocab)
    target, draft = (torch.empty(count, vocab, dtype=dtype, device=device) for _ in range(2))
    targets, drafts = (x.to(device) for x in pool(vocab, shape))
    for i in range(count):
        j, offset = torch.randint(0, vocab, (2,), generator=generator).tolist()
        j %= POOL
        for to, row in ((target, targets[j]), (draft, drafts[j])):
            to[i, offset:] = row[: vocab - offset]
            to[i, :offset] = row[vocab - offset :]
    return target, draft


def distribution(logits: Tensor, filters: Filters) -> tuple[Tensor, Tensor, Tensor]:
    """(probabilities, log-sum of the scaled kept logits, threshold) of rows [n, vocab], by sorting."""
    temperature, top_k, top_p, min_p = filters
    raw = logits.float()
    threshold = raw.new_full(raw.shape[:1], -torch.inf)
    if filters.any:
        ranked = raw.sort(descending=True).values
        if min_p:
            threshold = ranked[:, 0] + temperature * math.log(min_p)
        if top_k:
            threshold = threshold.maximum(ranked[:, min(top_k, raw.shape[1]) - 1])
        if top_p is not None:
            kept = ranked.where(ranked >= threshold[:, None], -torch.inf)
            mass = (kept.double() / temperature).softmax(-1).cumsum(-1)
            last = (mass < top_p).sum(-1, keepdim=True).clamp(max=raw.shape[1] - 1)
            threshold = threshold.maximum(ranked.gather(1, last)[:, 0])
    scaled = (raw / temperature).where(raw >= threshold[:, None], -torch.inf)
    return scaled.softmax(-1), scaled.logsumexp(-1), threshold


def chain(
    batch: int,
    draft: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    filters: Filters = Filters(),  # noqa: B008
    shape: str = "llm",
    seed: int = 0,
    accepted_so_far: float = 0.0,
    device: str = "cpu",
) -> ChainInput:
    """One batch: rows, ids drawn from the draft distribution, and a key under which half of the drafts are accepted.

    The distribution accepts 2.5 of 5 on average, one small batch may not: of TRIED_SEEDS noise seeds the one is kept
    whose total comes closest to ACCEPTED * batch * draft. `accepted_so_far`, the surplus of the batches before, lets a
    series of single requests (2, 3, 2, 3 accepted) meet the average too.
    """
    generator = torch.Generator(device).manual_seed(seed * 104729 + vocab)
    target, drafted = rows(batch * (draft + 1), vocab, dtype=dtype, shape=shape, seed=seed, device=device)
    target = target.view(batch, draft + 1, vocab)
    drafted = drafted.view(batch, draft + 1, vocab)[:, :draft].contiguous()
    ids = torch.empty(batch, draft, dtype=torch.int64, device=device)
    ratio = torch.empty(batch, draft, dtype=torch.float64, device=device)
    logsumexp, threshold = torch.empty(batch, draft, device=device), torch.empty(batch, draft, device=device)
    for b in range(batch):  # a request at a time: no probabilities of the whole batch in memory
        q, logsumexp[b], threshold[b] = distribution(drafted[b], filters)
        ids[b] = (q / torch.empty_like(q).exponential_(generator=generator)).argmax(-1)
        p = distribution(target[b, :draft], filters)[0]
        ratio[b] = p.gather(1, ids[b, :, None])[:, 0].double() / q.gather(1, ids[b, :, None])[:, 0].double()
    ratio = ratio.cpu()  # many noise seeds are tried on a few numbers
    wanted = ACCEPTED * batch * draft - accepted_so_far
    best: tuple[float, RngKey, Tensor] | None = None
    for attempt in range(TRIED_SEEDS if shape == "llm" else 1):
        first = (seed * TRIED_SEEDS + attempt) * batch
        noise_ = RngKey(torch.arange(first, first + batch), torch.arange(batch) * 17 + 100)
        accepted = (coins(noise_, draft) < ratio).cumprod(1).sum(1)
        miss = abs(float(accepted.sum()) - wanted)
        if best is None or miss < best[0]:
            best = miss, noise_, accepted
    assert best is not None
    rng = RngKey(best[1].seed.to(device), best[1].position.to(device))
    return ChainInput(ids, target, drafted, logsumexp, threshold, filters, rng, best[2].to(device))


def coins(rng: RngKey, draft: int) -> Tensor:
    """Acceptance coins float64 [batch, draft], by the package's public definition."""
    index = torch.zeros(1, dtype=torch.int64, device=rng.seed.device)
    words = [
        random_words(RngKey(rng.seed, rng.position + i, rng.step), purpose="coin", index=index)[:, 0]
        for i in range(draft)
    ]
    return (torch.stack(words, 1) >> 8).double() * 2.0**-24


def chains(count: int, batch: int, draft: int, vocab: int, **options: object) -> list[ChainInput]:
    """`count` batches whose acceptance is right as a whole; timing walks through them, so no row stays in a cache.

    Rows on which no noise seed comes within half a token of what is wanted (a first draft that is surely rejected, say)
    are drawn again, up to four times.
    """
    made: list[ChainInput] = []
    surplus = 0.0
    for i in range(count):
        best: tuple[float, ChainInput] | None = None
        for attempt in range(4 if options.get("shape", "llm") == "llm" else 1):
            seed = i + count * attempt
            x = chain(batch, draft, vocab, seed=seed, accepted_so_far=surplus, **options)  # type: ignore[arg-type]
            over = surplus + float(x.num_accepted.sum()) - ACCEPTED * batch * draft
            if best is None or abs(over) < abs(best[0]):
                best = over, x
            if abs(over) <= 0.5:
                break
        assert best is not None
        surplus = best[0]
        made.append(best[1])
    return made
