# ruff: noqa: RUF059 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""acceptance_ratios in Triton: the laws of all rows, then one pass over the pairs. Two launches, three with filters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chains import Chain, chain_of, column_of, row_offset
from ..._triton.codes import S_DRAFT, S_ID, S_LAYOUT, S_SAMPLING, S_TARGET, S_ZERO
from ..._triton.handshake import arrive
from ..._triton.laws import law_of, prob
from ..._triton.pairs import Pairs, draft_probs, launch_laws, target_probs
from ..._triton.rows import Sampling, sampling_of
from ..._triton.stats import BAD, Q_ARG, Q_STATE, get_record_i
from ..._triton.walk import any_of, target_logits_at


@triton.jit
def _ratios(pairs, b, ratio, overlap, status, NT, NR, ROWS: tl.constexpr, KP: tl.constexpr):
    """Ratios and status of request b, and the overlaps that need no pass: p(x) of a point mass, 0 of no row."""
    ids, k, bad_id, first, bad, lost = chain_of(pairs.chain, b, pairs.target.vocab, KP)
    inv_t, _, _, _, _, _, greedy, bad_value = sampling_of(pairs.sampling, b, pairs.target.vocab)
    i = tl.arange(0, KP)
    used = (i < k) & (lost == 0)
    row = b * NR + i
    good = used & (get_record_i(pairs.ws, row, Q_STATE, used) != BAD)
    x = target_logits_at(pairs, b, first, i, ids, good)
    p = prob(x, law_of(pairs.ws, tl.where(good, row, -1)), inv_t)
    argmax = get_record_i(pairs.ws, row, Q_ARG, used)
    p = tl.where(greedy, (ids == argmax).to(tl.float32), p)
    q = tl.full([KP], 1.0, tl.float32)
    paired = i < 0
    code = tl.where(bad, S_LAYOUT, 0)
    code = tl.where(any_of(used & (good == 0)), code | S_TARGET, code)
    if ROWS:
        draft_inv_t, _, _, _, _, _, draft_greedy, bad_draft_value = sampling_of(
            pairs.draft_sampling, b, pairs.draft.vocab
        )
        bad_value = bad_value | (bad_draft_value & (k > 0))
        has_row = used & (draft_greedy == 0)
        bad_draft = has_row & (get_record_i(pairs.ws, row + NT, Q_STATE, has_row) == BAD)
        code = tl.where(any_of(bad_draft), code | S_DRAFT, code)
        good = good & (bad_draft == 0)
        paired = good & has_row
        column = column_of(pairs.columns, tl.where(paired, ids, 0), paired, pairs.draft.vocab)
        at = row_offset(pairs.draft, pairs.chain, first, b, i, 0)
        y = tl.load(pairs.draft.ptr + at + column, mask=column >= 0, other=float("-inf")).to(tl.float32)
        q = tl.where(paired, prob(y, law_of(pairs.ws, tl.where(paired, row + NT, -1)), draft_inv_t), q)
    code = tl.where(any_of(good & (q == 0)), code | S_ZERO, code)
    code = tl.where(bad_id & (lost == 0), code | S_ID, code)
    code = tl.where(bad_value, code | S_SAMPLING, code)
    value = tl.where(q > 0, tl.minimum(tl.div_rn(p, tl.where(q > 0, q, 1.0)), 1.0), 0.0)
    width = pairs.chain.width
    tl.store(ratio + b * width + i, tl.where(good, value, 0.0), mask=i < width)
    tl.store(overlap + b * width + i, tl.where(good, p, 0.0), mask=(i < width) & (paired == 0))
    tl.store(status + b, code)


