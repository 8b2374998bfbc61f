"""Exact distributions of tree verification in float64, written from the mathematics, not from the package's code.

A tree is a list of parents; `p` and `q` map the ids of a path (a tuple) to a row. `tree_distribution` is the
distribution of the emitted ids given the drafted tokens, `drafts` enumerates these with their probability,
`joint_error` sums both against the target's own distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from exact_chains import positive
from torch import Tensor

Rows = dict[tuple[int, ...], Tensor]
Distribution = dict[tuple[int, ...], float]


def one_hot(x: int, vocab: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(x), vocab).double()


def path_ids(parents: list[int], tokens: list[int], node: int) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    while node > 0:
        ids, node = (tokens[node], *ids), parents[node]
    return ids


def children_of(parents: list[int], node: int) -> list[int]:
    return [n for n, parent in enumerate(parents) if parent == node and n > 0]


def random_rows(vocab: int, depth: int, seed: int, spread: float = 1.2) -> Rows:
    g = torch.Generator().manual_seed(seed)
    return {
        ids: (spread * torch.randn(vocab, generator=g, dtype=torch.float64)).softmax(0)
        for n in range(depth + 1)
        for ids in itertools.product(range(vocab), repeat=n)
    }


# --- one node: (probability of each candidate, distribution of the token where all are rejected)


def without(p: Tensor, ids: list[int]) -> Tensor:
    p = p.clone()
    p[ids] = 0
    return p / p.sum() if float(p.sum()) > 0 else p


def rejection(p: Tensor, q: Tensor | None, ids: list[int], replacement: bool) -> tuple[list[float], Tensor]:
    """Recursive rejection as it is defined, one candidate after the other; q None: each is a point mass."""
    shares, alive = [], 1.0
    for x in ids:
        distribution = one_hot(x, len(p)) if q is None else q
        accept = min(1.0, float(p[x] / distribution[x])) if float(distribution[x]) > 0 else 0.0
        shares.append(alive * accept)
        alive *= 1 - accept
        rest = (p - distribution).clamp(min=0)
        p = rest / rest.sum() if float(rest.sum()) > 0 else p
        if q is not None and not replacement:
            q = without(q, [x])
    return shares, p


def multi_draft(p: Tensor, q: Tensor | None, ids: list[int]) -> tuple[list[float], Tensor]:
    """Greedy multi-draft: a ratio test of the last candidate, whose distribution leaves the others out."""
    if not ids:
        return [], p
    *others, x = ids
    distribution = one_hot(x, len(p)) if q is None else without(q, others)
    accept = min(1.0, float(p[x] / distribution[x]))
    rest = positive(p - distribution) if accept < 1 else p
    shares = [(1 - accept) * float(rest[y]) for y in others]
    return [*shares, accept], without(rest, others)


def node_distribution(rule: str, p: Tensor, q: Tensor | None, ids: list[int]) -> tuple[list[float], Tensor]:
    if rule in ("match", "target_only"):
        return [0.0 if x in ids[:j] else float(p[x]) for j, x in enumerate(ids)], without(p, ids)
    if rule == "greedy_multi_draft":
        return multi_draft(p, q, ids)
    return rejection(p, q, ids, replacement=rule == "iid")


# --- a tree


def tree_distribution(rule: str, parents: list[int], tokens: list[int], p: Rows, q: Rows | None) -> Distribution:
    """Distribution of the emitted ids given the tree's tokens; "iid" and "recursive" are the two recursive rules."""
    if rule == "traversal":
        return _traversal(parents, tokens, p, q)
    out: Distribution = {}

    def visit(node: int, weight: float) -> None:
        ids = path_ids(parents, tokens, node)
        children = children_of(parents, node)
        shares, rest = node_distribution(rule, p[ids], None if q is None else q[ids], [tokens[n] for n in children])
        for child, share in zip(children, shares, strict=True):
            if weight * share > 0:
                visit(child, weight * share)
        stopped = weight * (1 - sum(shares))
        for y, share in enumerate(rest.tolist()):
            if stopped * share > 1e-300:
                out[(*ids, y)] = out.get((*ids, y), 0.0) + stopped * share

    visit(0, 1.0)
    return out


