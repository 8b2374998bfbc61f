"""Several independent drafts of one request: batch speculative decoding as a case of verify_tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._check import ID_DTYPES, MAX_NODES, Checker, fail
from ..._codes import Backend, Logprobs
from ..._edits import Edits, RowEdits
from ..._sparse import SparseRows
from ..._types import RngKey, Sampling
from . import TreeResult, verify_tree


def batch_sd(
    draft_ids: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | SparseRows,
    *,
    sampling: Sampling,
    draft_sampling: Sampling,
    rng: RngKey,
    token_map: Tensor | None = None,
    allowed: Tensor | None = None,
    edits: Edits | RowEdits | None = None,
    draft_edits: Edits | RowEdits | None = None,
    logprobs: Logprobs | None = None,
    top: int | None = None,
    group: Any = None,
    vocab_offsets: Sequence[int] | None = None,
    out: TreeResult | None = None,
    backend: Backend | None = None,
) -> TreeResult:
    """Verify several independent drafts: the first tokens in turn, then the chain of the one that was accepted.

    Algorithm 4 of Yin et al. (NeurIPS 2024): `verify_tree` with rule ``recursive`` and `replacement` on a root with
    one chain per draft. Lossless; one draft is ``verify_chain`` with rule ``ratio``.

    Args:
        draft_ids: int32 or int64 ``[batch, branches, draft]``, each branch padded with -1, drawn independently.
        target_logits: ``[batch, 1 + branches * draft, vocab]``: row 0 is the distribution of every first token, row
            ``1 + branch * draft + i`` that of the token after token i of a branch.
        draft_logits: ``[batch, 1 + branches * draft, draft_vocab]``, likewise; the last row of a branch is not read.
        sampling: see `verify_tree`.
        draft_sampling: see `verify_tree`.
        rng: see `verify_tree`.
        token_map: see `verify_tree`.
        allowed: see `verify_tree`.
        edits: see `verify_tree`.
        draft_edits: see `verify_tree`.
        logprobs: see `verify_tree`.
        top: see `verify_tree`.
        group: see `verify_tree`; one exchange for each branch but the first.
        vocab_offsets: see `verify_chain`.
        out: preallocated results.
        backend: see `verify_chain`.

    Returns:
        TreeResult; its path counts nodes as the rows are counted.

    Raises:
        ValueError: wrong shapes, dtypes, devices or combinations.

    Example:
        >>> import torch
        >>> from specdec_kernels import RngKey, Sampling, batch_sd
        >>> p, q = torch.eye(3)[[1, 2, 0, 0, 2]][None] * 90, torch.zeros(1, 5, 3)
        >>> rng = RngKey(seed=torch.tensor([1]), position=torch.tensor([0]))
        >>> ids = torch.tensor([[[0, 1], [1, 0]]])
        >>> batch_sd(ids, p, q, sampling=Sampling(), draft_sampling=Sampling(), rng=rng).token_ids
        tensor([[1, 0, 2]])
    """
    name = "batch_sd"
    check = Checker.of(name, "draft_ids", draft_ids, "of int32 or int64")
    check.tensor("draft_ids", draft_ids, ID_DTYPES, ("batch", "branches", "draft"))
    batch, branches, draft = draft_ids.shape
    if branches * draft >= MAX_NODES:
        fail(name, "draft_ids", f"of less than {MAX_NODES} tokens a request", list(draft_ids.shape))
    token_ids = torch.nn.functional.pad(draft_ids.flatten(1), (1, 0), value=-1)
    node = torch.arange(branches * draft, device=draft_ids.device)
    following = torch.where(node % max(draft, 1) == 0, 0, node)
    parents = torch.nn.functional.pad(following, (1, 0), value=-1).repeat(batch, 1)
    return verify_tree(
        token_ids, parents, target_logits, draft_logits, max_depth=draft, sampling=sampling,
        draft_sampling=draft_sampling, rng=rng, rule="recursive", replacement=True, token_map=token_map,
        allowed=allowed, edits=edits, draft_edits=draft_edits, logprobs=logprobs, top=top, group=group,
        vocab_offsets=vocab_offsets, max_children=None if group is None else max(branches, 1), out=out, backend=backend,
    )  # fmt: skip
