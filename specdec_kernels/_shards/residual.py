"""The arguments that residual_probs and residual_sample share, checked once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._check import Checker, fail
from .group import Shards, shards_of


def check_residual(
    op: str, target_logits: Tensor, draft_logits: Any, a: Any, b: Any, sampling: Any, draft_sampling: Any,
    token_map: Any, allowed: Any, edits: Any, draft_edits: Any, draft_ids: Any, group: Any, vocab_offsets: Any,
    backend: Any,
) -> tuple[Checker, tuple[Any, ...], Shards | None]:  # fmt: skip
    """The checker, the flat arguments up to draft_ids, and the shards (None without a group)."""
    check = Checker.of(op, "target_logits", target_logits, "[batch, vocab]")
    vocab = check.logits("target_logits", target_logits, ("batch", "vocab"))
    batch = target_logits.shape[0]
    draft_vocab = vocab
    if draft_logits is not None:
        draft_vocab = check.logits("draft_logits", draft_logits, (batch, "draft_vocab"))
        if draft_sampling is None:
            fail(op, "draft_sampling", "given with draft_logits: the distribution of the draft", None)
    sampling = check.sampling("sampling", sampling, batch)
    drafted = check.draft_sampling(draft_sampling, batch)
    token_map = check.token_map(token_map, draft_vocab, vocab)
    if draft_ids is not None:
        draft_ids = check.vector("draft_ids", draft_ids, (torch.int64,), batch)
    weights = check.weight("a", a, batch), check.weight("b", b, batch)
    shards = shards_of(op, group, vocab_offsets, vocab, backend)
    allowed = check.allowed(allowed, batch, vocab if shards is None else shards.size)
    edited = check.edits("edits", edits, batch, vocab)
    draft_edited = check.draft_edits(draft_edits, draft_logits, batch, token_map)
    arguments = (target_logits, draft_logits, *weights, *sampling, *drafted, token_map, allowed, *edited, *draft_edited)
    return check, (*arguments, draft_ids), shards
