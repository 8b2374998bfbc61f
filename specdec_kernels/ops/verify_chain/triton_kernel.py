# ruff: noqa: SIM109 - `if` on a constexpr prunes code
"""verify_chain in Triton: digest and settle every row, walk, draw. Rule block sums residual masses before it ends."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chains import Chain, chain_of, number_of, row_offset
from ..._triton.codes import PROCESSED_LOGPROBS, RAW_LOGPROBS, RESIDUAL_PURPOSE, S_DRAFT, TARGET_PURPOSE
from ..._triton.digest import larger, largest
from ..._triton.emit import draw_next
from ..._triton.kept import kept_masses
from ..._triton.laws import Law, law_of
from ..._triton.look import Look, digest_rows, look, on_chains
from ..._triton.pairs import add_tiles, draft_probs, options_of, target_probs
from ..._triton.rows import load_asked, sampling_of, size_of
from ..._triton.settle import TILES, settle_request
from ..._triton.thresholds import SCAN
from ..._triton.visit import Rest
from ..._triton.walk import (
    BLOCK,
    D_FIELDS,
    D_HOW,
    D_LENGTH,
    DISTANCE,
    GREEDY,
    MATCH,
    PLAIN,
    POINT,
    RATIO,
    RESIDUAL,
    TOPM,
    TYPICAL,
    Call,
    Knobs,
    settle_block,
    walk_block,
    walk_ratio,
    walk_target,
    write_outputs,
)  # fmt: skip
from ..._types import ChainArguments, Sampling


@triton.jit
def _draft_law(call, b, i, first, on, NT, NR, STATS: tl.constexpr):
    """Law of draft row i, if it is `on`: that of its record, or what draft_stats say, whose log-sum is its shift."""
    if STATS:
        return Law(0.0, 1.0, tl.load(call.draft_threshold + first + i, mask=on, other=0.0))
    else:
        return law_of(call.ws, tl.where(on, b * NR + NT + i, -1))


def _name(made: Any) -> str:
    """Profiles tell apart what streams rows and what looks at candidates."""
    return "_kept_mass_kernel" if made.constants["KEPT"] else "_mass_kernel"


@functools.partial(host.entry, repr=_name)
def _mass_kernel(
    call, sums, tiles, NT, ND, STATS: tl.constexpr, KEPT: tl.constexpr, TILE: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """Rule block: S[i] = sum_v (w[i] p_i(v) - q_i(v))+ of rows 1 .. K - 1. Grid: batch * (width - 1) * tiles.

    Draft rows that hold candidates are one tile.
    """
    call = Call(*call)
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid % tiles).to(tl.int32)
    pair = pid // tiles
    b = pair // (size_of(call.chain.width) - 1)
    i = (pair % (size_of(call.chain.width) - 1)).to(tl.int32) + 1
    at = call.decision + b * D_FIELDS
    if (tl.load(at + D_LENGTH) > i) & (tl.load(at + D_HOW) == RESIDUAL):
        first = chain_of(call.chain, b, call.target.vocab, KP).first
        inv_t = sampling_of(call.sampling, b, call.target.vocab).inv_t
        row, w = b * (NT + ND) + i, tl.load(call.scale + b * 2 * KP + i)
        if KEPT:
            mass, _ = kept_masses(call, b, i, first, row, row + NT, inv_t, w, 1.0, None, None, 0)
        else:
            _, p = target_probs(call, b, i, first, row, tile, inv_t, b < 0, TILE)
            law, shift = _draft_law(call, b, i, first, b >= 0, NT, NT + ND, STATS), None
            if STATS:
                shift = tl.load(call.draft_logsumexp + first + i)
            _, q = draft_probs(call, b, i, first, tile, law, TILE, shift)
            mass = tl.sum(tl.maximum(w * p - q, 0.0), axis=0)
        tl.store(sums + pid, mass)


@triton.jit
def _masses(call, sums, tiles, b, KP: tl.constexpr):
    """S of each row that is examined, [KP]."""
    lane = tl.arange(0, KP)
    at = call.decision + b * D_FIELDS
    mass = tl.zeros([KP], tl.float32)
    if tl.load(at + D_HOW) == RESIDUAL:
        for i in range(1, tl.load(at + D_LENGTH)):
            part = add_tiles(sums + (b * (size_of(call.chain.width) - 1) + i - 1) * tiles, tiles)
            mass = tl.where(lane == i, part, mass)
    return mass


@triton.jit
def _is_unusable(rows, offset, number, TILE: tl.constexpr):
    """Whether a row holds NaN or has no finite maximum; read by one program."""
    top = tl.full([], float("-inf"), tl.float32)
    STEP: tl.constexpr = TILE if rows.changes is None else SCAN  # more would spill
    for start in range(0, rows.vocab, STEP):
        x = load_asked(rows, offset, number, start, STEP)
        top = larger(top, largest(x, 0))
    return (tl.abs(top) < float("inf")) == 0


@triton.jit
def _draw(
    call, b, first, accepted, how, status, token, scale, NT, NR,
    ROWS: tl.constexpr, STATS: tl.constexpr, FROM_TARGET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(token, status): the token after the accepted ids."""
    if FROM_TARGET:
        how = tl.where((how == RESIDUAL) | (how == POINT), PLAIN, how)
    inv_t = sampling_of(call.sampling, b, call.target.vocab).inv_t
    rest, is_late = Rest(), b < 0
    if ROWS or STATS:
        row = tl.where(how == RESIDUAL, accepted, 0)
        offset, number = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        law, shift = _draft_law(call, b, row, first, how == RESIDUAL, NT, NR, STATS), None
        if STATS:
            shift = tl.load(call.draft_logsumexp + first + row, mask=how == RESIDUAL, other=0.0)
        if how == RESIDUAL:
            offset = row_offset(call.draft, call.chain, first, b, row, 0)
            number = number_of(call.chain, first, b, row)
            if STATS and not ROWS:  # a row that is first read here
                is_late = _is_unusable(call.draft, offset, number, TILE)
                status |= tl.where(is_late, S_DRAFT, 0)
        draft_inv_t = sampling_of(call.draft_sampling, b, call.draft.vocab).inv_t
        rest = Rest(call.draft, call.columns, offset, number, law, draft_inv_t, scale, 1.0, shift)
    rejected = call.chain.ids + first + accepted
    return draw_next(
        call, b, b * NR + accepted, how, status, token, inv_t, rest, is_late, rejected, 1, None, ROWS or STATS, TILE, 1
    )


