"""`warmup`: after it, calls of a configuration compile nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import RngKey, Sampling, sample, warmup


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[list[str], list[str]]]:
    """For each case of warm_keys.py the kernels that warmup and then calls would compile."""
    pytest.importorskip("triton")
    script = Path(__file__).parent / "warm_keys.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (warm, late) for name, warm, late in lines}


def test_no_call_compiles_after_warmup(compiled: dict[str, tuple[list[str], list[str]]]) -> None:
    """Other batches, drafts, nodes, sampling parameters, steps and lanes; vocabularies of any divisibility."""
    late = {name: late for name, (_, late) in compiled.items() if late and not name.startswith("too little")}
    assert late == {}
    assert len(compiled) > 50
    assert all("digest_kernel" in warm for warm, _ in compiled.values())


def test_what_was_not_asked_for_is_still_compiled_later(compiled: dict[str, tuple[list[str], list[str]]]) -> None:
    """The twin: a warmup without filters, and calls with them."""
    late = [late for name, (_, late) in compiled.items() if name.startswith("too little")]
    assert late and all({"settle_kernel", "gather_kernel"} <= set(kernels) for kernels in late)


@pytest.mark.parametrize(
    ("op", "more"),
    [
        ("sample", {"logprobs": "raw", "num_samples": 3}),
        ("sample", {"draft_vocab": 40}),
        ("sample", {"edits": True}),
        ("token_logprobs", {"top": 3, "allowed": True, "filters": (True,)}),
        ("verify_chain", {"rules": ("ratio", "block", "topm"), "draft_stats": True, "max_draft": 3}),
        ("verify_chain", {"rules": ("match",), "flat": True, "allowed": True, "max_draft": 20}),
        ("verify_tree", {"rules": ("recursive", "target_only"), "nodes": 5, "draft_vocab": 40}),
        (
            "verify_chain",
            {"rules": ("ratio",), "edits": True, "draft_edits": True, "max_draft": 2, "filters": (False,)},
        ),
        ("verify_tree", {"rules": ("match",), "nodes": 3, "edits": True, "draft_edits": True, "filters": (False,)}),
        ("verify_chain", {"rules": ("ratio", "block"), "kept": 5, "max_draft": 2, "filters": (False,)}),
        ("verify_tree", {"rules": ("recursive",), "kept": 5, "nodes": 3, "filters": (False,)}),
        ("acceptance_ratios", {"drafted": False, "max_draft": 2}),
        ("residual_probs", {"allowed": True, "draft_edits": True}),
        ("residual_sample", {"dtypes": (torch.float32,), "filters": (True,)}),
    ],
)
def test_every_op_is_called(op: Any, more: dict[str, Any], backend: str, device: str) -> None:
    said: list[str] = []
    warmup(op, vocab=70, device=device, report=said.append, **more)
    assert said and all(line.startswith(op) and line.endswith(" s") for line in said)


def test_a_call_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"warmup: sample bfloat16 failed: sample: backend 'cuda' cannot run"):
        warmup("sample", vocab=9, device="cpu", backend="cuda")


def test_wrong_arguments_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="warmup: op must be one of 'sample', 'token_logprobs'"):
        warmup("draw", vocab=9, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup: rules must be None for sample"):
        warmup("sample", vocab=9, rules=("ratio",), device="cpu")
    with pytest.raises(ValueError, match="warmup: kept must be None but for verify_chain and verify_tree"):
        warmup("sample", vocab=9, kept=3, device="cpu")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"vocab": "9"}, "vocab must be an int >= 1, got '9'"),
        ({"vocab": 0}, "vocab must be an int >= 1, got 0"),
        ({"max_draft": -1}, "max_draft must be an int >= 0, got -1"),
        ({"rules": "match"}, "rules must be a sequence of str, .*, got 'match'"),
        ({"rules": ()}, "rules must be a sequence of str, .*, got \\(\\)"),
        ({"dtypes": torch.float32}, "dtypes must be a sequence of dtype, .*, got torch.float32"),
        ({"dtypes": ("float32",)}, "dtypes must be a sequence of dtype, .*, got \\('float32',\\)"),
        ({"filters": ()}, "filters must be a sequence of bool, .*, got \\(\\)"),
        ({"filters": True}, "filters must be a sequence of bool, .*, got True"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match="warmup: " + message):
            warmup("verify_chain", **{"vocab": 9, "device": "cpu", **change})
    with pytest.raises(ValueError, match="verify_chain: rule must be one of 'ratio'"):
        warmup("verify_chain", vocab=9, rules=("ratoi",), device="cpu")


def test_a_warmed_op_serves_any_batch() -> None:
    warmup("sample", vocab=9, dtypes=(torch.float32,), device="cpu")
    rng = RngKey(torch.arange(4), torch.zeros(4).long())
    assert sample(torch.zeros(4, 9), sampling=Sampling(), rng=rng, purpose="target").status.tolist() == [0] * 4
