"""How SGLang calls its tree kernels: results made before each launch, links and candidate lists left by its drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import tree_links

from ..trees import MAX_DEPTH, Shape, TreeInput

FULL_MASK, QLEN_ONLY = 0, 1


class Kernels(NamedTuple):
    """Who builds and verifies, with SGLang's arguments; None where it has no such kernel."""

    build: Callable[..., Any]
    greedy: Callable[..., Any]
    target_only: Callable[..., Any] | None = None


class DraftedTree(NamedTuple):
    """Inputs of its tree builder: candidate `topk * row + rank` is a child of the node of that row."""

    parent_list: Tensor  # int64 [batch, row]: the candidate that became the node of a row; row 0 is the root's
    selected: Tensor  # int64 [batch, nodes - 1]: the candidate that became each node
    lengths: Tensor  # int64 [batch]
    past: int
    topk: int


def drafted(x: Shape, past: int = 0) -> DraftedTree:
    """Its form of a batch of trees; not timed."""
    topk = 1 + max(rank for paths in x.choices for path in paths for rank in path)
    parent_list, selected = [], []
    for paths in x.choices:
        rows: dict[tuple[int, ...], int] = {(): 0}
        for path in paths:
            rows.setdefault(path[:-1], len(rows))
        selected.append([rows[path[:-1]] * topk + path[-1] for path in paths])
        candidates = dict(zip(paths, selected[-1], strict=True))
        parent_list.append([-1, *(candidates[path] for path in list(rows)[1:])])
    width = max(map(len, parent_list))
    padded = [row + [-1] * (width - len(row)) for row in parent_list]
    lists = (torch.tensor(rows_, device=x.parents.device) for rows_ in (padded, selected, [past] * len(padded)))
    return DraftedTree(*lists, past, topk)


def build_tree(kernel: Callable[..., Any], tree: DraftedTree) -> tuple[Tensor, Tensor, Tensor]:
    """(mask, positions [batch * nodes], links [3, batch, nodes]); behind a past the mask has its columns too."""
    batch, nodes = len(tree.selected), tree.selected.shape[1] + 1
    device = tree.selected.device
    mask = torch.full((batch * nodes * (tree.past + nodes),), True, device=device)
    positions = torch.empty(batch * nodes, dtype=torch.int64, device=device)
    links = torch.full((3, batch, nodes), -1, dtype=torch.int64, device=device)
    mode = FULL_MASK if tree.past else QLEN_ONLY
    kernel(*tree[:3], mask, positions, *links, tree.topk, MAX_DEPTH, nodes, mode)
    return mask, positions, links


def with_drafted(
    rival: ModuleType, made: Sequence[Shape], past: int = 0
) -> Callable[[Shape], tuple[Tensor, Tensor, Tensor]]:
    """A rival's build of a batch, its lists made before the clock."""
    ready = {id(x): drafted(x, past) for x in made}
    return lambda x: build_tree(rival.kernels().build, ready[id(x)])


def verify_tree(kernels: Kernels, rule: str, x: TreeInput, links: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(the token behind each node on the path [batch * nodes], the path [batch, slots], -1 padded)."""
    batch, nodes = x.token_ids.shape
    device, slots = x.target.device, x.leaf_paths[0].shape[1]
    predicts = torch.zeros(batch * nodes, dtype=torch.int32, device=device)
    path = torch.full((batch, slots), -1, dtype=torch.int32, device=device)
    count = torch.empty(batch, dtype=torch.int32, device=device)
    given = (predicts, path, count, x.token_ids, *links)
    if rule == "greedy":
        kernels.greedy(*given, x.target.argmax(-1))
    else:
        assert kernels.target_only is not None
        assert x.sampling.temperature is not None
        probs = (x.target.float() / x.sampling.temperature[:, None, None]).softmax(-1)
        coins, last = torch.rand(batch, nodes, device=device), torch.rand(batch, device=device)
        kernels.target_only(*given, coins, last, probs, torch.zeros_like(probs), 1.0, 1.0, True)
    return predicts, path


def with_links(rival: ModuleType, rule: str, made: Sequence[TreeInput]) -> Callable[[TreeInput], tuple[Tensor, Tensor]]:
    """A rival's verification of a batch, the links as its builder left them."""
    ready = {id(x): tree_links(x.parents, engine="sglang") for x in made}
    return lambda x: verify_tree(rival.kernels(), rule, x, ready[id(x)])


def supports(case: Any, rules: tuple[str, ...]) -> str | None:
    """None, or why the case is not for it."""
    if case.op == "verify_tree":
        return None if case.rule in rules else f"it has the rules {', '.join(rules)}"
    if case.op == "tree_mask":
        has_format = case.format == "layout and bool" or case.format.startswith("flat,")
        return None if has_format else "it writes bools, for the nodes alone or for all keys of each request"
    return None
