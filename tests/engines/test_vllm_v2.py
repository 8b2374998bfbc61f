"""Model Runner V2's contract on tables like its own: ragged, -1, no drafts, NaN, strides, smaller draft vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec_kernels import RngKey, Sampling, sample
from specdec_vllm import fallbacks, suffix, v2

VOCAB, STEPS, PLACES = 64, 3, 7


def table(values: Any, dtype: torch.dtype) -> SimpleNamespace:
    tensor = torch.as_tensor(values, dtype=dtype)
    return SimpleNamespace(gpu=tensor, np=tensor.numpy())


def make_sampler(vocab: int = VOCAB, **distribution: Any) -> SimpleNamespace:
    states = SimpleNamespace(
        vocab_size=vocab,
        temperature=table(distribution.get("temperature", [1.0] * PLACES), torch.float32),
        top_k=table(distribution.get("top_k", [vocab] * PLACES), torch.int32),
        top_p=table(distribution.get("top_p", [1.0] * PLACES), torch.float32),
        min_p=table([0.0] * PLACES, torch.float32),
        seeds=table(range(100, 100 + PLACES), torch.int64),
    )
    return SimpleNamespace(
        sampling_states=states,
        needs_logits_processing=np.zeros(PLACES, dtype=bool),
        logits_processors=[0, 1, 2],
        logprobs_mode="raw_logprobs",
        return_sampling_mask=False,
        trace_replay_state=None,
    )


def refuse(*args: Any, **keywords: Any) -> Any:
    raise AssertionError("vLLM's own path was taken")


def verify(rule: str, sampler: Any, logits: Tensor, draft_logits: Tensor | None, drafts: list[list[int]],
           places: list[int], first: list[int], theirs: Any = refuse,
           known: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_verify` of requests whose last sampled tokens stand at positions `first`; grammars know so many drafts."""
    counts = [len(d) + 1 for d in drafts]
    flat = torch.tensor([t for d in drafts for t in (0, *d)], dtype=torch.int32)
    pos = torch.tensor([p + i for p, n in zip(first, counts, strict=True) for i in range(n)])
    cu = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    verifier = SimpleNamespace(sampler=sampler, num_speculative_steps=STEPS)
    index, marked = torch.tensor(places), flat.clone()
    for end, count, most in zip(cu[1:].tolist(), counts, known or [STEPS] * len(counts), strict=True):
        marked[end - count + 1 + most : end] = -1
    more = (None, None, None, marked)
    return v2.verified(rule, theirs, verifier, logits, draft_logits, flat, pos, cu, index, index.numpy(), *more)


def plain(sampler: Any, logits: Tensor, place: int, position: int) -> int:
    """The token of plain decoding at a position."""
    states = sampler.sampling_states
    one = slice(place, place + 1)
    distribution = Sampling(states.temperature.gpu[one], states.top_k.gpu[one], states.top_p.gpu[one])
    rng = RngKey(states.seeds.gpu[one], torch.tensor([position]))
    return int(sample(logits[None].contiguous(), sampling=distribution, rng=rng, purpose="target").token_ids)


@pytest.mark.parametrize("is_strided", [False, True])
def test_match_returns_what_plain_sampling_would(is_strided: bool) -> None:
    g = torch.Generator().manual_seed(1)
    sampler = make_sampler(temperature=[1, 0, 0.7, 1, 1, 1, 1], top_k=[VOCAB, VOCAB, 5, VOCAB, VOCAB, VOCAB, 9])
    places, first = [6, 1, 0, 2], [40, 11, 0, 7]
    rows = torch.randn(4 * (STEPS + 1), VOCAB + 8, generator=g).bfloat16()
    rows = rows[:, :VOCAB] if is_strided else rows[:, :VOCAB].contiguous()
    drafts: list[list[int]] = []
    start = 0
    for b, kept in enumerate((2, 3, 0, 1)):  # right ones, then a wrong one, -1 or the end
        right = [plain(sampler, rows[start + i], places[b], first[b] + 1 + i) for i in range(STEPS)]
        wrong = [(right[kept] + 1) % VOCAB] if b == 0 else []
        drafts.append([*right[:kept], *wrong] if b != 3 else [right[0], -1, right[2]])
        start += len(drafts[b]) + 1
    logits, ids, count = verify("match", sampler, rows[:start], None, drafts, places, first)
    assert logits.data_ptr() == rows.data_ptr() and count.tolist() == [3, 4, 1, 2]
    start = 0
    for b, n in enumerate(count.tolist()):
        expected = [plain(sampler, rows[start + i], places[b], first[b] + 1 + i) for i in range(n)]
        assert ids[b, :n].tolist() == expected
        start += len(drafts[b]) + 1


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_a_step_ends_before_rows_that_the_grammar_did_not_mask(rule: str) -> None:
    rows = torch.full((3, STEPS + 1, VOCAB), -torch.inf).index_fill(2, torch.tensor([5]), 0.0)
    drafts = [[5] * STEPS] * 3
    _, ids, count = verify(rule, make_sampler(), rows.flatten(0, 1), None, drafts, [2, 0, 1], [5, 6, 7],
                           known=[0, 2, 3])  # fmt: skip
    assert count.tolist() == [1, 3, 4] and ids.sum(1).tolist() == [5, 15, 20]


