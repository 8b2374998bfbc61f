"""Over-acceptance: rejections and bias of the kernels beside Yin et al., Theorem 5, and which residual writes better.

p is the target and q the draft here. Decoding-OPT draws a rejected position from norm((p - q)+), Decoding-UNO from p.
Both accept x with min(1, (p + epsilon) / q) where p > 0; the kernels refuse what the target excludes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specdec_kernels import RejectedFrom, RngKey, sample, verify_chain

from .exact import Filters, Table, distribution_of, joint_distribution, processed, sampling_of
from .experiments import agreement, decode
from .family import Call
from .goodness import fit, normal_tail
from .models import load, next_tokens
from .procedures import Procedure, Step, Verdict

EPSILONS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
RESIDUALS = {"OPT": "residual", "UNO": "target"}
# Target and draft of the first table of docs/losslessness.md, section Over-acceptance.
EXAMPLE = {"p (.2 .3 .1 .4), q (.5 .3 .15 .05)": ((0.2, 0.3, 0.1, 0.4), (0.5, 0.3, 0.15, 0.05))}
CHUNK = 25_000
TIE = 1e-9  # log-likelihoods this close are equal


@dataclass(frozen=True)
class Over:
    """Over-acceptance as the `verify` of a method."""

    epsilon: float
    rejected_from: str

    def __call__(self, method: Procedure, step: Step) -> Verdict:
        """Verify a batch."""
        sampling = sampling_of(step.filters, len(step.token_ids))
        result = verify_chain(
            step.token_ids, step.target, step.draft, sampling=sampling,
            draft_sampling=sampling, rng=step.rng, over_acceptance=self.epsilon,
            rejected_from=cast(RejectedFrom, self.rejected_from),
        )  # fmt: skip
        return result.token_ids, result.num_accepted


@dataclass
class Point:
    """One point beside the front P(reject) + bias = TV(p, q).

    Attributes:
        rows: which.
        residual: "OPT" or "UNO".
        epsilon: over-acceptance.
        rejected: measured share of rejected drafts.
        rejected_theory: sum over p > 0 of (q - p - eps)+, and q where p = 0.
        bias: measured total variation to p, over the ids where theory has too much mass.
        bias_theory: of the exact output distribution.
        variation: TV(p, q).
        p_value: of the output, against its own exact distribution.
        rejected_p: of the share of rejected drafts, against theory.
        draws: how many.
    """

    rows: str
    residual: str
    epsilon: float
    rejected: float
    rejected_theory: float
    bias: float
    bias_theory: float
    variation: float
    p_value: float
    rejected_p: float
    draws: int


def example() -> dict[str, tuple[Tensor, Tensor]]:
    """Rows of `EXAMPLE` as logits."""
    return {name: (torch.tensor(p).log(), torch.tensor(q).log()) for name, (p, q) in EXAMPLE.items()}


def output_distribution(p: Tensor, q: Tensor, epsilon: float, residual: str) -> tuple[Tensor, float]:
    """(distribution of the token, P(reject))."""
    taken = torch.where(p > 0, torch.minimum(q, p + epsilon), 0.0)
    rejected = max(0.0, 1 - float(taken.sum()))
    left = (p - q).clamp(min=0)
    rest = left / left.sum() if residual == "OPT" and float(left.sum()) > 0 else p
    return taken + rejected * rest, rejected


def measure(name: str, target: Tensor, draft: Tensor, epsilon: float, residual: str, draws: int) -> Point:
    """One draft on rows ``[vocab]``, `draws` times."""
    target, draft = target.float(), draft.float()
    p, q = processed(target), processed(draft)
    distribution, rejected = output_distribution(p, q, epsilon, residual)
    counts, accepted = torch.zeros(len(p), dtype=torch.int64), 0
    for first in range(0, draws, CHUNK):
        n = min(CHUNK, draws - first)
        seed = torch.arange(first, first + n)
        rng = RngKey(seed, torch.zeros_like(seed), torch.zeros_like(seed))
        rows = draft.expand(n, -1)
        ids = sample(rows, sampling=sampling_of({}, n), rng=rng, purpose="draft").token_ids
        step = Step(ids, target.expand(n, 2, -1), rows[:, None], {}, rng)
        emitted, kept = Over(epsilon, RESIDUALS[residual])(Procedure("", "ratio", (1,)), step)
        counts += torch.bincount(emitted[:, 0], minlength=len(p))
        accepted += int(kept.sum())
    surplus = distribution > p
    bias = float(counts[surplus].sum()) / draws - float(p[surplus].sum())
    share = 1 - accepted / draws
    spread = math.sqrt(share * (1 - share) / draws)
    return Point(
        name, residual, epsilon, share, rejected, bias, float((distribution - p).abs().sum() / 2),
        float((p - q).abs().sum() / 2), fit(counts, distribution).chi_square,
        agreement(share, rejected, spread, draws), draws,
    )  # fmt: skip


def front(rows: dict[str, tuple[Tensor, Tensor]], draws: int) -> list[Call]:
    """The grid: both residuals, every epsilon, all rows."""
    return [
        Call(measure, (name, target, draft, epsilon, residual, draws))
        for name, (target, draft) in rows.items()
        for residual in RESIDUALS
        for epsilon in EPSILONS
    ]


@dataclass
class WinRate:
    """How often a text of OPT is likelier under the target than one of UNO with the same epsilon.

    Attributes:
        epsilon: of both.
        opt: share of pairs that OPT wins, a tie counted half.
        interval: half width of its 95 % interval, prompts as the unit.
        exact: what `opt` estimates on these prompts, by the distributions of both.
        p_value: of their difference.
        prompts: how many.
        pairs: of each prompt.
        length: tokens of a text.
        rejected_opt: drafts that OPT rejects, of those that a first step looks at.
        rejected_uno: likewise.
        bias_opt: total variation of OPT's texts to the target's, exact, mean over prompts.
        bias_uno: likewise.
    """

    epsilon: float
    opt: float
    interval: float
    exact: float
    p_value: float
    prompts: int
    pairs: int
    length: int
    rejected_opt: float
    rejected_uno: float
    bias_opt: float
    bias_uno: float


class Duel(NamedTuple):
    """OPT against UNO on one prompt.

    Attributes:
        won: share of pairs that OPT wins.
        error: its standard error.
        exact: its expectation.
        rejected: by OPT and by UNO.
        bias: of OPT and of UNO.
    """

    won: float
    error: float
    exact: float
    rejected: tuple[float, float]
    bias: tuple[float, float]


def duels_on_models(target: str, draft: str, prompt: list[int], number: int, pairs: int, length: int) -> list[Duel]:
    """One for each epsilon behind a prompt of models, in the folders that `models.load` takes."""
    table = next_tokens(load(target, draft), prompt, length)
    return duels(table, {"top_k": 4}, length=length, pairs=pairs, number=number)


def duels(table: Table, filters: Filters, *, length: int, pairs: int, number: int) -> list[Duel]:
    """One for each epsilon; rows are looked up, so that pairs share all prefixes. Seeds follow from the number."""
    keys, distribution = joint_distribution(table, length, filters)
    p, q = (processed(rows, **filters) for rows in (table.target, table.draft))  # type: ignore[arg-type]
    return [_duel(table, filters, keys, distribution, p, q, epsilon, length, pairs, number) for epsilon in EPSILONS[2:]]


def _duel(
    table: Table, filters: Filters, keys: Tensor, distribution: Tensor, p: Tensor, q: Tensor, epsilon: float,
    length: int, pairs: int, number: int,
) -> Duel:  # fmt: skip
    scores, rejected, distributions = [], [], []
    for place, (residual, source) in enumerate(RESIDUALS.items()):
        method = Procedure(residual, "ratio", (1,) * length, verify=Over(epsilon, source))
        tokens, first = decode(
            method, table, filters, texts=pairs, length=length, seed=(2 * number + place) * pairs
        )  # fmt: skip
        scores.append(likelihood(table, p, tokens))
        rejected.append(float((first < length).double().sum() / (first + (first < length)).double().sum()))
        rows = torch.stack([output_distribution(a, b, epsilon, residual)[0] for a, b in zip(p, q, strict=True)])
        distributions.append(distribution_of(keys, table, length, rows))
    ahead = scores[0] - scores[1]
    wins = (ahead > TIE).double() + 0.5 * (ahead.abs() <= TIE).double()
    bias = [float((mine - distribution).abs().sum() / 2) for mine in distributions]
    error = float(wins.std()) / math.sqrt(pairs)
    expected = _exact(distribution.log(), *distributions)
    return Duel(float(wins.mean()), error, expected, (rejected[0], rejected[1]), (bias[0], bias[1]))


def _exact(score: Tensor, opt: Tensor, uno: Tensor) -> float:
    """P(a text of OPT scores above one of UNO) + P(a tie) / 2."""
    levels, place = (score / TIE / 2).round().unique(return_inverse=True)
    mine, other = (
        torch.zeros(len(levels), dtype=torch.float64).index_add(0, place, distribution) for distribution in (opt, uno)
    )
    return float((mine * (other.cumsum(0) - other / 2)).sum())


def win_rates(found: Sequence[Sequence[Duel]], *, pairs: int, length: int) -> list[WinRate]:
    """The table of seed 003 from all prompts' duels."""
    rates = []
    for epsilon, column in zip(EPSILONS[2:], zip(*found, strict=True), strict=True):
        each = torch.tensor([duel.won for duel in column], dtype=torch.float64)
        spread = 1.96 * float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else math.nan
        exact = math.fsum(duel.exact for duel in column) / len(column)
        error = math.sqrt(math.fsum(duel.error**2 for duel in column)) / len(column)
        off = float(each.mean()) - exact
        p_value = normal_tail(off / error) if error > 0 else float(abs(off) < 1e-9)
        means = [math.fsum(x) / len(column) for x in zip(*((*d.rejected, *d.bias) for d in column), strict=True)]
        rates.append(WinRate(epsilon, float(each.mean()), spread, exact, p_value, len(column), pairs, length, *means))
    return rates


def likelihood(table: Table, p: Tensor, tokens: Tensor) -> Tensor:
    """Log-likelihood of texts ``[n, length]`` under distributions p of a table's contexts."""
    log_p = p.log()
    context, score = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros(len(tokens), dtype=torch.float64)
    for x in tokens.unbind(1):
        score, context = score + log_p[context, x], table.after[context, x]
    return score
