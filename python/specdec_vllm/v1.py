"""vLLM's V1 runner: `_sample` and the drafter's `_sample_draft_tokens`, from the logits as the model gave them.

A batch is served whole; where some requests are vLLM's (requests.py), its own sampler runs after ours on the same
logits, and each row takes its own. The distribution of a token is named by its absolute position, so a text does not
depend on the batch, on chunks of its prompt or on pre-emption; the step is the position of the first token that it
decides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import (
    ChainResult,
    ChainRule,
    DrawPurpose,
    RngKey,
    SampleResult,
    Sampling,
    edit_rows,
    sample,
    verify_chain,
)

from .edits import Texts, Wishes, changes_rows, needs_text, padded
from .patch import original, replace
from .requests import Batch, known, read
from .shards import Shards, exchange, first_id


@dataclass
class Drafting:
    """State of the drafter: its next draft is token `drawn` of each text."""

    rule: ChainRule
    sampling: Sampling
    seed: Tensor
    position: Tensor
    drawn: int = 0

    def draw(self, logits: Tensor) -> Tensor:
        """Draft ids of the next position; of the next `rows / batch` where a drafter makes all of them at once."""
        batch = len(self.seed)
        count = logits.shape[0] // batch
        at_once = torch.arange(count, device=logits.device).repeat(batch)
        sampling = Sampling(*(None if x is None else x.repeat_interleave(count) for x in self.sampling))
        seed, position = self.seed.repeat_interleave(count), self.position.repeat_interleave(count)
        purpose: DrawPurpose = "target" if self.rule == "match" else "draft"
        rng = RngKey(seed, position + self.drawn + at_once, position)
        self.drawn += count
        return sample(logits, sampling=sampling, rng=rng, purpose=purpose).token_ids[:, 0]


class Editing:
    """What the runner's requests change of their logits, from step to step.

    The ids of a step are appended at the next one, up to the position that it begins at: by then the device knows which
    of them the engine took. A request that was not in the last batch is counted again, from the host's ids.
    """

    def __init__(self) -> None:
        """No text is known."""
        self.texts: Texts | None = None
        self.slots: dict[str, int] = {}  # of the requests of the last batch whose text matters
        self.last: tuple[dict[str, int], Tensor] | None = None  # rows of the last batch, and its ids
        self.composition: tuple[str, ...] = ()
        self.wishes: Wishes | None = None

    def of(self, runner: Any, position: Tensor, vocab: int) -> Wishes | None:
        """The batch's wishes, with its texts up to `position`; None: no request of it changes anything."""
        names = tuple(runner.input_batch.req_ids)
        states = [runner.requests[name] for name in names]
        served = [s.sampling_params if known(runner, n).is_served else None for n, s in zip(names, states, strict=True)]
        wanted = [params is not None and changes_rows(params) for params in served]
        if not any(wanted):
            self.slots, self.last, self.composition, self.wishes = {}, None, (), None
            return None
        followed = [row for row, params in enumerate(served) if params is not None and needs_text(params)]
        self.follow(runner, names, followed, position)
        if names != self.composition or self.wishes is None:
            slots = [self.slots.get(name, runner.max_num_reqs) for name in names]
            params = [p if is_wanted else None for p, is_wanted in zip(served, wanted, strict=True)]
            prompts = [state.num_prompt_tokens for state in states]
            self.wishes = Wishes.of(params, prompts, slots, vocab, position.device)
            self.composition = names
        return self.wishes

    def follow(self, runner: Any, names: tuple[str, ...], followed: list[int], position: Tensor) -> None:
        """Bring the texts of some rows up to date."""
        last = {} if self.last is None else self.last[0]
        kept = {names[row] for row in followed if names[row] in self.slots and names[row] in last}
        if len(kept) != len(followed) or len(kept) != len(self.slots):
            self.composition = ()
        self.slots = {name: slot for name, slot in self.slots.items() if name in kept}
        if not followed:
            return
        device = position.device
        if self.texts is None:
            longest = min(runner.max_model_len, runner.input_batch.vocab_size)
            self.texts = Texts(runner.max_num_reqs, longest, device)
        if kept:
            assert self.last is not None
            rows = [row for row in followed if names[row] in kept]
            slots = torch.tensor([self.slots[names[row]] for row in rows]).to(device, non_blocking=True)
            before = torch.tensor([last[names[row]] for row in rows]).to(device, non_blocking=True)
            here = position[torch.tensor(rows).to(device, non_blocking=True)]
            self.texts.append(slots, self.last[1][before], here - self.texts.length[slots])
        new = [names[row] for row in followed if names[row] not in kept]
        if new:
            free = sorted(set(range(runner.max_num_reqs)).difference(self.slots.values()))
            self.slots |= dict(zip(new, free, strict=False))
            states = [runner.requests[name] for name in new]
            prompts = padded([state.prompt_token_ids or [] for state in states])
            outputs = padded([[id for id in state.output_token_ids if id >= 0] for state in states])
            slots = torch.tensor([self.slots[name] for name in new]).to(device)
            self.texts.begin(slots, prompts.to(device), outputs.to(device))
            unknown = torch.tensor([s.num_prompt_tokens - len(s.prompt_token_ids or []) for s in states])
            self.texts.length[slots] += unknown.to(device)  # a prompt of embeddings has no ids

    def forget(self, name: str) -> None:
        """A request begins anew: it is counted again."""
        self.slots.pop(name, None)
        self.composition = ()

    def sampled(self, runner: Any, ids: Tensor) -> None:
        """Note the ids of a step, ``[batch, width]``, -1 behind the last."""
        self.last = ({name: row for row, name in enumerate(runner.input_batch.req_ids)}, ids) if self.slots else None