def test_rows_of_nan_give_ids_of_the_vocabulary() -> None:
    rows = torch.full((4, VOCAB), torch.nan)
    _, ids, count = verify("ratio", make_sampler(), rows, None, [[1, 2, 3]], [3], [5])
    assert 1 <= int(count) <= STEPS + 1 and bool(((ids >= 0) & (ids < VOCAB)).all())


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_ratio_rules_follow_the_target(rule: str) -> None:
    """One draft of a vocabulary of 3 in a target vocabulary of 4, the id 2 forbidden by a grammar: chi-square, 1e-6."""
    requests, vocab = 30_000, 4
    g = torch.Generator().manual_seed(2)
    target, draft = torch.randn(2, vocab, generator=g), torch.randn(3, generator=g)
    target[:, 2] = -torch.inf
    sampler = make_sampler(vocab)
    seeds = torch.arange(requests)
    states = sampler.sampling_states
    for name, value in (("temperature", 0.8), ("top_k", vocab), ("top_p", 1.0), ("min_p", 0.0)):
        old = getattr(states, name).gpu
        setattr(states, name, table(torch.full((requests,), value, dtype=old.dtype), old.dtype))
    states.seeds = table(seeds, torch.int64)
    sampler.needs_logits_processing = np.zeros(requests, dtype=bool)
    kept = torch.full((requests, STEPS, vocab), -torch.inf)
    speculator = SimpleNamespace(
        speculative_config=SimpleNamespace(rejection_sample_method="standard"),
        use_local_argmax_reduction=False,
        compute_draft_logits=lambda hidden, step: draft.expand(requests, 3).contiguous(),
        _maybe_predict_acceptance=lambda *args: None,
    )
    ids = v2.drafted(rule, refuse, speculator, torch.empty(0), torch.full((requests,), 9), seeds,
                     states.temperature.gpu, states.seeds.gpu, torch.tensor(0), kept)  # fmt: skip
    rows = target.repeat(requests, 1)
    _, tokens, _ = verify(rule, sampler, rows, kept, [[int(i)] for i in ids], seeds.tolist(), [9] * requests)
    distribution = (target[0].double() / 0.8).softmax(0)
    seen = tokens[:, 0].bincount(minlength=vocab).double()
    assert seen[2] == 0
    expected = distribution * requests
    statistic = float(((seen - expected) ** 2 / expected)[distribution > 0].sum())
    assert statistic < 27.6  # 2 degrees of freedom, 1e-6


def test_requests_of_vllm_keep_its_tokens() -> None:
    sampler = make_sampler()
    sampler.penalties = None
    v2.others_of(sampler)[4] = True
    rows = torch.randn(4, VOCAB)

    def theirs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return rows + 1, torch.full((2, STEPS + 1), 63), torch.tensor([1, 1], dtype=torch.int32)

    logits, ids, count = verify("match", sampler, rows, None, [[1], [2]], [4, 5], [1, 2], theirs)
    assert bool((logits == rows + 1).all()) and ids[0, 0] == 63 and count[0] == 1
    assert ids[1, 0] == plain(sampler, rows[2], 5, 3)


def params(**wanted: Any) -> SimpleNamespace:
    off: dict[str, Any] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    off |= dict.fromkeys(("logit_bias", "min_tokens", "bad_words_token_ids", "allowed_token_ids"))
    return SimpleNamespace(**off | {"all_stop_token_ids": set()} | wanted)


