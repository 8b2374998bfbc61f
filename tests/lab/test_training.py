"""Training: learning rate, runs that are resumed, what drafters learn, and all of it end to end."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import block_head, config, feature_head, medusa, run_block
from models import model
from safetensors.torch import save_file
from small_library import small_library
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_lab.cli import main
from specdec_lab.training import curves, drafters, losses, target, texts
from specdec_lab.training.run import Run, learning_rate, optimizers
from specdec_loop import corpus, heads

LOADERS = {
    "draft": heads.load_draft_model,
    "medusa": heads.load_medusa,
    "eagle": heads.load_eagle,
    "eagle3": heads.load_eagle3,
    "mtp": heads.load_mtp,
    "dflash": heads.load_dflash,
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_library(tmp_path / "library", monkeypatch)


def train(*words: str) -> None:
    assert main(["train", *words]) == 0


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(i / 1000) for i in range(1001)]
    peak = rates.index(max(rates))
    assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)
    assert rates[0] < 0.1 and max(rates) == pytest.approx(1, abs=1e-3) and rates[-1] == pytest.approx(0.01)


def small_run(folder: Path, *, minutes: float, resume: bool) -> Run:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    made = optimizers(network.parameters(), set(), peak=0.01)
    return Run(network, made, minutes=minutes, peak=0.01, seed=5, folder=folder, resume=resume)


def of_random_rows(run: Run, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    loss = run.model(torch.randn(2, 4, generator=generator)).square().sum()
    return loss, loss.detach()


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("time.process_time", lambda: next(clock))  # a step takes a second

    def finish(run: Run) -> Run:
        run.train(lambda g: of_random_rows(run, g), lambda: 1.0, title="x", every=3)
        return run

    whole = finish(small_run(tmp_path / "whole", minutes=12 / 60, resume=False))
    assert whole.step == 12 and whole.curve.step == [3, 6, 9, 12, 12]
    first = small_run(tmp_path / "cut", minutes=12 / 60, resume=False)
    first.budget = 12
    for _ in range(5):
        first._step(lambda g: of_random_rows(first, g))
        first.spent += 1
    first.save()
    second = finish(small_run(tmp_path / "cut", minutes=12 / 60, resume=True))
    assert second.step == 12
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def teacher(ids: torch.Tensor) -> Any:
    return model()(ids, output_hidden_states=True)


def test_a_drafter_that_says_what_the_target_says_has_the_least_loss() -> None:
    ids = torch.randint(1, 60, (2, 9))
    distribution = teacher(ids).logits
    entropy = -(distribution.softmax(-1) * distribution.log_softmax(-1)).sum(-1).mean()
    same = losses.draft_model_distributions(model(), ids, teacher(ids))
    other = losses.draft_model_distributions(LlamaForCausalLM(config(model())), ids, teacher(ids))
    assert losses.loss(same, losses.cross_entropy).item() == pytest.approx(entropy.item(), abs=1e-4)
    assert losses.loss(other, losses.cross_entropy).item() > entropy.item() + 0.1
    assert losses.acceptance(same).item() == pytest.approx(1, abs=1e-5)
    assert losses.loss(same, losses.refusal).item() == pytest.approx(0, abs=1e-5)
    shared = torch.minimum(other.pairs[0][0].softmax(-1), distribution.softmax(-1)).sum(-1)
    assert losses.acceptance(other).item() == pytest.approx(shared.mean().item(), rel=1e-5)
    assert losses.loss(other, losses.refusal).item() == pytest.approx(-shared.log().mean().item(), rel=1e-5)


def test_medusa_heads_learn_the_distributions_behind_the_next_one() -> None:
    ids = torch.randint(1, 60, (2, 9))
    out, made = teacher(ids), medusa()
    logits, want = made(out.hidden_states[-1]), 0.0
    for i in range(4):
        pairs = [
            (t, t + 1 + i) for t in range(9) if t + 1 + i < 9
        ]  # row t and the row whose distribution it should know
        each = [-(out.logits[:, r].softmax(-1) * logits[:, t, i].log_softmax(-1)).sum(-1).mean() for t, r in pairs]
        want += losses.DECAY**i * float(torch.stack(each).mean())
    distributions = losses.medusa_distributions(made, ids, out)
    assert losses.loss(distributions, losses.cross_entropy).item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_heads_are_trained_on_what_they_meet_when_they_draft(kind: str) -> None:
    """Each step is that of the head run on from its own features, text by text and row by row."""
    head, ids = feature_head(kind, model()), torch.randint(1, 60, (1, 7))
    out = teacher(ids)
    hidden = torch.cat([out.hidden_states[level] for level in head.levels], -1)
    made, drift = losses.feature_distributions(head, ids, out), 0.0
    for step in range(losses.STEPS):
        logits, distributions, states = [], [], []
        for last in range(6 - step):  # the pair that the head continues from
            features = head.fuse(hidden[:, : last + 1])
            for more in range(step + 1):
                seen = features.shape[1]
                new = head(ids[:, 1 : 1 + seen], features, torch.arange(seen)[None])[:, -1:]
                features = torch.cat([features, new], 1)
                assert seen == last + 1 + more
            distribution = out.logits[:, last + 1 + step].softmax(-1)
            distributions.append(distribution if head.token_map is None else distribution[:, head.token_map.long()])
            logits.append(head.logits(new[:, 0]))
            state = out.hidden_states[-1][:, last + 1 + step]
            states.append(torch.nn.functional.smooth_l1_loss(new[:, 0], state))
        torch.testing.assert_close(made.pairs[step][0], torch.stack(logits, 1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.pairs[step][1], torch.stack(distributions, 1), rtol=1e-4, atol=1e-6)
        drift += losses.DECAY**step * float(torch.stack(states).mean())
    assert (made.drift is None) == (kind != "eagle")
    assert made.drift is None or made.drift.item() == pytest.approx(drift, rel=1e-4)


@pytest.mark.parametrize("starts_early", [False, True])
def test_blocks_are_trained_on_what_they_meet_when_they_draft(starts_early: bool) -> None:
    """Each block is that of its text alone, and its tokens learn what the target says of them."""
    head, ids = block_head(model(), starts_early=starts_early), torch.randint(1, 60, (2, 15))
    out = teacher(ids)
    hidden = torch.cat([out.hidden_states[level] for level in head.levels], -1)
    made = losses.block_distributions(head, ids, out).pairs
    places = [1, 5, 9]  # of the known tokens
    assert len(made) == head.longest and all(logits.shape[1] == len(places) for logits, _ in made)
    for number, place in enumerate(places):
        rows = run_block(head, ids[:, place : place + 1], hidden[:, :place], torch.arange(place)[None])
        logits = head.logits(rows[:, -head.longest :])
        for d, (got, distribution) in enumerate(made):
            torch.testing.assert_close(got[:, number], logits[:, d], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(distribution[:, number], out.logits[:, place + d].softmax(-1))


def test_everything_is_trained_and_loads(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "VOCAB", 300)
    monkeypatch.setattr(drafters, "DRAFT_VOCAB", 100)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    whole = target.config
    monkeypatch.setattr(target, "config", lambda vocab: LlamaConfig(**{**whole(vocab).to_dict(), **small}))
    shared = ["--work", str(tmp_path / "work"), "--length", "24", "--batch", "2", "--threads", "1"]
    train("target", "--out", str(tmp_path / "target"), "--minutes", "0.03", *shared)
    train("texts", "--models", str(tmp_path), "--work", str(tmp_path), "--count", "7", "--length", "70", "--batch", "4")
    said = texts.load(tmp_path / texts.FILE)
    assert said.shape == (7, 70) and said.min() >= 0 and said.max() < 300 and len(said.unique(dim=0)) == 7
    own = ["--texts", str(tmp_path / texts.FILE)]
    train("drafters", "--models", str(tmp_path), "--minutes", "0.001", *own, *shared)
    network = LlamaForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    tokenizer = corpus.load_tokenizer(tmp_path / "target")
    assert len(tokenizer) == network.config.vocab_size == 300
    for name, load in LOADERS.items():
        load(tmp_path / name, network)
    ids = corpus.encode(tokenizer, corpus.read(corpus.sources()[:1]))[None, :20].long()
    assert network(ids, labels=ids).loss.item() < 0.9 * math.log(300)
    train("drafters", "draft", "--models", str(tmp_path), "--minutes", "0.001", "--resume", *shared)  # no time is left


def test_half_of_a_batch_is_the_targets_own_texts(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of an id that the corpus never has tell where each row comes from."""
    seen: list[torch.Tensor] = []
    tokens = torch.arange(1, 40).repeat(9).short()
    save_file({"texts": torch.full((3, 16), 55).short()}, tmp_path / texts.FILE)

    def distributions(network: Any, ids: torch.Tensor, out: Any) -> losses.Distributions:
        seen.append(ids)
        return losses.draft_model_distributions(network, ids, out)

    build = drafters.build
    monkeypatch.setattr(drafters, "build", lambda *a: (*build(*a)[:2], distributions))
    options = {
        "seed": 0,
        "peak": 1e-3,
        "minutes": 0.002,
        "batch": 4,
        "length": 12,
        "work": tmp_path,
        "models": tmp_path,
    }
    off = {"resume": False, "bfloat16": False, "compile": False}
    args = argparse.Namespace(texts=tmp_path / texts.FILE, **options, **off)
    drafters.train("draft", model(), tokens, tokens, args)
    trained = [ids for ids in seen if bool((ids == 55).any())]
    assert trained and all((ids == 55).all(1).tolist() == [False, False, True, True] for ids in trained)


def test_a_wrong_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "drafters", "dragt"]) == 2
    assert "no drafter is called dragt; drafters are draft, medusa" in capsys.readouterr().err


def test_curves_become_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, see requirements/bench.txt")
    (tmp_path / "work/target").mkdir(parents=True)
    curve = {"step": [1, 2], "seconds": [60.0, 120.0], "train": [3.0, 2.0], "held_out": [3.1, 2.5]}
    (tmp_path / "work/target/curve.json").write_text(json.dumps(curve))
    curves.main(["--work", str(tmp_path / "work"), "--out", str(tmp_path)])
    assert json.loads((tmp_path / "curves.json").read_text()) == {"target": curve}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
