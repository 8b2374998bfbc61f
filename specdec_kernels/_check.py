"""Argument checks: a ValueError that names op, argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from ._edits import BLOCK, MAX_VOCAB, Edits, RowEdits, TokenCounts
from ._sparse import MAX_KEPT, SparseRows
from ._types import Kept, RngKey, Sampling, Typical

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ID_DTYPES = (torch.int32, torch.int64)
SAMPLING_FIELDS = Sampling._fields
SAMPLING_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.bool)
NO_SAMPLING, NO_ROW_EDITS, NO_KEPT = Sampling(), RowEdits(), Kept()  # made once: many calls have none
SIZE_BITS = 40  # of a result's axis
MAX_NODES = 1024  # of a tree: one block's threads


def fail(op: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise the one kind of error that wrong arguments give."""
    raise ValueError(f"{op}: {argument} must be {expected}, got {got}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _fits(have: Sequence[int], want: Sequence[int | str]) -> bool:
    if have == want:
        return True
    if len(have) != len(want):
        return False
    for i, size in enumerate(want):  # noqa: SIM110 - twice as fast as all(), and it runs for every tensor of a call
        if have[i] != size and not isinstance(size, str):
            return False
    return True


# Fields of Edits: dtype, and shape behind the batch.
_EDITS: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "bias_ids": (torch.int32, ("n",)),
    "bias": (torch.float32, ("n",)),
    "repetition": (torch.float32, ()),
    "frequency": (torch.float32, ()),
    "presence": (torch.float32, ()),
    "slots": (torch.int32, ()),
    "stop_ids": (torch.int32, ("n",)),
    "min_tokens": (torch.int32, ()),
    "bad_words": (torch.int32, ("words", "length")),
    "tail": (torch.int32, ("tokens",)),
}


