"""A call of every op on small numbers that a seed draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import make_chain
from torch import Tensor
from tree_cases import make_tree

from specdec_kernels import CacheLayout, Edits, RngKey, Sampling, TokenCounts, tree_layout

Call = tuple[tuple[Any, ...], dict[str, Any]]
BATCH, VOCAB = 3, 41


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rng(g: torch.Generator) -> RngKey:
    return RngKey(*(torch.randint(0, 1000, (BATCH,), generator=g) for _ in range(3)))


def distribution(g: torch.Generator) -> Sampling:
    return Sampling(torch.rand(BATCH, generator=g), None, 0.5 + torch.rand(BATCH, generator=g) / 2, None)


def chain(seed: int) -> Call:
    case = make_chain(BATCH, 4, VOCAB, seed=seed)
    return (case.draft_ids, case.target_logits, case.draft_logits), dict(case.keywords)


def ratios(seed: int) -> Call:
    args, kwargs = chain(seed)
    return args, {name: kwargs[name] for name in ("sampling", "draft_sampling")}


def tree(seed: int) -> Call:
    case = make_tree(BATCH, 9, VOCAB, seed=seed)
    return case.tensors, dict(case.keywords, logprobs="raw")


def sampled(seed: int) -> Call:
    g = numbers(seed)
    return (torch.randn(BATCH, VOCAB, generator=g),), {
        "sampling": distribution(g),
        "rng": rng(g),
        "purpose": "draft",
        "num_samples": 3,
    }


def residual(seed: int, *, is_drawn: bool = True) -> Call:
    g = numbers(seed)
    weights = {name: torch.rand(BATCH, generator=g) for name in "ab"}
    rows = (torch.randn(BATCH, VOCAB, generator=g), torch.randn(BATCH, VOCAB, generator=g))
    named = {"rng": rng(g)} if is_drawn else {}
    return rows, dict(sampling=distribution(g), draft_sampling=distribution(g), **weights, **named)


def parents(seed: int, nodes: int = 7) -> Tensor:
    g = numbers(seed)
    return torch.tensor([[-1, *(int(torch.randint(0, n, (), generator=g)) for n in range(1, nodes))]] * BATCH)


def candidates(seed: int) -> Call:
    g = numbers(seed)
    ids = torch.randint(0, VOCAB, (BATCH, 7), generator=g)
    return (ids, parents(seed), torch.randn(BATCH, 7, generator=g)), {"num_nodes": 4}


def marginals(seed: int) -> Call:
    g = numbers(seed)
    ids = torch.randint(0, VOCAB, (BATCH, 3, 4), generator=g)
    limits = torch.tensor([6, 1, 4], dtype=torch.int32)
    given = {"num_nodes": 6, "root_ids": ids[:, 0, 0].contiguous(), "max_nodes": limits}
    return (ids, torch.randn(BATCH, 3, 4, generator=g).log_softmax(2)), given


def gathered(seed: int) -> Call:
    g = numbers(seed)
    path = torch.tensor([[1, 3, -1], [2, -1, -1], [1, 2, -1]])
    return (torch.randn(BATCH, 5, 6, generator=g), path), {}


def attended(seed: int) -> Call:
    g = numbers(seed)
    query, key = (torch.randn(BATCH, *shape, generator=g) for shape in ((7, 4, 8), (2, 16, 8)))
    ancestors = tree_layout(parents(seed)).ancestors
    return (query, key, torch.randn(key.shape, generator=g), ancestors, torch.tensor([1, seed, 3])), {}


def cached(op: str) -> Callable[[int], Call]:
    def call(seed: int) -> Call:
        g = numbers(seed)
        rows = [torch.randn(BATCH, 2, 16, 4, generator=g) for _ in range(4)]
        accepted = torch.randint(0, 3, (BATCH,), generator=g, dtype=torch.int32)
        start = torch.randint(0, 5, (BATCH,), generator=g)
        path = torch.tensor([[2, 3, -1]] * BATCH)
        rest = {
            "compact_cache": (path, accepted, start),
            "select_state": (accepted,),
            "rollback": (start, accepted),
        }[op]
        return (CacheLayout(rows, "bhld"), *rest), {}

    return call


def replayed(seed: int) -> Call:
    """A step of a gated delta rule in two layers, of two drafts."""
    g = numbers(seed)
    keys, values = (torch.randn(2, BATCH, 3, heads, 4, generator=g) for heads in (1, 2))
    gates = torch.rand(2, 2, BATCH, 3, 2, generator=g)
    accepted = torch.randint(-1, 3, (BATCH,), generator=g, dtype=torch.int32)
    given = (torch.randn(2, BATCH, 2, 4, 4, generator=g), keys, values, accepted)
    return given, {"log_decay": -gates[0], "beta": gates[1]}


def shifted(seed: int) -> Call:
    """A step of two short convolutions, of two drafts."""
    g = numbers(seed)
    accepted = torch.randint(-1, 3, (BATCH,), generator=g, dtype=torch.int32)
    return (torch.randn(2, BATCH, 4, 3, generator=g), torch.randn(2, BATCH, 3, 4, generator=g), accepted), {}


def edits(seed: int) -> Call:
    """As many ids as there is room for: what lies behind the last one is not written."""
    g = numbers(seed)
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[:7] for _ in range(BATCH)]).int()
    return (Edits(bias_ids=ids, bias=torch.randn(BATCH, 7, generator=g)), None), {"vocab": VOCAB}


def counted(seed: int) -> Call:
    g = numbers(seed)
    return (TokenCounts.empty(BATCH, VOCAB), torch.randint(-1, VOCAB, (BATCH, 9), generator=g)), {}


def budgeted(seed: int) -> Call:
    """As many drafts as the budget: what lies behind the last one is padding."""
    g = numbers(seed)
    ids, confidence = torch.randint(0, VOCAB, (BATCH, 4), generator=g), torch.rand(BATCH, 4, generator=g)
    return (ids, confidence), {"budget": 7, "cost": 9 + torch.arange(8.0)}


def scored(seed: int) -> Call:
    g = numbers(seed)
    ids = torch.randint(0, VOCAB, (BATCH,), generator=g)
    sampling = distribution(g)
    return (torch.randn(BATCH, VOCAB, generator=g), ids), {"top": 5, "sampling": sampling, "logprobs": "processed"}


CALLS: dict[str, Callable[[int], Call]] = {
    "verify_chain": chain,
    "acceptance_ratios": ratios,
    "verify_tree": tree,
    "sample": sampled,
    "token_logprobs": scored,
    "residual_sample": residual,
    "residual_probs": lambda seed: residual(seed, is_drawn=False),
    "allocate_drafts": budgeted,
    "edit_rows": edits,
    "count_tokens": counted,
    "tree_layout": lambda seed: ((parents(seed),), {"max_depth": 5}),
    "tree_mask": lambda seed: ((parents(seed),), {"past": torch.tensor([1, seed, 3]), "size": 12}),
    "select_tree": candidates,
    "tree_from_sequences": lambda seed: ((torch.randint(0, 4, (BATCH, 3, 2), generator=numbers(seed)),), {}),
    "tree_from_marginals": marginals,
    "gather_nodes": gathered,
    "tree_attention": attended,
    "advance_state": replayed,
    "advance_window": shifted,
    **{op: cached(op) for op in ("compact_cache", "select_state", "rollback")},
}


def moved(value: Any, device: str) -> Any:
    """Arguments or results on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, CacheLayout):
        return CacheLayout([t.to(device) for t in value.tensors], "blhd")  # of a layout: [batch, slot, head, byte]
    if isinstance(value, dict):
        return {name: moved(v, device) for name, v in value.items()}
    if isinstance(value, tuple):
        parts = [moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