def install(rule: ChainRule) -> None:
    """Patch the classes, once."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(rejection_sampler, "expand_batch_to_tokens", expanded)
    replace(GPUModelRunner, "_sample", functools.partial(sampled, rule))
    replace(GPUModelRunner, "_update_streaming_request", continued)
    replace(GPUModelRunner, "_get_spec_decode_draft_probs", functools.partial(draft_probs, rule))
    replace(SpecDecodeBaseProposer, "_sample_draft_tokens", drafted)


def expanded(
    theirs: Callable[..., Any], x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:  # fmt: skip
    """`expand_batch_to_tokens`: a value for each token. On a CPU, vLLM 0.32 writes it to a copy and returns noise."""
    if x.device.type != "cpu" or x.dtype == torch.int64:
        found: Tensor = theirs(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        return found
    values = torch.where(x == replace_from, replace_to, x) if replace_from != replace_to else x
    return values.repeat_interleave(torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)))


def device_tensor(x: Any) -> Tensor:
    """A tensor of the runner, which keeps some beside their host copies."""
    found: Tensor = getattr(x, "gpu", x)
    return found


def sampled(rule: ChainRule, theirs: Callable[..., Any], runner: Any, logits: Tensor, spec: Any) -> Any:
    """`_sample`: ours, theirs, or each row its own."""
    metadata = runner.input_batch.sampling_metadata
    batch = None if logits is None else read(runner, metadata)
    drafter = getattr(runner, "drafter", None)
    if batch is None:
        if drafter is not None:
            drafter.specdec = None
        return theirs(runner, logits, with_drafts(spec))
    shards: Shards | None = getattr(runner, "specdec_shards", None)
    logits = logits if shards is None else shards.own(logits)
    position = first_position(runner, len(batch.seed), spec)
    if not hasattr(runner, "specdec_editing"):
        runner.specdec_editing = Editing()
    editing: Editing = runner.specdec_editing
    vocab = logits.shape[1] if shards is None else shards.offsets[-1]
    wishes = editing.of(runner, position, vocab)
    if spec is None:
        rng, edits, allowed = RngKey(batch.seed, position), None, None
        if wishes is not None:
            changes = wishes.at(editing.texts, position)
            if changes is not None:
                edits = edit_rows(changes, vocab=logits.shape[1], first_id=first_id(shards))
            allowed = wishes.allowed
        result: SampleResult | ChainResult = sample(
            logits, sampling=batch.sampling, rng=rng, purpose="target", edits=edits, allowed=allowed, **listing(runner),
            **exchange(shards),
        )  # fmt: skip
        ids, accepted = result.token_ids.clamp(min=0), torch.zeros_like(position)
    else:
        result, ids, accepted = verified(rule, runner, logits, spec, batch, position, wishes, shards)
    output, logprobs = None, scored(result, ids)
    if batch.others is not None:
        output = theirs(runner, logits, with_drafts(spec))
        own = output.sampled_token_ids.long()
        ids = torch.where(batch.others[:, None], own, ids)
        accepted = torch.where(batch.others, (own >= 0).sum(1) - 1, accepted)
    else:
        runner.input_batch.update_async_output_token_ids()
    output = finished(output, batch.others, ids, logprobs)
    editing.sampled(runner, ids)
    if drafter is not None:
        drafter.specdec = Drafting(rule, batch.draft_sampling, batch.seed, position + accepted + 1)
    return output


def with_drafts(spec: Any) -> Any:
    """For vLLM's own verifier, which fails on a step in which nobody has a draft: that is plain sampling."""
    return spec if spec is not None and spec.max_spec_len > 0 else None


