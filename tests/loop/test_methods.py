"""The table of methods: each makes a drafter that may be verified by its rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from head_models import TinyAssets
from models import model
from texts import prompts

from specdec_kernels import Sampling
from specdec_loop import Datastore, generate
from specdec_loop.draft_length import FixedLength
from specdec_loop.methods import METHODS, DrafterAssets
from specdec_loop.serve.engine import Engine
from specdec_loop.serve.request import Request


class Irregular(FixedLength):
    """Lengths as a policy may ask for them: none for a step, none for many, then drafts again."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self.asked: list[int] = []

    def next(self) -> int:
        lengths = (self.longest, 0, 1, 0, 0, 0, self.longest, *[0] * 12)
        self.asked.append(lengths[len(self.asked) % len(lengths)])
        return self.asked[-1]

    def verified(self, lengths: Any) -> int:
        return max(lengths, default=0) // 2


def assets() -> TinyAssets:
    return TinyAssets(
        model(),
        heads=Path("nowhere").joinpath,
        load_draft=lambda: model(seed=1),
        load_store=lambda: Datastore.build(prompts()),
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name != "plain"])
def test_every_drafter_follows_a_text_through_steps_without_drafts(name: str) -> None:
    method, policy = METHODS[name], Irregular(METHODS[name].draft_length)
    sampling = Sampling.full(3, temperature=0.0 if not method.keeps_the_text else 0.9)
    arguments: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 24, "stop": ()}
    plain = generate(model(), None, prompts(3), **arguments).tokens
    result = generate(
        model(), method.make(assets()), prompts(3), rule=method.rule, draft_length=policy, **arguments
    )  # fmt: skip
    assert result.tokens == plain
    assert policy.asked.count(0) > 3


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.keeps_the_text])
def test_every_method_that_keeps_the_text_is_served_to_requests_that_come_and_go(name: str, budget: int | None) -> None:
    method = METHODS[name]
    if budget is not None and method.make(assets()) is not None and method.make(assets()).is_whole:
        pytest.skip("its trees are not cut")
    plain = generate(
        model(), None, prompts(5), sampling=Sampling.full(5, temperature=0.9), seed=2, max_new_tokens=24, stop=()
    ).tokens  # fmt: skip
    policy = Irregular(method.draft_length)
    sizes: dict[str, Any] = {"slots": 2, "pages": 60, "page_size": 8}
    engine = Engine(model(), lambda: method.make(assets()), draft_length=policy, budget=budget, **sizes)
    requests = [engine.submit(Request(ids, 24, 0.9, seed=2 + i)) for i, ids in enumerate(prompts(5))]
    steps = []
    while engine.waiting or engine.running:
        steps.append(sum(progress.drafted or 0 for progress in engine.step()))
    assert budget is None or max(steps) <= budget
    assert [request.new for request in requests] == plain
    assert not any(request.error for request in requests)
    assert policy.asked.count(0) > 3


@pytest.mark.parametrize("name", ["draft-model", "eagle", "eagle2", "eagle3", "mtp", "dflash", "dflash-tree"])
def test_behind_steps_without_drafts_a_drafter_knows_what_it_would_have_known(name: str) -> None:
    """The same drafts of the same texts; with other features they would be others."""

    def drafts_of(policy: FixedLength) -> dict[tuple[int, ...], list[int]]:
        drafter: Any = METHODS[name].make(assets())
        drafter._confidence.least = 0.0
        seen: dict[tuple[int, ...], list[int]] = {}
        whole = drafter.draft

        def draft(text: Any, length: int) -> Any:
            made = whole(text, length)
            for row, ids, is_finished in zip(text.rows, made.token_ids.tolist(), text.is_finished, strict=True):
                if not is_finished and length == policy.longest:
                    seen[tuple(row)] = ids
            return made

        drafter.draft = draft
        generate(
            model(), drafter, prompts(5), sampling=Sampling.full(5, temperature=0.0), rule="match",
            draft_length=policy, max_new_tokens=60, stop=(),
        )  # fmt: skip
        return seen

    always, seldom = drafts_of(FixedLength(3)), drafts_of(Irregular(3))
    both = always.keys() & seldom.keys()
    assert len(both) > 10
    assert [always[text] for text in both] == [seldom[text] for text in both]


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle2", "dflash-tree"])
def test_of_cut_trees_a_drafter_learns_what_it_would_have_learned(name: str) -> None:
    """The same drafts of the same texts, though the path that it is told is one of a smaller tree."""

    def drafts_of(budget: int | None) -> dict[tuple[int, ...], list[int]]:
        seen: dict[tuple[int, ...], list[int]] = {}

        def make() -> Any:
            drafter: Any = METHODS[name].make(assets())
            whole = drafter.draft

            def draft(text: Any, length: int) -> Any:
                made = whole(text, length)
                seen.update(zip(map(tuple, text.rows), made.token_ids.tolist(), strict=True))
                return made

            drafter.draft = draft
            return drafter

        engine = Engine(model(), make, draft_length=FixedLength(3), budget=budget, slots=2, pages=60, page_size=8)
        for ids in prompts(5):
            engine.submit(Request(ids, 60))
        engine.run()
        return seen

    whole, cut = drafts_of(None), drafts_of(3)
    both = whole.keys() & cut.keys()
    assert len(both) > 10
    assert [whole[text] for text in both] == [cut[text] for text in both]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_is_plain_when_greedy(name: str) -> None:
    method, sampling = METHODS[name], Sampling.full(3, temperature=0.0)
    drafter = method.make(assets())
    assert drafter is None or method.rule in drafter.rules
    plain = generate(model(), None, prompts(3), sampling=sampling, max_new_tokens=12).tokens
    result = generate(
        model(),
        drafter,
        prompts(3),
        sampling=sampling,
        rule=method.rule,
        draft_length=method.length(batch=3),
        max_new_tokens=12,
    )
    assert result.tokens == plain


def test_parts_are_loaded_when_they_are_wanted(tmp_path: Path) -> None:
    loaded = []

    def load() -> Any:
        loaded.append("draft")
        return model(seed=1)

    assets = DrafterAssets(model(), heads=tmp_path.joinpath, load_draft=load, load_store=lambda: Datastore.build([[1]]))
    METHODS["prompt-lookup"].make(assets)
    assert loaded == []
    for name in ("draft-model", "draft-model-ratio"):
        METHODS[name].make(assets)
    assert loaded == ["draft"]
    with pytest.raises(FileNotFoundError, match=r"medusa_lm_head\.safetensors"):
        METHODS["medusa"].make(assets)
