"""FlashInfer's chain_speculative_sampling. Its counters are added to in place, whatever their integer type.

Unlike there a request's numbers do not depend on its slot in the batch: coin i is named by (seed, offset + i).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import RngKey, random_words
from . import _draws


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify chains by the ratio test, from probabilities; `verify_chain` does it from logits.

    Args:
        draft_probs: float32 ``[batch, drafts, vocab]``.
        draft_token_ids: int32 ``[batch, drafts]``.
        target_probs: float32 ``[batch, drafts + 1, vocab]``.
        maybe_output_accepted_token_num: ``[batch]``; the drafts that pass one by one are added to it.
        maybe_output_emitted_draft_token_num: ``[batch]``; the accepted drafts are added to it.
        deterministic: results always are.
        generator: draws the coins where seed and offset are not given.
        seed: an int, or ``[1]`` or ``[batch]``.
        offset: an int, or ``[1]`` or ``[batch]``; a caller moves it on by ``drafts + 1`` a call.

    Returns:
        (int32 ids ``[batch, drafts + 1]``, -1 behind the last; both counters).
    """
    batch, drafts = draft_token_ids.shape
    device, ids = target_probs.device, draft_token_ids.long()
    if seed is None or offset is None:
        coins = torch.rand(batch, drafts + 1, generator=generator, dtype=torch.float32, device=device)
    else:
        seeds, offsets = (_each(x, batch, device) for x in (seed, offset))
        first = torch.zeros(1, dtype=torch.int64, device=device)
        rng = (RngKey(seeds, offsets + i) for i in range(drafts + 1))
        words = torch.cat([random_words(n, purpose="coin", index=first) for n in rng], 1)
        coins = (words >> 8).float() * 2.0**-24
    count, token, passes = _draws.chain(ids, target_probs, draft_probs, coins[:, :drafts], coins[:, drafts])
    place = torch.arange(drafts + 1, device=device)
    padded = torch.nn.functional.pad(ids, (0, 1), value=-1)
    out = torch.where(place < count[:, None], padded, torch.where(place == count[:, None], token[:, None], -1))
    counters = []
    for given, found in (
        (maybe_output_accepted_token_num, passes.sum(1)),
        (maybe_output_emitted_draft_token_num, count),
    ):
        counters.append(found.int() if given is None else given.add_(found.to(given.dtype)))
    return out.int(), counters[0], counters[1]


def _each(value: int | Tensor, batch: int, device: torch.device) -> Tensor:
    return torch.as_tensor(value, device=device).to(torch.int64).flatten().expand(batch)
