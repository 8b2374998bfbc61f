"""One run of real vLLM in a process of its own: reads a job as JSON from its arguments, prints the texts as JSON.

python vllm_texts.py '{"models": "...", "speculation": "draft", "batches": [[{...}, ...], ...]}'
"""

from __future__ import annotations

import json
import os
import sys
import time

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def speculative(job: dict) -> dict | None:
    kinds = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft": {"model": job["models"] + "/draft", "num_speculative_tokens": 4},
    }
    found = kinds[job["speculation"]]
    return found if found is None else found | job.get("options", {})


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
    texts, seconds = [], []
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
    result = {"texts": texts, "seconds": seconds, "fallbacks": {}}
    if "specdec_vllm" in sys.modules:
        result["fallbacks"] = dict(sys.modules["specdec_vllm"].fallbacks)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
