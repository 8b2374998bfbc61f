"""The vLLM plug-in without vLLM: versions, seeds of requests without one, and counts of what is left to vLLM."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_vllm
from specdec_vllm import plugin, requests

IDS = ("17-0123abcd", "17-89abcdef", "18-0123abcd", "1_17-0123abcd")  # vLLM ends the id of a request at random


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of vLLM as the plug-in asks without its engine."""
    made: Any = ModuleType("vllm")
    made.__version__ = "0.32.0"
    made.envs = SimpleNamespace(VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=False)
    monkeypatch.setitem(sys.modules, "vllm", made)
    specdec_vllm.fallbacks.clear()
    plugin.is_supported.cache_clear()
    yield made
    specdec_vllm.fallbacks.clear()


class Params:
    """Sampling parameters that ask for nothing."""

    logprobs = None

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def __getattr__(self, name: str) -> None:
        return None


def runner(*processors: Any) -> Any:
    known = {name: SimpleNamespace(sampling_params=Params()) for name in IDS}
    metadata = SimpleNamespace(logitsprocs=SimpleNamespace(all=processors))
    return SimpleNamespace(
        model_config=SimpleNamespace(seed=5, logprobs_mode="raw_logprobs"),
        input_batch=SimpleNamespace(sampling_metadata=metadata, req_ids=[*IDS]),
        requests=known,
        speculative_config=None,
    )


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.320.0", "dev"])
def test_another_version_of_vllm_is_left_as_it_is(vllm: Any, version: str, caplog: pytest.LogCaptureFixture) -> None:
    vllm.__version__ = version
    with caplog.at_level(logging.WARNING, "vllm.specdec_kernels"):
        specdec_vllm.register()
        specdec_vllm.register()
    (line,) = caplog.messages
    assert f"vLLM {version}" in line and "0.32 and 0.33" in line


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+g0123abc", "0.33.0", "0.33.1+cpu"])
def test_a_version_that_is_supported_is_patched(vllm: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.__version__ = version
    installed: list[tuple[str, ...]] = []
    for part in ("v1", "v2", "suffix", "block"):
        monkeypatch.setattr(f"specdec_vllm.{part}.install", lambda *rule, part=part: installed.append((part, *rule)))
    specdec_vllm.register()
    assert installed == [("v1", "match"), ("v2", "match"), ("suffix",), ("block",)]


def test_a_request_without_a_seed_gets_one_that_the_next_run_repeats(vllm: Any) -> None:
    seeds = [requests.describe(runner(), name, Params()).seed for name in IDS]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3
    other = runner()
    other.model_config.seed = 6
    assert requests.describe(other, IDS[0], Params()).seed != seeds[0]
    vllm.envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION = True
    assert len({requests.describe(runner(), name, Params()).seed for name in IDS}) == 4


def test_seeds_beyond_64_bits_with_a_sign_are_served(vllm: Any) -> None:
    """The second of two copies of a request has the next seed, and vLLM's V1 runner takes seeds without a sign."""
    engine = runner()
    metadata, engine.device = engine.input_batch.sampling_metadata, torch.device("cpu")
    metadata.temperature = metadata.top_k = metadata.top_p = None
    metadata.logitsprocs.argmax_invariant = []
    for name, seed in zip(IDS, (7, 2**63 - 1, 2**63, -(2**63)), strict=True):
        engine.requests[name].sampling_params = Params(seed)
    batch = requests.read(engine, metadata)
    assert batch is not None and batch.seed.tolist() == [7, 2**63 - 1, -(2**63), -(2**63)]


@pytest.mark.parametrize("method", ["synthetic", "fly"])
def test_acceptance_that_changes_texts_is_vllms(vllm: Any, method: str) -> None:
    engine = runner()
    engine.speculative_config = SimpleNamespace(rejection_sample_method="standard")
    assert requests.are_served(engine) and not specdec_vllm.fallbacks
    engine = runner()
    engine.speculative_config = SimpleNamespace(rejection_sample_method=method)
    assert not requests.are_served(engine)
    assert requests.read(engine, engine.input_batch.sampling_metadata) is None
    assert dict(specdec_vllm.fallbacks) == {f"{method} acceptance": len(IDS)}


def test_a_request_that_a_custom_processor_leaves_to_vllm_counts_once(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine:
        pass

    engine = runner(Mine())
    with caplog.at_level(logging.WARNING, "vllm.specdec_kernels"):
        for _ in range(3):
            assert not requests.are_served(engine)
            assert requests.read(engine, engine.input_batch.sampling_metadata) is None
    assert dict(specdec_vllm.fallbacks) == {"custom logits processors": len(IDS)}
    (line,) = caplog.messages
    assert "Mine" in line
    assert requests.are_served(runner()) and specdec_vllm.fallbacks.total() == len(IDS)
