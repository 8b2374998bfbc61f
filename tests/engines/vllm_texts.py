"""One run of real vLLM in a process of its own: reads a job as JSON from its arguments, prints the texts as JSON.

python vllm_texts.py '{"models": "...", "speculation": "draft", "batches": [[{...}, ...], ...]}'
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from typing import Any

TOKENS = 48
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def request(prompt: list[int], seed: int | None = None, **params: Any) -> dict[str, Any]:
    return {"prompt": prompt, "seed": seed, "max_tokens": TOKENS, **params}


def run(models: str, speculation: str, batches: list[list[dict[str, Any]]], rule: str = "match", **job: Any) -> Any:
    """What `main` prints of this job, with the plug-in's rule or, at "off", without the plug-in."""
    job = {"models": models, "speculation": speculation, "batches": batches, **job}
    plugins = {"VLLM_PLUGINS": ""} if rule == "off" else {"SPECDEC_VLLM_RULE": rule}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(job)], env=os.environ | plugins, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def speculative(job: dict) -> dict | None:
    kinds = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft": {"model": job["models"] + "/draft", "num_speculative_tokens": 4},
        "eagle": {"method": "eagle", "model": job["models"] + "/head", "num_speculative_tokens": 3},
        "eagle3": {"method": "eagle3", "model": job["models"] + "/head", "num_speculative_tokens": 3},
    }
    found = kinds[job["speculation"]]
    return found if found is None else found | job.get("options", {})


def note_drafts(found: list[dict]) -> None:
    """Have the drafter of vLLM's V1 runner note each draft of a batch of one, and the logits it was chosen from."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    propose = SpecDecodeBaseProposer.propose
    signature = inspect.signature(propose)

    def noting(self: Any, *args: Any, **keywords: Any) -> Any:
        given, compute, rows = signature.bind(self, *args, **keywords).arguments, self.model.compute_logits, []
        at = given.get("token_indices_to_sample")
        position = given["target_positions"][-1 if at is None else at].item()  # of the last token the target has seen
        self.model.compute_logits = lambda hidden: rows.append(compute(hidden)) or rows[-1]
        drafts = propose(self, *args, **keywords)
        del self.model.compute_logits
        (ids,) = drafts.tolist()
        found.append({"seen": position + 1, "ids": ids, "logits": [row[0].tolist() for row in rows]})
        return drafts

    SpecDecodeBaseProposer.propose = noting


def main() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    job = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["models"] + "/target",
        skip_tokenizer_init=True,
        max_model_len=512,
        enforce_eager=True,
        dtype=job.get("dtype", "float32"),
        speculative_config=speculative(job),
        max_num_seqs=8,
    )
    texts, seconds, drafts, found = [], [], [], []
    if job.get("drafts"):
        note_drafts(found)
    for batch in job["batches"]:
        start = time.perf_counter()
        prompts = [{"prompt_token_ids": request.pop("prompt")} for request in batch]
        for request in batch:
            if bias := request.get("logit_bias"):  # JSON has no integer keys
                request["logit_bias"] = {int(token): value for token, value in bias.items()}
        params = [SamplingParams(detokenize=False, ignore_eos=True, **request) for request in batch]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([list(o.outputs[0].token_ids) for o in outputs])
        seconds.append(time.perf_counter() - start)
        drafts.append(found[:])
        found.clear()
    result = {"texts": texts, "seconds": seconds, "drafts": drafts, "fallbacks": {}}
    if "specdec_vllm" in sys.modules:
        result["fallbacks"] = dict(sys.modules["specdec_vllm"].fallbacks)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
