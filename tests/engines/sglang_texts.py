"""Jobs for a real SGLang engine on a CPU, each in a process of its own: with the plug-in or without.

The engine starts its scheduler as a process that imports this file again, so the stand-ins are installed there too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sglang_loader

TOKENS = 40
LONGEST = 600  # seconds of a job
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
# A tree of two children a node, and chains; n-grams are trees by themselves.
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
CHAIN = {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}
SPECULATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
    "draft": {"speculative_algorithm": "STANDALONE", **CHAIN},
    "draft tree": {"speculative_algorithm": "STANDALONE", **TREE},
    "eagle": {"speculative_algorithm": "EAGLE", **CHAIN},
    "eagle tree": {"speculative_algorithm": "EAGLE", **TREE},
}


def request(prompt: list[int], **parameters: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_new_tokens": TOKENS, "ignore_eos": True, **parameters}


def run(models: str, speculation: str, batches: list[list[dict[str, Any]]], rule: str = "match", **job: Any) -> Any:
    """Result of `serve` of this job, with the plug-in's rule or, at "off", without the plug-in."""
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_PLUGINS"} | ENVIRONMENT
    environment |= {"SGLANG_PLUGINS": "none"} if rule == "off" else {"SPECDEC_SGLANG_RULE": rule}
    job = {"models": models, "speculation": speculation, "batches": batches, **job}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job), env=environment, text=True, capture_output=True,
        timeout=LONGEST, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT ")) | {"log": done.stderr}
    raise AssertionError(f"SGLang ended with {done.returncode}\n" + (done.stdout + done.stderr)[-6000:])


def start(job: dict[str, Any]) -> Any:
    import sglang

    folder, kind = Path(job["models"]), job["speculation"].split()[0]
    options = {
        "model_path": str(folder / "target"),
        "device": "cpu",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "log_level": "warning",  # the plug-in says what it leaves to SGLang
        "max_running_requests": 8,
        "max_total_tokens": 8192,
        "disable_radix_cache": True,
    }
    if kind not in ("none", "ngram"):
        options["speculative_draft_model_path"] = str(folder / kind)
    return sglang.Engine(**options | SPECULATIONS[job["speculation"]] | job.get("options", {}))


def serve(job: dict[str, Any]) -> dict[str, Any]:
    texts, steps, scores, seconds = [], [], [], []
    engine = start(job)
    for batch in job["batches"]:
        prompts = [one.pop("prompt") for one in batch]
        begun = time.perf_counter()
        outputs = engine.generate(input_ids=prompts, sampling_params=batch, return_logprob=True)
        seconds.append(time.perf_counter() - begun)
        texts.append([list(one["output_ids"]) for one in outputs])
        steps.append([one["meta_info"].get("spec_verify_ct", 0) for one in outputs])
        scores.append([one["meta_info"].get("output_token_logprobs") for one in outputs])
    engine.shutdown()
    return {"texts": texts, "steps": steps, "scores": scores, "seconds": seconds}


if __name__ in ("__main__", "__mp_main__"):
    sglang_loader.install()
if __name__ == "__main__":
    print("RESULT " + json.dumps(serve(json.loads(sys.stdin.read()))), flush=True)
