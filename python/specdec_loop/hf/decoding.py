"""A decoding method for transformers' `generate`: `model.generate(ids, custom_generate=generate, draft_model=...)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from specdec_kernels import ChainRule, Sampling, TreeRule

from ..draft_length import FixedLength
from ..drafters import Drafter, DraftModel, PromptLookup
from ..generation import generate as decode
from ..generation import overhang
from ..prefix_cache import PrefixCache
from ..sequences import BAD_ROW
from ..tree_cache import check_model, has_states
from .caches import adopt, fill, has_rows
from .columns import Columns
from .processors import likely, split, split_edits

CACHES = ("cache", "past_key_values", "cache_params")  # the first is its name from transformers 5.24 on
KNOWN = {*CACHES, "attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache"}
RETURNED = next(name for name in CACHES if name in GenerateDecoderOnlyOutput.__dataclass_fields__)
REFUSED = {"output_attentions", "output_hidden_states"}


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    *,
    draft_model: Any = None,
    drafter: Drafter | None = None,
    draft_length: int | FixedLength = 4,
    rule: ChainRule | TreeRule = "match",
    seed: int | Tensor | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode speculatively for `model.generate`, which calls this with what it has prepared.

    Greedy texts are those of plain `generate`; sampled ones follow its distribution. Batches, left padding, static
    caches, processors, criteria and `return_dict_in_generate` are honoured.

    Args:
        model: a causal LM that `TreeCache` serves.
        input_ids: ``[batch, width]``.
        logits_processor: warpers at its end are handed to the kernels; the others are called for each position, with
            its own prefix. One that keeps a state is refused.
        stopping_criteria: called for each column in turn, as plain decoding calls them.
        generation_config: without beams.
        draft_model: of the same vocabulary.
        drafter: instead of a draft model; neither: `PromptLookup`.
        draft_length: see `specdec_loop.generate`.
        rule: likewise.
        seed: likewise; None: drawn from torch's default generator.
        streamer: transformers keeps the one that it is given to itself: write
            ``custom_generate=functools.partial(generate, streamer=streamer)``.
        **model_kwargs: attention_mask, past_key_values, ...

    Returns:
        Token ids ``[batch, width + longest text]``, or a GenerateDecoderOnlyOutput, whose past_key_values are None
        where a model has recurrent layers.

    Raises:
        ValueError: something that cannot be done exactly.
        RuntimeError: logits from which no token can be drawn.

    Example:
        >>> from specdec_loop.hf import generate
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()
        >>> ids, how = torch.tensor([[5, 6, 7], [8, 1, 2]]), dict(max_new_tokens=8, do_sample=False)
        >>> torch.equal(model.generate(ids, custom_generate=generate, **how), model.generate(ids, **how))
        True
    """
    _check(model, draft_model, drafter, generation_config, model_kwargs)
    config, width, device = generation_config, input_ids.shape[1], model.device
    input_ids = input_ids.to(device)
    mask = _mask(input_ids, model_kwargs)
    longest = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)] or [config.max_length]
    limit = max(int(min(longest)) - width, 1)
    calls, sampling, drafted = _distributions(logits_processor, config, len(input_ids), device)
    padding = set(input_ids[mask == 0].tolist())
    calls, edits, skipped = split_edits(calls, batch=len(input_ids), width=width, padding=padding, device=device)
    if drafter is None:
        drafter = PromptLookup() if draft_model is None else DraftModel(draft_model, sampling=drafted)
    behind = overhang(drafter, FixedLength(draft_length) if isinstance(draft_length, int) else draft_length)
    returns_dict = config.return_dict_in_generate
    ends = [c for c in stopping_criteria if type(c) is EosTokenCriteria]
    others = [c for c in stopping_criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    columns = Columns(
        input_ids,
        limit + behind,
        pad=pad,
        calls=calls,
        skipped=skipped,
        processors=logits_processor,
        criteria=stopping_criteria if others else None,
        streamer=streamer,
        keeps_logits=bool(returns_dict and config.output_logits),
        keeps_scores=bool(returns_dict and config.output_scores),
    )
    past = PrefixCache(int((mask != 0).sum(1).max()) + limit + behind)
    cache = next((model_kwargs[name] for name in CACHES if model_kwargs.get(name) is not None), None)
    if cache is not None and has_states(model.config):
        if cache.has_previous_state() or getattr(cache, "_is_user_defined", False):
            _refuse("past_key_values", "left out: the states of recurrent layers do not move between caches", "a cache")
        cache = None  # the empty one that `generate` made
    if cache is not None:
        _check_room(cache, model, width + limit - 1)
        adopt(past, model, cache, input_ids, mask)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    if seed is None:
        seed = torch.randint(2**62, (len(input_ids),)).to(device) if config.do_sample else 0
    result = decode(
        model,
        drafter,
        input_ids,
        mask,
        sampling=sampling,
        seed=seed,
        rule=rule,
        max_new_tokens=limit,
        draft_length=draft_length,
        stop=[int(i) for c in ends for i in c.eos_token_id.flatten()],
        past=past,
        edits=edits,
        hooks=columns,
    )
    for b, status in enumerate(result.status):
        if status & BAD_ROW:
            raise RuntimeError(f"specdec_loop.hf: the logits of request {b} hold NaN, or no token that may be drawn")
    if streamer is not None:
        streamer.end()
    counts = [len(tokens) for tokens in result.tokens]
    sequences = columns.ids[:, : width + max(counts)]
    if cache is not None and (returns_dict or getattr(cache, "_is_user_defined", False)):
        fill(cache, past, mask, width + min(counts) - 1)
    if not returns_dict:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(columns.scores) if config.output_scores else None,
        logits=tuple(columns.logits) if config.output_logits else None,
        **{RETURNED: cache},
    )


