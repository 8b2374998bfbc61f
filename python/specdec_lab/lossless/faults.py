"""Samplers broken on purpose, in ways that have been shipped or nearly were. A laboratory must find every one.

G1 to G7 are the global rules of docs/design.md. Each fault is a method with one field changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_kernels import Edits, RngKey, Sampling, random_words, residual_sample, sample

from .edits import EDITS
from .exact import Filters, processed, sampling_of
from .procedures import PROCEDURES, Procedure, Step, Verdict, verify, within_budget


@dataclass(frozen=True)
class Fault:
    """A broken method, and the filters under which its bias shows.

    Attributes:
        name: for `--inject`.
        what: in words.
        method: the broken one.
        filters: of target and draft.
        impossible: it shows only where a coin is exactly 0, once in 16.8 million draws: look there.
        edits: of target and draft.
    """

    name: str
    what: str
    method: Procedure
    filters: Filters
    impossible: bool = False
    edits: Edits | None = None


def confident(method: Procedure, step: Step) -> Tensor:
    """Offer a drafted id only if it is id 0, and nothing behind it."""
    return (step.token_ids == 0).long().cumprod(1).bool()


def likely(method: Procedure, step: Step) -> Tensor:
    """Give the budget to the ids that were likely to be drawn: a confidence may not look at the drawn id."""
    drawn = step.draft.log_softmax(-1).gather(2, step.token_ids[:, :, None])[:, :, 0]
    return within_budget(step.token_ids, drawn.exp())


def accepted_later(method: Procedure, step: Step) -> Tensor:
    """Give the budget to the drafts that are going to be accepted, so that nothing is drawn from a residual."""
    _, accepted = verify(method, step)
    places = torch.arange(step.token_ids.shape[1], device=accepted.device)
    return within_budget(step.token_ids, places < accepted[:, None])


def unfiltered_residual(method: Procedure, step: Step) -> Verdict:
    """Accept by the filtered distributions, but draw a rejected position from the residual of the unfiltered ones."""
    emitted, accepted = verify(method, step)
    batch, drafts = step.token_ids.shape
    place = accepted.long().clamp(max=drafts - 1)
    request = torch.arange(batch, device=emitted.device)
    drawn = residual_sample(
        step.target[request, place], step.draft[request, place], sampling=Sampling(), draft_sampling=Sampling(),
        rng=step.rng._replace(position=step.rng.position + accepted.long()),
    ).token_ids  # fmt: skip
    kept = emitted.gather(1, accepted.long()[:, None])[:, 0]
    drawn = torch.where(accepted < drafts, drawn.to(emitted.dtype), kept)
    return emitted.scatter(1, accepted.long()[:, None], drawn[:, None]), accepted


def from_target(method: Procedure, step: Step) -> Verdict:
    """Draw a rejected position from the target in place of the residual."""
    emitted, accepted = verify(method, step)
    rows = step.target[torch.arange(len(emitted), device=emitted.device), accepted.long()]
    rng = step.rng._replace(position=step.rng.position + accepted.long())
    drawn = sample(rows, sampling=sampling_of(step.filters, len(rows)), rng=rng, purpose="residual").token_ids
    return emitted.scatter(1, accepted.long()[:, None], drawn.to(emitted.dtype)), accepted


def one_draw_a_path(method: Procedure, step: Step) -> Verdict:
    """Draw a target token anew for each path and depth, and keep the path that agrees longest."""
    parents = method.parents()
    leaves = [n for n in range(len(parents)) if n not in parents]
    batch, width = len(step.token_ids), method.depth + 1
    sampling = sampling_of(step.filters, batch)
    best = torch.full((batch, width), -1, dtype=torch.int64)
    most = torch.full((batch,), -1)
    for lane, leaf in enumerate(leaves):
        path = [leaf]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        drawn = [
            sample(
                step.target[:, node], sampling=sampling, purpose="draft", lane=lane,
                rng=step.rng._replace(position=step.rng.position + d),
            ).token_ids[:, 0]
            for d, node in enumerate(path)
        ]  # fmt: skip
        drafted = step.token_ids[:, path[1:]]
        count = (drafted == torch.stack(drawn[:-1], 1)).long().cumprod(1).sum(1)
        best = torch.where((count > most)[:, None], torch.stack(drawn, 1), best)
        most = torch.maximum(count, most)
    return best, most


def coin_at_most(method: Procedure, step: Step) -> Verdict:
    """The ratio test of one draft with `coin * q <= p`: a coin of 0 accepts what the target excludes."""
    coin = (random_words(step.rng, purpose="coin", index=torch.zeros(1, dtype=torch.int64))[:, 0] >> 8) * 2.0**-24
    x = step.token_ids[:, :1]
    p = processed(step.target[:, 0], **step.filters).gather(1, x)[:, 0]  # type: ignore[arg-type]
    q = processed(step.draft[:, 0], **step.filters).gather(1, x)[:, 0]  # type: ignore[arg-type]
    emitted, accepted = verify(method, step)
    wrong = (coin * q <= p) & (accepted == 0)
    emitted = torch.where(wrong[:, None], torch.cat([x, emitted[:, :1], emitted[:, 2:]], 1), emitted)
    return emitted, torch.where(wrong, 1, accepted)


_BY_NAME = {method.name: method for method in PROCEDURES}
_RATIO, _BLOCK, _TRAVERSAL = (_BY_NAME[name] for name in ("ratio", "block", "tree traversal"))
_DISTINCT, _INDEPENDENT = (_BY_NAME[f"tree recursive{kind}"] for kind in ("", ", with replacement"))
_MATCH = _BY_NAME["tree match"]

FAULTS = [
    Fault("g1", "argmax drafts scored with the whole draft row", replace(_RATIO, drawn={"temperature": 0.0}), {}),
    Fault("wrong-q", "drafts drawn at temperature 0.8, scored at 1", replace(_RATIO, drawn={"temperature": 0.8}), {}),
    Fault("g2", "drafts share the noise of the residual", replace(_RATIO, purpose="residual"), {}),
    Fault(
        "shared-noise", "independent siblings that share one race", replace(_INDEPENDENT, siblings="shared"), {}
    ),
    Fault("g3", "block verification whose noise has no step", replace(_BLOCK, has_step=False), {}),
    Fault("g3-tree", "traversal verification whose noise has no step", replace(_TRAVERSAL, has_step=False), {}),
    Fault("g4", "a draft cut off after looking at its ids", replace(_RATIO, keep=confident), {}),
    Fault(
        "g5", "distinct siblings under the rule for independent ones", replace(_INDEPENDENT, siblings="distinct"), {}
    ),
    Fault("g6", "a target token drawn for each path, not each node", replace(_MATCH, verify=one_draw_a_path), {}),
    Fault("g7", "coin <= ratio, so that coin 0 accepts the impossible", replace(_RATIO, verify=coin_at_most), {}, True),
    Fault("target-residual", "a rejected position drawn from the target", replace(_RATIO, verify=from_target), {}),
    Fault(
        "unfiltered-residual", "a residual that forgets the filters",
        replace(_RATIO, verify=unfiltered_residual), {"temperature": 0.9, "top_k": 2},
    ),
    Fault(
        "one-edit", "the penalties of a step's first position at all of them",
        replace(_RATIO, has_one_edit=True), {}, edits=EDITS["penalties"],
    ),
    Fault(
        "one-edit-tree", "the bad words of a tree's root at all its nodes",
        replace(_DISTINCT, has_one_edit=True), {}, edits=EDITS["bad words"],
    ),
    Fault("budget-drawn", "one budget, given to ids that were likely to be drawn", replace(_RATIO, keep=likely), {}),
    Fault(
        "budget-accepted", "one budget, given to the drafts that will be accepted",
        replace(_RATIO, keep=accepted_later), {},
    ),
]  # fmt: skip


def coins_of_zero() -> RngKey:
    """RngKey whose first coin is exactly 0: of the 2^24 positions of seed 1 there are two."""
    rng = RngKey(torch.tensor([1, 1]), torch.tensor([1012415, 9427389]), torch.tensor([0, 0]))
    words = random_words(rng, purpose="coin", index=torch.zeros(1, dtype=torch.int64))
    assert bool((words >> 8 == 0).all()), "the coins are no longer 0"
    return rng
