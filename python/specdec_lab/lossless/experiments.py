"""The experiment: texts of many decode steps held against the target's own distribution."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Edits, RngKey

from . import goodness
from .acceptance import expected_tokens
from .edits import GrowingEdits, edited_table
from .exact import Filters, Table, distribution_of, joint_counts, joint_distribution, processed
from .procedures import Procedure, decode_step

ALPHA = 0.01  # of the whole family: chance that a correct sampler fails somewhere
CHUNK_BYTES = 1 << 28
SHOWN = 24  # outcomes of a finding that keep their frequencies
FEWEST = 200  # draws below which a time limit does not stop an experiment


@dataclass
class Finding:
    """One experiment on one method.

    Attributes:
        experiment: which.
        case: rows and filters.
        method: whose.
        fit: of the tokens to the target's distribution.
        tokens: a first step, mean.
        theory: the same by `acceptance`; None where it has no closed form.
        tokens_p: p-value of their difference; 1 where there is no theory, 0 where nothing was drafted.
        least_bias: smallest total variation towards the draft's distribution that was found with probability 0.99.
        seconds: of a processor.
        shown: (key, target's distribution, draft's distribution, frequency) of the likeliest outcomes, for a figure.
        adjusted: smallest p-value of the three after Holm's correction over the family.
    """

    experiment: str
    case: str
    method: str
    fit: goodness.Fit
    tokens: float
    theory: float | None
    tokens_p: float
    least_bias: float
    seconds: float
    shown: list[tuple[int, float, float, float]] = field(default_factory=list)
    adjusted: float = 1.0

    @property
    def passed(self) -> bool:
        """Whether chance explains all differences."""
        return self.adjusted > ALPHA

    def row(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "fit": self.fit._asdict(), "passed": self.passed}


def judge(findings: list[Finding]) -> bool:
    """Correct the p-values for the size of the family; whether all pass."""
    p_values = [p for f in findings for p in (f.fit.chi_square, f.fit.g, f.tokens_p)]
    adjusted = goodness.holm(p_values)
    for i, finding in enumerate(findings):
        finding.adjusted = min(adjusted[3 * i : 3 * i + 3])
    return all(finding.passed for finding in findings)


def decode(
    method: Procedure, table: Table, filters: Filters, *, texts: int, length: int, seed: int, device: str = "cpu",
    edits: Edits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(tokens ``[texts, length]``, accepted in the first step ``[texts]``): steps until every text is long enough.

    Texts advance by different numbers of tokens, as requests of an engine do.
    """
    table = Table(*(t.to(device) for t in table))
    seeds = (torch.arange(texts, device=device) + seed) * 7919 + 1
    done = torch.zeros(texts, dtype=torch.int64, device=device)
    context, width = torch.zeros_like(done), method.depth + 1
    tokens = torch.full((texts, length + width), -1, device=device)
    first = torch.zeros_like(done)
    places = torch.arange(width, device=device)
    growing = None if edits is None else GrowingEdits(edits, texts, table.vocab, device)
    step = 0
    while int(done.min()) < length:
        rng = RngKey(seeds, done, torch.full_like(done, step))
        now = None if growing is None else growing.now(tokens, done)
        ids, accepted, contexts = decode_step(method, table, context, rng, filters, now)
        accepted = accepted.long()
        first = accepted if step == 0 else first
        runs = done < length
        place = (done[:, None] + places).clamp(max=tokens.shape[1] - 1)
        taken = (places <= accepted[:, None]) & runs[:, None]
        tokens.scatter_(1, place, torch.where(taken, ids.long(), tokens.gather(1, place)))
        if growing is not None:
            growing.grown(torch.where(taken, ids, -1))
        moved = contexts.gather(1, accepted[:, None] + 1)[:, 0]
        context = torch.where(runs, moved, context)
        done = torch.where(runs, done + accepted + 1, done)
        step += 1
    return tokens[:, :length], first