class Checker:
    """Checks the arguments of one call; every tensor must live where the first one does.

    A check is one condition; what is wrong is found out after it failed.
    """

    __slots__ = ("device", "op")

    def __init__(self, op: str, device: torch.device) -> None:
        """Remember the op's name for messages and the device that all tensors share."""
        self.op = op
        self.device = device

    @classmethod
    def of(cls, op: str, name: str, value: Any, kind: str) -> Checker:
        """A checker on the device of this argument, which is a tensor."""
        if not isinstance(value, Tensor):
            fail(op, name, f"a tensor {kind}", type(value).__name__)
        return cls(op, value.device)

    def tensor(
        self, name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[int | str], axes: str = ""
    ) -> Tensor:
        """A tensor of one of `dtypes`; `shape` may name free axes by a string.

        `axes` names those of rows with bonus rows, for the message where some are missing.
        """
        if (
            isinstance(value, Tensor)
            and value.dtype in dtypes
            and value.device == self.device
            and _fits(value.shape, shape)
        ):
            return value
        self._refuse(name, value, dtypes, shape, axes)

    def vector(self, name: str, value: Any, dtypes: Sequence[torch.dtype], length: int) -> Tensor:
        """A dense vector, read with stride 1 by the kernels."""
        if self._is_dense(value, dtypes, (length,)):
            return value
        self._refuse(name, value, dtypes, (length,))

    def _is_dense(self, value: Any, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]) -> TypeGuard[Tensor]:
        return (
            isinstance(value, Tensor)
            and value.dtype in dtypes
            and value.device == self.device
            and value.shape == shape
            and value.is_contiguous()
        )

    def _refuse(
        self, name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[int | str], axes: str = ""
    ) -> NoReturn:
        """Say which of the conditions on a tensor does not hold."""
        if not isinstance(value, Tensor):
            fail(self.op, name, f"a tensor of {_names(dtypes)}", type(value).__name__)
        if value.dtype not in dtypes:
            fail(self.op, name, _names(dtypes), str(value.dtype).removeprefix("torch."))
        if value.device != self.device:
            fail(self.op, name, f"on {self.device}", value.device)
        if axes and value.shape[:-1] != shape[:-1] and value.dim() == len(shape):
            expected, got = f"{axes} = {[*shape[:-1], value.shape[-1]]}", list(value.shape)
            fail(self.op, name, expected, f"{got}: each request's last row is the bonus row, after its drafts")
        if not _fits(value.shape, shape):
            fail(self.op, name, f"[{', '.join(map(str, shape))}]", list(value.shape))
        fail(self.op, name, "dense (call .contiguous())", f"stride {value.stride(0)}")

    def logits(self, name: str, value: Any, shape: Sequence[int | str], axes: str = "") -> int:
        """Vocabulary of raw logits: float, last dimension dense, no gradient wanted."""
        rows = self.tensor(name, value, LOGIT_DTYPES, shape, axes)
        vocab = rows.shape[-1]
        if not 0 < vocab <= MAX_VOCAB:
            fail(self.op, name, f"of a vocabulary of 1 to {MAX_VOCAB} ids", list(rows.shape))
        stride = rows.stride()[-1]  # 50 ns less than stride(-1)
        if vocab > 1 and stride != 1:
            fail(self.op, name, "dense in its last dimension (call .contiguous())", f"stride {stride}")
        if rows.requires_grad and torch.is_grad_enabled():
            fail(self.op, name, "without gradient: the ops are inference only (use torch.no_grad())", "requires_grad")
        return vocab

    def sampling(self, name: str, value: Any, batch: int) -> Sampling:
        """A Sampling whose tensors are all [batch]."""
        if not isinstance(value, Sampling):
            fail(self.op, name, "a Sampling (see Sampling.full)", type(value).__name__)
        parts: tuple[Any, ...] = value
        for i, part in enumerate(parts):
            if part is not None and not self._is_dense(part, (SAMPLING_DTYPES[i],), (batch,)):
                self._refuse_parameter(name, i, part, batch)
        return value

    def _refuse_parameter(self, name: str, place: int, part: Any, batch: int) -> NoReturn:
        field, dtype = SAMPLING_FIELDS[place], SAMPLING_DTYPES[place]
        if not isinstance(part, Tensor):
            made = f"Sampling.full({batch}, {field}={part!r}) makes it"
            if dtype == torch.bool:
                made = "False for a request that only pads the batch"
            fail(self.op, f"{name}.{field}", f"a tensor of {_names((dtype,))} [{batch}] ({made})", part)
        self._refuse(f"{name}.{field}", part, (dtype,), (batch,))

    def draft_sampling(self, value: Any, batch: int) -> Sampling:
        """The draft's Sampling; which requests are active is the target's to say."""
        if value is None:
            return NO_SAMPLING
        checked = self.sampling("draft_sampling", value, batch)
        return checked if checked.active is None else checked._replace(active=None)

    def rng(self, value: Any, batch: int) -> RngKey:
        """A RngKey whose tensors are all int64 [batch]."""
        if not isinstance(value, RngKey):
            fail(self.op, "rng", "an RngKey(seed, position, step=None)", type(value).__name__)
        dtypes, shape = (torch.int64,), (batch,)
        parts: tuple[Any, ...] = value
        for i, part in enumerate(parts):
            if not self._is_dense(part, dtypes, shape) and (part is not None or i < 2):
                self._refuse(f"rng.{RngKey._fields[i]}", part, dtypes, shape)
        return value

    def dense(self, name: str, value: Any, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> Tensor:
        """A contiguous tensor."""
        tensor = self.tensor(name, value, dtypes, shape)
        if not tensor.is_contiguous():
            fail(self.op, name, "contiguous (call .contiguous())", f"strides {list(tensor.stride())}")
        return tensor

    def allowed(self, value: Any, rows: int, vocab: int) -> Tensor | None:
        """Packed bits, one row per target row, as grammar engines make them."""
        if value is None:
            return None
        words = (vocab + 31) // 32
        bits = self.tensor("allowed", value, (torch.int32,), (rows, words))
        if words > 1 and bits.stride(-1) != 1:
            fail(self.op, "allowed", "dense in its last dimension", f"stride {bits.stride(-1)}")
        return bits

    def edits(self, name: str, value: Any, rows: int, vocab: int, batch: int | None = None) -> RowEdits | Edits:
        """What `edit_rows` returned for as many rows as wide; with `batch` also what each request asks for."""
        if value is None:
            return NO_ROW_EDITS
        if batch is not None and isinstance(value, Edits):
            return self.request_edits(name, value, batch)
        if not isinstance(value, RowEdits) or None in value[:1]:
            fail(self.op, name, "the RowEdits that edit_rows returned", type(value).__name__)
        words = (vocab + BLOCK - 1) // BLOCK
        self.dense(f"{name}.edit_bits", value.edit_bits, (torch.int64,), (rows, words))
        self.dense(f"{name}.edit_start", value.edit_start, (torch.int32,), (rows, words + 1))
        self.dense(f"{name}.edit_values", value.edit_values, (torch.float32,), (4, rows, "room"))
        return value

    def request_edits(self, name: str, value: Edits, batch: int) -> Edits:
        """What each request of a batch asks for."""
        for field, (dtype, shape) in _EDITS.items():
            part = getattr(value, field)
            if part is not None:
                self.dense(f"{name}.{field}", part, (dtype,), (batch, *shape))
        for one, other in (("bias_ids", "bias"), ("stop_ids", "min_tokens")):
            if (getattr(value, one) is None) != (getattr(value, other) is None):
                missing = one if getattr(value, one) is None else other
                fail(self.op, f"{name}.{missing}", f"given: {one} and {other} go together", None)
        if value.bias_ids is not None and value.bias is not None and value.bias_ids.shape != value.bias.shape:
            fail(self.op, f"{name}.bias", f"{list(value.bias_ids.shape)}, one for each id", list(value.bias.shape))
        if value.bad_words is not None:
            words, length = value.bad_words.shape[1:]
            if length == 0:
                fail(self.op, f"{name}.bad_words", "[batch, words, length] with length >= 1", [batch, words, length])
            tail = 0 if value.tail is None else value.tail.shape[1]
            if tail < length - 1:
                fail(self.op, f"{name}.tail", f"[batch, {length - 1}] or more: what stands before a bad word", tail)
        self.token_counts(f"{name}.counts", value.counts)
        if value.counts.token_ids is not None and value.slots is None and value.counts.token_ids.shape[0] < batch:
            fail(self.op, f"{name}.slots", "given where counts has fewer slots than requests", None)
        return value

    def token_counts(self, name: str, value: Any) -> None:
        """Both tensors of TokenCounts, or neither."""
        if not isinstance(value, TokenCounts):
            fail(self.op, name, "a TokenCounts (see TokenCounts.empty)", type(value).__name__)
        if value.token_ids is None and value.token_counts is None:
            return
        ids = self.dense(f"{name}.token_ids", value.token_ids, (torch.int32,), ("slots", "capacity"))
        self.dense(f"{name}.token_counts", value.token_counts, (torch.int32,), tuple(ids.shape))
        capacity = ids.shape[1]
        if capacity == 0 or capacity & (capacity - 1):
            fail(self.op, f"{name}.token_ids", "[slots, a power of two] (see TokenCounts.empty)", list(ids.shape))

    def draft_edits(
        self, value: Any, draft_logits: Tensor | None, rows: int, token_map: Tensor | None, batch: int | None = None
    ) -> RowEdits | Edits:
        """`edits` of draft rows, whose columns must be ids."""
        if value is None:
            return NO_ROW_EDITS
        if draft_logits is None:
            fail(self.op, "draft_logits", "given with draft_edits", None)
        if token_map is not None:
            got = type(value).__name__
            fail(self.op, "draft_edits", "None where token_map is given: edits name ids, not columns", got)
        return self.edits("draft_edits", value, rows, draft_logits.shape[-1], batch)

    def choice(self, name: str, value: Any, options: Any) -> Any:
        """The code of a named option."""
        if not isinstance(value, (str, type(None))) or value not in options:
            fail(self.op, name, "one of " + ", ".join(repr(o) for o in options), repr(value))
        return options[value]

    def token_map(self, value: Any, draft_vocab: int, vocab: int) -> Tensor | None:
        """Target id of each draft column; without it both vocabularies must be the same."""
        if value is None:
            if draft_vocab != vocab:
                fail(self.op, "token_map", f"given where draft_vocab ({draft_vocab}) is not vocab ({vocab})", None)
            return None
        return self.dense("token_map", value, (torch.int32,), (draft_vocab,))

    def sparse(
        self, value: SparseRows, shape: tuple[int | str, ...], drafted: Sampling | None, refused: dict[str, Any]
    ) -> tuple[Tensor, Kept]:
        """(logits, what else is kept) of candidates `shape` + [k]; `refused`: arguments that only dense rows know."""
        logits = value.logits
        if self.logits("draft_logits.logits", logits, (*shape, "k")) > MAX_KEPT:
            fail(self.op, "draft_logits.logits", f"[..., k] with k of at most {MAX_KEPT}", list(logits.shape))
        self.dense("draft_logits.logits", logits, LOGIT_DTYPES, logits.shape)
        ids = self.dense("draft_logits.ids", value.ids, ID_DTYPES, logits.shape)
        logsumexp = self.dense("draft_logits.logsumexp", value.logsumexp, (torch.float32,), logits.shape[:-1])
        for name, argument in refused.items():
            if argument is not None:
                fail(self.op, name, "None where draft_logits are SparseRows, of target ids", type(argument).__name__)
        if isinstance(drafted, Sampling) and drafted.has_filters:
            hint = "a temperature alone where draft_logits are SparseRows: what is kept is what filters left"
            fail(self.op, "draft_sampling", hint, "top_k, top_p or min_p")
        return logits, Kept(ids, logsumexp)

    def chain_ids(self, draft_ids: Tensor, cu_draft: Any, max_draft: Any) -> tuple[int, int]:
        """(batch, longest draft) of dense or flat drafts."""
        if cu_draft is None:
            self.dense("draft_ids", draft_ids, ID_DTYPES, ("batch", "draft"))
            batch, width = draft_ids.shape
            if max_draft not in (None, width):
                fail(self.op, "max_draft", f"{width} (or left out) for dense draft_ids", repr(max_draft))
            return batch, width
        self.dense("draft_ids", draft_ids, ID_DTYPES, ("total",))
        self.dense("cu_draft", cu_draft, (torch.int32,), ("batch + 1",))
        if cu_draft.shape[0] == 0:
            fail(self.op, "cu_draft", "[batch + 1] with a leading 0", [0])
        if max_draft is None:
            fail(self.op, "max_draft", "given with cu_draft, a host int >= 0", None)
        return cu_draft.shape[0] - 1, self.size("max_draft", max_draft, 0, SIZE_BITS)

    def chain_rows(
        self, name: str, value: Any, draft_ids: Tensor, cu_draft: Tensor | None, width: int, *, bonus: bool
    ) -> int:
        """Vocabulary of the rows that belong to draft_ids, one more a request if `bonus`."""
        shape: tuple[int | str, ...]
        more = 1 if bonus else 0  # torch.compile (2.11) cannot add a truth to a size that it does not know
        if cu_draft is None:
            shape, axes = (draft_ids.shape[0], width + more, "vocab"), "[batch, draft + 1, vocab]"
        else:
            shape, axes = (draft_ids.shape[0] + more * (cu_draft.shape[0] - 1), "vocab"), "[total + batch, vocab]"
        return self.logits(name, value, shape, axes if bonus else "")

    def parents(self, value: Any) -> tuple[int, int]:
        """(batch, nodes) of trees given by their parents."""
        self.dense("parents", value, ID_DTYPES, ("batch", "nodes"))
        batch, nodes = value.shape
        if not 1 <= nodes <= MAX_NODES:
            fail(self.op, "parents", f"[batch, nodes] with 1 (the root) to {MAX_NODES} nodes", list(value.shape))
        return batch, nodes

    def size(self, name: str, value: Any, least: int, bits: int = 63) -> int:
        """A host int < ``2**bits``; of a result's axis SIZE_BITS, so that its shape does not overflow."""
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**bits:
            is_large = isinstance(value, int) and value > max(least, 1)
            fail(self.op, name, f"a host int < 2^{bits}" if is_large else f"a host int >= {least}", repr(value))
        return value

    def knob(self, name: str, value: Any, batch: int, most: float = float("inf")) -> tuple[float, Tensor | None]:
        """A parameter of a rule: (that of all requests, or those of each)."""
        if isinstance(value, Tensor):
            return 0.0, self.vector(name, value, (torch.float32,), batch)
        if not isinstance(value, (int, float)) or not 0 <= value <= most:
            fail(self.op, name, f"a number in [0, {most:g}] or float32 [batch]", repr(value))
        return float(value), None

    def typical(self, epsilon: Any, delta: Any, batch: int) -> Typical:
        """Thresholds of rule `typical`."""
        own_epsilon, epsilons = self.knob("typical_epsilon", epsilon, batch)
        own_delta, deltas = self.knob("typical_delta", delta, batch)
        return Typical(own_epsilon, own_delta, epsilons, deltas)

    def lanes(self, value: Any, batch: int) -> Tensor | None:
        """Lane of each request; None for 0."""
        if isinstance(value, Tensor):
            return self.vector("lane", value, (torch.int64,), batch)
        if not isinstance(value, int) or not 0 <= value < 2**30:
            fail(self.op, "lane", "an int in [0, 2^30) or int64 [batch]", repr(value))
        return torch.full((batch,), value, dtype=torch.int64, device=self.device) if value else None

    def weight(self, name: str, value: Any, batch: int) -> Tensor:
        """A weight of the residual as float32 [batch]."""
        if isinstance(value, Tensor):
            return self.vector(name, value, (torch.float32,), batch)
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            fail(self.op, name, "a finite float >= 0 or float32 [batch]", repr(value))
        return torch.full((batch,), float(value), dtype=torch.float32, device=self.device)


def outputs(op: str, out: Any, kind: Any, name: str, dtype: torch.dtype, *, is_wanted: bool) -> Any:
    """Tensors given for the results: an empty one in place of the result `name` where it is missing or not wanted."""
    if out is None:
        return None
    if not isinstance(out, kind):
        fail(op, "out", f"a {kind.__name__}", type(out).__name__)
    given = getattr(out, name) if is_wanted else None
    if not isinstance(out.status, Tensor):
        fail(op, "out.status", "a tensor", type(out.status).__name__)
    return tuple(out._replace(**{name: out.status.new_empty(0, dtype=dtype) if given is None else given}))
