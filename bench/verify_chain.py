"""verify_chain beside its rivals. For its check a rival is handed the same coins, for its time it draws its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import ChainResult, verify_chain

from .cases import BOTH, Case
from .rivals import eager
from .rivals.eager import scaled
from .rows import ChainInput, coins, distribution
from .suite import Run, chain_inputs, first_requests, rivals_for, sampling_for
from .suite import ours as ours_on

OP, QUICK = "verify_chain", 8
CASES = [
    *(Case(OP, dtype=dtype, compiled=True) for dtype in ("fp32", "bf16")),
    Case(OP, batch=1),
    Case(OP, batch=1, dtype="bf16"),
    Case(OP, filters=BOTH),
    Case(OP, dtype="bf16", filters=BOTH),
    Case(OP, batch=1, threads=1),
    Case(OP, batch=1, dtype="bf16", threads=1),
    Case(OP, vocab=32000),
    Case(OP, vocab=151936, dtype="bf16"),
    Case(OP, batch=4, dtype="bf16"),
    Case(OP, batch=64, dtype="bf16"),
    Case(OP, draft=1),
    Case(OP, draft=3, dtype="bf16"),
    Case(OP, draft=8, dtype="bf16"),
    *(Case(OP, filters=filters) for filters in ("top-k 50", "top-p .95", "min-p .05")),
    Case(OP, batch=1, filters=BOTH),
    *(Case(OP, rule=rule, dtype="bf16") for rule in ("greedy", "match", "block", "typical")),
    *(Case(OP, rows=shape, dtype=dtype) for shape, dtype in (("flat", "fp32"), ("peaked", "bf16"))),
    Case(OP, rows="flat", filters=BOTH),
]


def inputs(case: Case) -> list[ChainInput]:
    """Batches that a case walks through; rules that need a step get one."""
    made = chain_inputs(case)
    return [x._replace(rng=x.rng._replace(step=torch.zeros_like(x.rng.seed))) for x in made]


def ours(case: Case, x: ChainInput, backend: str, has_stats: bool = False) -> ChainResult:
    """One call of the package."""
    with_draft = case.rule in ("ratio", "block")
    return verify_chain(
        x.draft_ids,
        x.target,
        x.draft if with_draft else None,
        draft_stats=(x.logsumexp, x.threshold) if has_stats else None,
        sampling=x.sampling,
        draft_sampling=x.sampling if with_draft else None,
        rng=x.rng,
        rule=case.rule,
        backend=backend,
    )


def variants(case: Case, backend: str) -> dict[str, Run]:
    """Ours; under rule ratio also with the statistics of the drafts."""
    plain = ours_on(case, backend)
    return {backend: plain} | (
        {f"{backend} + draft_stats": partial(plain, has_stats=True)} if case.rule == "ratio" else {}
    )


def check(case: Case, run: Run, x: ChainInput) -> None:
    """Token for token as the reference."""
    part = first_requests(x)
    got, want = run(part), ours(case, part, "reference")
    for name in ("num_accepted", "status", "token_ids"):
        have, expected = getattr(got, name), getattr(want, name)
        assert torch.equal(have, expected), f"{name} {have} != {expected}"


def check_rival(case: Case, run: Run, x: ChainInput) -> None:
    """Greedy: the reference's tokens; ratio: a drawn token that the exact distribution can give.

    With the same coins, where a rival takes coins, the same number is accepted. Under rule match it has noise of its
    own: nothing to compare.
    """
    if case.rule == "greedy":
        part = first_requests(x)
        assert torch.equal(run(part)[0], ours(case, part, "reference").token_ids)
    elif isinstance(run, Drawing):
        uniforms = coins(x.rng._replace(step=None), x.draft_ids.shape[1]).float()
        tokens, count = run(x, uniforms.to(x.target.device))
        assert torch.equal(count.cpu(), x.num_accepted.cpu()), f"accepts {count}, exact arithmetic {x.num_accepted}"
        check_drawn(x, tokens, count)
    elif case.rule == "ratio":
        check_drawn(x, *run(x))


def check_drawn(x: ChainInput, tokens: Tensor, count: Tensor) -> None:
    """Each drawn token has mass under the distribution it must come from."""
    for b, n in enumerate(count.tolist()):
        p = distribution(x.target[b, n : n + 1].cpu(), x.filters)[0][0]
        if n < x.draft.shape[1]:
            p = p - distribution(x.draft[b, n : n + 1].cpu(), x.filters)[0][0]
        assert float(p[tokens[b, n]]) > -1e-9, f"request {b}: token {int(tokens[b, n])} has no mass"


class Drawing:
    """A rival under rule ratio that draws its coins or takes them."""

    def __init__(self, rival: Any) -> None:
        self.rival = rival

    def __call__(self, x: ChainInput, uniforms: Tensor | None = None) -> Any:
        """(token ids, number accepted)."""
        return self.rival.verify_chain(x.draft_ids, x.target, x.draft, sampling_for(self.rival, x), uniforms)


def rivals(case: Case, made: Sequence[ChainInput]) -> dict[str, Run]:
    """Those that have the rule; logits are prepared before the clock where a rival keeps them so."""
    if case.rule == "greedy":
        return {eager.NAME: lambda x: eager.verify_greedy(x.draft_ids, x.target)}
    if case.rule == "match":
        return {eager.NAME: lambda x: eager.verify_match(x.draft_ids, x.target, x.sampling.temperature)}
    if case.rule != "ratio":
        return {}
    found: dict[str, Run] = {rival.NAME: Drawing(rival) for rival in rivals_for(case, "verify_chain")}
    for rival in rivals_for(case, "verify_prepared"):
        ready = {id(x): rival.prepare(x.target, x.draft, x.sampling) for x in made}
        found[rival.NAME] = lambda x, rival=rival, ready=ready: rival.verify_prepared(x.draft_ids, ready[id(x)])
    for rival in rivals_for(case, "verify_step"):  # the assistant hands over logits that are processed
        drafted = {id(x): scaled(x.draft, x.sampling) for x in made}
        found[rival.NAME] = lambda x, rival=rival, drafted=drafted: rival.verify_step(
            x.draft_ids, x.target, drafted[id(x)], x.filters
        )
    return found
