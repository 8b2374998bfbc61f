"""Inputs of a call: sampling parameters and random number keys of each request, and arguments in their order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._edits import Edits, RowEdits


class Sampling(NamedTuple):
    """Per-request sampling parameters; each is a tensor ``[batch]`` or None (off).

    Applied in the order temperature, min-p, top-k, top-p, each on what the one before it kept. Ties at a
    threshold are all kept.

    Attributes:
        temperature: float32; 0 is greedy, None is 1.
        top_k: int32; keeps every logit >= the k-th largest; 0 is off.
        top_p: float32; keeps every logit >= the largest threshold whose kept mass is >= p; >= 1 is off.
        min_p: float32; keeps probabilities >= min_p times the largest; <= 0 is off.
        active: bool; False marks a request that only pads the batch, as those of a captured graph that is replayed
            with fewer requests than it was captured with. None of its rows and ids is read; its ids come out as -1,
            everything else, `status` too, as 0. Read of the target's parameters alone, not of `draft_sampling`.
    """

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    active: Tensor | None = None

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p is given."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @classmethod
    def full(
        cls,
        batch: int,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        device: torch.device | str = "cpu",
    ) -> Sampling:
        """The same parameters for every request of a batch.

        Raises:
            ValueError: a batch that is no int of at least 0, a parameter that is no number, a top_k with a fraction.
        """
        if not hasattr(batch, "__index__") or batch < 0:
            raise ValueError(f"Sampling.full: batch must be an int >= 0, got {batch!r}")

        def repeat(name: str, value: float | None, dtype: torch.dtype) -> Tensor | None:
            if value is None:
                return None
            if dtype == torch.int32:
                if not hasattr(value, "__index__") or not -(2**31) <= value < 2**31:
                    raise ValueError(f"Sampling.full: {name} must be an int below 2^31, got {value!r}")
            elif not hasattr(value, "__float__"):
                raise ValueError(f"Sampling.full: {name} must be a number, got {value!r}")
            return torch.full((batch,), value, dtype=dtype, device=device)

        return cls(
            repeat("temperature", temperature, torch.float32),
            repeat("top_k", top_k, torch.int32),
            repeat("top_p", top_p, torch.float32),
            repeat("min_p", min_p, torch.float32),
        )


class RngKey(NamedTuple):
    """Names every random number of a call: Philox of (seed, position, step, purpose, token id).

    Attributes:
        seed: int64 ``[batch]``, one per request, kept for its whole life.
        position: int64 ``[batch]``, absolute position of the first token this call decides.
        step: int64 ``[batch]`` decode-step counter that never repeats within a request, or None (0). Rules that
            look past the first rejection (``block``, ``traversal``) need it; their drafts must be drawn with it too.
    """

    seed: Tensor
    position: Tensor
    step: Tensor | None = None


class CandidateTree(NamedTuple):
    """A tree of candidates that was built on the device.

    `tree_from_sequences`, `tree_from_marginals` and `select_tree` return it.

    Attributes:
        token_ids: ``[batch, num_nodes]``, dtype of the ids given; -1 at padding (and at the root of
            `tree_from_sequences`, which does not know the last committed token).
        parents: int32 ``[batch, num_nodes]``; -1 at the root and at padding.
        source: int32 ``[batch, num_nodes]``: which candidate a node was, -1 where it was none.
        status: int32 ``[batch]``.
    """

    token_ids: Tensor
    parents: Tensor
    source: Tensor
    status: Tensor


class EditArguments(NamedTuple):
    """Arguments of `edit_rows`, in the order of the schema."""

    batch: int
    vocab: int
    draft_ids: Tensor | None
    parents: Tensor | None
    cu_draft: Tensor | None
    max_draft: int
    only_last: bool
    edits: Edits
    active: Tensor | None
    first_id: int


class SampleArguments(NamedTuple):
    """Arguments of `sample`, in the order of the schema."""

    logits: Tensor
    sampling: Sampling
    rng: RngKey
    purpose: int
    num_samples: int
    lane: Tensor | None
    exclude_ids: Tensor | None
    token_map: Tensor | None
    allowed: Tensor | None
    edits: RowEdits
    logprobs_mode: int


class RatioArguments(NamedTuple):
    """Arguments of `acceptance_ratios`, in the order of the schema."""

    draft_ids: Tensor
    target_logits: Tensor
    draft_logits: Tensor | None
    cu_draft: Tensor | None
    max_draft: int
    sampling: Sampling
    draft_sampling: Sampling
    token_map: Tensor | None
    allowed: Tensor | None
    edits: RowEdits
    draft_edits: RowEdits


class ResidualArguments(NamedTuple):
    """Arguments of `residual_probs` and `residual_sample`, in the order of the schema."""

    target_logits: Tensor
    draft_logits: Tensor | None
    a: Tensor
    b: Tensor
    sampling: Sampling
    draft_sampling: Sampling
    token_map: Tensor | None
    allowed: Tensor | None
    edits: RowEdits
    draft_edits: RowEdits
    draft_ids: Tensor | None


class Kept(NamedTuple):
    """What `SparseRows` holds beside the logits, in arguments of ops."""

    kept_ids: Tensor | None = None
    kept_logsumexp: Tensor | None = None


class Typical(NamedTuple):
    """Thresholds of rule ``typical``: of all requests, or float32 [batch] of each."""

    typical_epsilon: float
    typical_delta: float
    typical_epsilons: Tensor | None
    typical_deltas: Tensor | None

    def of_requests(self, rule: str) -> tuple[Tensor | None, Tensor | None]:
        """Those of each request, where the rule reads them."""
        return (self.typical_epsilons, self.typical_deltas) if rule == "typical" else (None, None)


class ChainArguments(NamedTuple):
    """Arguments of `verify_chain`, in the order of the schema."""

    draft_ids: Tensor
    target_logits: Tensor
    draft_logits: Tensor | None
    draft_logsumexp: Tensor | None
    draft_threshold: Tensor | None
    cu_draft: Tensor | None
    max_draft: int
    sampling: Sampling
    draft_sampling: Sampling
    rng: RngKey
    rule: int
    over_acceptance: float
    over_acceptances: Tensor | None
    rejected_from_target: bool
    token_map: Tensor | None
    draft_kept: Kept
    allowed: Tensor | None
    edits: RowEdits
    draft_edits: RowEdits
    typical: Typical
    top_m: int
    max_distance: int
    min_block: int
    logprobs_mode: int


class TreeArguments(NamedTuple):
    """Arguments of `verify_tree`, in the order of the schema."""

    token_ids: Tensor
    parents: Tensor
    target_logits: Tensor
    draft_logits: Tensor | None
    max_depth: int
    sampling: Sampling
    draft_sampling: Sampling
    rng: RngKey
    rule: int
    replacement: bool
    token_map: Tensor | None
    draft_kept: Kept
    allowed: Tensor | None
    edits: RowEdits
    draft_edits: RowEdits
    typical: Typical
    logprobs_mode: int