def _traversal(parents: list[int], tokens: list[int], p: Rows, q: Rows | None) -> Distribution:
    """Traversal verification with every weight recomputed after every deletion, as the paper has it."""
    nodes = range(len(parents))
    paths = [path_ids(parents, tokens, n) for n in nodes]
    row_p = [p[ids].clone() for ids in paths]
    row_q = [None if q is None else q[ids].clone() for ids in paths]
    kept = dict.fromkeys(nodes, True)
    fixed: dict[int, float] = {}
    out: Distribution = {}
    alive = 1.0

    def weight(n: int) -> float:
        if n in fixed or n == 0:
            return fixed.get(n, 1.0)
        f, x = parents[n], tokens[n]
        distribution = one_hot(x, len(row_p[f])) if row_q[f] is None else row_q[f]
        assert distribution is not None
        return min(1.0, weight(f) * float(row_p[f][x] / distribution[x]))

    while True:
        leaf = 0
        while below := [n for n in children_of(parents, leaf) if kept[n]]:
            leaf = below[0]
        accept = 1.0 if leaf == 0 else weight(leaf)
        for y, share in enumerate(row_p[leaf].tolist()):
            if alive * accept * share > 0:
                key = (*paths[leaf], y)
                out[key] = out.get(key, 0.0) + alive * accept * share
        if leaf == 0:
            return out
        alive *= 1 - accept
        kept[leaf] = False
        f, x = parents[leaf], tokens[leaf]
        distribution = row_q[f]
        excess = (weight(f) * row_p[f] - (one_hot(x, len(row_p[f])) if distribution is None else distribution)).clamp(
            min=0
        )
        mass, w = float(excess.sum()), weight(f)
        if mass > 0:
            row_p[f] = excess / mass
        fixed[f] = mass / (mass + (1 - w)) if mass > 0 else 0.0
        if distribution is not None:
            row_q[f] = without(distribution, [x])


# --- drafts, and what comes out over all of them


def drafts(kind: str, parents: list[int], q: Rows) -> Iterator[tuple[list[int], float]]:
    """(tokens, probability) of every drafted tree: "iid", "distinct" (no replacement), "top", "greedy_multi_draft"."""

    def extend(tokens: list[int], weight: float) -> Iterator[tuple[list[int], float]]:
        n = len(tokens)
        if n == len(parents):
            yield tokens, weight
            return
        row = q[path_ids(parents, tokens, parents[n])]
        siblings = children_of(parents, parents[n])
        earlier = [tokens[m] for m in siblings if m < n]
        ranked = row.argsort(descending=True).tolist()
        if kind == "top" or (kind == "greedy_multi_draft" and n != siblings[-1]):
            distribution = one_hot(ranked[len(earlier)], len(row))
        else:
            distribution = row if kind == "iid" else without(row, earlier)
        for x, share in enumerate(distribution.tolist()):
            if share > 0:
                yield from extend([*tokens, x], weight * share)

    yield from extend([-1], 1.0)


def output_distribution(rule: str, kind: str, parents: list[int], p: Rows, q: Rows) -> Distribution:
    """Distribution of the emitted ids over all drafts."""
    out: Distribution = {}
    for tokens, weight in drafts(kind, parents, q):
        for ids, share in tree_distribution(rule, parents, tokens, p, None if kind == "top" else q).items():
            out[ids] = out.get(ids, 0.0) + weight * share
    return out


def expected_accepted(distribution: Distribution) -> float:
    return sum((len(ids) - 1) * share for ids, share in distribution.items())


def joint_error(distribution: Distribution, p: Rows, vocab: int, length: int) -> float:
    """Largest error of the first `length` ids, completed by the target, against the target's own distribution."""
    joint: Distribution = {}
    for ids, share in distribution.items():
        for tail in itertools.product(range(vocab), repeat=length - len(ids)):
            whole, mass = ids + tail, share
            for j in range(len(ids), length):
                mass *= float(p[whole[:j]][whole[j]])
            joint[whole] = joint.get(whole, 0.0) + mass
    worst = 0.0
    for whole in itertools.product(range(vocab), repeat=length):
        exact = 1.0
        for j in range(length):
            exact *= float(p[whole[:j]][whole[j]])
        worst = max(worst, abs(exact - joint.get(whole, 0.0)))
    return worst


def ceiling(kind: str, p: Tensor, q: Tensor, count: int) -> float:
    """Best acceptance of any lossless verifier at one node: min over H of p(H) + 1 - Pr(all candidates in H)."""
    vocab, best = len(p), 1.0
    flat = [0] * (count + 1)
    flat[0] = -1
    table = {(): q}
    for size in range(vocab + 1):
        for subset in itertools.combinations(range(vocab), size):
            inside = sum(w for tokens, w in drafts(kind, flat, table) if set(tokens[1:]) <= set(subset))
            best = min(best, float(p[list(subset)].sum()) + 1 - inside)
    return best


def medusa_typical(p: Tensor, ids: Tensor, leaves: Tensor, epsilon: float, delta: float) -> tuple[list[int], int]:
    """Medusa's evaluation of one tree over leaf rows: longest prefix, then the largest sum of log p."""
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for row in leaves.tolist():
        path = [n for n in row if n >= 0]
        taken, score = [], 0.0
        for parent, node in itertools.pairwise(path):
            entropy = -float(torch.special.xlogy(p[parent], p[parent]).sum())
            x = float(p[parent, ids[node]])
            if x <= min(epsilon, delta * float(torch.tensor(-entropy).exp())):
                break
            taken.append(node)
            score += float(torch.tensor(x, dtype=torch.float64).log())
        if (len(taken), score) > (best[0], best[1]) and taken:
            best = (len(taken), score, taken)
    return best[2], best[0]
