"""Jobs for real vLLM in processes of their own: with the plug-in or without, of either model runner, each started by
its first job.

The import of vLLM costs more than all engines together, so a process stays for the jobs of every test: they come as
lines of JSON, and engines are kept by their options. A job that fails ends its process; the next job starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TOKENS = 48
SEATS = 8
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# Model Runner V2 is made of Triton kernels. vLLM's wheel for CPUs looks for a Triton that compiles for them; the
# interpreter of the usual one runs them as well (`interpret_triton`).
RUNNERS = {
    "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "v2": {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"},
}
# Two workers of tensor parallelism on a machine with one NUMA node, whose logits stay with them.
SHARDED = {"SPECDEC_VLLM_SHARDED": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SHARDED |= dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
LONGEST = 240  # seconds of a job: a worker that waits for another ends as a failure
CACHE = 128 << 20  # bytes of an engine's KV cache: all of them live at once


def request(prompt: list[int], seed: int | None = None, **params: Any) -> dict[str, Any]:
    return {"prompt": prompt, "seed": seed, "max_tokens": TOKENS, **params}


class Vllm:
    """A process of `main`."""

    def __init__(self, has_plugin: bool, runner: str, is_sharded: bool = False) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE")}
        environment |= RUNNERS[runner] | (SHARDED if is_sharded else {})
        if not has_plugin:
            environment["VLLM_PLUGINS"] = ""
        self.log = tempfile.NamedTemporaryFile(prefix="vllm")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment | ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
        )  # fmt: skip
        atexit.register(self.process.communicate)  # ends its input, and waits

    def ask(self, job: dict[str, Any]) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        late = threading.Timer(LONGEST, os.killpg, (self.process.pid, signal.SIGKILL))  # and its workers: its group
        late.start()
        try:
            for line in self.process.stdout:
                if line.startswith("RESULT "):
                    return json.loads(line.removeprefix("RESULT "))
        finally:
            late.cancel()
        start.cache_clear()
        raise AssertionError(f"vLLM ended with {self.process.wait()}\n" + Path(self.log.name).read_text()[-4000:])


start = cache(Vllm)


def run(
    models: str, speculation: str, batches: list[list[dict[str, Any]]], rule: str = "match", runner: str = "v1",
    ranks: int = 1, **job: Any,
) -> Any:  # fmt: skip
    """Result of `serve` of this job, with the plug-in's rule or, at "off", without the plug-in."""
    job = {"models": models, "speculation": speculation, "batches": batches, "rule": rule, "ranks": ranks, **job}
    return start(rule != "off", runner, ranks > 1).ask(job)


def speculative(job: dict) -> dict | None:
    kinds = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft": {"model": job["models"] + "/draft", "num_speculative_tokens": 4},
        "suffix": {"method": "suffix", "num_speculative_tokens": 6},
        "eagle": {"method": "eagle", "model": job["models"] + "/head", "num_speculative_tokens": 3},
        "eagle3": {"method": "eagle3", "model": job["models"] + "/head", "num_speculative_tokens": 3},
        "dflash": {"method": "dflash", "model": job["models"] + "/head", "num_speculative_tokens": 4},
    }
    found = kinds[job["speculation"]]
    return found if found is None else found | job.get("options", {})


class Traffic:
    """What a worker of tensor parallelism exchanges: methods that vLLM adds to its workers.

    Of each kind of collective: how often, and the bytes that this rank sent. Those of vLLM are named as its methods,
    those of this package "ours".
    """

    def watch_traffic(self) -> None:
        import torch.distributed as dist
        from vllm.distributed.parallel_state import GroupCoordinator

        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

        def watch(owner: Any, method: str, name: str, place: int) -> None:
            theirs = getattr(owner, method)

            def counting(*args: Any, **keywords: Any) -> Any:
                self.calls[name] += 1
                self.sent[name] += args[place].nbytes
                return theirs(*args, **keywords)

            setattr(owner, method, counting)

        for name in ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast"):
            watch(GroupCoordinator, name, name, 1)
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                watch(dist, name, "ours", 1)

    def traffic(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) since it was last asked."""
        found = {name: (count, self.sent[name]) for name, count in self.calls.items()}
        self.calls.clear()
        self.sent.clear()
        return found


def engine(
    models: str, speculative: str, rule: str, seats: int, room: int, ranks: int, has_tokenizer: bool
) -> Any:  # fmt: skip
    """One that stays, by its options; of workers, the last one alone: they read the rule when they start."""
    if ranks == 1:
        return make_engine(models, speculative, seats, room, has_tokenizer=has_tokenizer)
    made = (models, speculative, rule, seats, room)
    if made not in WORKERS:
        for llm in WORKERS.values():
            llm.llm_engine.engine_core.shutdown()
            fork_workers()
        WORKERS.clear()
        WORKERS[made] = make_engine.__wrapped__(*made[:2], seats, room, ranks)
        WORKERS[made].collective_rpc("watch_traffic")
    return WORKERS[made]


WORKERS: dict[Any, Any] = {}


def fork_workers() -> None:
    """Start no more of them as vLLM does on a CPU, each with an import of vLLM, which takes longer than their texts.

    The first ones are started so: they load the plug-in themselves. Forked ones have the plug-in and the rule of here.
    """
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


@cache
def make_engine(
    models: str, speculative: str, seats: int, room: int, ranks: int = 1, *, has_tokenizer: bool = False
) -> Any:  # fmt: skip
    from vllm import LLM

    workers = {"distributed_executor_backend": "mp", "worker_extension_cls": "vllm_texts.Traffic"} if ranks > 1 else {}
    return LLM(
        tensor_parallel_size=ranks,
        **workers,
        model=models + "/target",
        skip_tokenizer_init=not has_tokenizer,
        max_model_len=512,
        enforce_eager=True,
        dtype="float32",
        speculative_config=json.loads(speculative),
        max_num_seqs=seats,
        kv_cache_memory_bytes=room,
    )


def load_plugins(rule: str) -> dict[str, int]:
    """Have vLLM load its plug-ins as a process with this rule does; returns the plug-in's counts, set to zero."""
    from vllm import plugins

    os.environ["SPECDEC_VLLM_RULE"] = rule
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    ours = sys.modules.get("specdec_vllm")
    assert (ours is None) == (rule == "off")
    if ours is None:
        return {}
    ours.fallbacks.clear()
    return ours.fallbacks


