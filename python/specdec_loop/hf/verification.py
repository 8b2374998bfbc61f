"""Verification for transformers' own assisted decoding: its function's place is taken by `verify_chain`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation import candidate_generator, utils

from specdec_kernels import RngKey, Sampling, verify_chain

_THEIRS = utils._speculative_sampling


def speculative_sampling(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    assistant_ensemble_weight: float | None = None,
    is_done_candidate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Do what `transformers.generation.utils._speculative_sampling` does, without probability tensors, and exactly.

    A token of target probability 0 is never accepted, and where nothing is left of the residual the target is drawn
    from. Randomness comes from torch's default generator, one number a call.

    Args:
        candidate_input_ids: ``[1, length + draft]``: the text, then the drafts.
        candidate_logits: ``[1, draft, vocab]``: the rows that the drafts were drawn from, filtered as they were then.
        candidate_length: drafts.
        new_logits: ``[1, draft + 1, vocab]`` of the target, filtered.
        assistant_ensemble_weight: transformers' lossy rule, which is left to transformers.
        is_done_candidate: the drafts end with a stop (an argument of transformers up to 5.17).

    Returns:
        The tokens that follow the text, ``[1, accepted + 1]``, and how many of them are drafts, a scalar tensor.

    Raises:
        RuntimeError: a row from which no token can be drawn.

    Example:
        >>> import torch
        >>> from specdec_loop.hf import speculative_sampling
        >>> target = torch.tensor([[[0.0, 40.0, 0.0], [40.0, 0.0, 0.0]]])
        >>> speculative_sampling(torch.tensor([[5, 1]]), torch.zeros(1, 1, 3), 1, target)
        (tensor([[1, 0]]), tensor(1))
    """
    if assistant_ensemble_weight is not None:
        more = {"is_done_candidate": is_done_candidate} if _takes_done(_THEIRS) else {}
        arguments = (candidate_input_ids, candidate_logits, candidate_length, new_logits)
        result: tuple[Tensor, Tensor] = _THEIRS(*arguments, assistant_ensemble_weight=assistant_ensemble_weight, **more)
        return result
    drafts = candidate_input_ids[:, candidate_input_ids.shape[1] - candidate_length :].contiguous()
    seed = torch.randint(2**63 - 1, (1,), device=new_logits.device)
    as_given = Sampling()
    verdict = verify_chain(
        drafts,
        new_logits,
        candidate_logits,
        sampling=as_given,
        draft_sampling=as_given,
        rng=RngKey(seed, torch.zeros_like(seed)),
    )
    count = int(verdict.num_accepted)
    if is_done_candidate and count == candidate_length:
        return drafts, verdict.num_accepted[0].long() - 1
    tokens = verdict.token_ids[:, : count + 1]
    if int(tokens[0, -1]) < 0:
        raise RuntimeError(f"speculative_sampling: row {count} of new_logits has no token to draw, or holds NaN")
    return tokens, verdict.num_accepted[0].long()


@contextmanager
def patched() -> Iterator[None]:
    """Verify transformers' assisted decoding by `speculative_sampling`, within the context.

    Gemma-4 assistants draft the argmax and hand over the logits that it was taken from; verified as if it had been
    drawn from them, the text does not follow the target's distribution. Here they hand over the distribution that they
    drafted from, a point mass.

    Example:
        >>> from specdec_loop.hf import patched
        >>> with patched():
        ...     pass  # model.generate(ids, assistant_model=assistant, do_sample=True)
    """
    generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    theirs, candidates = utils._speculative_sampling, generator.get_candidates

    def point_masses(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        ids, logits = candidates(self, input_ids, *args, **kwargs)
        if logits is None:
            return ids, None
        drafted = ids[:, input_ids.shape[1] :, None]
        return ids, torch.full_like(logits, -float("inf")).scatter_(2, drafted, 0.0)

    def with_done(ids: Tensor, logits: Tensor, length: int, new: Tensor, done: bool, **more: Any) -> Any:
        return speculative_sampling(ids, logits, length, new, is_done_candidate=done, **more)

    utils._speculative_sampling = with_done if _takes_done(theirs) else speculative_sampling
    generator.get_candidates = point_masses
    try:
        yield
    finally:
        utils._speculative_sampling, generator.get_candidates = theirs, candidates


def _takes_done(function: Any) -> bool:
    return "is_done_candidate" in inspect.signature(function).parameters
