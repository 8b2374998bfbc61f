"""verify_chain beside its rivals. For its check a rival is handed the same coins, for its time it draws its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import ChainResult, verify_chain

from . import cases as case_tables
from .cases import Case
from .rivals import eager
from .rows import ChainInput, coins
from .rows import distribution as exact_distribution
from .suite import Contender, chain_inputs, distribution, first_requests, pytest_speed, rivals_for

FUNCTIONS = ("verify_chain", "verify_prepared", "verify_step")


def cases(extent: str) -> list[Case]:
    """Cases of `quick`, `default` or `full`."""
    return case_tables.verify_chain_cases(extent)


def inputs(case: Case) -> list[ChainInput]:
    """Batches that a case walks through; rules that need a step get one."""
    made = chain_inputs(case)
    return [x._replace(rng=x.rng._replace(step=torch.zeros_like(x.rng.seed))) for x in made]


def ours(x: ChainInput, rule: str, backend: str, stats: bool = False) -> ChainResult:
    """One call of the package."""
    sampling = x.filters.sampling(len(x.draft_ids), str(x.target.device))
    with_draft = rule in ("ratio", "block")
    return verify_chain(
        x.draft_ids,
        x.target,
        x.draft if with_draft else None,
        draft_stats=(x.logsumexp, x.threshold) if stats else None,
        sampling=sampling,
        draft_sampling=sampling if with_draft else None,
        rng=x.rng,
        rule=rule,
        backend=backend,
    )


def check_ours(rule: str, backend: str, stats: bool) -> Callable[[ChainInput], None]:
    """Token for token as the reference; only a token drawn within rounding may differ, and is counted."""

    def check(x: ChainInput) -> None:
        part = first_requests(x)
        got, want = ours(part, rule, backend, stats), ours(part, rule, "reference", stats)
        assert torch.equal(got.num_accepted, want.num_accepted), f"{backend}: {got.num_accepted} != {want.num_accepted}"
        assert torch.equal(got.status, want.status), f"{backend}: status {got.status} != {want.status}"
        assert torch.equal(got.token_ids, want.token_ids), f"{backend}: {got.token_ids} != {want.token_ids}"

    return check


def check_rival(run: Callable[[ChainInput, Tensor], tuple[Tensor, Tensor]]) -> Callable[[ChainInput], None]:
    """The same number accepted with the same coins, and a drawn token that the exact distribution can give."""

    def check(x: ChainInput) -> None:
        uniforms = coins(x.rng._replace(step=None), x.draft_ids.shape[1]).float()
        tokens, count = run(x, uniforms.to(x.target.device))
        assert torch.equal(count.cpu(), x.num_accepted.cpu()), f"accepts {count}, exact arithmetic {x.num_accepted}"
        check_drawn(x, tokens, count)

    return check


def check_drawn(x: ChainInput, tokens: Tensor, count: Tensor) -> None:
    """Each drawn token has mass under the distribution it must come from."""
    for b, n in enumerate(count.tolist()):
        p = exact_distribution(x.target[b, n : n + 1].cpu(), x.filters)[0][0]
        if n < x.draft.shape[1]:
            p = p - exact_distribution(x.draft[b, n : n + 1].cpu(), x.filters)[0][0]
        assert float(p[tokens[b, n]]) > -1e-9, f"request {b}: token {int(tokens[b, n])} has no mass"


def contenders(case: Case, made: Sequence[ChainInput], backends: Sequence[str]) -> list[Contender]:
    """Ours, then the rivals."""
    field = []
    for backend in backends:
        for stats in (False, True) if case.rule == "ratio" else (False,):
            field.append(
                Contender(
                    f"{backend} + draft_stats" if stats else backend,
                    True,
                    lambda x, backend=backend, stats=stats: ours(x, case.rule, backend, stats),
                    check_ours(case.rule, backend, stats),
                )
            )
    if case.rule == "ratio":
        distributions = {id(x): distribution(x) for x in made}
        for function in FUNCTIONS:
            field += [ratio_rival(rival, function, case, made, distributions) for rival in rivals_for(case, function)]
    elif case.rule == "greedy":
        greedy = lambda x: eager.verify_greedy(x.draft_ids, x.target)  # noqa: E731
        field.append(Contender(eager.NAME, False, greedy, check_greedy))
    elif case.rule == "match":
        match = lambda x: eager.verify_match(x.draft_ids, x.target, distribution(x)[0])  # noqa: E731
        field.append(Contender(eager.NAME, False, match, lambda x: None))  # its own noise: nothing to compare
    return field


def ratio_rival(
    rival: Any, function: str, case: Case, made: Sequence[ChainInput], distributions: dict[int, Any]
) -> Contender:
    """A rival under rule ratio, its parameters as it takes them, prepared before the clock where it takes that."""
    call = getattr(rival, function)
    filters = made[0].filters
    if function != "verify_chain":  # transformers: draws its own coins
        ready = (
            {id(x): rival.prepare(x.target, x.draft, *distributions[id(x)]) for x in made}
            if function == FUNCTIONS[1]
            else {id(x): prepared_draft(x, distributions[id(x)]) for x in made}
        )

        def run_step(x: ChainInput) -> Any:
            if function == FUNCTIONS[1]:
                return call(x.draft_ids, ready[id(x)])
            return call(x.draft_ids, x.target, ready[id(x)], filters)

        return Contender(rival.NAME, False, run_step, lambda x: check_drawn(x, *run_step(x)))

    def arguments(x: ChainInput) -> list[Any]:
        parameters = list(distributions.get(id(x)) or distribution(x))
        if rival.NAME.startswith("topk"):
            parameters[1] = filters.top_k  # torch.topk wants a host number: one for the batch
        return [x.draft_ids, x.target, x.draft, *parameters]

    return Contender(
        rival.NAME,
        False,
        lambda x: call(*arguments(x)),
        check_rival(lambda x, uniforms: call(*arguments(x), uniforms)),
    )


def prepared_draft(x: ChainInput, parameters: Sequence[Tensor | None]) -> Tensor:
    """Draft logits as transformers' assistant returns them: processed, float32."""
    from .rivals.lazy import scaled

    return scaled(x.draft, *parameters)


def check_greedy(x: ChainInput) -> None:
    """As rule greedy of the reference."""
    part = first_requests(x)
    tokens, _ = eager.verify_greedy(part.draft_ids, part.target)
    assert torch.equal(tokens, ours(part, "greedy", "reference").token_ids)


test_speed = pytest_speed("verify_chain")
