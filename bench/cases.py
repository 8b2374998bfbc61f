"""The cases: real models' vocabularies, batches, draft lengths, filters, dtypes."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

from .rows import Filters

MODELS = {32000: "llama-2", 128256: "llama-3", 151936: "qwen"}
FILTERS = {
    "none": Filters(0.8),
    "top-k 50": Filters(0.8, top_k=50),
    "top-p .95": Filters(0.8, top_p=0.95),
    "top-k 50 + top-p .95": Filters(0.8, top_k=50, top_p=0.95),
    "min-p .05": Filters(0.8, min_p=0.05),
}
BOTH = "top-k 50 + top-p .95"


@dataclass(frozen=True)
class OpCase:
    """One shape of one op."""

    op: str
    threads: int = field(default=0, kw_only=True)  # 0: all cores

    @property
    @abstractmethod
    def words(self) -> str:
        """The part of the id that differs among the op's cases."""

    @property
    def name(self) -> str:
        """As printed."""
        return self.words + (f", {self.threads} thread" if self.threads else "")

    @property
    def id(self) -> str:
        """For pytest."""
        return re.sub(r"[ ,'+.]+", "-", self.name)


@dataclass(frozen=True)
class Case(OpCase):
    """One shape of an op on rows."""

    vocab: int = 128256
    batch: int = 16
    draft: int = 5
    dtype: str = "fp32"
    filters: str = "none"
    rule: str = "ratio"
    rows: str = "llm"
    compiled: bool = False  # torch.compile takes a while: only where it is asked for

    @property
    def words(self) -> str:
        """Model, sizes, dtype, and what differs from the usual."""
        parts = [f"{MODELS[self.vocab]} {self.vocab}", f"batch {self.batch}"]
        if self.op in ("verify_chain", "acceptance_ratios"):
            parts.append(f"K {self.draft}")
        parts.append(self.dtype)
        if self.op == "verify_chain" and self.rule != "ratio":
            parts.append(self.rule)
        if self.filters != "none":
            parts.append(self.filters)
        if self.rows != "llm":
            parts.append(f"{self.rows} rows")
        return ", ".join(parts)


class Measured(NamedTuple):
    """Times of one contender in one case, microseconds."""

    p50: float
    p20: float
    p80: float
    runs: int


def verify_chain_cases(extent: str) -> list[Case]:
    """quick: the main cases; default: minutes on two cores; full: the whole grid."""
    op = "verify_chain"
    quick = [Case(op, dtype=dtype, compiled=True) for dtype in ("fp32", "bf16")]
    quick += [
        Case(op, batch=1),
        Case(op, batch=1, dtype="bf16"),
        Case(op, filters=BOTH),
        Case(op, dtype="bf16", filters=BOTH),
    ]
    quick += [Case(op, batch=1, threads=1), Case(op, batch=1, dtype="bf16", threads=1)]
    if extent == "quick":
        return quick
    default = [
        *quick,
        Case(op, vocab=32000),
        Case(op, vocab=151936, dtype="bf16"),
        Case(op, batch=4, dtype="bf16"),
        Case(op, batch=64, dtype="bf16"),
        Case(op, draft=1),
        Case(op, draft=3, dtype="bf16"),
        Case(op, draft=8, dtype="bf16"),
        Case(op, filters="top-k 50"),
        Case(op, filters="top-p .95"),
        Case(op, filters="min-p .05"),
        Case(op, batch=1, filters=BOTH),
        *(Case(op, rule=rule, dtype="bf16") for rule in ("greedy", "match", "block", "typical")),
        *(Case(op, rows=shape, dtype=dtype) for shape, dtype in (("flat", "fp32"), ("peaked", "bf16"))),
        Case(op, rows="flat", filters=BOTH),
    ]
    if extent == "default":
        return default
    grid = [
        Case(op, vocab, batch, draft, dtype, filters)
        for vocab in MODELS
        for batch in (1, 4, 16, 64, 256)
        for draft in (1, 3, 5, 8)
        for dtype in ("fp32", "bf16")
        for filters in FILTERS
        if filters == "none" or draft == 5
    ]
    seen = {case.name for case in default}
    return default + [case for case in grid if case.name not in seen]


def row_cases(op: str, extent: str) -> list[Case]:
    """Cases of the ops that take one row a request."""
    quick = [Case(op, compiled=op == "sample"), Case(op, dtype="bf16")]
    if extent == "quick":
        return quick
    default = [*quick, Case(op, batch=1), Case(op, filters=BOTH)]
    if op == "sample":
        default += [
            Case(op, vocab=32000),
            Case(op, vocab=151936, batch=64, dtype="bf16"),
            Case(op, batch=1, filters=BOTH),
            *(Case(op, filters=filters) for filters in ("top-k 50", "top-p .95", "min-p .05")),
            Case(op, rows="flat", filters=BOTH),
        ]
    if extent == "default":
        return default
    grid = [
        Case(op, vocab, batch, dtype=dtype, filters=filters)
        for vocab in MODELS
        for batch in (1, 4, 16, 64, 256)
        for dtype in ("fp32", "bf16")
        for filters in FILTERS
    ]
    seen = {case.name for case in default}
    return default + [case for case in grid if case.name not in seen]
