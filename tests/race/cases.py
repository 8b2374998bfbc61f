"""Small calls that between them launch every CUDA kernel. Rows of WIDE ids span three tiles: their blocks must meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import caches
import torch
from cases import FILTERS, RULES, make_chain, make_rng, mixed_sampling
from edit_cases import make_edits
from op_calls import CALLS, Call
from residuals import make_residual
from tree_cases import TREE_RULES, make_tree, random_parents

import specdec_kernels
from specdec_kernels import Edits, Sampling, SparseRows, TokenCounts, edit_rows
from specdec_kernels._op import OPS

Case = Callable[[], Any]
WIDE = 2 * 4096 + 37
MASKS = ("bool", "additive", "flat", "flat_packed", "int32", "int64", "xqa", "sglang_packed")


def cases() -> Iterator[tuple[str, Case]]:
    """(name, call); names begin with that of the op."""
    for op in (name for name in CALLS if "cuda" in OPS[name].backends):
        yield f"{op} small", bound(op, CALLS[op](0))
    for rule in RULES:
        for filters in ("none", "all"):
            chain = make_chain(2, 3, WIDE, rule=rule, filters=filters)
            call = (chain.draft_ids, chain.target_logits, chain.draft_logits), chain.keywords | {"logprobs": "raw"}
            yield f"verify_chain {rule} {filters}", bound("verify_chain", call)
    yield from other_chains()
    for rule in TREE_RULES:
        for filters in ("none", "all"):
            tree = make_tree(2, 6, WIDE, rule=rule, filters=filters)
            yield f"verify_tree {rule} {filters}", bound("verify_tree", (tree.tensors, tree.keywords))
    for rule in TREE_RULES:
        tree = make_tree(2, 12, 50, rule=rule, drafts="point" if rule != "traversal" else "model", closeness=3.0)
        yield f"verify_tree {rule} far", bound("verify_tree", (tree.tensors, tree.keywords | {"logprobs": "raw"}))
    yield from digests()
    yield from samples()
    yield from logprobs()
    yield from residuals()
    yield from budgets()
    yield from edits()
    yield from layouts()
    yield from moves()
    yield from replays()


def bound(op: str, call: Call) -> Case:
    """The call, on the CUDA sources."""
    return lambda: getattr(specdec_kernels, op)(*call[0], **call[1], backend="cuda_host")


def everything_allowed(*rows: int) -> torch.Tensor:
    """A packed mask without a zero."""
    return torch.full((*rows, -(-WIDE // 32)), -1, dtype=torch.int32)


def candidates(rows: torch.Tensor) -> SparseRows:
    """The likeliest ids of rows, more than a block has threads."""
    logits, ids = rows.topk(300, dim=-1)
    return SparseRows(ids, logits, logits.logsumexp(-1))


def other_chains() -> Iterator[tuple[str, Case]]:
    """Drafts without rows, with statistics, flat and ragged, masked, with a smaller vocabulary."""
    for name, keywords in {
        "point": {"drafts": "point"},
        "stats": {"drafts": "stats"},
        "flat": {"flat": True, "ragged": True},
        "greedy": {"greedy_every": 2},
    }.items():
        for rule in ("ratio", "block"):
            chain = make_chain(2, 3, WIDE, rule=rule, **keywords)  # type: ignore[arg-type]
            call = (chain.draft_ids, chain.target_logits, chain.draft_logits), chain.keywords
            yield f"verify_chain {rule} {name}", bound("verify_chain", call)
    for rule in ("ratio", "block"):
        chain = make_chain(2, 3, WIDE, rule=rule, closeness=3.0)
        assert chain.draft_logits is not None
        call = (chain.draft_ids, chain.target_logits, candidates(chain.draft_logits)), chain.keywords
        yield f"verify_chain {rule} kept", bound("verify_chain", call)
    for rule in ("recursive", "greedy_multi_draft", "traversal"):
        tree = make_tree(2, 6, WIDE, rule=rule, closeness=3.0)
        assert tree.draft_logits is not None
        call = (*tree.tensors[:3], candidates(tree.draft_logits)), tree.keywords
        yield f"verify_tree {rule} kept", bound("verify_tree", call)
    chain = make_chain(2, 3, WIDE, closeness=3.0)
    mapped = chain.keywords | {"token_map": torch.randperm(WIDE)[:5000].int(), "allowed": everything_allowed(8)}
    assert chain.draft_logits is not None
    call = (chain.draft_ids, chain.target_logits, chain.draft_logits[..., :5000]), mapped
    yield "verify_chain ratio mapped", bound("verify_chain", call)


def digests() -> Iterator[tuple[str, Case]]:
    """Every dtype with everything that a digest may hold, of few rows and of many: their blocks have other shares."""
    held = (("greedy", None), ("ratio", None), ("typical", None), ("ratio", "raw"), ("typical", "raw"))
    for batch, dtype in itertools.product((2, 28), (torch.float32, torch.bfloat16, torch.float16)):
        for rule, logprobs in held:
            for allowed in (None, everything_allowed(4 * batch)):
                chain = make_chain(batch, 3, WIDE, rule=rule, dtype=dtype)
                keywords = chain.keywords | {"logprobs": logprobs, "allowed": allowed}
                call = (chain.draft_ids, chain.target_logits, chain.draft_logits), keywords
                kind = f"{rule} {dtype} {logprobs} {'all' if allowed is None else 'allowed'}"
                yield f"verify_chain digest {kind} of {batch}", bound("verify_chain", call)
                if batch == 2 or allowed is None:
                    named = edited(make_edits(batch, WIDE), chain.draft_ids, is_drafted=True)
                    call = call[0], keywords | named
                    yield f"verify_chain digest {kind} edits {batch}", bound("verify_chain", call)


def samples() -> Iterator[tuple[str, Case]]:
    """Short lists and long ones, and those that do not suffice: then a row is read again, its values gathered."""
    torch.manual_seed(0)
    peaked, level = 4 * torch.randn(2, WIDE), 0.01 * torch.randn(2, WIDE)
    ties = torch.zeros(2, WIDE)
    wide = Sampling.full(2, top_k=700, top_p=0.9)
    for samples in (1, 5):
        for name, logits, sampling in (
            ("plain", peaked, Sampling()),
            ("listed", peaked, mixed_sampling(2, FILTERS["all"])),
            ("long", peaked, Sampling.full(2, min_p=1e-5)),
            ("gathered", level, wide),
            ("top_p", level, Sampling.full(2, top_p=0.8)),
            ("ties", ties, wide),
        ):
            keywords = {"sampling": sampling, "rng": make_rng(2), "purpose": "draft", "num_samples": samples}
            yield f"sample {name} {samples}", bound("sample", ((logits,), keywords))
    keywords = {"sampling": wide, "rng": make_rng(2), "purpose": "draft", "allowed": everything_allowed(2)}
    yield "sample allowed", bound("sample", ((level,), keywords))


def logprobs() -> Iterator[tuple[str, Case]]:
    """Few blocks and all of them; more ids at the edge of the list than it has room for; edits and filters."""
    torch.manual_seed(0)
    ids, bits = torch.tensor([5, -1]), everything_allowed(2)
    settled: dict[str, Any] = {"logprobs": "processed", "sampling": mixed_sampling(2, FILTERS["all"])}
    for name, logits, more in (
        ("peaked", 4 * torch.randn(2, WIDE), {}),
        ("ties", torch.zeros(2, WIDE), {}),
        ("falling", -torch.arange(2.0 * WIDE).view(2, -1), {}),
        ("greedy", torch.randn(2, WIDE), {"logprobs": "processed", "sampling": Sampling.full(2, temperature=0.0)}),
        ("filters", torch.randn(2, WIDE), {**settled, "allowed": bits}),
        ("edits", torch.randn(2, WIDE), {**settled, **edited(make_edits(2, WIDE))}),
    ):
        yield f"token_logprobs {name}", bound("token_logprobs", ((logits, ids), {"top": 20, **more}))
    yield "token_logprobs rank", bound("token_logprobs", ((torch.randn(2, WIDE), ids), {}))


def residuals() -> Iterator[tuple[str, Case]]:
    """Residuals and ratios of rows of several tiles."""
    for filters in ("none", "all"):
        case = make_residual(2, WIDE, filters=filters)
        yield f"residual_probs {filters}", bound("residual_probs", ((), case))
        yield f"residual_sample {filters}", bound("residual_sample", ((), case | {"rng": make_rng(2)}))
        chain = make_chain(2, 3, WIDE, filters=filters)
        keywords = {name: chain.keywords[name] for name in ("sampling", "draft_sampling")}
        call = (chain.draft_ids, chain.target_logits, chain.draft_logits), keywords
        yield f"acceptance_ratios {filters}", bound("acceptance_ratios", call)


def edits() -> Iterator[tuple[str, Case]]:
    """Edits of every kind, behind chains, flat chains and trees; calls on rows that have them, of every kernel."""
    rows = make_edits(2, WIDE)
    texts = torch.arange(40).repeat(2, 15)  # more tokens than a block has threads, each of them often
    for named in ({"is_prompt": True}, {"slots": torch.tensor([1, -1], dtype=torch.int32)}):
        yield f"count_tokens {list(named)}", bound("count_tokens", ((TokenCounts.empty(2, 40), texts), named))
    for rule, filters, flat in (("ratio", "all", False), ("typical", "none", True), ("block", "none", True)):
        chain = make_chain(2, 3, WIDE, rule=rule, filters=filters, flat=flat, dtype=torch.bfloat16)
        layout = {name: chain.keywords[name] for name in ("cu_draft", "max_draft") if flat}
        assert chain.draft_logits is not None
        yield f"edit_rows {rule}", bound("edit_rows", ((rows, chain.draft_ids), {"vocab": WIDE, **layout}))
        named = edited(rows, chain.draft_ids, is_drafted=True, **layout)
        call = (
            (chain.draft_ids, chain.target_logits, chain.draft_logits),
            {**chain.keywords, **named, "logprobs": "raw"},
        )
        yield f"verify_chain edits {rule}", bound("verify_chain", call)
    for rule in ("typical", "recursive"):
        tree = make_tree(2, 6, WIDE, rule=rule)
        layout = {"parents": tree.parents}
        yield f"edit_rows tree {rule}", bound("edit_rows", ((rows, tree.token_ids), {"vocab": WIDE, **layout}))
        named = edited(rows, tree.token_ids, is_drafted=True, **layout)
        yield f"verify_tree edits {rule}", bound("verify_tree", (tree.tensors, tree.keywords | named))
    case = make_residual(2, WIDE)
    case |= edited(rows, is_drafted=True)
    yield "residual_probs edits", bound("residual_probs", ((), case))
    chain = make_chain(2, 3, WIDE)
    named = edited(rows, chain.draft_ids)
    named |= {name: chain.keywords[name] for name in ("sampling", "draft_sampling")}
    call = (chain.draft_ids, chain.target_logits, chain.draft_logits), named
    yield "acceptance_ratios edits", bound("acceptance_ratios", call)


def budgets() -> Iterator[tuple[str, Case]]:
    """More requests than a block has threads, and more drafts than it looks at once."""
    torch.manual_seed(0)
    ids, confidence = torch.arange(900).view(300, 3), torch.rand(300, 3)
    cost = 300 + torch.arange(601.0)
    for named in ({}, {"cost": cost}, {"cost": cost, "compare_all": True}):
        yield f"allocate_drafts {list(named)}", bound("allocate_drafts", ((ids, confidence), {"budget": 600, **named}))


def edited(rows: Edits, *args: Any, is_drafted: bool = False, **named: Any) -> dict[str, Any]:
    """Keywords of edited rows."""
    edits = edit_rows(rows, *args, vocab=WIDE, **named, backend="reference")
    return {"edits": edits, "draft_edits": edits} if is_drafted else {"edits": edits}


def layouts() -> Iterator[tuple[str, Case]]:
    """Trees of more nodes than a block has threads; every format of a mask."""
    large = random_parents(2, 300, 9, ragged=True)
    yield "tree_layout large", bound("tree_layout", ((large,), {"max_depth": 9}))
    ids, scores = torch.arange(600).view(2, 300), torch.randn(2, 300)
    yield "select_tree large", bound("select_tree", ((ids, large, scores), {"num_nodes": 60}))
    for format in MASKS:
        nodes = 20 if format == "sglang_packed" else 40
        sized = {} if format in ("int32", "int64", "xqa", "sglang_packed") else {"past": 30}
        yield f"tree_mask {format}", bound("tree_mask", ((random_parents(2, nodes, 5),), {"format": format, **sized}))
    ids = torch.randint(0, 3, (2, 260, 4))  # more sequences than a block has threads
    yield "tree_from_sequences large", bound("tree_from_sequences", ((ids,), {}))
    ids, logprobs = torch.randint(0, 40, (2, 9, 50)), torch.randn(2, 9, 50).log_softmax(2)  # more than threads
    yield "tree_from_marginals large", bound("tree_from_marginals", ((ids, logprobs), {"num_nodes": 300}))


def replays() -> Iterator[tuple[str, Case]]:
    """More columns than a block of the state has; a chain and a path."""
    torch.manual_seed(0)
    state, keys, gates = torch.randn(2, 2, 2, 20, 70), torch.randn(2, 2, 5, 1, 20), torch.rand(2, 2, 5, 2)
    given = (state, keys, torch.randn(2, 2, 5, 2, 70), caches.counts([3, 0], "cpu"))
    more = {"log_decay": -gates, "beta": gates}
    yield "advance_state chain", bound("advance_state", (given, more))
    path = torch.tensor([[1, 2, 4, -1]] * 2)
    yield "advance_state tree", bound("advance_state", (given, {**more, "path": path}))
    long = (torch.zeros(1, 2, 1, 130, 8), torch.randn(1, 2, 3, 1, 130), torch.randn(1, 2, 3, 1, 8))
    yield "advance_state long keys", bound("advance_state", ((*long, caches.counts([2, 1], "cpu")), {}))
    windows = (torch.randn(2, 2, 300, 6), torch.randn(2, 2, 5, 300), caches.counts([3, 0], "cpu"))
    yield "advance_window chain", bound("advance_window", (windows, {}))
    halves = (windows[0].bfloat16(), windows[1].bfloat16(), windows[2])
    yield "advance_window tree", bound("advance_window", (halves, {"path": path}))


def moves() -> Iterator[tuple[str, Case]]:
    """Caches in every layout; more moves than a block looks up at once."""
    torch.manual_seed(0)
    nodes = list(range(2, 42))
    for format in caches.FORMATS:
        cache = caches.make_cache(format, batch=2, capacity=60)
        path = torch.tensor([nodes, nodes])
        yield (
            f"compact_cache {format}",
            bound("compact_cache", ((cache.layout(), path, caches.counts([40, 7], "cpu"), torch.tensor([3, 9])), {})),
        )
        yield f"select_state {format}", bound("select_state", ((cache.layout(), caches.counts([2, 0], "cpu")), {}))
        back = {"max_tail": 37, "zero_tail": True}
        lengths, accepted = torch.tensor([3, 9]), caches.counts([2, 0], "cpu")
        yield f"rollback {format}", bound("rollback", ((cache.layout(), lengths, accepted), back))
