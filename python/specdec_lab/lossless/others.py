"""Samplers of others: which experiments each is put through, and what came of them."""

from __future__ import annotations

from typing import Any

import torch

from .exact import Filters, Table, flat_table, processed, sampling_of
from .experiments import Finding, judge
from .family import SMALL, Job, small_tables
from .samplers import load, method_of, refusal

Row = dict[str, Any]
ROUNDING = 1e-3  # total variation that float32 may make of a filtered row


def peaked_row(peak: float, seed: int, vocab: int = 32_768, spread: float = 0.3) -> torch.Tensor:
    """One likely id above a nearly flat tail: a search for the top-p threshold on linear probabilities gets lost."""
    distribution = torch.full((vocab,), (1 - peak) / (vocab - 1))
    distribution[0] = peak
    return distribution.log() + spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def cases() -> list[tuple[str, Table, int, Filters]]:
    """(name, rows, tokens, filters) of what a sampler meets."""
    tables = small_tables()
    eight, history = tables["eight ids"], tables["history of 3 ids"]
    peaked = flat_table(peaked_row(0.8, seed=0).expand(3, -1), peaked_row(0.7, seed=1).expand(3, -1))
    return [
        ("eight ids, two tokens", *eight, {}),
        ("history of 3 ids, six tokens", *history, {}),
        ("history of 3 ids, top-k", *history, SMALL["top-k"]),
        ("history of 3 ids, top-p", *history, SMALL["top-p"]),
        ("peaked row of 32,768 ids, top-p 0.9", peaked, 1, {"top_p": 0.9}),
    ]


def other_jobs(name: str, texts: int, seconds: float) -> tuple[list[Row], list[Job]]:
    """(row, job) of every case that is for the sampler; a single row and no job where it cannot run here.

    Raises:
        ValueError: there is no such sampler.
    """
    module = load(name)
    blank = {"name": f"{module.NAME} (`{name}`, {module.version()})", "draws": 0, "p": "", "variation": "", "note": ""}
    reason = module.available()
    if reason is not None:
        return [{**blank, "case": "", "verdict": "not run", "note": reason}], []
    rows, jobs = [], []
    for case, table, length, filters in cases():
        if refusal(module, filters, table.vocab) is None:
            exact = length == 1 and hasattr(module, "filtered_logits")
            bias, note = exact_bias(module, table, filters) if exact else (0.0, "")
            rows.append({**blank, "case": case, "note": note, "bias": bias})
            jobs.append(Job("other", case, method_of(name), table, filters, texts, length, seconds))
    return rows, jobs


def judged(rows: list[Row], findings: list[Finding]) -> list[Row]:
    """Rows with their verdicts; all findings are one family, and a filter that is known to be wrong is biased."""
    judge(findings)
    left = iter(findings)
    for row in rows:
        if row.get("verdict") != "not run":
            finding = next(left)
            is_right = finding.passed and row["bias"] < ROUNDING  # what is known exactly needs no draws
            row["verdict"] = "pass" if is_right else "biased"
            row["draws"], row["p"] = finding.fit.draws, f"{finding.adjusted:.2g}"
            row["variation"] = f"{finding.fit.variation:.3f} / {finding.fit.expected_variation:.3f}"
    return rows


def exact_bias(module: Any, table: Table, filters: Filters) -> tuple[float, str]:
    """(total variation to what is right, in words) of what a sampler's filter keeps of a row."""
    kept = module.filtered_logits(table.target[:1, None], sampling_of({"temperature": 1.0, **filters}, 1))[0, 0]
    exact = processed(table.target[0], **filters)  # type: ignore[arg-type]
    bias = float((kept.double().softmax(-1) - exact).abs().sum() / 2)
    counts = int((kept > -torch.inf).sum()), int((exact > 0).sum())
    return bias, f"keeps {counts[0]:,} ids where {counts[1]:,} are right: TV {bias:.4f} exactly"