@host.entry
def _block_kernel(
    call, count, tiles, NT, ND, settles,
    ROWS: tl.constexpr, STATS: tl.constexpr, RAW: tl.constexpr, TILE: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """First half of rule block. Grid: batch."""
    call = Call(*call)
    b = tl.program_id(0).to(tl.int64)
    if settles > 0:
        settle_request(call, b, NT, NT + ND, count, tiles, True, ROWS, True, RAW, TILE, KP)
    walk_block(call, b, KP, NT, NT + ND, ROWS, STATS)


@host.entry
def _decide_kernel(
    call, sums, count, tiles, NT, ND, settles,
    RULE: tl.constexpr, ROWS: tl.constexpr, STATS: tl.constexpr, FROM_TARGET: tl.constexpr, LOGPROBS: tl.constexpr,
    TILE: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The walk of a request, the token after it, its results. Grid: batch.

    Token = argmax_v log(weight(v)) - log E(v), weight = p, p without x, or (w p - q)+ of the row that stopped.
    """
    call = Call(*call)
    b = tl.program_id(0).to(tl.int64)
    NR = NT + ND
    scale = tl.full([], 1.0, tl.float32)
    if RULE == RATIO or RULE == GREEDY or RULE == DISTANCE:
        MASS: tl.constexpr = RULE == RATIO or LOGPROBS == PROCESSED_LOGPROBS
        if settles > 0:
            settle_request(call, b, NT, NR, count, tiles, RULE == RATIO, ROWS, MASS, LOGPROBS == RAW_LOGPROBS, TILE, KP)
    if RULE == RATIO:
        accepted, how, status, token = walk_ratio(call, b, KP, NT, NR, ROWS, STATS)
    elif RULE == BLOCK:
        accepted, how, status, token, scale = settle_block(call, b, _masses(call, sums, tiles, b, KP), KP, NR)
    else:
        accepted, how, status, token = walk_target(call, b, KP, NR, RULE)
    if RULE <= BLOCK:
        first = chain_of(call.chain, b, call.target.vocab, KP).first
        token, status = _draw(
            call, b, first, accepted, how, status, token, scale, NT, NR, ROWS, STATS, FROM_TARGET, TILE
        )
    write_outputs(call, b, KP, NR, RULE, LOGPROBS, accepted, token, how, status)


def _sum_masses(
    call: Call, on: Look, rows: tuple[int, int, int, int], flags: dict[str, Any], has_draft: bool, raw: bool,
    settles: bool,
) -> Tensor:  # fmt: skip
    """First half of rule block, and the sums of the residual masses of its rows."""
    batch, (_, tiles, nt, nd) = call.status.shape[0], rows
    host.launch(
        _block_kernel, batch, call, *rows, int(settles), RAW=raw, TILE=host.TILE, num_warps=4, seen=on.seen, **flags,
    )  # fmt: skip
    is_kept = call.columns.kept is not None
    sums = torch.empty(batch * max(nt - 2, 0) * tiles, dtype=torch.float32, device=call.status.device)
    if has_draft:
        options = {"num_warps": 2} if is_kept else options_of(call.target, call.draft, call.columns)
        host.launch(
            _mass_kernel, sums.numel(), call, sums, tiles, nt, nd, STATS=flags["STATS"], KEPT=is_kept, TILE=host.TILE,
            KP=flags["KP"], seen=on.seen, **options,
        )  # fmt: skip
    return sums


def verify_chain_out(
    given: ChainArguments, token_ids: Tensor, num_accepted: Tensor, status: Tensor, logprobs: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.verify_chain`."""
    draft_ids, target_logits, draft_logits = given.draft_ids, given.target_logits, given.draft_logits
    cu_draft, rule, max_draft, logprobs_mode = given.cu_draft, given.rule, given.max_draft, given.logprobs_mode
    is_block, is_typical = rule == BLOCK.value, rule == TYPICAL.value
    batch, device = status.shape[0], target_logits.device
    if batch == 0:
        return
    flat, vocab = cu_draft is not None, target_logits.shape[-1]
    draft = target_logits if draft_logits is None else draft_logits
    # Shapes that a configuration fixes: no kernel is compiled for a flat step in which nobody drafts.
    has_draft = draft_logits is not None and draft.shape[-1] > 0 and max_draft > 0 and rule <= BLOCK.value
    has_stats = has_draft and given.draft_logsumexp is not None and given.draft_threshold is not None
    has_rows = has_draft and (not has_stats or rule == BLOCK.value)
    draft = draft if has_draft else target_logits
    nt, nd, kp = max_draft + 1, max_draft if has_rows else 0, host.power(max(max_draft + 1, 16))
    # greedy, topm and distance read no sampling parameter; with draft_stats the draft's filters are in its threshold.
    reads_sampling = rule <= MATCH.value or is_typical
    sampling = given.sampling if reads_sampling else Sampling(active=given.sampling.active)
    draft_sampling = given.draft_sampling
    if has_stats or not has_rows:
        draft_sampling = Sampling(draft_sampling.temperature)
    noise = scratch.noise_of(given.rng)
    target_rows = scratch.rows_of(target_logits, flat=flat, allowed=given.allowed, edits=given.edits)
    draft_rows = scratch.rows_of(draft, flat=flat, edits=given.draft_edits if has_draft else None)
    on = look(batch, target_rows, draft_rows if has_rows else None, sampling, draft_sampling, nt, nd)
    whole, whole_draft = on.sampling, on.draft_sampling
    if sampling is not given.sampling:
        whole = scratch.sampling_of(given.sampling, device)
    if draft_sampling is not given.draft_sampling:
        whole_draft = scratch.sampling_of(given.draft_sampling, device)
    chain = Chain(draft_ids, cu_draft, host.size(draft_ids.shape[0] if flat else 0), host.size(max_draft), whole)
    kept = given.draft_kept
    if kept.kept_ids is not None and kept.kept_ids.numel() == 0:  # candidates are read without a mask
        kept = kept._replace(kept_ids=kept.kept_ids.new_empty(draft.shape[-1]))
    columns = scratch.columns(given.token_map, vocab, kept) if has_draft else scratch.columns(None, vocab)
    on = on_chains(on, chain, noise, skips_greedy=True)
    # Rows that are neither filtered nor drawn from are settled by what decides: a launch less.
    settles = rule in (RATIO.value, BLOCK.value, GREEDY.value, DISTANCE.value) and on.digest.tiles <= TILES.value
    settles = settles and on.work is None and on.draft_work is None and columns.kept is None
    races = {MATCH.value: TARGET_PURPOSE.value, TYPICAL.value: RESIDUAL_PURPOSE.value}
    raw = logprobs_mode == RAW_LOGPROBS.value
    mass = rule <= BLOCK.value or rule == TYPICAL.value or logprobs_mode == PROCESSED_LOGPROBS.value
    digest_rows(
        on, noise, purpose=races.get(rule, -1), top_m=given.top_m if rule == TOPM.value else 0,
        mass=mass or on.work is not None, entropy=is_typical, raw=raw, columns=columns, settles=not settles,
    )  # fmt: skip
    over = scratch.given_or_null(given.over_acceptances, torch.float32, device) if rule == RATIO.value else None
    typical = scratch.typical_of(given.typical, is_typical, device)
    limits = (given.top_m, given.max_distance, given.min_block)
    sizes = (host.size(min(n, vocab + max_draft)) for n in limits)  # larger ones ask no more
    knobs = Knobs(given.over_acceptance, over, typical, *sizes)
    call = Call(
        chain, target_rows, draft_rows, columns,
        whole, whole_draft, noise,
        given.draft_logsumexp if has_stats else None, given.draft_threshold if has_stats else None,
        knobs,
        on.digest, on.plan,
        torch.empty(batch * D_FIELDS.value, dtype=torch.int32, device=device) if is_block else None,
        torch.empty(batch * 2 * kp, dtype=torch.float32, device=device) if is_block else None,
        token_ids, num_accepted, status, logprobs if logprobs_mode else None,
    )  # fmt: skip
    flags: dict[str, Any] = {"ROWS": has_rows, "STATS": has_stats, "KP": kp}
    tiles = 1 if columns.kept is not None else on.digest.tiles  # whose residual masses are summed
    rows, sums = (on.rows, tiles, nt, nd), None
    if is_block:
        sums = _sum_masses(call, on, rows, flags, has_draft, raw, settles)
    threads = {"num_warps": 4 if rule in (GREEDY.value, DISTANCE.value) else 1}
    if rule <= BLOCK.value:
        threads = scratch.options_of(target_rows, draft_rows)
    if has_stats and given.allowed is not None:  # 128 registers a thread spill on sm_120; else 16 warps are faster
        threads = host.MANY_REGISTERS
    host.launch_alone(
        _decide_kernel, batch, call, sums, *rows, int(settles), RULE=rule, FROM_TARGET=given.rejected_from_target,
        LOGPROBS=logprobs_mode, TILE=host.TILE, seen=on.seen, **threads, **flags,
    )  # fmt: skip