@contextlib.contextmanager
def noted_drafts() -> Iterator[list[dict]]:
    """The drafter of vLLM's V1 runner notes each draft of a batch of one, and the logits it was chosen from."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    propose, found = SpecDecodeBaseProposer.propose, []
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
    try:
        yield found
    finally:
        SpecDecodeBaseProposer.propose = propose


def own_drafts(
    target: Any, drafter: Any, prompt: list[int], *, tokens: int, length: int
) -> tuple[list[int], dict[int, list[int]]]:
    """A greedy text of the decoding loop, and each chain it drafted by how much of the text the target had seen."""
    from specdec_kernels import Sampling
    from specdec_loop.generation import generate

    draft, found = drafter.draft, {}

    def noting(text: Any, longest: int) -> Any:
        made = draft(text, longest)
        found[text.ends[0] - 1] = made.token_ids[0].tolist()
        return made

    drafter.draft = noting
    try:
        made = generate(
            target, drafter, [prompt], sampling=Sampling.full(1, temperature=0.0), rule="greedy",
            max_new_tokens=tokens, draft_length=length, stop=(),
        )  # fmt: skip
    finally:
        drafter.draft = draft
    return made.tokens[0], found


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Drafts that vLLM's scheduler had verified, those that were accepted, and requests that it pre-empted."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make, preempt, found = Scheduler.make_spec_decoding_stats, Scheduler._preempt_request, Counter()
    signature = inspect.signature(make)

    def counting(self: Any, *args: Any, **keywords: Any) -> Any:
        given = signature.bind(self, *args, **keywords).arguments
        found.update(drafted=given["num_draft_tokens"], accepted=given["num_accepted_tokens"])
        return make(self, *args, **keywords)

    def preempting(self: Any, *args: Any, **keywords: Any) -> Any:
        found["preempted"] += 1
        return preempt(self, *args, **keywords)

    Scheduler.make_spec_decoding_stats, Scheduler._preempt_request = counting, preempting
    try:
        yield found
    finally:
        Scheduler.make_spec_decoding_stats, Scheduler._preempt_request = make, preempt


def serve(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fallbacks = load_plugins(job["rule"])
    ranks, options = job["ranks"], (job.get("seats", SEATS), job.get("room", CACHE))
    has_grammars = any("regex" in request for batch in job["batches"] for request in batch)
    llm = engine(job["models"], json.dumps(speculative(job)), job["rule"], *options, ranks, has_grammars)
    texts, drafts, counts, scores, traffic = [], [], [], [], []
    with noted_drafts() if job.get("drafts") else contextlib.nullcontext([]) as found, counted() as count:
        for batch in job["batches"]:
            prompts = [{"prompt_token_ids": request.pop("prompt")} for request in batch]
            for request in batch:
                if bias := request.get("logit_bias"):  # JSON has no integer keys
                    request["logit_bias"] = {int(token): value for token, value in bias.items()}
            words = [request.pop("bad_words_ids", None) for request in batch]  # vLLM's own need a tokenizer
            for request in batch:
                if regex := request.pop("regex", None):  # a text ends with it
                    request |= {"structured_outputs": StructuredOutputsParams(regex=regex), "ignore_eos": False}
            params = [SamplingParams(**{"detokenize": False, "ignore_eos": True} | request) for request in batch]
            for one, ids in zip(params, words, strict=True):
                one._bad_words_token_ids = ids
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([list(o.outputs[0].token_ids) for o in outputs])
            scores.append([scores_of(o.outputs[0].logprobs) for o in outputs])
            if ranks > 1:
                traffic.append(llm.collective_rpc("traffic"))
            drafts.append(found[:])
            counts.append(dict(count))
            found.clear()
            count.clear()
    return {
        "texts": texts, "drafts": drafts, "counts": counts, "fallbacks": dict(fallbacks), "scores": scores,
        "traffic": traffic,
    }  # fmt: skip


def scores_of(logprobs: list[dict[int, Any]] | None) -> list[list[tuple[int, float, int]]]:
    """(id, log-probability, rank) of the ids that vLLM lists for each token, by rank."""
    return [sorted(((i, x.logprob, x.rank) for i, x in one.items()), key=lambda s: s[2]) for one in logprobs or ()]


def interpret_triton() -> None:
    """Have vLLM find a Triton for CPUs: the interpreter."""
    from types import SimpleNamespace

    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret_triton()
    from vllm.platforms import current_platform

    # vLLM does this for every engine, and fails after numba is imported, as the n-gram drafter does; once is enough.
    once = cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(once)
    for line in sys.stdin:
        begun, spent = time.perf_counter(), time.process_time()
        job = json.loads(line)
        what = f"{job['rule']} {job['speculation']}"
        result = json.dumps(serve(job))
        print(f"{what}: {time.perf_counter() - begun:.1f} s, {time.process_time() - spent:.1f} of CPU", file=sys.stderr)
        print("RESULT " + result, flush=True)


if __name__ == "__main__":
    main()
