"""vLLM's Model Runner V2: `Sampler.sample`, `RejectionSampler._verify` and the speculator's `sample_draft`.

Rows come as the model gave them, requests by their place in the runner's tables. Log-probabilities of raw logits are
vLLM's to compute, from the tokens returned here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import ChainRule, RngKey, Sampling, edit_rows, sample, verify_chain

from .edits import Texts, Wishes, changes_rows, needs_text
from .patch import replace
from .requests import GREEDY, leave, reason_against, reason_against_acceptance


def install(rule: ChainRule) -> None:
    """Patch the classes, once."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    replace(Sampler, "add_request", added)
    replace(Sampler, "sample", sampled)
    replace(RejectionSampler, "__init__", accepting)
    replace(RejectionSampler, "_verify", functools.partial(verified, rule))
    replace(DraftModelSpeculator, "sample_draft", functools.partial(drafted, rule))
    with contextlib.suppress(ImportError):  # vLLM 0.32 has no XPress
        from vllm.v1.worker.gpu.spec_decode.xpress.speculator import XPressSpeculator

        replace(XPressSpeculator, "__init__", without_logits)


def accepting(theirs: Callable[..., Any], verifier: Any, sampler: Any, config: Any, device: Any, **more: Any) -> None:
    """`RejectionSampler.__init__`: its sampler is told how drafts will be accepted."""
    theirs(verifier, sampler, config, device, **more)
    sampler.specdec_reason = reason_against_acceptance(config)


def without_logits(theirs: Callable[..., Any], speculator: Any, *args: Any) -> None:
    """`XPressSpeculator.__init__`: drafts are argmaxes, which vLLM 0.33 would verify as draws from empty logits."""
    theirs(speculator, *args)
    speculator.draft_logits = None


def added(theirs: Callable[..., Any], sampler: Any, index: int, params: Any) -> None:
    """`add_request`: note whose the request is, for as long as it holds its place."""
    theirs(sampler, index, params)
    reason = getattr(sampler, "specdec_reason", None) or reason_against(params)
    is_others = reason is not None or needs_processed(sampler)
    if is_others:
        leave(reason or "processed logits")
    others_of(sampler)[index] = is_others
    editing_of(sampler).added(index, None if is_others else params)


class Editing:
    """What the requests of the sampler's tables change of their logits. vLLM holds their texts, on the device."""

    def __init__(self) -> None:
        """No request has a place."""
        self.texts: Texts | None = None
        self.params: dict[int, Any] = {}  # of those that change something, by their place
        self.new: set[int] = set()  # places that must be counted from their beginning
        self.composition: tuple[int, ...] = ()
        self.wishes: Wishes | None = None

    def added(self, index: int, params: Any) -> None:
        """A request takes a place; None: one that changes nothing here."""
        self.params.pop(index, None)
        self.new.discard(index)
        self.composition = ()
        if params is not None and changes_rows(params):
            self.params[index] = params
            if needs_text(params):
                self.new.add(index)

    def of(self, sampler: Any, places_np: Any, vocab: int, steps: int) -> Wishes | None:
        """The wishes of the requests at these places, whose texts are brought up to date; None: there are none."""
        if not self.params:
            return None
        places = tuple(places_np.tolist())
        if not any(place in self.params for place in places):
            return None
        self.follow(sampler.req_states, [p for p in places if p in self.params and needs_text(self.params[p])], steps)
        if self.composition != places or self.wishes is None:
            states, params = sampler.req_states, [self.params.get(place) for place in places]
            empty = states.max_num_reqs
            slots = [
                place if p is not None and needs_text(p) else empty for place, p in zip(places, params, strict=True)
            ]
            prompts = [int(states.prompt_len.np[place]) for place in places]
            self.wishes = Wishes.of(params, prompts, slots, vocab, states.last_sampled_tokens.device)
            self.composition = places
        return self.wishes

    def follow(self, states: Any, places: list[int], steps: int) -> None:
        """Count what came to these places since they were last looked at: at most `steps + 1` tokens."""
        if not places:
            return
        device, tokens = states.last_sampled_tokens.device, states.all_token_ids.gpu
        if self.texts is None:
            self.texts = Texts(states.max_num_reqs, min(states.max_model_len, states.vocab_size), device)
        old = [place for place in places if place not in self.new]
        if old:
            slots = torch.tensor(old).to(device, non_blocking=True)
            length = self.texts.length[slots]
            place = length[:, None] + torch.arange(steps + 1, device=device)
            ids = tokens[slots[:, None], place.clamp(max=tokens.shape[1] - 1)]
            self.texts.append(slots, ids, states.total_len.gpu[slots].long() - length)
        new = [place for place in places if place in self.new]
        if new:
            slots = torch.tensor(new).to(device, non_blocking=True)
            prompt, end = (x.gpu[slots].long()[:, None] for x in (states.prompt_len, states.prefill_len))
            place = torch.arange(int(states.prefill_len.np[new].max()), device=device)
            known = tokens[slots][:, : len(place)]
            shifted = (place + prompt).clamp(max=tokens.shape[1] - 1)
            outputs = tokens[slots[:, None], shifted].masked_fill(place >= end - prompt, -1)
            self.texts.begin(slots, known.masked_fill(place >= prompt, -1), outputs)
            self.new.difference_update(new)


