"""Calls of our Triton launchers whose kernels are compiled: each rule bare, masked and with filters, each other op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_kernels  # noqa: F401 - declares the ops
from specdec_kernels._op import OPS

DRAFT, NODES, SMALL, KEPT = 5, 1024, 64, 64
TYPICAL = (0.3, 0.3, None, None)  # thresholds
VOCABULARIES = (32000, 128256, 151936, 262144)
BF16, FP32 = torch.bfloat16, torch.float32
RULES = ("ratio", "block", "match", "greedy", "typical", "topm", "distance")
TREE_RULES = ("match", "greedy", "typical", "recursive", "greedy_multi_draft", "target_only", "traversal")


class Size(NamedTuple):
    """Of a call."""

    batch: int
    vocab: int

    def logits(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """No memory is touched; a stride of 0 allows 16-byte loads, as that of a dense tensor of such a width."""
        return torch.zeros((), dtype=dtype).expand(self.batch, *shape, self.vocab)

    def bits(self, rows: int) -> Tensor:
        """A mask of the vocabulary."""
        return torch.zeros(1, dtype=torch.int32).expand(self.batch * rows, -(-self.vocab // 32))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """[batch, *shape]."""
        return torch.zeros(self.batch, *shape, dtype=dtype)

    def edits(self, rows: int, given: bool = True) -> tuple[Tensor | None, ...]:
        """(bits, start, values) of edited rows."""
        words, count = -(-self.vocab // 64), self.batch * rows
        bits, start = torch.zeros(1, words, dtype=torch.int64), torch.zeros(1, words + 1, dtype=torch.int32)
        return (bits.expand(count, -1), start.expand(count, -1), torch.zeros(4, count, SMALL)) if given else (None,) * 3

    @property
    def longs(self) -> Tensor:
        """int64 [batch]."""
        return self.zeros()

    @property
    def ints(self) -> Tensor:
        """int32 [batch]."""
        return self.zeros(dtype=torch.int32)

    @property
    def numbers(self) -> Tensor:
        """float32 [batch]."""
        return self.zeros(dtype=FP32)

    def kept(self, given: bool, *shape: int) -> tuple[Tensor | None, Tensor | None]:
        """Candidates of draft rows: (ids, logsumexp)."""
        return (self.zeros(*shape, KEPT), self.zeros(*shape, dtype=FP32)) if given else (None, None)

    def filters(self, given: bool) -> tuple[Tensor | None, ...]:
        """(top_k, top_p, min_p, active)."""
        return (self.ints, self.numbers, self.numbers, None) if given else (None, None, None, None)


class Case(NamedTuple):
    """A call of one op. `rows`: rows of logits a request that it must read; 0 where rows are not its work."""

    op: str
    what: str
    call: Callable[[Size], None]
    rows: int = 0
    filters: bool = False

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.op} {self.what}".strip()


def _launcher(op: str) -> Any:
    """The backend of an op: its flat arguments, then the results."""
    return OPS[op]._triton_out


def _chain(
    rule: str, dtype: torch.dtype, filters: bool = False, mask: bool = False, stats: bool = False, edits: bool = False,
    kept: bool = False,
) -> Case:  # fmt: skip
    drafts, mode = rule in ("ratio", "block"), int(filters) + int(stats)

    def call(s: Size) -> None:
        rows = s._replace(vocab=KEPT) if kept else s
        given, made = s.filters(filters), s.zeros(DRAFT, dtype=FP32) if stats else None
        _launcher("verify_chain")(
            s.zeros(DRAFT), s.logits(dtype, DRAFT + 1), rows.logits(dtype, DRAFT) if drafts else None, made, made, None,
            DRAFT, s.numbers, *given, s.numbers, *given, s.longs, s.longs, s.longs, RULES.index(rule), 0.0, None, False,
            None, *s.kept(kept, DRAFT), s.bits(DRAFT + 1) if mask else None, *s.edits(DRAFT + 1, edits),
            *s.edits(DRAFT + 1, edits and drafts), *TYPICAL, 3, 1, 1, mode, s.zeros(DRAFT + 1), s.ints, s.ints,
            s.zeros(DRAFT + 1, dtype=FP32),
        )  # fmt: skip

    words = [rule, "bf16" if dtype == BF16 else "fp32"]
    flags = (("mask", mask), ("edits", edits), ("stats", stats), ("filters", filters), ("kept", kept))
    words += [word for word, on in flags if on]
    return Case("verify_chain", " ".join(words), call, 2 * DRAFT + 1 if drafts and not stats else DRAFT + 1, filters)


def _sample(
    dtype: torch.dtype, filters: bool, count: int = 1, mapped: bool = False, mode: int = 1, edits: bool = False
) -> Case:
    def call(s: Size) -> None:
        token_map = torch.zeros(s.vocab, dtype=torch.int32) if mapped else None
        _launcher("sample")(
            s.logits(dtype), s.numbers, *s.filters(filters), s.longs, s.longs, s.longs, 3, count, s.longs, None,
            token_map, s.bits(1) if mapped else None, *s.edits(1, edits), mode, s.zeros(count),
            s.zeros(count, dtype=FP32), s.numbers, s.numbers, s.ints,
        )  # fmt: skip

    words = ["bf16" if dtype == BF16 else "fp32", "mask map 8 raw" * mapped, "edits" * edits, "filters" * filters]
    return Case("sample", " ".join(filter(None, words)), call, 1, filters)


def _token_logprobs(dtype: torch.dtype, filters: bool, top: int = 20, mask: bool = False, edits: bool = False) -> Case:
    def call(s: Size) -> None:
        _launcher("token_logprobs")(
            s.logits(dtype), s.longs, top, s.numbers, *s.filters(filters), s.bits(1) if mask else None,
            *s.edits(1, edits), s.numbers, s.ints, s.zeros(top), s.zeros(top, dtype=FP32), s.ints,
        )  # fmt: skip

    words = ["bf16" if dtype == BF16 else "fp32", "rank" * (top == 0), "mask" * mask, "edits" * edits]
    return Case("token_logprobs", " ".join(filter(None, [*words, "filters" * filters])), call, 1, filters)


def _acceptance_ratios(filters: bool, edits: bool = False) -> Case:
    def call(s: Size) -> None:
        given = s.filters(filters)
        _launcher("acceptance_ratios")(
            s.zeros(DRAFT), s.logits(BF16, DRAFT + 1), s.logits(BF16, DRAFT), None, DRAFT, s.numbers, *given,
            s.numbers, *given, None, None, *s.edits(DRAFT + 1, edits), *s.edits(DRAFT + 1, edits),
            s.zeros(DRAFT, dtype=FP32), s.zeros(DRAFT, dtype=FP32), s.ints,
        )  # fmt: skip

    return Case("acceptance_ratios", "bf16" + " edits" * edits + " filters" * filters, call, 2 * DRAFT, filters)


def _residual(op: str, filters: bool, mapped: bool = False, edits: bool = False) -> Case:
    def call(s: Size) -> None:
        given, token_map = s.filters(filters), torch.zeros(s.vocab, dtype=torch.int32) if mapped else None
        common = (
            s.logits(BF16), s.logits(BF16), s.numbers, s.numbers, s.numbers, *given, s.numbers, *given, token_map,
            None, *s.edits(1, edits), *s.edits(1, edits), s.longs,
        )  # fmt: skip
        if op == "residual_probs":
            _launcher(op)(*common, torch.empty(s.batch, s.vocab), s.numbers, s.ints)
        else:
            _launcher(op)(*common, s.longs, s.longs, s.longs, 2, s.longs, s.numbers, s.ints)

    return Case(op, "bf16" + " edits" * edits + " filters" * filters + " map" * mapped, call, 2, filters)


def _tree(
    rule: str, nodes: int = SMALL, dtype: torch.dtype = BF16, filters: bool = False, edits: bool = False,
    kept: bool = False,
) -> Case:  # fmt: skip
    drafts = rule in ("recursive", "greedy_multi_draft", "traversal")

    def call(s: Size) -> None:
        ids, path, given = s.zeros(nodes), s.zeros(2), s.filters(filters)
        rows = s._replace(vocab=KEPT) if kept else s
        _launcher("verify_tree")(
            ids, ids.int(), s.logits(dtype, nodes), rows.logits(dtype, nodes) if drafts else None, 1, s.numbers, *given,
            s.numbers, *given, s.longs, s.longs, s.longs, TREE_RULES.index(rule), False, None,
            *s.kept(kept, nodes), None, *s.edits(nodes, edits), *s.edits(nodes, edits and drafts), *TYPICAL,
            int(filters), path, path, s.ints, s.ints, s.zeros(2, dtype=FP32),
        )  # fmt: skip

    words = [rule, "bf16" if dtype == BF16 else "fp32"] + ["1024"] * (nodes == NODES)
    words += ["edits"] * edits + ["filters"] * filters + ["kept"] * kept
    return Case("verify_tree", " ".join(words), call)


def _edit_rows(what: str) -> Case:
    def call(s: Size) -> None:
        s = s._replace(vocab=VOCABULARIES[1])
        lists, numbers = s.zeros(4, dtype=torch.int32), s.zeros(4, dtype=FP32)
        tables, words = s.zeros(NODES, dtype=torch.int32), s.zeros(4, 3, dtype=torch.int32)
        ids = {"flat": s.longs.repeat(DRAFT), "tree": s.zeros(DRAFT + 1)}.get(what, s.zeros(DRAFT))
        parents = s.zeros(DRAFT + 1, dtype=torch.int32) if what == "tree" else None
        cu = torch.zeros(s.batch + 1, dtype=torch.int32) if what == "flat" else None
        _launcher("edit_rows")(
            s.batch, s.vocab, ids, parents, cu, DRAFT, False, lists, numbers, s.numbers, s.numbers, s.numbers, tables,
            tables, s.ints, lists, s.ints, words, lists, None, 0, *s.edits(DRAFT + 1),
        )  # fmt: skip

    return Case("edit_rows", what, call)


def _count_tokens(s: Size) -> None:
    tables = s.zeros(NODES, dtype=torch.int32)
    _launcher("count_tokens")(tables, tables, s.zeros(DRAFT + 1), s.ints, 2, s.ints)


def _allocate_drafts(s: Size) -> None:
    ids, capacity = s.zeros(DRAFT), s.batch * DRAFT
    flat, numbers = torch.zeros(capacity, dtype=torch.int64), torch.zeros(capacity + 1)
    kept = torch.zeros(capacity, dtype=torch.int32)
    _launcher("allocate_drafts")(
        ids, s.zeros(DRAFT, dtype=FP32), None, numbers, capacity, False,
        flat, torch.zeros(s.batch + 1, dtype=torch.int32), kept, s.ints, s.ints,
    )  # fmt: skip


def _cache(op: str, what: str, paged: bool, more: Callable[[Size], tuple[Any, ...]], *dims: int) -> Case:
    def call(s: Size) -> None:
        views = [torch.zeros(s.batch, 16, 8, dim, dtype=torch.uint8) for dim in (dims or (256,)) * 2]
        table = s.zeros(4, dtype=torch.int32) if paged else None
        _launcher(op)(views, torch.zeros(len(views), 5, dtype=torch.int64), table, 16, s.batch, *more(s))

    return Case(op, what, call)


def _path(s: Size, columns: int) -> tuple[Tensor, ...]:
    return s.longs.repeat(columns, 1).T.contiguous(), s.ints, s.longs, s.ints


def _gather_nodes(s: Size) -> None:
    values = s.zeros(DRAFT, 8192, dtype=torch.uint8)
    _launcher("gather_nodes")(values, s.zeros(DRAFT), values, s.ints)


def _advance_state(dtype: torch.dtype, gates: str) -> Callable[[Size], None]:
    def call(s: Size) -> None:
        state = torch.zeros(2, s.batch, 4, 128, 128, dtype=dtype)
        keys, gate = torch.zeros(2, s.batch, DRAFT, 4, 128, dtype=BF16), torch.zeros(2, s.batch, DRAFT, 4)
        decay = torch.zeros(*gate.shape, 128) if gates == "channel" else gate
        is_tree = gates == "channel"
        path, beta = s.zeros(DRAFT) if is_tree else None, None if gates == "plain" else gate
        _launcher("advance_state")(state, keys, keys, decay, beta, s.ints, path, s.ints if is_tree else None, s.ints)

    return call


def _advance_window(dtype: torch.dtype, is_tree: bool) -> Callable[[Size], None]:
    def call(s: Size) -> None:
        windows, inputs = torch.zeros(2, s.batch, 512, 3, dtype=dtype), torch.zeros(2, s.batch, DRAFT, 512, dtype=dtype)
        path = s.zeros(DRAFT) if is_tree else None
        _launcher("advance_window")(windows, inputs, s.ints, path, s.ints if is_tree else None, s.ints)

    return call


def _tree_layout(nodes: int) -> Callable[[Size], None]:
    def call(s: Size) -> None:
        # A view of a wider tensor, as a launcher gets it.
        tree, longs = s.zeros(NODES, dtype=torch.int32)[:, :nodes], s.zeros(NODES)[:, :nodes]
        words = s.zeros(nodes, nodes // 32, dtype=torch.int32)
        _launcher("tree_layout")(tree, s.longs, 31, nodes, tree, longs, tree, tree, words, words, s.ints)

    return call


def _tree_mask(what: str, format: int, dtype: torch.dtype, shape: Callable[[int], tuple[int, ...]]) -> Case:
    def call(s: Size) -> None:
        mask = torch.empty(shape(s.batch), dtype=dtype)
        _launcher("tree_mask")(
            s.zeros(NODES, dtype=torch.int32), s.longs, s.longs, 7, mask.shape[-1], format, dtype, mask,
            torch.zeros(s.batch + 1).long(), s.ints,
        )  # fmt: skip

    return Case("tree_mask", what, call)


def _tree_attention(
    what: str, dtype: torch.dtype, nodes: int, dim: int, paged: bool, *,
    is_latent: bool = False, float8: torch.dtype | None = None,
) -> Case:  # fmt: skip
    def call(s: Size) -> None:
        heads, value_dim = (1, dim - 64) if is_latent else (8, dim)
        key, value = (s.zeros(16, heads, size, dtype=float8 or dtype) for size in (dim, value_dim))
        scales = [None, None] if float8 is None else [torch.ones(heads)] * 2
        _launcher("tree_attention")(
            torch.empty(s.batch, nodes, 32, dim, dtype=dtype), key, key[..., :value_dim] if is_latent else value,
            s.zeros(nodes, -(-nodes // 32), dtype=torch.int32), s.longs,
            s.zeros(64, dtype=torch.int32) if paged else None, 0.1, 7 if paged else 0, *scales,
            torch.empty(s.batch, nodes, 32, value_dim, dtype=dtype), torch.empty(s.batch, nodes, 32), s.ints,
        )  # fmt: skip

    return Case("tree_attention", what, call)


def _select_tree(nodes: int) -> Callable[[Size], None]:
    def call(s: Size) -> None:
        ids, tree = s.zeros(NODES)[:, :nodes], s.zeros(NODES, dtype=torch.int32)[:, :nodes]
        _launcher("select_tree")(ids, tree, s.zeros(nodes, dtype=BF16), nodes // 2, ids, tree, tree, s.ints)

    return call


def _tree_from_sequences(s: Size) -> None:
    tree = s.zeros(NODES, dtype=torch.int32)
    _launcher("tree_from_sequences")(s.zeros(30, 7), NODES, s.zeros(NODES), tree, tree, s.ints)


def _tree_from_marginals(nodes: int, depth: int, width: int) -> Callable[[Size], None]:
    def call(s: Size) -> None:
        tree = s.zeros(nodes, dtype=torch.int32)
        _launcher("tree_from_marginals")(
            s.zeros(depth, width), s.zeros(depth, width, dtype=FP32), nodes, s.longs, s.ints,
            s.zeros(nodes), tree, tree, s.ints,
        )  # fmt: skip

    return call


# Cases whose kernels know the vocabulary; those with filters take longest to compile and come last.
ROW_CASES = sorted([
    *(_chain(rule, BF16) for rule in RULES),
    *(_chain(rule, BF16, mask=True) for rule in RULES),
    *(_chain(rule, BF16, filters=True) for rule in ("ratio", "block", "match", "typical")),
    *(_chain(rule, BF16, filters=True, mask=True) for rule in ("ratio", "match")),
    _chain("ratio", FP32),
    _chain("ratio", FP32, filters=True, mask=True, stats=True),
    _chain("ratio", BF16, stats=True),
    _chain("typical", FP32, filters=True, mask=True),
    _sample(BF16, False),
    _sample(BF16, True),
    _sample(FP32, True, 8, True, 2),
    _token_logprobs(BF16, False),
    _token_logprobs(BF16, False, 0),
    _token_logprobs(FP32, True, mask=True),
    _token_logprobs(BF16, True, edits=True),
    _acceptance_ratios(False),
    _acceptance_ratios(True),
    _residual("residual_probs", False),
    _residual("residual_sample", False),
    _residual("residual_sample", True, True),
    *(_tree(rule, NODES if rule == "target_only" else SMALL) for rule in TREE_RULES),
    _tree("greedy", NODES, FP32),
    _tree("traversal", SMALL, FP32),
    *(_chain(rule, BF16, kept=True) for rule in ("ratio", "block")),
    *(_tree(rule, kept=True) for rule in ("recursive", "greedy_multi_draft", "traversal")),
    _chain("ratio", BF16, edits=True),
    _chain("block", BF16, filters=True, edits=True),
    _chain("match", BF16, filters=True, mask=True, edits=True),
    _chain("typical", FP32, filters=True, edits=True),
    _chain("ratio", BF16, stats=True, edits=True),
    _sample(BF16, False, edits=True),
    _sample(BF16, True, mode=2, edits=True),
    _acceptance_ratios(False, True),
    _residual("residual_sample", True, edits=True),
    _tree("recursive", edits=True),
    _tree("recursive", filters=True, edits=True),
    _tree("typical", edits=True),
    _tree("match", filters=True),
    _tree("recursive", filters=True),
], key=lambda case: "filters" in case.name)  # fmt: skip
OTHER_CASES = [
    _cache("compact_cache", "dense", False, lambda s: _path(s, 6)),
    _cache("compact_cache", "paged", True, lambda s: _path(s, 6)),
    _cache("compact_cache", "long path, any dims", False, lambda s: _path(s, 30), 256, 128),
    _cache("select_state", "", False, lambda s: (s.ints, s.ints)),
    Case("advance_state", "fp32 delta", _advance_state(FP32, "delta")),
    Case("advance_state", "bf16 plain", _advance_state(BF16, "plain")),
    Case("advance_state", "bf16 channel tree", _advance_state(BF16, "channel")),
    Case("advance_window", "fp32", _advance_window(FP32, is_tree=False)),
    Case("advance_window", "bf16 tree", _advance_window(BF16, is_tree=True)),
    _cache("rollback", "paged zero", True, lambda s: (s.longs, s.ints, 64, s.longs, s.ints.repeat(4), s.ints, s.ints)),
    _cache("rollback", "dense zero", False, lambda s: (s.longs, s.ints, 64, s.longs, s.ints, s.ints, s.ints)),
    *(_edit_rows(layout) for layout in ("dense", "flat", "tree")),
    Case("allocate_drafts", "", _allocate_drafts),
    Case("count_tokens", "", _count_tokens),
    Case("gather_nodes", "", _gather_nodes),
    *(Case("tree_layout", str(nodes), _tree_layout(nodes)) for nodes in (SMALL, NODES)),
    *(Case("select_tree", str(nodes), _select_tree(nodes)) for nodes in (SMALL, NODES)),
    Case("tree_from_sequences", "", _tree_from_sequences),
    Case("tree_from_marginals", str(SMALL), _tree_from_marginals(SMALL, 7, 9)),
    Case("tree_from_marginals", str(NODES), _tree_from_marginals(NODES, 33, 61)),
    _tree_mask("bool", 0, torch.bool, lambda b: (b, 1, NODES, NODES)),
    _tree_mask("additive bf16", 1, BF16, lambda b: (b, 1, NODES, NODES)),
    _tree_mask("flat", 2, torch.bool, lambda b: (b * NODES * NODES,)),
    _tree_mask("flat packed", 3, torch.uint8, lambda b: (b * NODES * NODES // 8,)),
    _tree_mask("int64", 5, torch.int64, lambda b: (b, NODES, NODES // 64)),
    _tree_attention("bf16 paged", BF16, SMALL, 128, True),
    _tree_attention("bf16 8 nodes", BF16, 8, 128, True),
    _tree_attention("bf16 dense", BF16, SMALL, 128, False),
    _tree_attention("bf16 1024 nodes, widest", BF16, NODES, 256, True),
    _tree_attention("fp32 paged", FP32, SMALL, 128, True),
    _tree_attention("fp32 1024 nodes, widest", FP32, NODES, 256, True),
    _tree_attention("bf16 latent", BF16, SMALL, 576, True, is_latent=True),
    _tree_attention("bf16 e4m3", BF16, SMALL, 128, True, float8=torch.float8_e4m3fn),
    _tree_attention("bf16 e5m2, widest", BF16, SMALL, 256, True, float8=torch.float8_e5m2),
    _tree_attention("bf16 latent e4m3", BF16, SMALL, 576, True, is_latent=True, float8=torch.float8_e4m3fn),
]
# Launches that find nothing to do where lists of the first pass decide, as on rows of a language model: each block
# looks and leaves. How often they read all the same is the traffic meter's business.
IDLE = r"again|gather_kernel"
# What marks the code of a digest that a block of a long row does not run: the tile that a row does not fill.
COLD = "mask=v < rows.vocab"