def _distributions(
    processors: Any, config: Any, batch: int, device: torch.device
) -> tuple[list[Any], Sampling, Sampling]:
    """Processors that must be called, the target's distribution behind them, and a distribution for drafts."""
    if not config.do_sample:  # the argmax of what all of them make of the logits
        greedy = Sampling.full(batch, temperature=0.0, device=device)
        return list(processors), greedy, greedy
    calls, sampling = split(processors, batch=batch, device=device)
    return calls, sampling, likely(processors, batch=batch, device=device)


def _mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """1 at tokens, 0 at padding; refuses other positions than those it gives."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape:
        _refuse("attention_mask", f"{list(input_ids.shape)}, as input_ids (the whole text)", list(mask.shape))
    positions, is_token = model_kwargs.get("position_ids"), mask != 0
    if positions is not None:
        own = is_token.long().cumsum(1) - 1
        # Qwen's models with images have several a token, the same for text.
        if positions.shape[-1] != own.shape[1] or bool(((positions.to(own.device) != own) & is_token).any()):
            _refuse("position_ids", "left out: positions count the tokens of attention_mask", "others")
    return mask


# --- arguments


def _check(model: Any, draft_model: Any, drafter: Any, config: Any, model_kwargs: dict[str, Any]) -> None:
    if config is None:
        _refuse("custom_generate", "used through model.generate(..., custom_generate=generate)", "a call of its own")
    if model.config.is_encoder_decoder:
        _refuse("model", "a decoder", "an encoder and a decoder")
    check_model(model.config, model)
    if config.num_beams is not None and config.num_beams > 1:
        _refuse("num_beams", "1", config.num_beams)
    for name in sorted(REFUSED):
        if config.return_dict_in_generate and getattr(config, name, None):
            _refuse(name, "False: drafts that are rejected leave none", True)
    given = {name for name, value in model_kwargs.items() if value is not None and not _is_empty(value)}
    unknown = sorted(given - KNOWN - REFUSED)
    if unknown:
        _refuse("inputs", "tokens, attention_mask and past_key_values", ", ".join(unknown))
    if draft_model is None:
        return
    if drafter is not None:
        _refuse("drafter", "left out where there is a draft_model", type(drafter).__name__)
    if "Assistant" in type(draft_model).__name__:
        use = "a causal LM (one that reads the target's states: assistant_model=, within specdec_loop.hf.patched)"
        _refuse("draft_model", use, type(draft_model).__name__)
    sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (model, draft_model)]
    if sizes[0] != sizes[1]:
        use = f"of {sizes[0]} tokens, as the model (else give drafter=DraftModel(draft_model, token_map=...))"
        _refuse("draft_model", use, sizes[1])


def _is_empty(value: Any) -> bool:
    """Of models that take images, transformers hands over an empty dictionary of them."""
    return isinstance(value, dict) and not value


def _check_room(cache: Any, model: Any, columns: int) -> None:
    """Refuse a static cache that is too short. A layer with a sliding window needs room for the window only."""
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None) or columns
    for layer in filter(has_rows, getattr(cache, "layers", [])):
        need = min(columns, window) if layer.is_sliding else columns
        room = int(layer.get_max_length())
        if 0 <= room < need:
            _refuse("past_key_values", f"of room for {need} tokens", room)


def _refuse(name: str, expected: str, got: object) -> None:
    raise ValueError(f"specdec_loop.hf: {name} must be {expected}, got {got}")