def editing_of(sampler: Any) -> Editing:
    """The sampler's."""
    if not hasattr(sampler, "specdec_editing"):
        sampler.specdec_editing = Editing()
    found: Editing = sampler.specdec_editing
    return found


def others_of(sampler: Any) -> Any:
    """Of every place in the tables, whether its request is vLLM's; a numpy array."""
    if not hasattr(sampler, "specdec_others"):
        sampler.specdec_others = sampler.needs_logits_processing.copy()
        sampler.specdec_others[:] = False
    return sampler.specdec_others


def needs_processed(sampler: Any) -> bool:
    """Whether the engine as a whole wants what only vLLM's sampler computes."""
    is_raw = sampler.logprobs_mode in ("raw_logprobs", "raw_logits")
    has_custom = len(sampler.logits_processors) > 3  # bias, penalties, bad words
    is_watermarked = hasattr(sampler, "watermarking")
    return (
        not is_raw or has_custom or is_watermarked or sampler.return_sampling_mask or bool(sampler.trace_replay_state)
    )


def distribution(sampler: Any, places: Tensor, places_np: Any) -> tuple[Sampling, Tensor]:
    """(sampling parameters, seeds) of the requests at these places; filters only where the host knows of one."""
    states = sampler.sampling_states
    temperature = states.temperature.gpu[places]
    used = {
        "top_k": bool((states.top_k.np[places_np] != states.vocab_size).any()),
        "top_p": bool((states.top_p.np[places_np] != 1.0).any()),
        "min_p": bool((states.min_p.np[places_np] != 0.0).any()),
    }
    filters = {name: getattr(states, name).gpu[places] if is_used else None for name, is_used in used.items()}
    return Sampling(torch.where(temperature < GREEDY, 0.0, temperature), **filters), states.seeds.gpu[places]


def mine_and_theirs(sampler: Any, places_np: Any, device: torch.device) -> tuple[bool, Tensor | None]:
    """(whether any request is ours, which are vLLM's: None where none is)."""
    others = others_of(sampler)[places_np]
    if not others.any():
        return True, None
    return not others.all(), torch.from_numpy(others).to(device, non_blocking=True)