def continued(theirs: Callable[..., Any], runner: Any, name: str, data: Any) -> Any:
    """`_update_streaming_request`: a prompt goes on behind what was said so far, under parameters of its own."""
    state = theirs(runner, name, data)
    state.specdec = None
    if hasattr(runner, "specdec_editing"):
        runner.specdec_editing.forget(name)
    return state


def listing(runner: Any) -> dict[str, Any]:
    """Arguments of an op that emits tokens: log-probabilities, where a request that is served here asks for them."""
    asked = runner.input_batch.num_logprobs
    counts = [count for name, count in asked.items() if known(runner, name).is_served]
    return {"logprobs": "raw", "top": max(counts)} if counts else {}


def scored(result: SampleResult | ChainResult, ids: Tensor) -> Any:
    """LogprobsTensors of a step's ids ``[batch, width]``, a row for each of them; None: nobody asked."""
    from vllm.v1.outputs import LogprobsTensors

    if result.logprobs is None or result.ranks is None or result.top_ids is None or result.top_logprobs is None:
        return None
    listed = torch.cat((ids[..., None], result.top_ids), 2).clamp(min=0)
    values = torch.cat((result.logprobs[..., None], result.top_logprobs), 2)
    return LogprobsTensors(listed.int().flatten(0, 1), values.flatten(0, 1), result.ranks.long().flatten())


