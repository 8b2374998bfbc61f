"""Distribution of the first drafted tokens of a text, counted over many requests and enumerated from the target."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import transformers
from torch import Tensor

from specdec_kernels import Sampling

VOCAB, TOKENS, PROMPT = 4, 3, [1, 2]
REQUESTS = 10000  # the rarest of the 64 texts is expected 10 times


@functools.cache
def tiny(seed: int, vocab: int = VOCAB) -> Any:
    """A model of few ids whose distribution depends on the whole context."""
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    made = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    made.generation_config.eos_token_id = None
    return made


def distribution(target: Any, temperature: float) -> Tensor:
    """Probability of any TOKENS tokens behind the first, in the order of itertools.product."""
    texts = list(itertools.product(range(VOCAB), repeat=1 + TOKENS))
    logits = target(torch.tensor([PROMPT + list(text) for text in texts])).logits[:, len(PROMPT) - 1 : -1].double()
    chosen = (logits / temperature).log_softmax(-1).gather(2, torch.tensor(texts)[:, :, None])
    return chosen.sum((1, 2)).exp().view(VOCAB, -1).sum(0)


def surprise(texts: list[list[int]], expected: Tensor) -> float:
    """Probability of a chi-square at least this large where the distribution is the expected one."""
    number = (torch.tensor([text[1 : 1 + TOKENS] for text in texts]) * VOCAB ** torch.arange(TOKENS).flip(0)).sum(1)
    seen = torch.bincount(number, minlength=len(expected)).double()
    mean = expected * len(texts)
    assert float(mean.min()) > 5, "chi-square needs texts that are not too rare"
    statistic = ((seen - mean) ** 2 / mean).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def many(temperature: float = 1.0, requests: int = REQUESTS) -> dict[str, Any]:
    """Arguments of `generate` for the same prompt many times, each with a seed of its own."""
    return {
        "input_ids": [PROMPT] * requests,
        "sampling": Sampling.full(requests, temperature=temperature),
        "seed": torch.arange(requests) * 7919 + 5,
        "max_new_tokens": TOKENS + 2,  # the first comes with the prompt; no limit may make the last step special
    }
