"""Yin et al., Algorithm 4, run by `batch_sd`: observed rejections beside Theorems 1 and 3."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels import RngKey, Sampling, batch_sd, sample

from ..theory import Markov, batch_rejections
from .exact import Table
from .family import Call
from .goodness import normal_tail

STATES, HORIZON = 7, 50  # the paper's simulation


def random_chain(seed: int = 0) -> tuple[Markov, Markov]:
    """Target and draft: non-stationary chains whose rows are uniform on the simplex."""
    g = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        exponential = -torch.rand(*shape, STATES, generator=g, dtype=torch.float64).log()
        return exponential / exponential.sum(-1, keepdim=True)

    target, draft = (Markov(rows(), rows(HORIZON - 1, STATES)) for _ in range(2))
    return target, draft


def as_table(target: Markov, draft: Markov) -> Table:
    """Context 0 is the start, context 1 + (n - 2) vocab + x is token n after x."""
    vocab, horizon = len(target.start), len(target.steps) + 1
    logits = [torch.cat([m.start[None], m.steps.flatten(0, 1)]).log().float() for m in (target, draft)]
    first = torch.arange(len(logits[0])).sub(1).div(vocab, rounding_mode="floor").add(1)
    first[0] = 0  # tokens that a context has behind its first
    after = 1 + first[:, None] * vocab + torch.arange(vocab)
    return Table(logits[0], logits[1], torch.where(first[:, None] < horizon - 1, after, 0))


def observe(table: Table, horizon: int, branches: int, texts: int, seed: int = 0) -> Tensor:
    """Rejections of each text, ``[texts]``: M drafts of all that is left are verified, again after each rejection."""
    seeds = torch.arange(texts) + seed
    done, context = (torch.zeros(texts, dtype=torch.int64) for _ in range(2))
    rejected = torch.zeros(texts, dtype=torch.int64)
    lane = torch.arange(branches).repeat(texts)
    step = 0
    while bool((done < horizon).any()):
        longest = horizon - int(done.min())
        at, ids, contexts = context.repeat_interleave(branches), [], []
        for i in range(longest):
            position = (done + i).repeat_interleave(branches)
            rng = RngKey(seeds.repeat_interleave(branches), position, torch.full_like(position, step))
            drawn = sample(table.draft[at], sampling=Sampling(), rng=rng, purpose="draft", lane=lane).token_ids[:, 0]
            at = table.after[at, drawn]
            ids.append(torch.where(position < horizon, drawn, -1))
            contexts.append(at)
        nodes = torch.cat([context[:, None], torch.stack(contexts, 1).view(texts, -1)], 1)
        result = batch_sd(
            torch.stack(ids, 1).view(texts, branches, longest), table.target[nodes], table.draft[nodes],
            sampling=Sampling(), draft_sampling=Sampling(), rng=RngKey(seeds, done, torch.full_like(done, step)),
        )  # fmt: skip
        kept = result.num_accepted.long()
        rejected += (done < horizon) & (kept < horizon - done)
        for i, x in enumerate(result.token_ids.unbind(1)):
            context = torch.where(i <= kept, table.after[context, x.clamp(min=0)], context)
        done = (done + kept + 1).clamp(max=horizon)
        step += 1
    return rejected


@dataclass
class Simulation:
    """Observed rejections beside theory.

    Attributes:
        drafts: M.
        mean: observed.
        spread: standard error of the mean.
        theory: Theorem 3 (M = 1: Theorem 1).
        p_value: of their difference.
        texts: how many.
    """

    drafts: int
    mean: float
    spread: float
    theory: float
    p_value: float
    texts: int


def simulate(branches: int, texts: int) -> Simulation:
    """Texts of Algorithm 4 with M drafts."""
    target, draft = random_chain()
    seen = observe(as_table(target, draft), HORIZON, branches, texts, seed=branches * texts).double()
    expected = batch_rejections(target, draft, branches)
    mean, spread = float(seen.mean()), float(seen.std()) / math.sqrt(texts)
    return Simulation(branches, mean, spread, expected, normal_tail((mean - expected) / spread), texts)


def simulations(texts: int) -> list[Call]:
    """Theorem 1 (M = 1) and Theorem 3 (M = 2, 4, 5)."""
    return [Call(simulate, (branches, texts)) for branches in (5, 4, 2, 1)]


def scaling() -> dict[str, list[float]]:
    """E[rejections] over M, with its limit."""
    target, draft = random_chain()
    several = [1, 2, 3, 4, 5, 8, 16, 32, 64, 128]
    return {
        "drafts": [float(m) for m in several],
        "rejections": [batch_rejections(target, draft, m) for m in several],
        "limit": [batch_rejections(target, draft, math.inf)],
    }
