"""Verification from raw logits: `eagle_sample`, which EAGLE, MTP, draft models and n-grams share.

The distribution of a token is named by its absolute position, as in plain sampling (sampler.py): under ``match`` a text
does not depend on its drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specdec_kernels import ChainRule, RngKey, Sampling, TreeRule, tree_from_links, verify_chain, verify_tree

from .penalties import keep, penalize
from .requests import NO_SEEDS, leave, parameters, seeds_of


class Accepted(NamedTuple):
    """A path in SGLang's slots: the root, then accepted drafts.

    Attributes:
        token_ids: ``[batch, slots]``: the token behind each slot.
        nodes: int64 ``[batch, slots]``.
        num_accepted: int32 ``[batch]``, the root not counted.
    """

    token_ids: Tensor
    nodes: Tensor
    num_accepted: Tensor


def reason_against(rule: str, verify_input: Any, info: Any, watermark_state: Any) -> str | None:
    """Why a batch goes to SGLang's own verifier; None: it is served here."""
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    spec, draws = get_spec(), not info.is_all_greedy
    is_drawn = spec.speculative_use_rejection_sampling
    thresholds = (spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc)
    reasons = {
        NO_SEEDS: seeds_of(info) is None,
        "watermarks": watermark_state is not None and info.has_watermark_candidates,
        "simulated acceptance": SIMULATE_ACC_LEN > 0,
        "custom logits processors and drafts": info.has_custom_logit_processor,
        "acceptance thresholds below 1": draws and not is_drawn and thresholds != (1.0, 1.0),
        "drafts drawn at random, under target_only": draws and is_drawn and rule == "target_only",
        f"trees, under {rule}": draws and rule in ("ratio", "block") and verify_input.tree_topk != 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def verified(
    rule: str,
    theirs: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    *args: Any,
    **keywords: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`eagle_sample`: (the token behind each accepted node, by row; accepted drafts + 1; rows of the path)."""
    info, is_idle = batch.sampling_info, batch.forward_mode.is_idle()
    reason = None if is_idle else reason_against(rule, verify_input, info, keywords.get("watermark_state"))
    if is_idle or reason is not None:
        if reason is not None:
            leave(reason)
        found: tuple[Tensor, Tensor, Tensor] = theirs(
            verify_input, batch, logits_output, grammar_mask, *args, **keywords
        )
        return found
    nodes = verify_input.draft_token_num
    logits = edit(logits_output.next_token_logits, verify_input, batch, grammar_mask)
    seed = seeds_of(info)
    assert seed is not None
    position = batch.seq_lens.long() + 1  # the root is the last committed token
    rng = RngKey(seed, position, position)
    target = logits.view(len(seed), nodes, -1)
    if rule in ("match", "target_only") or info.is_all_greedy:
        accepted = decide_tree(cast(TreeRule, "match" if info.is_all_greedy else rule), verify_input, target, info, rng)
    else:
        accepted = decide_chain(cast(ChainRule, rule), verify_input, target, info, rng)
    results = written(accepted, verify_input.retrieve_index, len(logits))
    agree(results)
    if info.acc_additive_penalties is not None:
        keep(batch, results[0][results[2].long()].where(results[2] >= 0, -1))
    return results


def edit(logits: Tensor, verify_input: Any, batch: Any, grammar_mask: Any) -> Tensor:
    """Penalties, biases and a grammar's mask, in place and in SGLang's order."""
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    info = batch.sampling_info
    sanitize_nan_logits(logits, "verify: target model logits")
    if info.acc_additive_penalties is not None:
        penalize(logits, verify_input, batch)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(verify_input.draft_token_num, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    return logits


def decide_tree(rule: TreeRule, verify_input: Any, target: Tensor, info: Any, rng: RngKey) -> Accepted:
    """`verify_tree` on SGLang's links."""
    batch, nodes, _ = target.shape
    parents = tree_from_links(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling).parents
    ids = verify_input.draft_token.reshape(batch, nodes)
    if verify_input.tree_topk != 1:
        ids = without_twins(ids, parents)
    depth = verify_input.max_tree_depth - 1
    result = verify_tree(ids, parents, target, max_depth=depth, sampling=parameters(info), rng=rng, rule=rule)
    path = torch.nn.functional.pad(result.path[:, :depth], (1, 0))
    return Accepted(result.token_ids, path.long(), result.num_accepted)


def without_twins(ids: Tensor, parents: Tensor) -> Tensor:
    """Ids, -1 at a node whose elder sibling has the same one: n-gram trees are filled up with equal nodes."""
    is_twin = (ids[:, :, None] == ids[:, None, :]) & (parents[:, :, None] == parents[:, None, :])
    return ids.masked_fill(is_twin.tril(-1).any(-1) & (parents >= 0), -1)


def decide_chain(rule: ChainRule, verify_input: Any, target: Tensor, info: Any, rng: RngKey) -> Accepted:
    """`verify_chain`, with the distribution of the drafts where SGLang drew them."""
    batch, nodes, _ = target.shape
    ids = verify_input.draft_token.reshape(batch, nodes)[:, 1:].contiguous()
    probs = verify_input.draft_probs
    result = verify_chain(
        ids,
        target,
        None if probs is None else probs[:, : nodes - 1].log(),
        sampling=parameters(info),
        draft_sampling=None if probs is None else Sampling(),
        rng=rng,
        rule=rule,
    )
    path = torch.arange(nodes, device=ids.device).expand(batch, -1)
    return Accepted(result.token_ids, path, result.num_accepted)


def written(accepted: Accepted, retrieve_index: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `eagle_sample` returns, in its layout: `accept_index` is -1 behind the path, other rows' tokens are 0."""
    place = torch.arange(accepted.nodes.shape[1], device=retrieve_index.device)
    is_kept = place <= accepted.num_accepted[:, None]
    row = torch.where(is_kept, retrieve_index.long().gather(1, accepted.nodes.clamp(min=0)), -1)
    # A row of NaN has no token; the engine must be given one of its vocabulary.
    ids = accepted.token_ids.clamp(min=0).int()
    predict = ids.new_zeros(rows + 1).scatter_(0, row.where(is_kept, rows).flatten(), ids.flatten())
    return predict[:rows], (accepted.num_accepted + 1).int(), row.int()


def agree(results: tuple[Tensor, ...]) -> None:
    """Every rank takes the first one's results, as in SGLang: logits may differ between ranks by rounding."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        for result in results:
            group.broadcast(result, src=0)
