"""The cases: real models' vocabularies, batches, draft lengths, filters, dtypes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .rows import Filters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def row_cases(op: str) -> list[Case]:
    """Cases of the ops that take one row a request, the two main ones first."""
    return [Case(op, compiled=op == "sample"), Case(op, dtype="bf16"), Case(op, batch=1), Case(op, filters=BOTH)]
