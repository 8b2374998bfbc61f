"""select_tree, spelled plainly: the best candidates by the worst score on their path. The definition of the op."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _trees
from ..._codes import Status


def select_tree(
    token_ids: Tensor, parents: Tensor, scores: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `specdec_kernels.select_tree`."""
    batch, candidates = parents.shape
    device = parents.device
    tree = _trees.tree(parents, candidates - 1)
    usable = (tree.parents >= 0) & (token_ids >= 0) & ~scores.isnan()
    score = torch.where(usable, scores.float(), -torch.inf)
    score = torch.where(tree.node == 0, torch.inf, score)
    jump = tree.parents.clamp(min=0)
    for _ in range((candidates - 1).bit_length()):
        score = torch.minimum(score, score.gather(1, jump))
        jump = jump.gather(1, jump)

    # A child never scores above its parent and comes after it, so the best are connected and their order topological.
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
    chosen = torch.zeros_like(usable).scatter(1, order, True) & (score > -torch.inf)
    number = torch.where(chosen, chosen.cumsum(1) - 1, num_nodes)

    def place(values: Tensor) -> Tensor:
        out = torch.full((batch, num_nodes + 1), -1, device=device)
        return out.scatter(1, number, values)[:, :num_nodes].contiguous()

    parent = torch.where(tree.parents >= 0, number.gather(1, tree.parents.clamp(min=0)), -1)
    status = torch.where(tree.bad, Status.BAD_LAYOUT, 0)
    source = place(tree.node.expand(batch, -1))
    return place(token_ids.long()).to(token_ids.dtype), place(parent).int(), source.int(), status.int()