@triton.jit
def _overlap_kernel(
    pairs, sums, ratio, overlap, status, NT, ND, ROWS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """Ratio = min(1, p(x) / q(x)); overlap = sum_v min(p(v), q(v)) of each drafted position.

    Grid: batch * max(width, 1) * tiles; a program owns one tile of a row pair, the last of a row adds them up; the
    first program of a request writes its ratios and status.
    """
    pid = tl.program_id(0).to(tl.int64)
    tiles = pairs.ws.tiles
    tile = (pid % tiles).to(tl.int32)
    pair = pid // tiles
    rows = tl.maximum(NT + tl.full([], 0, tl.int64), 1)
    b = pair // rows
    i = (pair % rows).to(tl.int32)
    if (i == 0) & (tile == 0):
        _ratios(pairs, b, ratio, overlap, status, NT, NT + ND, ROWS, KP)
    if ROWS:
        ids, k, bad_id, first, bad, lost = chain_of(pairs.chain, b, pairs.target.vocab, KP)
        inv_t, _, _, _, _, _, greedy, _ = sampling_of(pairs.sampling, b, pairs.target.vocab)
        _, _, _, _, _, _, draft_greedy, _ = sampling_of(pairs.draft_sampling, b, pairs.draft.vocab)
        row = b * (NT + ND) + i
        good = (i < k) & (lost == 0) & (draft_greedy == 0)
        if good:
            good = get_record_i(pairs.ws, row, Q_STATE, b >= 0) != BAD
            good = good & (get_record_i(pairs.ws, row + NT, Q_STATE, b >= 0) != BAD)
        if good:
            x, p = target_probs(pairs, b, i, first, row, tile, inv_t, greedy, TILE)
            y, q = draft_probs(pairs, b, i, first, row + NT, tile, law_of(pairs.ws, row + NT), TILE)
            tl.store(sums + pair * tiles + tile, tl.sum(tl.minimum(p, q), axis=0))
            if arrive(pairs.ws.tickets + pair, tiles):
                t = tl.arange(0, T_PAD)
                part = tl.load(sums + pair * tiles + t, mask=t < tiles, other=0.0, cache_modifier=".cg")
                tl.store(overlap + pair, tl.sum(part, axis=0))


def acceptance_ratios_out(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor | None, cu_draft: Tensor | None, max_draft: int,
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    draft_temperature: Tensor | None, draft_top_k: Tensor | None, draft_top_p: Tensor | None,
    draft_min_p: Tensor | None, token_map: Tensor | None, allowed: Tensor | None,
    ratio: Tensor, overlap: Tensor, status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.acceptance_ratios`."""
    batch, device = status.shape[0], target_logits.device
    flat, vocab = cu_draft is not None, target_logits.shape[-1]
    has_rows = draft_logits is not None and draft_logits.numel() > 0
    draft = draft_logits if has_rows and draft_logits is not None else target_logits
    nt, nd = max_draft, max_draft if has_rows else 0
    rows, tiles = batch * (nt + nd), max(host.tiles_of(vocab), host.tiles_of(draft.shape[-1]))
    filters = (top_k, top_p, min_p)
    draft_filters = (draft_top_k, draft_top_p, draft_min_p) if has_rows else ()
    pairs = Pairs(
        Chain(draft_ids, cu_draft, draft_ids.shape[0] if flat else 0, max_draft),
        scratch.rows_of(target_logits, flat=flat, allowed=allowed), scratch.rows_of(draft, flat=flat),
        scratch.columns(token_map if has_rows else None, vocab),
        Sampling(temperature, *filters), Sampling(draft_temperature, draft_top_k, draft_top_p, draft_min_p),
        scratch.partials(host.counters(rows + batch, device), rows, tiles),
        scratch.lists(target_logits, rows, tiles, filters), scratch.lists(draft, rows, tiles, draft_filters),
    )  # fmt: skip
    shape = {"TILE": host.TILE, "T_PAD": host.power(tiles), "KP": host.power(max_draft)}
    launch_laws(pairs, rows, nt, nd, chain=True, kp=host.power(max_draft))
    sums = torch.empty(batch * max(nt, 1) * tiles, dtype=torch.float32, device=device)
    host.launch(
        _overlap_kernel, batch * max(nt, 1) * tiles, pairs, sums, ratio, overlap, status, nt, nd,
        ROWS=has_rows, **shape,
    )  # fmt: skip
