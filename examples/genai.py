"""The loop's drafters and verifier over onnxruntime-genai: its generator runs the model, this package does the rest.

    make test-runtimes      # makes .venv-runtimes; then, with its Python:
    python -m onnxruntime_genai.models.builder -m python/models/target -o build/genai -p fp32 -e cpu -c build/cache
    python examples/genai.py build/genai

Compares plain decoding by the runtime, its own look-up of n-grams, and drafters of `specdec_loop`: greedy, all of the
same text. With a temperature the text is that of `specdec_loop.generate` with the same seed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
import torch
from transformers import AutoTokenizer

from specdec_kernels import Sampling, verify_chain
from specdec_loop import PromptLookup, SuffixDecoding
from specdec_loop.drafters import Drafter, NoDrafter, Outcome
from specdec_loop.sequences import Sequences
from specdec_loop.stops import Stops


@torch.inference_mode()
def decode(
    model: Any, drafter: Drafter | None, prompt: Sequence[int], *, temperature: float = 0.0, seed: int = 0,
    limit: int = 128, draft_length: int = 8, stop: Sequence[int] = (),
) -> tuple[list[int], int]:  # fmt: skip
    """The continuation of a prompt and the forwards it took; `drafter` drafts chains and reads no features."""
    drafter = NoDrafter() if drafter is None else drafter
    params, sampling = og.GeneratorParams(model), Sampling.full(1, temperature=temperature)
    params.set_search_options(max_length=len(prompt) + limit + draft_length)
    generator = og.Generator(model, params)
    text = Sequences(
        torch.tensor([prompt]), torch.tensor([len(prompt)]), seed=torch.tensor([seed]), limits=[limit],
        stops=[Stops(stop)], overhang=1 + draft_length,
    )  # fmt: skip
    draft, steps, pending = NoDrafter().draft(text, 0), 0, list(prompt)
    while not text.is_finished[0]:
        drafts = draft.token_ids[0].tolist()
        generator.append_tokens(np.array([pending + drafts], dtype=np.int32))
        steps += 1
        logits = torch.from_numpy(generator.get_output("logits"))[:, -1 - len(drafts) :]
        verdict = verify_chain(
            draft.token_ids, logits.contiguous(), draft.logits, draft_sampling=draft.sampling, sampling=sampling,
            rng=text.rng(), rule="match",
        )  # fmt: skip
        followers = text.append(verdict.token_ids, verdict.num_accepted)
        if steps > 1:
            drafter.commit(text, Outcome(logits, followers, None))
        text.read(verdict.token_ids, verdict.status, followers)
        generator.rewind_to(len(text.rows[0]) - 1)  # rejected drafts have rows in the cache
        pending = text.rows[0][-1:]
        if text.is_finished[0]:
            break
        if steps == 1:
            drafter.begin(text, rule="match", sampling=sampling, longest=draft_length)
            drafter.prefill(text, None)
        draft = drafter.draft(text, draft_length)
    drafter.end(text, [0])
    return text.rows[0][len(prompt) :], steps


def own(model: Any, prompt: Sequence[int], limit: int = 128, **speculative: int) -> list[int]:
    """The same by the runtime alone, greedy; `speculative` as its `set_speculative_options` has it."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + limit)
    if speculative:
        params.set_speculative_options(**speculative)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]


def main(folder: str) -> None:
    torch.set_num_threads(1)  # the runtime has a pool of its own, whose threads spin
    model, tokenizer = og.Model(folder), AutoTokenizer.from_pretrained(folder)
    source = Path(torch.__file__).with_name("functional.py").read_text().splitlines()
    prompts = [tokenizer("\n".join(source[n : n + 8]))["input_ids"] for n in range(40, 640, 100)]
    end = [tokenizer.eos_token_id]
    ways: dict[str, Callable[[list[int]], list[int]]] = {
        "the runtime, plain": lambda prompt: own(model, prompt),
        **{
            f"the runtime, n-grams of {n}, {k} drafts": lambda prompt, n=n, k=k: own(
                model, prompt, ngram_size=n, max_draft_tokens=k
            )
            for n, k in ((2, 4), (3, 4), (2, 8), (3, 8))
        },
        "specdec, plain": lambda prompt: decode(model, None, prompt, stop=end)[0],
        "specdec, PromptLookup": lambda prompt: decode(model, PromptLookup(), prompt, stop=end)[0],
        "specdec, SuffixDecoding": lambda prompt: decode(model, SuffixDecoding(factor=2.0), prompt, stop=end)[0],
    }
    plain = [ways["the runtime, plain"](prompt) for prompt in prompts]
    count = sum(map(len, plain))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):  # in turn, for the machine's speed drifts
        for name, way in ways.items():
            begun = time.perf_counter()
            texts = [way(prompt) for prompt in prompts]
            seconds[name].append(time.perf_counter() - begun)
            assert texts == plain, name
    for name, times in seconds.items():
        print(f"{name:34} {count / statistics.median(times):5.0f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1])