@pytest.mark.parametrize("method", ["synthetic", "fly"])
def test_acceptance_that_changes_texts_is_vllms(method: str) -> None:
    """Also its drafts, for which vLLM 0.33 is told of how many steps they are."""
    config, sampler = SimpleNamespace(rejection_sample_method=method), make_sampler()
    v2.accepting(lambda *args, **more: None, SimpleNamespace(), sampler, config, "cpu", watermark_key=None)
    fallbacks.clear()
    v2.added(lambda *args: None, sampler, 3, params(thinking_token_budget=None))
    assert v2.others_of(sampler)[3] and dict(fallbacks) == {f"{method} acceptance": 1}
    speculator = SimpleNamespace(speculative_config=config, use_local_argmax_reduction=False)
    kept = torch.zeros(PLACES, STEPS, VOCAB)
    found = v2.drafted("match", lambda *args, **more: (args, more), speculator, *range(6), kept, num_steps=STEPS)
    assert found == ((speculator, *range(6), kept, 0), {"num_steps": STEPS})


def test_drafts_of_xpress_are_verified_as_argmaxes() -> None:
    """vLLM 0.33 makes room for their logits under `draft_sample_method=probabilistic`, and writes none."""
    speculator = SimpleNamespace()
    v2.without_logits(lambda made: setattr(made, "draft_logits", torch.zeros(1)), speculator)
    assert speculator.draft_logits is None


def edited(logits: Tensor, wanted: SimpleNamespace, prompt: list[int], output: list[int]) -> Tensor:
    """A row as vLLM changes it."""
    row = logits.float().clone()
    for token, bias in (wanted.logit_bias or {}).items():
        row[token] += bias
    seen = torch.tensor(sorted({*prompt, *output}))
    row[seen] = torch.where(row[seen] > 0, row[seen] / wanted.repetition_penalty, row[seen] * wanted.repetition_penalty)
    for token in output:
        row[token] -= wanted.frequency_penalty
    row[torch.tensor(sorted(set(output)), dtype=torch.long)] -= wanted.presence_penalty
    if len(output) < (wanted.min_tokens or 0):
        row[list(wanted.all_stop_token_ids)] = -torch.inf
    for word in wanted.bad_words_token_ids or []:
        if output[max(len(output) - len(word) + 1, 0) :] == word[:-1] or len(word) == 1:
            row[word[-1]] = -torch.inf
    if wanted.allowed_token_ids:
        row[[t for t in range(len(row)) if t not in wanted.allowed_token_ids]] = -torch.inf
    return row


def test_steps_apply_what_requests_change_at_every_position() -> None:
    """Greedy steps of three requests, one of which resumes with tokens of its own; then its place is another's."""
    g = torch.Generator().manual_seed(3)
    sampler = make_sampler(temperature=[0.0] * PLACES)
    sampler.num_speculative_tokens = STEPS
    texts = {1: ([3, 4, 5], [9]), 4: ([7, 7], []), 6: ([1], [2, 3, 2])}
    wanted = {
        1: params(repetition_penalty=1.8, frequency_penalty=0.6, logit_bias={3: 4.0, 60: 5.0}),
        4: params(presence_penalty=1.5, min_tokens=4, all_stop_token_ids={*range(0, VOCAB, 2)}),
        6: params(bad_words_token_ids=[[t] for t in range(40)] + [[t, t - 1] for t in range(41, VOCAB)],
                  allowed_token_ids=[*range(5, VOCAB)]),
    }  # fmt: skip
    tokens = torch.zeros(PLACES, 80, dtype=torch.int32)
    lengths = {name: torch.zeros(PLACES, dtype=torch.int32) for name in ("prompt_len", "prefill_len", "total_len")}
    sampler.req_states = SimpleNamespace(
        max_num_reqs=PLACES, max_model_len=80, vocab_size=VOCAB, last_sampled_tokens=torch.zeros(PLACES, 1),
        all_token_ids=SimpleNamespace(gpu=tokens),
        **{name: SimpleNamespace(gpu=x, np=x.numpy()) for name, x in lengths.items()},
    )  # fmt: skip

    def enter(place: int) -> None:
        prompt, output = texts[place]
        both = [*prompt, *output]
        tokens[place, : len(both)] = torch.tensor(both)
        lengths["prompt_len"][place], lengths["prefill_len"][place] = len(prompt), len(both)
        lengths["total_len"][place] = len(both)
        v2.editing_of(sampler).added(place, wanted[place])

    for place in texts:
        enter(place)
    for step in range(12):
        if step == 8:  # place 1 is taken by another request
            texts[1], wanted[1] = ([11, 12], []), params(frequency_penalty=-1.0)
            enter(1)
        order = [6, 1, 4] if step % 2 else [1, 4, 6]
        rows = 3 * torch.randn(3 * (STEPS + 1), VOCAB, generator=g)
        expected, drafts = [], []
        for i, place in enumerate(order):
            prompt, output = texts[place]
            right: list[int] = []
            for j in range(STEPS + 1):
                row = edited(rows[i * (STEPS + 1) + j], wanted[place], prompt, [*output, *right])
                right.append(int(row.argmax()))
            accepted = (step + place) % (STEPS + 1)
            draft = right[:STEPS]
            if accepted < STEPS:
                draft[accepted] = (draft[accepted] + 1) % VOCAB
            drafts.append(draft)
            expected.append(right[: accepted + 1])
        first = [sum(map(len, texts[place])) - 1 for place in order]
        _, ids, count = verify("match", sampler, rows, None, drafts, order, first)
        for i, place in enumerate(order):
            assert ids[i, : int(count[i])].tolist() == expected[i], (step, place)
            start = first[i] + 1
            tokens[place, start : start + len(expected[i])] = torch.tensor(expected[i], dtype=torch.int32)
            lengths["total_len"][place] = start + len(expected[i])
            texts[place][1].extend(expected[i])


