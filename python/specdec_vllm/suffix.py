"""`method: "suffix"` of vLLM's speculators, in both model runners, without the package arctic-inference.

The drafts come from `draft_suffixes`: an index for each running request, and one of the texts of finished requests. The
options are vLLM's own (`suffix_decoding_*`, `num_speculative_tokens`). All ranks see the same tokens and the same
requests in the same order, so they draft the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import SuffixIndex, draft_suffixes

from .patch import replace

MEMORY = 1 << 19  # most tokens of finished requests: 72 MiB of random text, 520 MiB of one that repeats itself


class Drafter:
    """Drafts for running requests, by their ids."""

    def __init__(self, vllm_config: Any) -> None:
        """Nothing is known."""
        config = vllm_config.speculative_config
        self.depth = max(2, config.suffix_decoding_max_tree_depth)
        self.options = {
            "factor": config.suffix_decoding_max_spec_factor,
            "least": config.suffix_decoding_min_token_prob,
        }
        self.longest = vllm_config.model_config.max_model_len
        memory = min(MEMORY, config.suffix_decoding_max_cached_requests * self.longest)
        self.memory = SuffixIndex(depth=self.depth, capacity=max(memory, self.depth)) if memory else None
        self.running: dict[str, tuple[SuffixIndex, int]] = {}  # and the length of the prompt

    def known(self, name: str) -> int:
        """Tokens of a request that were read."""
        return len(self.running[name][0]) if name in self.running else 0

    def begin(self, name: str, prompt: int) -> None:
        """A request whose prompt has so many tokens; one that returns after pre-emption goes on."""
        if name not in self.running:
            self.running[name] = (SuffixIndex(depth=self.depth), prompt)

    def draft(self, names: Sequence[str], new: Sequence[Tensor], length: int) -> list[list[int]]:
        """Drafts of requests that got these tokens, int32 ``[n]`` each; none beyond the longest text."""
        texts = [self.running[name][0] for name in names]
        ids = torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *new])
        cu = torch.tensor([0, *map(len, new)], device="cpu").cumsum(0)
        found = draft_suffixes(texts, ids, cu, length=length, memory=self.memory, **self.options)
        counts = [
            max(0, min(count, self.longest - len(text) - 1))
            for text, count in zip(texts, found.lengths.tolist(), strict=True)
        ]
        return [row[:count] for row, count in zip(found.token_ids.tolist(), counts, strict=True)]

    def finish(self, names: set[str]) -> None:
        """Requests are complete: what they said is remembered, in the order in which they came."""
        for name in [name for name in self.running if name in names]:  # ranks may differ in ids, and in a set's order
            text, prompt = self.running.pop(name)
            if self.memory is not None:
                self.memory.remember(text, prompt)


def install() -> None:
    """Patch the classes, once."""
    import vllm.config.speculative
    import vllm.v1.worker.gpu.model_runner
    from vllm.config import VllmConfig
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    vllm.config.speculative.has_arctic_inference = lambda: True  # not needed
    replace(SuffixDecodingProposer, "__init__", began)
    replace(SuffixDecodingProposer, "propose", proposed)
    replace(GPUModelRunner, "_update_states", updated)

    runner = vllm.v1.worker.gpu.model_runner
    replace(VllmConfig, "__post_init__", configured)
    replace(VllmConfig, "_get_v2_model_runner_unsupported_features", unsupported)
    replace(runner, "init_speculator", made)
    replace(runner.GPUModelRunner, "finish_requests", finished)
    replace(runner.GPUModelRunner, "take_draft_token_ids", taken)


def began(theirs: Callable[..., Any], proposer: Any, vllm_config: Any) -> None:
    """The proposer of the V1 runner."""
    proposer.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
    proposer.specdec_drafter = Drafter(vllm_config)


def proposed(
    theirs: Callable[..., Any],
    proposer: Any,
    length: int,
    batch: Any,
    sampled: list[list[int]],
    slot_mappings: Any = None,
) -> list[list[int]]:
    """`propose`: lists of drafts in the order of the batch, empty where a prompt has tokens to go."""
    drafter: Drafter = proposer.specdec_drafter
    rows = [row for row, ids in enumerate(sampled) if ids]
    names, new = [batch.req_ids[row] for row in rows], []
    for row, name in zip(rows, names, strict=True):
        drafter.begin(name, int(batch.num_prompt_tokens[row]))
        new.append(torch.from_numpy(batch.token_ids_cpu[row, drafter.known(name) : batch.num_tokens_no_spec[row]]))
    drafts: list[list[int]] = [[] for _ in sampled]
    for row, found in zip(rows, drafter.draft(names, new, length), strict=True):
        drafts[row] = found
    return drafts


def updated(theirs: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    """`_update_states`, where the V1 runner hears which requests are finished."""
    drafter = getattr(getattr(runner, "drafter", None), "specdec_drafter", None)
    if isinstance(drafter, Drafter):
        drafter.finish(scheduler_output.finished_req_ids)
    return theirs(runner, scheduler_output)


def configured(theirs: Callable[..., Any], config: Any, *args: Any) -> None:
    """`VllmConfig.__post_init__`: a scheduler that runs ahead has all columns verified, also those without a draft."""
    if config.speculative_config is not None and config.speculative_config.method == "suffix":
        if config.scheduler_config.async_scheduling:
            raise ValueError("asynchronous scheduling does not go with suffix decoding: set --no-async-scheduling")
        config.scheduler_config.async_scheduling = False
    theirs(config, *args)


def unsupported(theirs: Callable[..., Any], config: Any) -> list[str]:
    """What Model Runner V2 cannot do: suffix decoding is not among it."""
    found: list[str] = theirs(config)
    return [feature for feature in found if feature != "speculative method 'suffix'"]


class Speculator:
    """Model Runner V2's speculator. It reads the accepted tokens from the device once a step."""

    supports_mm_inputs = False
    num_query_per_req = 1
    num_extra_query_per_req = 0
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        """`states`: the runner's tables of requests."""
        self.drafter, self.device, self.states = Drafter(vllm_config), device, states
        self.length: int = vllm_config.speculative_config.num_speculative_tokens
        self.counts: dict[str, int] = {}  # drafts of each request of the last batch

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is no graph."""

    def capture(self) -> None:
        """There is no graph."""

    def propose(
        self, batch: Any, attn_metadata: Any, slot_mappings: Any, hidden: Any, aux_hidden: Any, num_sampled: Tensor,
        *args: Any, dummy_run: bool = False, **keywords: Any,
    ) -> Tensor:  # fmt: skip
        """int64 ``[requests, length]``, -1 behind the last draft: `taken` cuts these off."""
        texts = {} if dummy_run else self.read(batch, num_sampled)
        made = self.drafter.draft(list(texts), list(texts.values()), self.length)
        drafts = dict(zip(texts, made, strict=True))
        rows = [drafts.get(name, []) for name in batch.req_ids]
        self.counts = dict(zip(batch.req_ids, map(len, rows), strict=True))
        padded = [row + [-1] * (self.length - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).to(self.device, non_blocking=True)

    def read(self, batch: Any, num_sampled: Tensor) -> dict[str, Tensor]:
        """New tokens of the requests that got some in this step, in one copy to the host.

        The host knows how much of a text it has, but not how many drafts were accepted: it copies as many as can be.
        """
        states, known = self.states, [self.drafter.known(name) for name in batch.req_ids]
        places = batch.idx_mapping_np[: batch.num_reqs].tolist()
        pieces = [states.total_len.gpu[batch.idx_mapping[: batch.num_reqs].long()], num_sampled[: batch.num_reqs]]
        for place, first in zip(places, known, strict=True):
            end = max(first, int(states.prefill_len.np[place])) + 1 + self.length
            pieces.append(states.all_token_ids.gpu[place, first:end])
        totals, sampled, *texts = torch.cat(pieces).cpu().split(list(map(len, pieces)))
        found = {}
        columns = zip(places, batch.req_ids, known, totals.tolist(), sampled.tolist(), texts, strict=True)
        for place, name, first, total, count, tokens in columns:
            if count:
                self.drafter.begin(name, int(states.prompt_len.np[place]))
                found[name] = tokens[: total - first]
        return found


def made(theirs: Callable[..., Any], vllm_config: Any, device: torch.device, states: Any) -> Any:
    """`init_speculator`."""
    if vllm_config.speculative_config.method == "suffix":
        return Speculator(vllm_config, device, states)
    return theirs(vllm_config, device, states)


def finished(theirs: Callable[..., Any], runner: Any, scheduler_output: Any) -> None:
    """`finish_requests`, which also takes the places of pre-empted requests."""
    if isinstance(runner.speculator, Speculator):
        runner.speculator.drafter.finish(scheduler_output.finished_req_ids)
    theirs(runner, scheduler_output)


def taken(theirs: Callable[..., Any], runner: Any) -> Any:
    """`take_draft_token_ids`: as many of each request as were drafted."""
    found = theirs(runner)
    if found is not None and isinstance(runner.speculator, Speculator):
        counts = runner.speculator.counts
        found.draft_token_ids = [
            ids[: counts.get(name, 0)] for name, ids in zip(found.req_ids, found.draft_token_ids, strict=True)
        ]
    return found