def follow(
    method: Procedure,
    table: Table,
    filters: Filters,
    *,
    experiment: str,
    case: str,
    texts: int,
    length: int,
    seconds: float = math.inf,
    seed: int = 0,
    device: str = "cpu",
    edits: Edits | None = None,
) -> Finding:
    """Hold the first `length` tokens of many texts against the target's distribution; stop early after `seconds`."""
    started, cpu = time.perf_counter(), time.process_time()
    exact = table if edits is None else edited_table(table, edits, length)
    keys, distribution = joint_distribution(exact, length, filters)
    copies = 1 if bool((table.after == table.after[:, :1]).all()) else 2 * len(method.parents())
    chunk = max(1, min(texts, CHUNK_BYTES // (4 * table.vocab * copies), 50_000 if math.isinf(seconds) else FEWEST))
    counts = torch.zeros(len(keys) + 1, dtype=torch.int64)
    total = squares = 0.0
    drawn = 0
    while drawn < texts and (drawn < FEWEST or time.perf_counter() - started < seconds):
        n = min(chunk, texts - drawn)
        tokens, first = decode(
            method, table, filters, texts=n, length=length, seed=seed + drawn, device=device, edits=edits
        )  # fmt: skip
        counts += joint_counts(tokens, table.vocab, keys)
        total += float(first.sum())
        squares += float((first**2).sum())
        drawn += n
    mean = total / drawn
    spread = math.sqrt(max(squares / drawn - mean**2, 0.0) / drawn)
    return finding(
        keys, distribution, counts, exact, filters, experiment=experiment, case=case, method=method.name,
        length=length, accepted=mean, spread=spread, theory=expected_tokens(method, exact, filters), cpu=cpu,
    )  # fmt: skip


def finding(
    keys: Tensor, distribution: Tensor, counts: Tensor, table: Table, filters: Filters, *, experiment: str, case: str,
    method: str, length: int, accepted: float, spread: float, theory: float | None, cpu: float,
) -> Finding:  # fmt: skip
    """What was counted beside what is right.

    Args:
        keys: of the texts that can occur, see `joint_distribution`.
        distribution: theirs.
        counts: see `joint_counts`.
        table: of the exact rows.
        filters: of target and draft.
        experiment: which.
        case: likewise.
        method: likewise.
        length: tokens of a text.
        accepted: in a first step, mean.
        spread: its standard error.
        theory: tokens of a first step; None: unknown.
        cpu: `time.process_time` at the beginning.
    """
    drawn = int(counts.sum())
    towards = distribution_of(keys, table, length, processed(table.draft, **filters))  # type: ignore[arg-type]
    top = distribution.topk(min(SHOWN, len(distribution))).indices
    columns = (keys[top], distribution[top], towards[top], counts[top].double() / drawn)
    # The last cell: what cannot happen.
    distribution, towards = (torch.nn.functional.pad(x, (0, 1)) for x in (distribution, towards))
    least = goodness.least_bias(distribution, towards, drawn, ALPHA) if float(towards.sum()) > 0 else 0.0
    return Finding(
        experiment, case, method, goodness.fit(counts, distribution), 1 + accepted, theory,
        agreement(1 + accepted, theory, spread, drawn), least, round(time.process_time() - cpu, 2),
        list(zip(*(x.tolist() for x in columns), strict=True)),
    )  # fmt: skip


def agreement(mean: float, theory: float | None, spread: float, draws: int) -> float:
    """p-value of a mean beside its expectation; a rounding of float32 is no difference.

    Counts of a mean m + f, m whole, have a variance of at least f (1 - f): that of a sample lacks what is too rare.
    """
    if theory is None or abs(mean - theory) < 1e-6:
        return 1.0
    part = theory % 1
    spread = max(spread, math.sqrt(part * (1 - part) / draws))
    return goodness.normal_tail((mean - theory) / spread) if spread > 0 else 0.0