def finished(output: Any, others: Tensor | None, ids: Tensor, ours: Any) -> Any:
    """SamplerOutput of these ids, and of log-probabilities: vLLM's in rows of its requests, ours in the others."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    theirs = None if output is None else output.logprobs_tensors
    if ours is not None and theirs is not None:
        assert others is not None
        is_theirs = others.repeat_interleave(ids.shape[1])
        width = max(ours.logprobs.shape[1], theirs.logprobs.shape[1])

        def merged(a: Tensor, b: Tensor, filler: float) -> Tensor:
            a, b = (torch.nn.functional.pad(x, (0, width - x.shape[1]), value=filler) for x in (a, b))
            return torch.where(is_theirs[:, None], a, b)

        theirs = LogprobsTensors(
            merged(theirs.logprob_token_ids, ours.logprob_token_ids, 0),
            merged(theirs.logprobs, ours.logprobs, -math.inf),
            torch.where(is_theirs, theirs.selected_token_ranks, ours.selected_token_ranks),
        )
    return SamplerOutput(sampled_token_ids=ids.int(), logprobs_tensors=ours if theirs is None else theirs)


def first_position(runner: Any, count: int, spec: Any) -> Tensor:
    """Absolute position of the first token that each request decides."""
    if spec is None:
        rows = device_tensor(runner.query_start_loc)[1 : count + 1].long() - 1
    else:
        drafts = torch.diff(spec.cu_num_draft_tokens, prepend=spec.cu_num_draft_tokens.new_zeros(1))
        rows = spec.logits_indices[(spec.cu_num_sampled_tokens - drafts - 1).long()].long()
    return device_tensor(runner.positions)[rows].long() + 1


def verified(
    rule: ChainRule, runner: Any, logits: Tensor, spec: Any, batch: Batch, position: Tensor, wishes: Wishes | None,
    shards: Shards | None,
) -> tuple[ChainResult, Tensor, Tensor]:  # fmt: skip
    """(result; its ids ``[batch, longest draft + 1]``, -1 behind the last; accepted drafts)."""
    kept = None if rule == "match" else original(type(runner), "_get_spec_decode_draft_probs")(runner, spec)
    if kept is not None and shards is not None:
        kept = kept[:, shards.mine].contiguous()
    cu_draft = torch.nn.functional.pad(spec.cu_num_draft_tokens, (1, 0))
    edits, allowed = None, None
    if wishes is not None:
        edits = wishes.at(runner.specdec_editing.texts, position)
        allowed = None if wishes.allowed is None else wishes.allowed[row_owner(cu_draft, len(logits))]
    result = verify_chain(
        spec.draft_token_ids,
        logits,
        kept,
        cu_draft=cu_draft,
        max_draft=spec.max_spec_len,
        sampling=batch.sampling,
        draft_sampling=None if kept is None else batch.draft_sampling,
        rng=RngKey(batch.seed, position, position),
        rule=rule,
        edits=edits,
        allowed=allowed,
        **listing(runner),
        **exchange(shards),
    )
    accepted = result.num_accepted.long()
    # A row of NaN has no token; the engine must be given one of its vocabulary.
    place = torch.arange(result.token_ids.shape[1], device=logits.device)
    is_missing = (place == accepted[:, None]) & (result.token_ids < 0)
    return result, result.token_ids.long().masked_fill(is_missing, 0), accepted


def row_owner(cu_draft: Tensor, rows: int) -> Tensor:
    """The request of each row of logits, of which a request has one more than drafts."""
    ends = cu_draft[1:].long() + torch.arange(1, len(cu_draft), device=cu_draft.device)
    row = torch.arange(rows, device=cu_draft.device)
    return torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)


def draft_probs(rule: ChainRule, theirs: Callable[..., Any], runner: Any, spec: Any) -> Tensor | None:
    """`_get_spec_decode_draft_probs` for vLLM's own verifier: what is kept are logits, drawn from at a temperature."""
    kept: Tensor | None = theirs(runner, spec)
    if kept is None or getattr(runner.drafter, "specdec", None) is None:
        return kept
    temperature = runner.input_batch.sampling_metadata.temperature
    if temperature is None:
        return kept
    counts = torch.tensor(spec.num_draft_tokens, device=kept.device)
    scale = torch.where(temperature > 0, temperature, 1.0).repeat_interleave(counts)
    return (kept.float() / scale[:, None]).softmax(-1)


def drafted(
    theirs: Callable[..., Any], drafter: Any, hidden_states: Tensor, metadata: Any
) -> tuple[Tensor, Tensor | None]:
    """`_sample_draft_tokens`: (ids, their logits where the rule needs them)."""
    drafting: Drafting | None = getattr(drafter, "specdec", None)
    keeps_distribution = drafter._enable_probabilistic_draft_probs
    is_ours = drafting is not None and (drafting.rule == "match" or keeps_distribution) and not metadata.all_greedy
    if not is_ours or drafter.use_heterogeneous_vocab or drafter.use_local_argmax_reduction:
        found: tuple[Tensor, Tensor | None] = theirs(drafter, hidden_states, metadata)
        return found
    assert drafting is not None
    logits = drafter.model.compute_logits(hidden_states)
    ids = drafting.draw(logits)
    return ids, None if drafting.rule == "match" else logits
