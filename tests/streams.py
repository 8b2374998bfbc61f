"""Whole streams of tokens from a constant two-symbol model: many steps, ragged, as an engine would run them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec_kernels import ChainResult, Noise, Sampling, sample, verify_chain

Drafter = Callable[[Tensor, Noise, int], tuple[Tensor, Tensor | None]]


def stream(
    p: Tensor,
    q: Tensor,
    *,
    rule: str,
    sequences: int,
    length: int,
    draft: int,
    device: str = "cpu",
    draft_purpose: str | None = None,
    verified_q: Tensor | None = None,
    argmax_drafts: bool = False,
    keep: Callable[[Tensor], Tensor] | None = None,
    frozen_step: bool = False,
    verify: Callable[..., ChainResult] = verify_chain,
) -> Tensor:
    """Tokens [sequences, length] of speculative decoding on a model whose rows are always p (target) and q (draft).

    The keyword options break it on purpose: drafts drawn with another purpose (shared noise), a q that the drafts were
    not drawn from, a length that depends on the drafted ids (`keep`), random numbers without a step.
    """
    vocab = len(p)
    purpose = draft_purpose or ("target" if rule == "match" else "draft")
    target_row, draft_row = p.log().float().to(device), q.log().float().to(device)
    claimed = draft_row if verified_q is None else verified_q.log().float().to(device)
    seed = torch.arange(sequences, device=device) * 7919 + 1
    done = torch.zeros(sequences, dtype=torch.int64, device=device)
    tokens = torch.full((sequences, length + draft + 1), -1, device=device)
    columns = torch.arange(draft + 1, device=device)
    step = 0
    while int(done.min()) < length:
        steps = torch.full_like(done, 0 if frozen_step else step)
        ids = []
        for i in range(draft):
            noise = Noise(seed, done + i, steps)
            greedy = Sampling.full(sequences, temperature=0.0, device=device) if argmax_drafts else Sampling()
            drawn = sample(draft_row.expand(sequences, vocab), sampling=greedy, noise=noise, purpose=purpose)
            ids.append(drawn.token_ids[:, 0])
        draft_ids = torch.stack(ids, 1)
        if keep is not None:
            draft_ids = torch.where(keep(draft_ids), draft_ids, -1)
        result = verify(
            draft_ids,
            target_row.expand(sequences, draft + 1, vocab),
            claimed.expand(sequences, draft, vocab),
            sampling=Sampling(),
            draft_sampling=Sampling(),
            noise=Noise(seed, done, steps),
            rule=rule,
        )
        place = (done[:, None] + columns).clamp(max=tokens.shape[1] - 1)
        emitted = columns <= result.num_accepted[:, None]
        active = emitted & (done < length)[:, None]
        tokens.scatter_(1, place, torch.where(active, result.token_ids, tokens.gather(1, place)))
        done = torch.where(done < length, done + result.num_accepted + 1, done)
        step += 1
    return tokens[:, :length]


def joint_counts(tokens: Tensor, vocab: int) -> Tensor:
    """How often each whole sequence occurred."""
    length = tokens.shape[1]
    weights = vocab ** torch.arange(length - 1, -1, -1, device=tokens.device)
    return torch.bincount((tokens * weights).sum(1), minlength=vocab**length).cpu()


def joint_law(p: Tensor, length: int) -> Tensor:
    """Law of `length` independent tokens."""
    law = torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        law = torch.outer(law, p.double()).flatten()
    return law
