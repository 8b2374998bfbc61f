"""python -m bench.traffic --full: bytes that `sample` moves under each filter at real vocabularies, row by row.

A batch has the bytes of its rows, and rows differ: so ROWS rows are called one at a time, and a case tells the mean and
the worst of them as multiples of MIN, the bytes of one row. No row is cut: every load of the whole row is counted.
Interpreted Triton takes the first of the same rows. Each case is written as it comes, and a case that the file has of
the same commit is not metered again.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import RngKey, sample

from . import results
from .cases import FILTERS
from .machine import commit, machine, progress, versions
from .meters import Bytes, size
from .minimum import DRAWN, row_budget
from .rows import Filters, rows

VOCABULARIES = (128256, 151936)
SHAPES = ("llm", "normal", "equal", "capped", "peaked")
TEMPERATURES = (1.0, 0.8)
ROWS = {"cuda_host": 12, "triton": 3}  # a call: 0.1 s and, interpreted, 1 to 30 s
Meter = Callable[[], AbstractContextManager[Bytes]]


class FilterCase(NamedTuple):
    """Rows of one shape under one filter."""

    vocab: int
    filters: str
    temperature: float
    rows: str

    @property
    def name(self) -> str:
        """As printed and stored."""
        return f"{self.vocab} ids, {self.filters}, temperature {self.temperature:g}, {self.rows} rows"

    @property
    def chosen(self) -> Filters:
        """What `sample` is given."""
        return FILTERS[self.filters]._replace(temperature=self.temperature)


def cases() -> list[FilterCase]:
    """Top-p alone first: nothing bounds what it has to look at."""
    filters = ("top-p .95", "top-k 50 + top-p .95", "top-k 50", "min-p .05", "none")
    return [
        FilterCase(vocab, f, temperature, shape)
        for f, vocab, temperature, shape in itertools.product(filters, VOCABULARIES, TEMPERATURES, SHAPES)
    ]


def budget(case: FilterCase) -> float:
    """Allowed multiple of MIN."""
    return round(row_budget(case.filters, case.rows, case.vocab) + DRAWN / (2 * case.vocab), 3)


def meter_row(row: Tensor, filters: Filters, number: int, backend: str, meter: Meter) -> float:
    """Bytes that one row costs, as a multiple of its own."""
    key = torch.tensor([number])
    given = {"sampling": filters.sampling(1), "rng": RngKey(key, key * 17 + 100, torch.zeros_like(key))}
    with meter() as moved:
        found = sample(row, purpose="draft", backend=backend, **given)
    want = sample(row, purpose="draft", backend="cpu", **given)
    if not (torch.equal(found.token_ids, want.token_ids) and torch.equal(found.threshold, want.threshold)):
        raise SystemExit(
            f"bench.traffic: {backend} differs from cpu on row {number}: a meter of a wrong result is void"
        )
    return moved.total / size(row)


def meter(case: FilterCase, backend: str, make_meter: Meter) -> dict[str, Any]:
    """A row of the result file."""
    count = ROWS[backend]
    made, _ = rows(count, case.vocab, dtype=torch.bfloat16, shape=case.rows)
    started = time.perf_counter()
    multiples = [meter_row(made[i : i + 1], case.chosen, i, backend, make_meter) for i in range(count)]
    return {
        "op": "sample",
        "case": case.name,
        "contender": backend,
        **case._asdict(),
        "min_bytes": size(made[:1]),
        "mean_times_min": round(statistics.fmean(multiples), 3),
        "worst_times_min": round(max(multiples), 3),
        "rows_metered": count,
        "budget": budget(case),
        "seconds": round(time.perf_counter() - started, 1),
    }


def show(row: dict[str, Any]) -> None:
    """Print a line."""
    over = "OVER" if row["mean_times_min"] > row["budget"] else ""
    print(
        f"  {row['case']:<66}{row['contender']:<10} mean {row['mean_times_min']:>7.3f}   worst "
        f"{row['worst_times_min']:>7.3f}   <= {row['budget']:<5}{over}",
        flush=True,
    )


def run(meters: dict[str, Meter], only: str = "") -> None:
    """Meter every case that the file does not have of this commit; the quick backend first."""
    stamp = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    for backend in sorted(meters):
        for case in (c for c in cases() if only in c.name):
            content = results.load(results.TRAFFIC_FULL)
            is_same = lambda r, c=case, b=backend: (r["case"], r["contender"]) == (c.name, b)  # noqa: E731
            if any(is_same(r) and r["commit"] == stamp["commit"] for r in content["rows"]):
                continue
            fresh = meter(case, backend, meters[backend])
            show(fresh)
            kept = [r for r in content["rows"] if not is_same(r)]
            results.write(results.TRAFFIC_FULL, {"machine": machine(), "rows": [*kept, fresh | stamp]})
    progress(f"saved in {results.TRAFFIC_FULL.name}")
