"""vLLM's top-k/top-p kernel as its verification uses it, then a plain ratio test: only the filter is under test.

The kernel is vLLM's file, on the path that more than 64 rows take, a verification of eleven requests with five drafts;
a CPU has no other. Triton's interpreter gives loop counters as Python ints: for it `row_id.to(tl.int64)` is spelled
`tl.cast(row_id, tl.int64)`, nothing else is changed. Equal rows are filtered once.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Sampling

from ..rivals import _vllm
from ..rivals.eager import probabilities, ratio_test

NAME = "vLLM top-k/top-p kernel"
available, version = _vllm.available, _vllm.version
ROWS = 65 if torch.cuda.is_available() else 1  # on a GPU up to 64 rows take another path


def supports(case: Any) -> str | None:
    """None, or why the case is not for it."""
    if "min-p" in case.filters:
        return "min-p is another kernel"
    return "the interpreter takes a second a row, and small tables have hundreds" if case.vocab < 1000 else None


@functools.cache
def _kernels() -> ModuleType:
    if torch.cuda.is_available():
        return _vllm.load("v1.sample.ops.topk_topp_triton")
    _vllm.install()
    root = _vllm.folder()
    assert root is not None
    text = (root / "v1/sample/ops/topk_topp_triton.py").read_text()
    assert text.count("row_id.to(tl.int64)") == 1, "vLLM's file has changed"
    # A jitted function reads its source from a file.
    copy = Path(tempfile.mkdtemp()) / "topk_topp_triton.py"
    copy.write_text(text.replace("row_id.to(tl.int64)", "tl.cast(row_id, tl.int64)"))
    spec = importlib.util.spec_from_file_location("vllm.v1.sample.ops.topk_topp_interpreted", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def _filtered(row: tuple[float, ...], top_k: int | None, top_p: float | None) -> Tensor:
    logits = torch.tensor(row).repeat(ROWS, 1)
    k = None if top_k is None else torch.full((ROWS,), top_k, dtype=torch.int32)
    p = None if top_p is None else torch.full((ROWS,), top_p)
    out: Tensor = _kernels().apply_top_k_top_p_triton(logits, k, p)
    return out[ROWS - 1].clone()


def filtered_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Scaled logits [batch, row, vocab] with what the kernel drops at -inf."""
    temperature, top_k, top_p, min_p, _ = sampling
    assert temperature is not None
    assert min_p is None
    whole = logits.float() / temperature[:, None, None]
    rows, place = whole.flatten(0, 1).unique(dim=0, return_inverse=True)
    k = None if top_k is None else int(top_k[0])
    p = None if top_p is None else float(top_p[0])
    kept = torch.stack([_filtered(tuple(row.tolist()), k, p) for row in rows])
    return kept[place].view_as(whole)


def verify_chain(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """(token ids [batch, draft + 1], number accepted [batch]); the drafts' distribution is filtered exactly."""
    p = filtered_logits(target_logits, sampling).softmax(-1)
    return ratio_test(draft_ids, p, probabilities(draft_logits, sampling))
