"""Penalties at every node of a tree, of all tokens before it.

SGLang counts the last token of each step alone, and gives every node of a tree the same penalties. Its definitions are
kept: only generated tokens count, and repetition penalties scale what the others leave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import tree_from_links, tree_mask


def penalize(logits: Tensor, verify_input: Any, batch: Any) -> None:
    """In place: logits ``[batch * nodes, vocab]``."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    counts = counts_before(verify_input, batch, logits.shape[-1])

    def of_each(name: str) -> Tensor:
        values = [getattr(request.sampling_params, name) for request in batch.reqs]
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None, None]

    added = -of_each("frequency_penalty") * counts - of_each("presence_penalty") * (counts > 0)
    is_early = counts.sum(-1, keepdim=True) < of_each("min_new_tokens")
    added.masked_fill_(is_early & is_stop(batch.reqs, logits)[:, None], float("-inf"))
    logits.add_(added.flatten(0, 1))
    apply_scaling_penalties(logits, torch.where(counts > 0, of_each("repetition_penalty"), 1.0).flatten(0, 1))


def counts_before(verify_input: Any, batch: Any, vocab: int) -> Tensor:
    """Float32 ``[batch, nodes, vocab]``: how often each id was generated, up to and with the node."""
    parents = tree_from_links(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling).parents
    ids = verify_input.draft_token.reshape(parents.shape).long()
    committed, nodes = counts_of(generated(batch, ids[:, :1]), vocab), ids.shape[1]
    is_drafted = torch.arange(nodes, device=ids.device) > 0
    lines = tree_mask(parents).mask[:, 0] & is_drafted  # the node and those above it but for the root
    return committed[:, None].repeat(1, nodes, 1).scatter_add_(2, ids[:, None].expand(-1, nodes, -1), lines.float())


def generated(batch: Any, root: Tensor) -> Tensor:
    """Int64 ``[batch, n]``, -1 where there is none: generated tokens with the root.

    Under overlap scheduling the host does not have those of the last step yet: their rows were kept by `keep`.
    """
    requests, device = batch.reqs, root.device
    known = [torch.tensor(list(request.output_ids), dtype=torch.int64) for request in requests]
    lengths = torch.tensor([len(request.origin_input_ids) + len(request.output_ids) for request in requests])
    is_late = batch.seq_lens + 1 > lengths.to(device)
    rows = [getattr(request, "specdec_step", None) for request in requests]
    late = padded([one if row is None else row.long() for row, one in zip(rows, root, strict=True)])
    return torch.cat([padded(known).to(device), late.masked_fill(~is_late[:, None], -1)], 1)


def keep(batch: Any, token_ids: Tensor) -> None:
    """Note the tokens of a step, ``[batch, n]`` with -1 behind the last, with their requests."""
    for request, row in zip(batch.reqs, token_ids, strict=True):
        request.specdec_step = row


def padded(rows: list[Tensor]) -> Tensor:
    """Int64 ``[batch, n]``, -1 behind the last."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def counts_of(ids: Tensor, vocab: int) -> Tensor:
    """Float32 ``[batch, vocab]``."""
    counts = torch.zeros(len(ids), vocab + 1, device=ids.device)
    return counts.scatter_add_(1, ids.where(ids >= 0, vocab), torch.ones_like(ids, dtype=torch.float32))[:, :vocab]


def is_stop(requests: list[Any], logits: Tensor) -> Tensor:
    """Bool ``[batch, vocab]``: ids that may not come before `min_new_tokens`; SGLang's own list of them."""
    marks = torch.zeros(len(requests), logits.shape[-1], dtype=torch.bool)
    for mark, request in zip(marks, requests, strict=True):
        if request.sampling_params.min_new_tokens > 0:
            stops = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
            stops |= set(request.tokenizer.additional_stop_token_ids or ()) | {request.tokenizer.eos_token_id}
            mark[[token for token in stops if token is not None]] = True
    return marks.to(logits.device)
