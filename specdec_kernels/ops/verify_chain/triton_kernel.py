# ruff: noqa: SIM102 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""verify_chain in Triton: statistics of every row, the walk, one draw. Two launches; one more for filters or block.

Launch 1 reads each row tile once; the last program of a request walks the chain. Rules whose emission is then known
end there. Otherwise the draw reads the one row (or pair of rows) that the next token comes from.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chain_rows import rows_again_kernel, rows_kernel
from ..._triton.chains import Chain, bit_row, chain_of, row_offset
from ..._triton.codes import RESIDUAL_PURPOSE, S_DRAFT, S_EMPTY
from ..._triton.handshake import arrive
from ..._triton.laws import draft_tile, kept, law_of, prob
from ..._triton.noise import log, tile_noise
from ..._triton.race import race_scores, winner
from ..._triton.rows import Noise, Sampling, load_logits, mask_allowed, sampling_of
from ..._triton.stats import (
    F_MAX,
    F_RAW_MAX,
    F_SCORE,
    F_SUM,
    I_ARG,
    I_RANK,
    I_WINNER,
    Q_ARG,
    get_f,
    get_i,
    get_record_i,
    put_f,
    put_i,
)  # fmt: skip
from ..._triton.walk import (
    BLOCK,
    D_ACCEPTED,
    D_FIELDS,
    D_HOW,
    D_LENGTH,
    D_STATUS,
    D_TOKEN,
    FIXED,
    MATCH,
    NOTHING,
    PLAIN,
    POINT,
    RESIDUAL,
    TYPICAL,
    Call,
    Knobs,
    pick,
    settle_block,
    write_outputs,
)  # fmt: skip


@triton.jit
def _pair(call, b, i, first, tile, NT, NR, inv_t, TILE: tl.constexpr, STATS: tl.constexpr):
    """(masked target logits, p, draft logits, q) of one tile of row pair i, over target ids."""
    start = tile * TILE
    v = start + tl.arange(0, TILE)
    x = load_logits(call.target, row_offset(call.target, call.chain, first, b, i, 1), start, TILE)
    x = mask_allowed(x, call.target, bit_row(call.chain, first, b, i), start, TILE)
    p = prob(x, law_of(call.ws, b * NR + i), inv_t)
    draft_inv_t, _, _, _, _, _, _, _ = sampling_of(call.draft_sampling, b, call.draft.vocab)
    y = draft_tile(call.draft, call.columns, row_offset(call.draft, call.chain, first, b, i, 0), v, call.target.vocab)
    if STATS:
        law = (0.0, tl.load(call.draft_logsumexp + first + i), 1.0, tl.load(call.draft_threshold + first + i))
    else:
        law = law_of(call.ws, b * NR + NT + i)
    return x, p, y, prob(y, law, draft_inv_t)


@triton.jit
def _mass_kernel(
    call, sums, tickets_b, NT, ND, STATS: tl.constexpr, TILE: tl.constexpr, T_PAD: tl.constexpr, KP: tl.constexpr
):
    """Rule block: S[i] = sum_v (w[i] p_i(v) - q_i(v))+ of rows 1 .. K - 1.

    Grid: batch * (width - 1) * tiles; a program owns one tile of a row pair. The last of a request finds tau.
    """
    pid = tl.program_id(0).to(tl.int64)
    tiles = call.ws.tiles
    tile = (pid % tiles).to(tl.int32)
    pair = pid // tiles
    inner = call.chain.width - 1
    b = pair // inner
    i = (pair % inner).to(tl.int32) + 1
    length = tl.load(call.decision + b * D_FIELDS + D_LENGTH)
    how = tl.load(call.decision + b * D_FIELDS + D_HOW)
    if (length > i) & (how == RESIDUAL):
        _, _, _, first, _, lost = chain_of(call.chain, b, call.target.vocab, KP)
        inv_t, _, _, _, _, _, _, _ = sampling_of(call.sampling, b, call.target.vocab)
        _, p, _, q = _pair(call, b, i, first, tile, NT, NT + ND, inv_t, TILE, STATS)
        w = tl.load(call.scale + b * 2 * KP + i)
        tl.store(sums + pair * tiles + tile, tl.sum(tl.maximum(w * p - q, 0.0), axis=0))
        if arrive(call.ws.tickets + tickets_b + b, (length - 1) * tiles):
            lane = tl.arange(0, KP)
            t = tl.arange(0, T_PAD)
            mass = tl.zeros([KP], tl.float32)
            for j in range(1, length):
                at = sums + (b * inner + j - 1) * tiles + t
                part = tl.sum(tl.load(at, mask=t < tiles, other=0.0, cache_modifier=".cg"), axis=0)
                mass = tl.where(lane == j, part, mass)
            settle_block(call, b, mass, KP, NT + ND, lost)


