"""Over-acceptance: rejections and bias of the kernels beside Yin et al., Theorem 5, and which residual writes better.

p is the target and q the draft here. Decoding-OPT draws a rejected position from norm((p - q)+), Decoding-UNO from p.
Both accept x with min(1, (p + epsilon) / q) where p > 0; the kernels refuse what the target excludes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Noise, sample, verify_chain

from .experiments import decode
from .goodness import fit
from .laws import Filters, Table, processed, sampling_of
from .methods import Method, Step, Verdict

EPSILONS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
RESIDUALS = {"OPT": "residual", "UNO": "target"}
CHUNK = 25_000


@dataclass(frozen=True)
class Over:
    """Over-acceptance as the `verify` of a method."""

    epsilon: float
    rejected_from: str

    def __call__(self, method: Method, step: Step) -> Verdict:
        """Verify a batch."""
        sampling = sampling_of(step.filters, len(step.token_ids))
        result = verify_chain(
            step.token_ids, step.target, step.draft, sampling=sampling,
            draft_sampling=sampling, noise=step.noise, over_acceptance=self.epsilon,
            rejected_from=self.rejected_from,
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
        bias_theory: of the exact output law.
        variation: TV(p, q).
        p_value: of the output, against its own exact law.
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
    draws: int

    def row(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def output_law(p: Tensor, q: Tensor, epsilon: float, residual: str) -> tuple[Tensor, float]:
    """(law of the token, P(reject))."""
    taken = torch.where(p > 0, torch.minimum(q, p + epsilon), 0.0)
    rejected = max(0.0, 1 - float(taken.sum()))
    left = (p - q).clamp(min=0)
    rest = left / left.sum() if residual == "OPT" and float(left.sum()) > 0 else p
    return taken + rejected * rest, rejected


def measure(name: str, target: Tensor, draft: Tensor, epsilon: float, residual: str, draws: int) -> Point:
    """One draft on rows ``[vocab]``, `draws` times."""
    target, draft = target.float(), draft.float()
    p, q = processed(target), processed(draft)
    law, rejected = output_law(p, q, epsilon, residual)
    counts, accepted = torch.zeros(len(p), dtype=torch.int64), 0
    for first in range(0, draws, CHUNK):
        n = min(CHUNK, draws - first)
        seed = torch.arange(first, first + n)
        noise = Noise(seed, torch.zeros_like(seed), torch.zeros_like(seed))
        rows = draft.expand(n, -1)
        ids = sample(rows, sampling=sampling_of({}, n), noise=noise, purpose="draft").token_ids
        step = Step(ids, target.expand(n, 2, -1), rows[:, None], {}, noise)
        emitted, kept = Over(epsilon, RESIDUALS[residual])(Method("", "ratio", (1,)), step)
        counts += torch.bincount(emitted[:, 0], minlength=len(p))
        accepted += int(kept.sum())
    surplus = law > p
    bias = float(counts[surplus].sum()) / draws - float(p[surplus].sum())
    return Point(
        name, residual, epsilon, 1 - accepted / draws, rejected, bias, float((law - p).abs().sum() / 2),
        float((p - q).abs().sum() / 2), fit(counts, law).chi_square, draws,
    )  # fmt: skip


def front(rows: dict[str, tuple[Tensor, Tensor]], draws: int) -> list[Point]:
    """The grid: both residuals, every epsilon, all rows."""
    return [
        measure(name, target, draft, epsilon, residual, draws)
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
        prompts: how many.
        pairs: of each prompt.
        rejected_opt: drafts that OPT rejects, of those that a first step looks at.
        rejected_uno: likewise.
    """

    epsilon: float
    opt: float
    interval: float
    prompts: int
    pairs: int
    rejected_opt: float
    rejected_uno: float

    def row(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def win_rates(tables: Sequence[Table], filters: Filters, *, length: int, pairs: int) -> list[WinRate]:
    """The table of seed 003, on texts of `length` tokens after each prompt."""
    found = []
    for epsilon in EPSILONS[2:]:
        wins, rejected = [], {"OPT": 0.0, "UNO": 0.0}
        for number, table in enumerate(tables):
            scores = {}
            for residual, source in RESIDUALS.items():
                method = Method(residual, "ratio", (1,) * length, verify=Over(epsilon, source))
                seed = (2 * number + (residual == "UNO")) * pairs
                tokens, first = decode(method, table, filters, texts=pairs, length=length, seed=seed)
                scores[residual] = likelihood(table, filters, tokens)
                rejected[residual] += float((first < length).double().sum() / (first + (first < length)).double().sum())
            ahead = scores["OPT"] - scores["UNO"]
            wins.append(float(((ahead > 1e-12).double() + 0.5 * (ahead.abs() <= 1e-12).double()).mean()))
        each = torch.tensor(wins, dtype=torch.float64)
        spread = 1.96 * float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else math.nan
        share = {residual: total / len(tables) for residual, total in rejected.items()}
        found.append(WinRate(epsilon, float(each.mean()), spread, len(tables), pairs, share["OPT"], share["UNO"]))
    return found


def likelihood(table: Table, filters: Filters, tokens: Tensor) -> Tensor:
    """Log-likelihood of texts ``[n, length]`` under the target."""
    log_p = processed(table.target, **filters).log()  # type: ignore[arg-type]
    context, score = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros(len(tokens), dtype=torch.float64)
    for x in tokens.unbind(1):
        score, context = score + log_p[context, x], table.after[context, x]
    return score