@pytest.mark.parametrize("places", [[2, 0, -1, -1], [-1, -1, -1, -1], [0, 1, 2, 3]])
def test_padding_writes_no_row_of_a_request(places: list[int]) -> None:
    kept, logits = torch.zeros(4, STEPS, 5), torch.arange(1.0, 17.0).view(4, 4)
    v2.keep(kept, torch.tensor(places), torch.tensor(1), logits)
    expected = torch.zeros(4, STEPS, 5)
    for row, place in enumerate(places):
        if place >= 0:
            expected[place, 1, :4] = logits[row]
    assert torch.equal(kept, expected)


def test_texts_of_suffix_drafts_are_read_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request, one whose prompt has tokens to go, one that returns; then a step that accepts all drafts."""
    settings = SimpleNamespace(
        num_speculative_tokens=STEPS, suffix_decoding_max_tree_depth=8, suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1, suffix_decoding_max_cached_requests=4,
    )  # fmt: skip
    config = SimpleNamespace(speculative_config=settings, model_config=SimpleNamespace(max_model_len=20))
    rows = torch.arange(60, dtype=torch.int32).view(3, 20)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=rows), total_len=table([17, 9, 6], torch.int32),
        prompt_len=table([16, 4, 5], torch.int32), prefill_len=table([16, 7, 5], torch.int32),
    )  # fmt: skip
    speculator, copies = suffix.Speculator(config, torch.device("cpu"), states), []
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_reqs=3, idx_mapping=torch.tensor([2, 0, 1]))
    batch.idx_mapping_np = batch.idx_mapping.numpy()
    to_host = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: copies.append(1) or to_host(tensor))

    def read(*sampled: int) -> dict[str, list[int]]:
        texts = speculator.read(batch, torch.tensor(sampled, dtype=torch.int32))
        speculator.drafter.draft(list(texts), list(texts.values()), STEPS)
        return {name: tokens.tolist() for name, tokens in texts.items()}

    assert read(1, 0, 2) == {"a": list(range(40, 46)), "c": list(range(20, 29))}
    states.total_len.gpu += torch.tensor([0, 1, STEPS + 1], dtype=torch.int32)
    assert read(STEPS + 1, 1, 1) == {"a": list(range(46, 50)), "b": list(range(17)), "c": [29]}
    assert len(copies) == 2


@pytest.mark.parametrize(("method", "asked", "given"), [("suffix", None, False), ("draft_model", True, True)])
def test_suffix_drafts_are_scheduled_one_step_after_the_other(method: str, asked: Any, given: Any) -> None:
    """A scheduler that runs ahead would have vLLM embed the -1 behind a request's last draft."""
    scheduler, seen = SimpleNamespace(async_scheduling=asked), []
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method), scheduler_config=scheduler)
    suffix.configured(lambda config: seen.append(config.scheduler_config.async_scheduling), config)
    assert seen == [given]
    if method == "suffix":
        scheduler.async_scheduling = True
        with pytest.raises(ValueError, match="--no-async-scheduling"):
            suffix.configured(seen.append, config)
