"""Time of a step and of the sampler in real vLLM, and the sampler's memory, with and without the plug-in, in turns.

    .venv-engines/bin/python tests/engines/profile_vllm.py [--rounds 3]

Prints a table. A one-layer model with Qwen's vocabulary of 151936, 1, 8 and 32 requests, a draft model of 4 drafts, on
this machine's CPU. The sampler is what turns logits into tokens: `_sample` and the drafter's `_sample_draft_tokens`
without its head. Its memory is the most by which the process grew during a call of either.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCAB, BATCHES, DRAFTS, TOKENS = 151936, (1, 8, 32), 4, 12
# No top-k: without the plug-in vLLM 0.32 on a CPU fails there when it speculates (an index out of bounds).
DISTRIBUTIONS = {
    "temperature 1": {"temperature": 1.0},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


def process_memory(name: str) -> int:
    """VmRSS or VmHWM (its peak) of this process, KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def make_models(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for name in ("target", "draft"):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=512, tie_word_embeddings=True, **sizes)
        model = LlamaForCausalLM(config)
        model.lm_head.weight.data *= 6  # logits spread over a few units, as a trained model's
        model.save_pretrained(folder / name)


def measure(folder: str) -> None:
    """In a process of its own: prints milliseconds a step and in the sampler, and MiB of the sampler, by case."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    llm = LLM(
        model=folder + "/target", skip_tokenizer_init=True, max_model_len=256, enforce_eager=True, dtype="bfloat16",
        max_num_seqs=max(BATCHES), speculative_config={
            "model": folder + "/draft", "num_speculative_tokens": DRAFTS, "draft_sample_method": "probabilistic",
        },
    )  # fmt: skip
    spent = {"sampler": 0.0, "head": 0.0, "steps": 0, "memory": -1}

    def timed(owner: type, name: str, what: str) -> None:
        inner = getattr(owner, name)

        def method(self, *args, **keywords):  # type: ignore[no-untyped-def]
            is_watched = spent["memory"] >= 0 and what == "sampler"
            if is_watched:
                Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
                before = process_memory("VmRSS")
            start = time.perf_counter()
            try:
                return inner(self, *args, **keywords)
            finally:
                spent[what] += time.perf_counter() - start
                spent["steps"] += name == "_sample"
                if is_watched:
                    spent["memory"] = max(spent["memory"], process_memory("VmHWM") - before)

        setattr(owner, name, method)

    timed(GPUModelRunner, "_sample", "sampler")
    timed(SpecDecodeBaseProposer, "_sample_draft_tokens", "sampler")
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    timed(type(runner.drafter.model), "compute_logits", "head")  # target and draft: one class

    def run(batch: int, distribution: dict, tokens: int, *, is_watched: bool = False) -> float:
        """Seconds of a batch; what it spent in `spent`."""
        params = [
            SamplingParams(seed=i, max_tokens=tokens, detokenize=False, ignore_eos=True, **distribution)
            for i in range(batch)
        ]
        spent.update(sampler=0.0, head=0.0, steps=0, memory=0 if is_watched else -1)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": [i + 1, 2, 3]} for i in range(batch)], params, use_tqdm=False)
        return time.perf_counter() - start

    result = {}
    for batch in BATCHES:
        for name, distribution in DISTRIBUTIONS.items():
            run(batch, distribution, 3, is_watched=True)  # the first run warms up
            run(batch, distribution, 3, is_watched=True)
            memory = spent["memory"] / 1024
            whole = run(batch, distribution, TOKENS)
            # the drafter's head runs inside `_sample_draft_tokens`, the target's outside; both cost the same a row
            heads = spent["head"] * DRAFTS / (2 * DRAFTS + 1)
            times = [1e3 * x / spent["steps"] for x in (whole, spent["sampler"] - heads)]
            result[f"{batch}, {name}"] = [*times, memory]
    print("RESULT " + json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        return measure(chosen.measure)
    kinds = {"vLLM": {"VLLM_PLUGINS": ""}, "match": {}, "ratio": {"SPECDEC_VLLM_RULE": "ratio"}}
    seen: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for turn in range(chosen.rounds):
            for kind, environment in kinds.items():
                print(f"round {turn + 1} of {chosen.rounds}: {kind}", file=sys.stderr)
                command = [sys.executable, __file__, "--measure", folder]
                out = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
                lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    sys.exit(out.stderr[-3000:])
                for case, numbers in json.loads(lines[-1][7:]).items():
                    seen.setdefault((case, kind), []).append(numbers)
    columns = ("ms a step", "ms in the sampler", "of vLLM's", "MiB in the sampler")
    print(f"| requests; {DRAFTS} drafts, vocabulary {VOCAB} | |", " | ".join(columns), "|")
    print("|---|---|--:|--:|--:|--:|")
    median = {which: [statistics.median(column) for column in zip(*rows, strict=True)] for which, rows in seen.items()}
    for (case, kind), (step, sampler, memory) in median.items():
        share = sampler / median[case, "vLLM"][1]
        print(f"| {case} | {kind} | {step:.1f} | {sampler:.1f} | {share:.2f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
