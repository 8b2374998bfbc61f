"""The numbers and names that callers and kernels share: status bits, rules, purposes, formats.

An argument that chooses among names has a `Literal` type; the code of a name is its place there. Kernels in C++ and
CUDA have the same codes in csrc/common/codes.h, those in Triton take them from here; tests/test_codes.py compares them.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, get_args

Backend = Literal["reference", "cpu", "triton", "cuda"]
CacheFormat = Literal["bhld", "blhd", "hnd", "nhd", "slots"]
ChainRule = Literal["ratio", "block", "match", "greedy", "typical", "topm", "distance"]
DrawPurpose = Literal["target", "draft", "residual"]
Logprobs = Literal["processed", "raw"]
MaskFormat = Literal["bool", "additive", "flat", "flat_packed", "int32", "int64", "xqa", "sglang_packed"]
Purpose = Literal["target", "coin", "residual", "draft"]
RejectedFrom = Literal["residual", "target"]
TreeEngine = Literal["sglang", "tensorrt_llm"]
TreeRule = Literal["match", "greedy", "typical", "recursive", "greedy_multi_draft", "target_only", "traversal"]


def _codes(names: Any) -> dict[str, int]:
    return {name: code for code, name in enumerate(get_args(names))}


CHAIN_RULES = _codes(ChainRule)
TREE_RULES = _codes(TreeRule)
PURPOSES = _codes(Purpose)
REJECTED_FROM = _codes(RejectedFrom)
MASK_FORMATS = _codes(MaskFormat)
LOGPROBS: dict[str | None, int] = {None: 0, "processed": 1, "raw": 2}
TARGET_PURPOSE, COIN_PURPOSE, RESIDUAL_PURPOSE, DRAFT_PURPOSE = PURPOSES.values()
NO_LOGPROBS, PROCESSED_LOGPROBS, RAW_LOGPROBS = LOGPROBS.values()


class Status(enum.IntFlag):
    """The bits of a request's `status`; 0 means that nothing was wrong. `explain_status` puts them into words.

    Example:
        >>> from specdec_kernels import Status
        >>> bool(Status.BAD_TARGET in Status(5)), bool(Status.BAD_DRAFT in Status(5))
        (True, False)
    """

    BAD_TARGET = 1
    BAD_DRAFT = 2
    BAD_ID = 4
    EMPTY_RESIDUAL = 8
    ZERO_DRAFT = 16
    BAD_LAYOUT = 32
    BAD_SAMPLING = 64


_EXPLANATIONS = {
    Status.BAD_TARGET: "a row of target logits holds NaN or has no finite maximum; nothing was emitted there",
    Status.BAD_DRAFT: "a draft row has no finite maximum, or a confidence or log q is out of range; the draft ends",
    Status.BAD_ID: "a drafted id lies outside the vocabulary; the draft ended there",
    Status.EMPTY_RESIDUAL: "the residual distribution was empty; the token was drawn from the target's",
    Status.ZERO_DRAFT: "the draft distribution gives a drafted id probability 0; the id was rejected",
    Status.BAD_LAYOUT: "cu_draft, parents, a path, a length or a block table is malformed; no draft used, no row moved",
    Status.BAD_SAMPLING: "a parameter is NaN, or temperature or top_k negative: the request was decoded greedily; "
    "or its MixedRules.choice names no rule: nothing was emitted",
}


def explain_status(status: int) -> list[str]:
    """One sentence for each bit set in the status of a request, lowest bit first; none for status 0.

    Args:
        status: of one request, such as ``result.status[b]``; reading it waits for the device.

    Returns:
        Sentences that begin with the name of the bit.

    Raises:
        ValueError: the status has a bit that no op sets.

    Example:
        >>> from specdec_kernels import explain_status
        >>> explain_status(4)
        ['BAD_ID: a drafted id lies outside the vocabulary; the draft ended there']
    """
    if not hasattr(status, "__index__") or getattr(status, "shape", ()) != ():
        raise ValueError(f"explain_status: status must be an int, that of one request, got {status!r}")
    bits = int(status)
    if not 0 <= bits <= sum(Status):
        raise ValueError(f"explain_status: status must be in [0, {sum(Status)}], got {bits}")
    return [f"{bit.name}: {text}" for bit, text in _EXPLANATIONS.items() if bit & bits]
