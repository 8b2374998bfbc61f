"""How much of the drafts a step verifies: what limits leave room for, what pays, and what the budget allows."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from specdec_kernels import Backend, allocate_drafts, available_backends

from ..draft_length import FixedLength
from ..drafters import Draft
from ..sequences import on_host
from ..step_times import StepTimes
from .request import SHARED, Request, acceptances, pooled
from .verification import nodes_of

FADE = 0.995  # of what is known of ranks, by each further step of a request


class Ranks:
    """How often the n-th child of an accepted node is accepted: of all requests, of late."""

    def __init__(self) -> None:
        """Nothing is known: half of the rest for each child."""
        self._taken: list[float] = []
        self._seen: list[float] = []

    def chances(self, count: int) -> list[float]:
        """Of the first `count` children. They never rise, so that the best nodes of a tree are a tree."""
        found: list[float] = []
        known = zip(self._taken, self._seen, strict=True)
        for rank in range(count):
            taken, seen = next(known, (0.0, 0.0))
            found.append(min((taken + SHARED * 0.5 ** (rank + 1)) / (seen + SHARED), *found[-1:], 1.0))
        return found

    def learn(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Note which nodes of a tree were accepted; children of a rejected node tell nothing."""
        self._taken, self._seen = ([FADE * x for x in known] for known in (self._taken, self._seen))
        for node in (0, *path):
            children = [child for child, parent in enumerate(parents) if parent == node]
            more = len(children) - len(self._seen)
            self._taken += [0.0] * more
            self._seen += [0.0] * more
            for rank, child in enumerate(children):
                self._seen[rank] += 1
                self._taken[rank] += child in path


class Offer(NamedTuple):
    """Drafts of a request that may be verified, the best first.

    Attributes:
        chances: that each is accepted if all before it were; of a tree, quotients of the chances of its nodes.
        parents: of a tree.
        nodes: of a tree, in this order; the root is none of them.
        depths: of all nodes of a tree.
    """

    chances: list[float]
    parents: Sequence[int] = ()
    nodes: Sequence[int] = ()
    depths: Sequence[int] = ()


