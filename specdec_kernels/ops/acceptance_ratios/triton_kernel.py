# ruff: noqa: RUF059 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""acceptance_ratios in Triton: digest and settle all rows, sum min(p, q) over the pairs, decide."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chains import Chain, chain_of, number_of, row_offset
from ..._triton.codes import S_DRAFT, S_ID, S_LAYOUT, S_SAMPLING, S_TARGET, S_ZERO
from ..._triton.laws import draft_logits_at, law_of, prob
from ..._triton.look import digest_rows, look, on_chains
from ..._triton.pairs import Pairs, add_tiles, draft_probs, options_of, target_probs
from ..._triton.records import BAD, Q_ARG, Q_STATE, get_record_i
from ..._triton.rows import sampling_of, size_of
from ..._triton.trees import any_of
from ..._triton.walk import target_logits_at
from ..._types import RatioArguments


@host.entry
def _decide_kernel(pairs, sums, ratio, overlap, status, NT, ND, ROWS: tl.constexpr, KP: tl.constexpr):
    """Ratio = min(1, p(x) / q(x)), and overlap: p(x) of a point mass, 0 of no row. Grid: batch."""
    pairs = Pairs(*pairs)
    b = tl.program_id(0).to(tl.int64)
    NR = NT + ND
    ids, k, bad_id, first, bad, lost = chain_of(pairs.chain, b, pairs.target.vocab, KP)
    settings = sampling_of(pairs.sampling, b, pairs.target.vocab)
    bad_value = settings.bad
    i = tl.arange(0, KP)
    used = (i < k) & (lost == 0)
    row = b * NR + i
    good = used & (get_record_i(pairs.ws, row, Q_STATE, used) != BAD)
    x = target_logits_at(pairs, b, first, i, ids, good)
    p = prob(x, law_of(pairs.ws, tl.where(good, row, -1)), settings.inv_t)
    argmax = get_record_i(pairs.ws, row, Q_ARG, used)
    p = tl.where(settings.greedy, (ids == argmax).to(tl.float32), p)
    q = tl.full([KP], 1.0, tl.float32)
    paired = i < 0
    code = tl.where(bad, S_LAYOUT, 0)
    code = tl.where(any_of(used & (good == 0)), code | S_TARGET, code)
    if ROWS:
        of_draft = sampling_of(pairs.draft_sampling, b, pairs.draft.vocab)
        bad_value = bad_value | (of_draft.bad & (k > 0))
        has_row = used & (of_draft.greedy == 0)
        bad_draft = has_row & (get_record_i(pairs.ws, row + NT, Q_STATE, has_row) == BAD)
        code = tl.where(any_of(bad_draft), code | S_DRAFT, code)
        good = good & (bad_draft == 0)
        paired = good & has_row
        at = row_offset(pairs.draft, pairs.chain, first, b, i, 0)
        number = number_of(pairs.chain, first, b, i)
        y = draft_logits_at(pairs.draft, pairs.columns, at, number, tl.where(paired, ids, 0), paired)
        q = tl.where(paired, prob(y, law_of(pairs.ws, tl.where(paired, row + NT, -1)), of_draft.inv_t), q)
    code = tl.where(any_of(good & (q == 0)), code | S_ZERO, code)
    code = tl.where(bad_id & (lost == 0), code | S_ID, code)
    code = tl.where(bad_value, code | S_SAMPLING, code)
    value = tl.where(q > 0, tl.minimum(tl.div_rn(p, tl.where(q > 0, q, 1.0)), 1.0), 0.0)
    width = size_of(pairs.chain.width)
    tl.store(ratio + b * width + i, tl.where(good, value, 0.0), mask=i < width)
    shared = tl.where(good, p, 0.0)
    if ROWS:
        for j in range(0, k):
            both = add_tiles(sums + (b * NT + j) * pairs.ws.tiles, pairs.ws.tiles)
            shared = tl.where((i == j) & paired, both, shared)
    tl.store(overlap + b * width + i, shared, mask=i < width)
    tl.store(status + b, code)


@host.entry
def _overlap_kernel(pairs, sums, NT, ND, TILE: tl.constexpr, KP: tl.constexpr):
    """Sum_v min(p(v), q(v)) of each tile of the drafted positions. Grid: batch * width * tiles."""
    pairs = Pairs(*pairs)
    pid = tl.program_id(0).to(tl.int64)
    tiles = pairs.ws.tiles
    tile = (pid % tiles).to(tl.int32)
    pair = pid // tiles
    b = pair // NT
    i = (pair % NT).to(tl.int32)
    ids, k, bad_id, first, bad, lost = chain_of(pairs.chain, b, pairs.target.vocab, KP)
    settings = sampling_of(pairs.sampling, b, pairs.target.vocab)
    draft_greedy = sampling_of(pairs.draft_sampling, b, pairs.draft.vocab).greedy
    row = b * (NT + ND) + i
    total = tl.full([], 0.0, tl.float32)
    good = (i < k) & (lost == 0) & (draft_greedy == 0)
    if good:
        good = get_record_i(pairs.ws, row, Q_STATE, b >= 0) != BAD
        good = good & (get_record_i(pairs.ws, row + NT, Q_STATE, b >= 0) != BAD)
    if good:
        x, p = target_probs(pairs, b, i, first, row, tile, settings.inv_t, settings.greedy, TILE)
        y, q = draft_probs(pairs, b, i, first, tile, law_of(pairs.ws, row + NT), TILE)
        total = tl.sum(tl.minimum(p, q), axis=0)
    tl.store(sums + pid, total)


def acceptance_ratios_out(
    given: RatioArguments, ratio: Tensor, overlap: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.acceptance_ratios`."""
    batch = status.shape[0]
    draft_ids, target_logits, draft_logits, cu_draft, max_draft, sampling, draft_sampling, token_map = given[:8]
    flat, vocab = cu_draft is not None, target_logits.shape[-1]
    has_rows = draft_logits is not None and draft_logits.shape[-1] > 0 and max_draft > 0
    draft = draft_logits if has_rows and draft_logits is not None else target_logits
    nt, nd, kp = max_draft, max_draft if has_rows else 0, host.power(max(max_draft, 16))
    whole = scratch.sampling_of(sampling, status.device)
    chain = Chain(draft_ids, cu_draft, host.size(draft_ids.shape[0] if flat else 0), host.size(max_draft), whole)
    target_rows = scratch.rows_of(target_logits, flat=flat, allowed=given.allowed, edits=given.edits)
    draft_rows = scratch.rows_of(draft, flat=flat, edits=given.draft_edits if has_rows else None)
    on = look(batch, target_rows, draft_rows if has_rows else None, sampling, draft_sampling, nt, nd)
    if on.rows > 0:
        on = on_chains(on, chain, None, more_target=0)
        digest_rows(on, None)
    pairs = Pairs(
        chain, target_rows, draft_rows, scratch.columns(token_map if has_rows else None, vocab), on.sampling,
        on.draft_sampling, on.digest, on.plan,
    )  # fmt: skip
    sums = None
    if has_rows:
        sums = torch.empty(batch * nt * on.digest.tiles, dtype=torch.float32, device=status.device)
        options = options_of(target_rows, draft_rows, pairs.columns)
        host.launch(_overlap_kernel, sums.numel(), pairs, sums, nt, nd, TILE=host.TILE, KP=kp, seen=on.seen, **options)
    host.launch(
        _decide_kernel, batch, pairs, sums, ratio, overlap, status, nt, nd, ROWS=has_rows, KP=kp, num_warps=1,
        seen=on.seen,
    )  # fmt: skip
