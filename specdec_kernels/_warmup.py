"""Compile and load what a configuration will run, before the first request."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._check import fail
from ._codes import Backend
from ._edits import BLOCK, RowEdits
from ._sparse import SparseRows
from ._types import RngKey, Sampling
from .ops.acceptance_ratios import acceptance_ratios
from .ops.residual_probs import residual_probs
from .ops.residual_sample import residual_sample
from .ops.sample import sample
from .ops.token_logprobs import token_logprobs
from .ops.verify_chain import verify_chain
from .ops.verify_tree import verify_tree

RowOp = Literal[
    "sample", "token_logprobs", "verify_chain", "verify_tree", "acceptance_ratios", "residual_probs", "residual_sample"
]  # fmt: skip
_OPS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        sample, token_logprobs, verify_chain, verify_tree, acceptance_ratios, residual_probs, residual_sample
    )
}  # fmt: skip
_OF_ONE_TABLE = ("sample", "token_logprobs")  # target rows alone
_ID_DTYPES = (torch.int64, torch.int32)  # of ids and of parents ...
_INT64_ALONE = ("sample", "residual_probs", "residual_sample")  # ... but for these ops


class _Rows(NamedTuple):
    """What the rows of a call look like."""

    vocab: int
    draft_vocab: int | None  # None: no draft rows
    dtype: torch.dtype
    draft_stats: bool
    allowed: bool
    edits: bool
    draft_edits: bool
    kept: int | None
    flat: bool
    device: torch.device
    id_dtype: torch.dtype
    parents_dtype: torch.dtype

    def logits(self, vocab: int | None, *shape: int) -> Tensor | None:
        return None if vocab is None else torch.zeros(*shape, vocab, dtype=self.dtype, device=self.device)

    def ids(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.id_dtype, device=self.device)

    def drafts(self, *shape: int) -> Tensor | SparseRows | None:
        """Draft rows: dense, or candidates."""
        if self.kept is None or self.draft_vocab is None:
            return self.logits(self.draft_vocab, *shape)
        ids = torch.arange(self.kept, device=self.device).expand(*shape, -1).contiguous()
        logsumexp = torch.full(shape, math.log(self.kept), dtype=torch.float32, device=self.device)
        logits = torch.zeros(ids.shape, dtype=self.dtype, device=self.device)
        return SparseRows(ids, logits, logsumexp)

    def common(self, rows: int) -> dict[str, Any]:
        """Arguments that all ops know."""
        named: dict[str, Any] = {}
        if self.draft_vocab is not None and self.draft_vocab != self.vocab:
            named["token_map"] = torch.arange(self.draft_vocab, dtype=torch.int32, device=self.device)
        if self.allowed:
            words = (self.vocab + 31) // 32
            named["allowed"] = torch.full((rows, words), -1, dtype=torch.int32, device=self.device)
        if self.edits:
            named["edits"] = self.no_edits(rows)
        return named

    def no_edits(self, rows: int) -> RowEdits:
        """Edits of so many rows, which change nothing."""
        blocks = (self.vocab + BLOCK - 1) // BLOCK
        start = torch.zeros(rows, blocks + 1, dtype=torch.int32, device=self.device)
        bits = torch.zeros(rows, blocks, dtype=torch.int64, device=self.device)
        return RowEdits(bits, start, torch.zeros(4, rows, 1, dtype=torch.float32, device=self.device))

    def chain(self, draft: int) -> dict[str, Any]:
        """One request with so many drafts."""
        at = () if self.flat else (1,)
        named = {
            "draft_ids": self.ids(*at, draft), "target_logits": self.logits(self.vocab, *at, draft + 1),
            "draft_logits": self.drafts(*at, draft), **self.common(draft + 1),
        }  # fmt: skip
        if self.flat:
            named["cu_draft"] = torch.tensor([0, draft], dtype=torch.int32, device=self.device)
            named["max_draft"] = draft
        if self.draft_edits:
            named["draft_edits"] = self.no_edits(draft + 1)
        if self.draft_stats:
            named["draft_stats"] = (torch.zeros(*at, draft, dtype=torch.float32, device=self.device),) * 2
        return named

    def tree(self, nodes: int) -> dict[str, Any]:
        """One request with so many nodes, of which the root counts."""
        parents = torch.arange(-1, nodes - 1, dtype=self.parents_dtype, device=self.device)[None]
        named = {"draft_edits": self.no_edits(nodes)} if self.draft_edits else {}
        return {
            "token_ids": self.ids(1, nodes), "parents": parents, "max_depth": 1,
            "target_logits": self.logits(self.vocab, 1, nodes), "draft_logits": self.drafts(1, nodes),
            **self.common(nodes), **named,
        }  # fmt: skip


def _sizes(largest: int, first: int, less: int) -> list[int]:
    """Sizes that are compiled apart: powers of two from `first`, less `less`, below the largest; and that one."""
    sizes = [largest]
    while first - less < largest:
        sizes.append(first - less)
        first *= 2
    return sorted(sizes)


def _inputs(op: str, rows: _Rows, max_draft: int, nodes: int) -> Iterator[dict[str, Any]]:
    """Rows and ids of each call."""
    if op == "sample":
        yield {"logits": rows.logits(rows.draft_vocab or rows.vocab, 1), **rows.common(1)}
    elif op == "token_logprobs":
        yield {"logits": rows.logits(rows.vocab, 1), "token_ids": rows.ids(1), **rows.common(1)}
    elif op in ("verify_chain", "acceptance_ratios"):
        yield from map(rows.chain, sorted({0, *_sizes(max_draft, 16, 1)}))  # 0: nobody drafts
    elif op == "verify_tree":
        yield from map(rows.tree, _sizes(nodes, 1, 0))
    else:
        target, draft = rows.logits(rows.vocab, 1), rows.logits(rows.draft_vocab, 1)
        named = {"draft_edits": rows.no_edits(1)} if rows.draft_edits else {}
        yield {"target_logits": target, "draft_logits": draft, "draft_ids": rows.ids(1), **rows.common(1), **named}


def warmup(
    op: RowOp,
    *,
    vocab: int,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    rules: Sequence[str] | None = None,
    filters: Sequence[bool] = (False, True),
    drafted: bool = True,
    draft_vocab: int | None = None,
    draft_stats: bool = False,
    allowed: bool = False,
    edits: bool = False,
    draft_edits: bool = False,
    kept: int | None = None,
    flat: bool = False,
    max_draft: int = 15,
    nodes: int = 64,
    device: torch.device | str = "cuda",
    backend: Backend | None = None,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Call an op once for each kernel that a configuration can need: later calls compile and load nothing.

    A kernel knows dtypes, the rule, whether there are filters, a mask, edits, draft rows, and the layout; it knows
    neither the batch, nor the number of drafts (but for the next power of two), nor which sampling parameters are
    given. Ids and parents may be int64 or int32, and nobody need draft. Call it before the first request and before a
    graph is captured; it waits for the device.

    Args:
        op: ``"sample"``, ``"token_logprobs"``, ``"verify_chain"``, ``"verify_tree"``, ``"acceptance_ratios"``,
            ``"residual_probs"`` or ``"residual_sample"``.
        vocab: size of the target's vocabulary. Tensors begin at multiples of 16 bytes, as torch allocates them.
        dtypes: of the logits.
        rules: of `verify_chain` or `verify_tree`; by default the op's own default rule.
        filters: whether requests come with top-k, top-p or min-p: ``(False, True)`` is both.
        drafted: draft rows are given, where the op and its rule take any.
        draft_vocab: of the drafter, if it is not the target's: a `token_map` is given. `sample` then draws from rows of
            this size, without a mask and edits.
        draft_stats: they are given with the draft rows, see `verify_chain`.
        allowed: a mask of the vocabulary is given.
        edits: edits of the target rows (of `sample` and `token_logprobs`: of their rows) are given.
        draft_edits: edits of the draft rows are given, where there are any.
        kept: draft rows of `verify_chain` and `verify_tree` are `SparseRows` of so many candidates, with int64 ids.
        flat: chains come with `cu_draft`.
        max_draft: longest draft of a chain.
        nodes: largest tree.
        device: where the tensors live.
        backend: see `verify_chain`.
        report: is called with a line for each call.
        options: passed to the op: ``logprobs``, ``top``, ``purpose``, ``num_samples``, ``rejected_from``,
            ``replacement``, ``exclude_ids`` (of one row).

    Raises:
        ValueError: arguments that the op refuses.
        RuntimeError: a call failed; its message says which.

    Example:
        >>> from specdec_kernels import warmup
        >>> warmup("verify_chain", vocab=1000, rules=("ratio", "match"), max_draft=5, device="cpu")
    """
    if op not in _OPS:
        fail("warmup", "op", "one of " + ", ".join(map(repr, _OPS)), repr(op))
    if rules is not None and op not in ("verify_chain", "verify_tree"):
        fail("warmup", "rules", f"None for {op}", rules)
    if kept is not None and (op not in ("verify_chain", "verify_tree") or draft_vocab is not None or draft_edits):
        fail("warmup", "kept", "None but for verify_chain and verify_tree, without draft_vocab and draft_edits", kept)
    for name, value in (("vocab", vocab), ("max_draft", max_draft), ("nodes", nodes)):
        if not isinstance(value, int) or value < (name != "max_draft"):
            fail("warmup", name, f"an int >= {int(name != 'max_draft')}", repr(value))
    if rules is not None:
        _check_sequence("rules", rules, str, '("ratio",)')
    _check_sequence("dtypes", dtypes, torch.dtype, "(torch.bfloat16,)")
    _check_sequence("filters", filters, bool, "(False, True)")
    place, takes_drafts = torch.device(device), op not in _OF_ONE_TABLE
    if place.type == "cuda" and not torch.cuda.is_available():
        fail("warmup", "device", 'one that torch has (device="cpu" warms up this machine)', repr(str(device)))
    if op == "sample":
        options.setdefault("purpose", "target")
    if op == "token_logprobs":
        options.setdefault("logprobs", "processed")
    ids = _ID_DTYPES[:1] if op in _INT64_ALONE else _ID_DTYPES
    kinds = itertools.product(ids, _ID_DTYPES if op == "verify_tree" else ids[:1])
    for (dtype, rule), kind in itertools.product(itertools.product(dtypes, rules or (None,)), kinds):
        drafts = drafted and takes_drafts and rule not in ("match", "greedy", "typical", "topm", "distance")
        drafts = drafts and rule != "target_only"
        columns = (draft_vocab or vocab) if drafts else draft_vocab if op == "sample" else None
        rows = _Rows(
            vocab, columns, dtype, draft_stats and drafts, allowed, edits, draft_edits and drafts, kept, flat, place,
            *kind,
        )  # fmt: skip
        draft_filters = filters if drafts and kept is None else filters[:1] if kept is None else (False,)
        pairs = list(itertools.product(filters, draft_filters))
        if set(kind) != {torch.int64}:  # kernels that read ids or parents do not know of filters
            pairs = pairs[:1]
        for inputs in _inputs(op, rows, max_draft, nodes):
            for target, draft in pairs:
                named = dict(inputs, **options)
                if rule is not None:
                    named["rule"] = rule
                named |= _requests(op, place, target, draft if takes_drafts else None)
                words = [op, *([rule] if rule else []), str(dtype).removeprefix("torch.")]
                words += [word for word, on in (("filters", target), ("draft filters", draft and drafts)) if on]
                _call(op, named, backend, " ".join(words), report)
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _check_sequence(name: str, values: Any, kind: type, example: str) -> None:
    is_full = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    if not (is_full and all(isinstance(value, kind) for value in values)):
        fail("warmup", name, f"a sequence of {kind.__name__}, such as {example}", repr(values))


def _requests(op: str, device: torch.device, filters: bool, draft_filters: bool | None) -> dict[str, Any]:
    """Sampling parameters and random numbers of the one request."""

    def sampling(filtered: bool) -> Sampling:
        given = {"top_k": 2, "top_p": 0.9, "min_p": 0.01} if filtered else {}
        return Sampling.full(1, temperature=0.7, device=device, **given)  # type: ignore[arg-type]

    named: dict[str, Any] = {"sampling": sampling(filters)}
    if draft_filters is not None:
        named["draft_sampling"] = sampling(draft_filters)
    if op not in ("acceptance_ratios", "residual_probs", "token_logprobs"):
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        named["rng"] = RngKey(zero, zero, zero)
    return named


def _call(op: str, named: dict[str, Any], backend: Backend | None, what: str, report: Any) -> None:
    begin = time.perf_counter()
    try:
        with torch.no_grad():
            _OPS[op](**named, backend=backend)
    except ValueError:
        raise
    except Exception as error:
        raise RuntimeError(f"warmup: {what} failed: {error}") from error
    if report is not None:
        report(f"{what}: {time.perf_counter() - begin:.2f} s")