class Allotment:
    """Cuts the drafts of a step.

    Attributes:
        times: of steps, by their tokens; None: drafts are cut by the budget alone.
        ranks: what trees are cut by.
    """

    def __init__(self, lengths: FixedLength, budget: int | None) -> None:
        """Cut by the time of steps where lengths follow it; `budget`: most drafts of a step, None: no bound."""
        self.times = StepTimes() if lengths.measures else None
        self.ranks = Ranks()
        self._lengths, self._budget = lengths, budget
        self._trees: dict[Request, Sequence[int]] = {}  # those of this step: parents

    def cut(self, requests: Sequence[Request], drafts: Sequence[Draft], own: int) -> list[Draft]:
        """The same drafts, of fewer tokens; `own`: tokens of the step beside them."""
        self._trees = {}
        is_cut = self.times is not None or self._budget is not None
        offers = self._offers(requests, drafts, are_trees_cut=is_cut)
        lengths = [len(offer.chances) for offer in offers]
        wanted = sum(lengths)
        budget = wanted if self._budget is None else min(wanted, self._budget)
        whole = zip(drafts, offers, strict=True)
        own += sum(nodes_of(draft) - 1 for draft, offer in whole if draft.parents is not None and not offer.parents)
        cost = self.times.table(own, budget) if self.times is not None and wanted else None
        if cost is not None or budget < wanted:
            most = max(lengths)
            chances = torch.tensor([[*offer.chances, *[0.0] * (most - len(offer.chances))] for offer in offers])
            is_draft = torch.arange(most) < torch.tensor(lengths)[:, None]
            ids = torch.where(is_draft, 0, -1)
            lengths = allocate_drafts(
                ids, chances, budget=budget, cost=cost, backend=_host_backend()
            ).num_draft.tolist()
        return list(map(self._kept, requests, drafts, offers, lengths))

    def learn(self, requests: Sequence[Request], paths: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        """Note what a step accepted of its trees."""
        for request, path, count in zip(requests, paths, accepted, strict=True):
            if request in self._trees:
                self.ranks.learn(self._trees[request], path[: max(count, 0)])

    def _offers(self, requests: Sequence[Request], drafts: Sequence[Draft], *, are_trees_cut: bool) -> list[Offer]:
        """What of each draft may be verified; nothing of a tree that is not cut."""
        are_cut = [d.parents is not None and d.candidates is None and are_trees_cut for d in drafts]
        trees = _read([draft for draft, is_cut in zip(drafts, are_cut, strict=True) if is_cut])
        copied = [sum(draft.lengths or ()) for draft in drafts if draft.is_free]
        columns = self._lengths.verified(copied) if copied else None
        shared, made = pooled(requests), list[Offer]()
        for request, draft, chance, is_cut in zip(requests, drafts, acceptances(requests), are_cut, strict=True):
            if is_cut:
                parents, ids = next(trees)
                made.append(self._offer_of_tree(parents, ids, request.left - 1, chance / shared))
            elif draft.parents is None:
                count = min(draft.token_ids.shape[1], request.left - 1)
                made.append(Offer([chance] * (count if columns is None else min(count, columns))))
            else:
                made.append(Offer([]))
        return made

    def _offer_of_tree(self, parents: Sequence[int], ids: Sequence[int], most: int, trust: float) -> Offer:
        """Nodes by the chance of their path. A node is not worth more than its parent, which stands before it."""
        chances = [trust * chance for chance in self.ranks.chances(len(ids))]
        score, depth, children = [1.0], [0], [0] * len(ids)
        for node, parent in list(enumerate(parents))[1:]:
            is_there = 0 <= parent < node and ids[node] >= 0 and depth[parent] < most
            score.append(score[parent] * min(1.0, chances[children[parent]]) if is_there else 0.0)
            depth.append(depth[parent] + 1 if is_there else 0)
            children[parent] += is_there
        nodes = sorted((n for n in range(1, len(ids)) if score[n] > 0), key=lambda n: -score[n])
        ordered = [1.0, *(score[n] for n in nodes)]
        return Offer([after / before for before, after in pairwise(ordered)], parents, nodes, depth)

    def _kept(self, request: Request, draft: Draft, offer: Offer, length: int) -> Draft:
        """The first `length` of what was offered."""
        if draft.parents is None:
            return (
                draft if draft.token_ids.shape[1] <= length else draft._replace(token_ids=draft.token_ids[:, :length])
            )
        if not offer.parents:
            return draft
        nodes = [0, *sorted(offer.nodes[:length])]
        place = {node: number for number, node in enumerate(nodes)}
        links = [place.get(offer.parents[node], -1) for node in nodes]
        self._trees[request] = links
        if len(nodes) == draft.token_ids.shape[1]:
            return draft
        columns = torch.tensor(nodes, device=draft.token_ids.device)
        kept = torch.tensor([links], dtype=draft.parents.dtype, device=draft.parents.device)
        return draft._replace(
            token_ids=draft.token_ids[:, columns], parents=kept, max_depth=max(offer.depths[n] for n in nodes)
        )


@functools.cache
def _host_backend() -> Backend:
    """For tensors of the host: SPECDEC_BACKEND chooses for those of the device."""
    return "cpu" if available_backends("cpu")["cpu"] is None else "reference"


def _read(trees: Sequence[Draft]) -> Iterator[tuple[list[int], list[int]]]:
    """Parents and ids of each, in one copy from the device."""
    columns = [x for draft in trees for x in (draft.parents, draft.token_ids) if x is not None]
    rows = [row for (row,) in on_host(*columns)] if columns else []
    return zip(rows[::2], rows[1::2], strict=True)
