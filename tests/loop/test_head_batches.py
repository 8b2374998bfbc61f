"""Drafters with heads in batches that are spoiled, flagged, or on a device that nobody may wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_models import DRAFTERS, feature_head
from models import model
from texts import prompts
from torch import Tensor

from specdec_kernels import Sampling
from specdec_loop.drafters import Drafter, HeadChain
from specdec_loop.generation import Generation, Hooks, generate
from specdec_loop.text import Text
from specdec_loop.tree_cache.layer import Lengths


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_bad_first_row_ends_its_own_text_alone(name: str) -> None:
    """The only token of its prompt is all that the text has: there is no pair to draft from."""

    class Spoiled(Hooks):
        def law(self, text: Text, draft: Any, logits: Tensor) -> Tensor:
            if text.lengths[0] == 1:
                logits[0] = torch.nan
            return logits

    def say(drafter: Drafter | None, starts: list[list[int]], **more: Any) -> Generation:
        cold = Sampling.full(len(starts), temperature=0.0)
        return generate(model(), drafter, starts, sampling=cold, max_new_tokens=8, stop=(), **more)

    got = say(DRAFTERS[name](), [[5], [6, 7]], hooks=Spoiled())
    assert got.status == [1, 0] and got.tokens[1] == say(None, [[6, 7]]).tokens[0]


@pytest.mark.parametrize("temperature", [0.001, 0.8])
def test_bad_sampling_is_flagged_whatever_the_confidence(temperature: float) -> None:
    sampling = Sampling(torch.tensor([temperature, 0.8]), top_p=torch.tensor([torch.nan, 1.0]))
    drafter = HeadChain(feature_head("mtp", model()), confidence=0.4)
    got, want = (generate(model(), d, prompts(2), sampling=sampling, max_new_tokens=9) for d in (drafter, None))
    assert got.status == want.status == [64, 0] and got.tokens == want.tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_asks_a_gpu_for_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache that believes itself on a GPU texts are the same, and lengths are read where a past is opened."""

    def say(drafter: Drafter | None) -> list[list[int]]:
        mixed = Sampling(torch.tensor([0.0, 0.8, 0.0, 1.0, 0.5, 0.0, 1.3]))
        return generate(model(), drafter, prompts(7), sampling=mixed, max_new_tokens=24).tokens

    want, reads = say(DRAFTERS[name]()), []
    begin, read = Lengths.__init__, Lengths.read
    monkeypatch.setattr(Lengths, "read", lambda lengths: reads.append(1) or read(lengths))

    def on_gpu(lengths: Lengths, *args: Any) -> None:
        begin(lengths, *args)
        lengths.is_on_host = False

    monkeypatch.setattr(Lengths, "__init__", on_gpu)
    say(None)
    opened = len(reads)
    reads.clear()
    assert say(DRAFTERS[name]()) == want and len(reads) == opened
