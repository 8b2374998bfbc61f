"""The cases of bench/gpu.py, the most telling first: a run that is cut short has measured the beginning."""

from __future__ import annotations

from typing import Any

from . import suite
from .cases import BOTH, Case
from .tree_mask import PAST, MaskCase
from .trees import TreeCase

ON_PAIRS = ("acceptance_ratios", "residual_probs", "residual_sample")  # of a target and a draft row, as chains are


def cases() -> list[Any]:
    """The pass over all rows alone (greedy), ratio, match and filters at batch 64; then everything else once."""
    op, bf16 = "verify_chain", "bf16"
    others = [name for name in suite.OPS if name not in (op, "sample", *ON_PAIRS, "tree_cache", "linear")]
    return [
        *(Case(op, batch=64, dtype=bf16, rule=rule) for rule in ("greedy", "ratio", "match")),
        *(Case(op, batch=64, dtype=bf16, filters=filters) for filters in (BOTH, "top-p .95")),
        Case("sample", batch=384, dtype=bf16),
        Case("sample", batch=64, dtype=bf16),
        Case("sample", batch=64, dtype=bf16, filters=BOTH),
        Case(op, batch=1, dtype=bf16),
        Case(op, batch=16, dtype=bf16),
        Case(op, vocab=151936, batch=256, draft=3, dtype=bf16),
        Case(op, batch=1, dtype=bf16, filters=BOTH),
        *(Case(op, batch=64, dtype=bf16, rule=rule) for rule in ("block", "typical")),
        *(Case(name, batch=64, dtype=bf16) for name in ON_PAIRS),
        *(TreeCase("verify_tree", dtype=bf16, rule=rule) for rule in ("match", "greedy", "target_only")),
        *(suite.module(name).CASES[0] for name in others),
        MaskCase("tree_mask", 64, 64, format=f"flat, past {PAST}"),
        Case(op, batch=16, compiled=True),  # Inductor takes a minute
    ]


def counted() -> list[Case]:
    """The calls whose hardware counters are read."""
    op, bf16 = "verify_chain", "bf16"
    plain = [Case(op, batch=64, dtype=bf16, rule=rule) for rule in ("greedy", "ratio", "match")]
    return [*plain, Case(op, batch=64, dtype=bf16, filters=BOTH)]
