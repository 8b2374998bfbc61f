"""Trees as other engines write them, both ways: first-child and next-sibling links."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _trees
from ._check import ID_DTYPES, MAX_NODES, Checker, fail
from ._codes import Status, TreeEngine


class TreeLinks(NamedTuple):
    """Result of `tree_links`: each ``[batch, nodes]``, local node numbers, -1 for none.

    Attributes:
        row: the row of each node's logits: ``batch * nodes + node`` for SGLang (retrive_index), else the node.
        next_token: first child (retrive_next_token).
        next_sibling: next node with the same parent (retrive_next_sibling).
    """

    row: Tensor
    next_token: Tensor
    next_sibling: Tensor


class LinkedTree(NamedTuple):
    """Result of `tree_from_links`.

    Attributes:
        parents: int32 ``[batch, nodes]``; a malformed tree is its root alone.
        status: int32 ``[batch]``: 32 where the links are not those of a tree.
    """

    parents: Tensor
    status: Tensor


def tree_links(parents: Tensor, *, engine: TreeEngine) -> TreeLinks:
    """The links that an engine's own tree verifier takes.

    Args:
        parents: int32 or int64 ``[batch, nodes]``, see `tree_layout`.
        engine: ``"sglang"`` (int64, rows counted over the batch) or ``"tensorrt_llm"`` (int32, rows within a request).

    Returns:
        TreeLinks. A malformed tree has no links; `tree_layout` gives its status.

    Raises:
        ValueError: wrong shapes or dtypes.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_links
        >>> tree_links(torch.tensor([[-1, 0, 0, 1]]), engine="tensorrt_llm").next_token
        tensor([[ 1,  3, -1, -1]], dtype=torch.int32)
    """
    check = Checker.of("tree_links", "parents", parents, "[batch, nodes, ...]")
    batch, nodes = check.parents(parents)
    dtype = check.choice("engine", engine, {"sglang": torch.int64, "tensorrt_llm": torch.int32})
    tree = _trees.tree(parents, nodes - 1)
    first_child, next_sibling = _trees.links(tree)
    row = tree.node.expand(batch, -1)
    if engine == "sglang":
        row = row + nodes * torch.arange(batch, device=parents.device)[:, None]
    return TreeLinks(row.to(dtype), first_child.to(dtype), next_sibling.to(dtype))


def tree_from_links(next_token: Tensor, next_sibling: Tensor) -> LinkedTree:
    """Parents of a tree given by first-child and next-sibling links (SGLang, TensorRT-LLM).

    A node that no link leads to is padding. Siblings are linked in ascending order, as engines build them: parents keep
    no other order.

    Args:
        next_token: int32 or int64 ``[batch, nodes]``: first child, -1 for none.
        next_sibling: the same shape: next sibling, -1 for none.

    Returns:
        LinkedTree.

    Raises:
        ValueError: wrong shapes or dtypes.

    Example:
        >>> import torch
        >>> from specdec_kernels import tree_from_links
        >>> tree_from_links(torch.tensor([[1, 3, -1, -1]]), torch.tensor([[-1, 2, -1, -1]])).parents
        tensor([[-1,  0,  0,  1]], dtype=torch.int32)
    """
    name = "tree_from_links"
    check = Checker.of(name, "next_token", next_token, "[batch, nodes, ...]")
    check.tensor("next_token", next_token, ID_DTYPES, ("batch", "nodes"))
    check.tensor("next_sibling", next_sibling, ID_DTYPES, tuple(next_token.shape))
    batch, nodes = next_token.shape
    if not 1 <= nodes <= MAX_NODES:
        fail(name, "next_token", f"[batch, nodes] with 1 to {MAX_NODES} nodes", list(next_token.shape))
    child, sibling = next_token.long(), next_sibling.long()
    node = torch.arange(nodes, device=child.device).expand(batch, -1)
    # A link points forward; then it cannot be part of a cycle. None leads to the root.
    bad = ((child != -1) & ((child <= node) | (child >= nodes))).any(1)
    bad = bad | ((sibling != -1) & ((sibling <= node) | (sibling >= nodes))).any(1)
    owner, children = followed(child)
    elder, siblings = followed(sibling)
    bad = bad | (children + siblings > 1).any(1)
    head = torch.where(elder >= 0, elder, node)
    for _ in range((nodes - 1).bit_length()):
        head = head.gather(1, head)
    parents = owner.gather(1, head)
    tree = _trees.tree(torch.where(bad[:, None], -1, parents), nodes - 1)
    # A sibling chain that no parent owns, or links that leave a padding node.
    first, following = _trees.links(tree)
    bad = bad | tree.bad | ((first != child) | (following != sibling)).any(1)
    parents = torch.where(bad[:, None], -1, tree.parents)
    return LinkedTree(parents.int(), torch.where(bad, Status.BAD_LAYOUT, 0).int())


def followed(link: Tensor) -> tuple[Tensor, Tensor]:
    """(node whose link leads here or -1, how many do), each [batch, nodes]."""
    nodes = link.shape[1]
    node = torch.arange(nodes, device=link.device).expand_as(link)
    inside = (link >= 0) & (link < nodes)
    target = torch.where(inside, link, nodes)
    source = torch.full((len(link), nodes + 1), -1, device=link.device).scatter(1, target, node)
    count = torch.zeros_like(source).scatter_add(1, target, inside.long())
    return source[:, :nodes], count[:, :nodes]
