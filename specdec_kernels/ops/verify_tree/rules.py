"""The rules of trees that go down from the root, each spelled plainly. p is a node's target row, q its draft row.

`recursive` takes one exchange of the vocabulary for each further sibling, for all nodes of the tree at once: what the
rejection of the first j children leaves does not depend on the walk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._codes import RESIDUAL_PURPOSE, Status
from ..._nodes import Nodes, at
from ..._walks import End, descend, finish, of_parent, testable


def target_only(nodes: Nodes, max_depth: int, status: Tensor) -> End:
    """One coin a node: the first child x_j with coin < p(x_1) + ... + p(x_j); else p without the children."""
    fine, faults = testable(nodes, False)
    siblings = (nodes.tree.parents[:, :, None] == nodes.tree.parents[:, None, :]) & fine[:, None, :]
    upto = siblings & (nodes.tree.node <= nodes.tree.node[:, None])
    total = torch.where(upto, nodes.p[:, None, :], 0.0).cumsum(2)[:, :, -1].float()
    passes = fine & (nodes.p.float() > 0) & (of_parent(nodes, nodes.children_coin) < total)
    last, status = descend(nodes, passes, max_depth, faults, status, in_order=False)
    return finish(nodes, last, fine, torch.ones_like(nodes.p[:, 0]), status, excludes=True)


def greedy_multi_draft(nodes: Nodes, max_depth: int, status: Tensor) -> End:
    """The last child X was drawn from q without the others S0; after its rejection a draw that is in S0 is accepted."""
    children = nodes.tree.parents[:, None, :] == nodes.tree.node[:, None]  # [batch, row, child]
    drawn = torch.where(children, nodes.tree.node, 0).amax(2)
    is_last = (nodes.tree.parents >= 0) & (of_parent(nodes, drawn) == nodes.tree.node)
    fine, faults = testable(nodes, False)
    bad_draft = (children & (fine & nodes.bad_draft)[:, None, :]).any(2)
    tested = fine & is_last
    faults.append((tested & nodes.bad_draft, Status.BAD_DRAFT))
    tested = tested & ~nodes.bad_draft
    others = fine & ~is_last & ~of_parent(nodes, bad_draft)

    point = ~nodes.has_draft_row
    hidden = others & ~point[:, None]
    room = 1 - torch.where(children & hidden[:, None, :], nodes.q[:, None, :], 0.0).sum(2)
    scale = torch.where(room > 0, 1 / room.clamp(min=1e-300), 0.0)
    px, qx = nodes.p.float(), (of_parent(nodes, scale) * nodes.q).float()
    faults.append((tested & (qx == 0), Status.ZERO_DRAFT))
    accepted = tested & (px > 0) & (qx > 0) & (nodes.coin * qx < px)

    tried = tested & ~accepted
    p, q = nodes.probs(nodes.every)
    q = torch.where(nodes.marked(nodes.every, hidden), 0.0, q)
    weight = p.float() - (scale.flatten()[:, None] * q).float()
    weight = torch.where(nodes.distribution.kept, weight, 0.0)
    plain, left, _ = nodes.race(nodes.every, RESIDUAL_PURPOSE, weight, tried, point)
    rejected = (children & tried[:, None, :]).any(2)
    empty = rejected & left.empty
    corrected = rejected & ~left.empty
    token = torch.where(corrected, left.token, plain.token)
    logit = torch.where(corrected, left.logit, plain.logit)
    faults.append((of_parent(nodes, empty), Status.EMPTY_RESIDUAL))
    open_rows = ~(children & accepted[:, None, :]).any(2)
    passes = accepted | (others & of_parent(nodes, open_rows) & (nodes.ids == of_parent(nodes, token)))
    last, status = descend(nodes, passes, max_depth, faults, status, in_order=False)
    return End(last, at(token, last), at(logit, last), status)


def recursive(nodes: Nodes, replacement: bool, rounds: int, max_depth: int, status: Tensor) -> End:
    """Recursive rejection: children are tried in turn, each against what the rejections before it left of p and q.

    Before the first child of a node C = 0, Z = 1, Q = 0. Child x is accepted iff u q(x) Z < (p(x) - C q(x)) (1 - Q);
    else C += Z / (1 - Q), Z = sum (p - C q)+, and without replacement Q += q(x). In the end (p - C q)+ is left.
    Where q is a point mass at each child: accepted iff u Z < p(x), Z = mass of p without the rejected ids.
    """
    fine, faults = testable(nodes, True)
    tree, point = nodes.tree, ~nodes.has_draft_row[:, None]
    earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (tree.node < tree.node[:, None])
    rank = earlier.sum(2)
    twin = (earlier & fine[:, None, :] & (nodes.x[:, :, None] == nodes.x[:, None, :])).any(2)
    children = (tree.parents[:, None, :] == tree.node[:, None]).sum(2)
    scale, mass, gone = (torch.full_like(nodes.p, value) for value in (0.0, 1.0, 0.0))
    passes, tried = torch.zeros_like(fine), torch.zeros_like(fine)
    for r in range(rounds):
        tested = fine & (rank == r) & (tree.parents >= 0)
        c, z = of_parent(nodes, scale), of_parent(nodes, mass)
        room = torch.where(point, 1.0, (1 - of_parent(nodes, gone)).clamp(min=0))
        rest = torch.where(point, torch.where(twin, 0.0, nodes.p), nodes.p - c * nodes.q)
        accepts = (nodes.coin * (nodes.q * z).float() < (rest * room).float()) & (nodes.p.float() > 0)
        accepts = accepts & (nodes.q.float() > 0)
        passes = passes | (tested & accepts)
        tried = tried | (tested & ~accepts)
        scale = _to_rows(nodes, tested, torch.where(room > 0, c + z / room.clamp(min=1e-300), c), scale)
        if not replacement:
            gone = _to_rows(nodes, tested & ~point, of_parent(nodes, gone) + nodes.q, gone)
        # Nodes with r + 2 children or more need the mass; no tree has more of them than this.
        count = (nodes.nodes - 1) // (r + 2)
        if r == rounds - 1 or count == 0:
            break
        rows = (children >= r + 2).int().argsort(dim=1, descending=True, stable=True)[:, :count]
        p, q = nodes.probs(rows)
        by_scale = (p - scale.gather(1, rows).flatten()[:, None] * q).clamp(min=0).sum(1)
        by_mask = torch.where(nodes.marked(rows, tried | passes), 0.0, p).sum(1)
        (left,) = nodes.vocabulary.sum(torch.where(point.expand_as(rows).flatten(), by_mask, by_scale).view(rows.shape))
        was_tested = _to_rows(nodes, tested, torch.ones_like(mass), torch.zeros_like(mass)).gather(1, rows) > 0
        mass = mass.scatter(1, rows, torch.where(was_tested, left, mass.gather(1, rows)))
    last, status = descend(nodes, passes, max_depth, faults, status, in_order=True)
    return finish(nodes, last, tried, at(scale, last), status)


def _to_rows(nodes: Nodes, which: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
    """Values [batch, nodes] of at most one candidate a row, put into its row."""
    row = torch.where(which, nodes.above, nodes.nodes)
    return torch.nn.functional.pad(otherwise, (0, 1)).scatter(1, row, values)[:, :-1]