def sampled(
    theirs: Callable[..., Any],
    sampler: Any,
    logits: Tensor,
    expanded: Tensor,
    places: Tensor,
    places_np: Any,
    pos: Tensor,
    *args: Any,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    """`Sampler.sample`: (ids ``[rows]``, the logits as given, or as vLLM processed them for its own requests)."""
    is_any, others = mine_and_theirs(sampler, places_np, logits.device)
    if not is_any or len(logits) != len(places):
        found: tuple[Tensor, Tensor] = theirs(sampler, logits, expanded, places, places_np, pos, *args, **keywords)
        return found
    sampling, seed = distribution(sampler, places, places_np)
    position, edits, allowed = pos.long() + 1, None, None
    editing, vocab = editing_of(sampler), logits.shape[1]
    wishes = editing.of(sampler, places_np, vocab, sampler.num_speculative_tokens)
    if wishes is not None:
        changes, allowed = wishes.at(editing.texts, position), wishes.allowed
        edits = None if changes is None else edit_rows(changes, vocab=vocab)
    rng = RngKey(seed, position)
    drawn = sample(logits, sampling=sampling, rng=rng, purpose="target", edits=edits, allowed=allowed)
    ids = drawn.token_ids[:, 0].clamp(min=0)
    if others is None:
        return ids, logits
    own, processed = theirs(sampler, logits, expanded, places, places_np, pos, *args, **keywords)
    return torch.where(others, own.long(), ids), processed


def verified(
    rule: ChainRule,
    theirs: Callable[..., Any],
    verifier: Any,
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    pos: Tensor,
    cu_num_logits: Tensor,
    places: Tensor,
    places_np: Any,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_verify`: (logits, ids ``[requests, drafts + 1]``, how many of them).

    A draft that the grammar forbids keeps its id: its target row gives it no mass, and the residual must know which
    id was drawn. -1 stands for no draft at all. The last of `args` are the drafts, -1 from the first on that vLLM's
    scheduler did not give to the grammar: rows behind that one are not masked, so a step ends with what it decides.
    """
    sampler, steps = verifier.sampler, verifier.num_speculative_steps

    def vllm() -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = theirs(
            verifier, logits, draft_logits, draft_sampled, pos, cu_num_logits, places, places_np, *args
        )
        return found

    is_any, others = mine_and_theirs(sampler, places_np, logits.device)
    if not is_any:
        return vllm()
    sampling, seed = distribution(sampler, places, places_np)
    batch, total = len(places), len(draft_sampled) - len(places)
    cu_draft = cu_num_logits - torch.arange(batch + 1, device=logits.device, dtype=cu_num_logits.dtype)
    place = torch.arange(total, device=logits.device)
    owner = torch.searchsorted(cu_draft[1:].long(), place, right=True).clamp(max=batch - 1)
    kept = None
    if rule != "match" and draft_logits is not None:
        kept = draft_logits[places[owner], place - cu_draft[owner].long()]
    position = pos[cu_num_logits[:-1].long()].long() + 1
    draft_ids, vocab, edits, allowed = draft_sampled[place + owner + 1].long(), logits.shape[1], None, None
    editing = editing_of(sampler)
    wishes = editing.of(sampler, places_np, vocab, steps)
    if wishes is not None:
        edits = wishes.at(editing.texts, position)
        row = torch.arange(len(logits), device=logits.device)
        request = torch.searchsorted(cu_num_logits[1:].long(), row, right=True).clamp(max=batch - 1)
        allowed = None if wishes.allowed is None else wishes.allowed[request]
    result = verify_chain(
        draft_ids,
        logits,
        kept,
        cu_draft=cu_draft,
        max_draft=steps,
        sampling=sampling,
        draft_sampling=None if kept is None else Sampling(sampling.temperature),
        rng=RngKey(seed, position, position),
        rule=rule,
        edits=edits,
        allowed=allowed,
    )
    known = torch.zeros_like(result.num_accepted).index_add_(0, owner, (args[-1][place + owner + 1] >= 0).int())
    count = result.num_accepted.minimum(known) + 1
    columns = torch.arange(steps + 1, device=logits.device)
    ids = torch.where(columns < count[:, None], result.token_ids.clamp(min=0), 0)
    if others is None:
        return logits, ids, count
    processed, own, own_count = vllm()
    return processed, torch.where(others[:, None], own.long(), ids), torch.where(others, own_count.int(), count)


def keep(kept: Tensor, places: Tensor, step: Tensor, logits: Tensor) -> None:
    """`kept[places, step] = logits`, but for places of -1 (padding of a graph). Waits for nothing.

    A padded row writes the row of the last true request again; where there is none, what stands there already.
    """
    row = torch.arange(len(places), device=places.device)
    is_true = places >= 0
    source = torch.where(is_true, row, torch.where(is_true, row, 0).amax())
    target, column = places[source].clamp(min=0), step.expand(len(places))[source]
    width = logits.shape[-1]
    kept[target, column, :width] = torch.where(is_true.any(), logits[source], kept[target, column, :width])


def drafted(
    rule: ChainRule,
    theirs: Callable[..., Any],
    speculator: Any,
    hidden_states: Tensor,
    positions: Tensor,
    places: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_step: Tensor,
    draft_logits: Tensor | None,
    spec_step_idx: int = 0,
    **keywords: Any,
) -> Tensor:
    """`sample_draft` at the request's temperature; under ``match`` with the noise of the target's own draw.

    `keywords`, since vLLM 0.33, tell its watermark how rows are ordered.
    """
    is_greedy = draft_logits is None and (rule != "match" or speculator.use_local_argmax_reduction)
    is_theirs = is_greedy or reason_against_acceptance(speculator.speculative_config) is not None
    if is_theirs or getattr(speculator, "draft_watermarker", None) is not None:
        found: Tensor = theirs(
            speculator, hidden_states, positions, places, temperature, seeds, draft_step, draft_logits, spec_step_idx,
            **keywords,
        )  # fmt: skip
        return found
    logits = speculator.compute_draft_logits(hidden_states, spec_step_idx)
    if draft_logits is not None:
        logits = logits.to(draft_logits.dtype)  # the distribution that will be verified is that of the kept logits
        keep(draft_logits, places.long(), draft_step.long(), logits)
    position = positions.long() + 1
    owner = places.long().clamp(min=0)
    scale = temperature[owner]
    drawn = sample(
        logits,
        sampling=Sampling(torch.where(scale < GREEDY, 0.0, scale)),
        rng=RngKey(seeds[owner], position, position - draft_step.long()),
        purpose="target" if rule == "match" else "draft",
    )
    speculator._maybe_predict_acceptance(logits, places, draft_step)
    return drawn.token_ids[:, 0].clamp(min=0)