@triton.jit
def _draw_tile(
    call, b, accepted, how, first, rejected, part, tile, NT, NR, scale, inv_t,
    ROWS: tl.constexpr, STATS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Both races of one tile: the plain row (what an empty residual falls back to) and the residual."""
    start = tile * TILE
    v = start + tl.arange(0, TILE)
    neg_log_e = tile_noise(call.noise, b, tl.load(call.noise.position + b) + accepted, RESIDUAL_PURPOSE, start, TILE)
    if how == RESIDUAL:
        if ROWS or STATS:
            x, p, y, q = _pair(call, b, accepted, first, tile, NT, NR, inv_t, TILE, STATS)
            weight = scale * p - q
            competes = weight >= 1.1754943508222875e-38
            best, at = winner(race_scores(log(tl.where(competes, weight, 1.0)), competes, neg_log_e), v)
            put_f(part, F_SUM, b, tile, best)
            put_i(part, I_RANK, b, tile, at)
            nan = tl.max((y != y).to(tl.int32), axis=0) > 0
            put_f(part, F_RAW_MAX, b, tile, tl.where(nan, float("nan"), tl.max(y, axis=0)))
    else:
        x = load_logits(call.target, row_offset(call.target, call.chain, first, b, accepted, 1), start, TILE)
        x = mask_allowed(x, call.target, bit_row(call.chain, first, b, accepted), start, TILE)
    competes = kept(x, law_of(call.ws, b * NR + accepted)[3])
    score = race_scores(x * inv_t, competes, neg_log_e)
    best, at = winner(score, v)
    put_f(part, F_SCORE, b, tile, best)
    put_i(part, I_WINNER, b, tile, at)
    if how == POINT:
        best, at = winner(tl.where(v == rejected, float("-inf"), score), v)
        put_f(part, F_SUM, b, tile, best)
        put_i(part, I_RANK, b, tile, at)
        # The largest logit that is not the rejected id: the winner where every score overflows.
        rest = tl.where(competes & (v != rejected), x, float("-inf"))
        best, at = winner(rest, v)
        put_f(part, F_MAX, b, tile, best)
        put_i(part, I_ARG, b, tile, at)


@triton.jit
def _draw_kernel(
    call, part, NT, ND,
    RULE: tl.constexpr, ROWS: tl.constexpr, STATS: tl.constexpr, FROM_TARGET: tl.constexpr, LOGPROBS: tl.constexpr,
    TILE: tl.constexpr, T_PAD: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Token = argmax_v log(weight(v)) - log E(v), weight = p, p without x, or (w p - q)+ of the row that stopped.

    Grid: batch * tiles; a program owns one tile of the row. The last of a request writes its results.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % part.tiles).to(tl.int32)
    b = pid // part.tiles
    NR = NT + ND
    at = call.decision + b * D_FIELDS
    accepted, how, status = tl.load(at + D_ACCEPTED), tl.load(at + D_HOW), tl.load(at + D_STATUS)
    token = tl.load(at + D_TOKEN)
    if FROM_TARGET:
        how = tl.where((how == RESIDUAL) | (how == POINT), PLAIN, how)
    is_last = tile == 0
    if (how != NOTHING) & (how != FIXED):
        ids, _, _, first, _, _ = chain_of(call.chain, b, call.target.vocab, KP)
        rejected = pick(ids, tl.arange(0, KP), accepted)
        inv_t, _, _, _, _, _, _, _ = sampling_of(call.sampling, b, call.target.vocab)
        scale = tl.full([], 1.0, tl.float32)
        if RULE == BLOCK:
            scale = tl.load(call.scale + b * 2 * KP + accepted)
        _draw_tile(
            call, b, accepted, how, first, rejected, part, tile, NT, NR, scale, inv_t,
            ROWS, STATS, TILE,
        )  # fmt: skip
        is_last = arrive(part.tickets + b, part.tiles)
        if is_last:
            argmax = get_record_i(call.ws, b * NR + accepted, Q_ARG, b >= 0)
            best, token = winner(
                get_f(part, F_SCORE, b, T_PAD, float("-inf")), get_i(part, I_WINNER, b, T_PAD, 0x7FFFFFFF)
            )
            token = tl.where(best > float("-inf"), token, argmax)
            if how != PLAIN:
                best, other = winner(
                    get_f(part, F_SUM, b, T_PAD, float("-inf")), get_i(part, I_RANK, b, T_PAD, 0x7FFFFFFF)
                )
                if how == POINT:
                    rest, rest_at = winner(
                        get_f(part, F_MAX, b, T_PAD, float("-inf")), get_i(part, I_ARG, b, T_PAD, 0x7FFFFFFF)
                    )
                    other = tl.where(best > float("-inf"), other, rest_at)
                    best = tl.maximum(best, rest)
                late = b < 0
                if STATS:
                    if how == RESIDUAL:
                        tops = get_f(part, F_RAW_MAX, b, T_PAD, float("-inf"))
                        top = tl.max(tops, axis=0)
                        late = (tl.max((tops != tops).to(tl.int32), axis=0) > 0) | (tl.abs(top) == float("inf"))
                empty = best == float("-inf")
                status = tl.where(late, status | S_DRAFT, tl.where(empty, status | S_EMPTY, status))
                token = tl.where(late | empty, token, other)
    if is_last:
        write_outputs(call, b, KP, NR, RULE, LOGPROBS, token, how, status)


def verify_chain_out(
    draft_ids: Tensor, target_logits: Tensor, draft_logits: Tensor | None, draft_logsumexp: Tensor | None,
    draft_threshold: Tensor | None, cu_draft: Tensor | None, max_draft: int,
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    draft_temperature: Tensor | None, draft_top_k: Tensor | None, draft_top_p: Tensor | None,
    draft_min_p: Tensor | None, seed: Tensor, position: Tensor, step: Tensor | None,
    rule: int, over_acceptance: float, rejected_from_target: bool, token_map: Tensor | None, allowed: Tensor | None,
    typical_epsilon: float, typical_delta: float, top_m: int, max_distance: int, min_block: int, logprobs_mode: int,
    token_ids: Tensor, num_accepted: Tensor, status: Tensor, logprobs: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.verify_chain`."""
    batch, device = seed.shape[0], target_logits.device
    if batch == 0:
        return
    flat, vocab = cu_draft is not None, target_logits.shape[-1]
    draft = target_logits if draft_logits is None else draft_logits
    has_draft = draft_logits is not None and draft.numel() > 0 and rule <= BLOCK.value
    has_stats = has_draft and draft_logsumexp is not None and draft_threshold is not None
    has_rows = has_draft and (not has_stats or rule == BLOCK.value)
    draft = draft if has_draft else target_logits
    draft_map = token_map if has_draft else None
    nt, nd = max_draft + 1, max_draft if has_rows else 0
    rows, tiles, kp = batch * (nt + nd), host.tiles_of(vocab), host.power(max_draft + 1)
    if has_rows:
        tiles = max(tiles, host.tiles_of(draft.shape[-1]))
    tickets = host.counters(rows + batch, device)
    ws = scratch.partials(tickets, rows, tiles)
    # greedy, topm and distance read no filter; with draft_stats the draft's are in its threshold.
    filters = (top_k, top_p, min_p) if rule <= MATCH.value or rule == TYPICAL.value else ()
    draft_filters = (draft_top_k, draft_top_p, draft_min_p) if has_rows and not has_stats else ()
    lists = scratch.lists(target_logits, rows, tiles, filters, races=rule > BLOCK.value)
    draft_lists = scratch.lists(draft, rows, tiles, draft_filters)
    decision = torch.empty(batch * D_FIELDS.value, dtype=torch.int32, device=device)
    scale = torch.empty(batch * 2 * kp, dtype=torch.float32, device=device)
    call = Call(
        Chain(draft_ids, cu_draft, draft_ids.shape[0] if flat else 0, max_draft),
        scratch.rows_of(target_logits, flat=flat, allowed=allowed), scratch.rows_of(draft, flat=flat),
        scratch.columns(draft_map, vocab),
        Sampling(temperature, top_k, top_p, min_p),
        Sampling(draft_temperature, draft_top_k, draft_top_p, draft_min_p),
        Noise(seed, position, step, None),
        draft_logsumexp if has_stats else None, draft_threshold if has_stats else None,
        Knobs(over_acceptance, typical_epsilon, typical_delta, top_m, max_distance, min_block),
        ws, lists, draft_lists, decision, scale, token_ids, num_accepted, status,
        logprobs if logprobs_mode else None,
    )  # fmt: skip
    flags: dict[str, Any] = {
        "RULE": rule, "ROWS": has_rows, "STATS": has_stats, "LOGPROBS": logprobs_mode,
         "TILE": host.TILE, "T_PAD": host.power(tiles), "KP": kp,
    }  # fmt: skip
    on = {"FILTERS": lists is not None, "DRAFT_FILTERS": draft_lists is not None}
    host.launch(rows_kernel, rows * tiles, call, nt, nd, rows, LISTED=host.LISTED, **on, **flags)
    if any(on.values()):
        host.launch(
            rows_again_kernel,
            rows * tiles,
            call,
            nt,
            nd,
            rows,
            GATHERED=host.GATHERED,
            num_warps=host.MANY_WARPS if rule == TYPICAL.value else host.NUM_WARPS,
            **on,
            **flags,
        )
    flags["FROM_TARGET"] = rejected_from_target
    if rule == BLOCK.value and has_draft and max_draft > 1:
        sums = torch.empty(batch * (max_draft - 1) * tiles, dtype=torch.float32, device=device)
        shape = {key: flags[key] for key in ("STATS", "TILE", "T_PAD", "KP")}
        host.launch(_mass_kernel, batch * (max_draft - 1) * tiles, call, sums, rows, nt, nd, **shape)
    if rule <= BLOCK.value:
        # Two races and a pair of rows a tile: half a tile keeps them in registers.
        draw_tile = max(host.TILE // 2, 32)
        draw_tiles = max(triton.cdiv(vocab, draw_tile), 1)
        part = scratch.partials(tickets, batch, draw_tiles)
        flags["T_PAD"], flags["TILE"] = host.power(draw_tiles), draw_tile
        host.launch(_draw_kernel, batch * draw_tiles, call, part, nt, nd, **flags)
