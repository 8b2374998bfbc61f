"""sample in Triton: digest and settle the rows, then the n best of each race, block by block."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import launch as host
from ..._triton import scratch
from ..._triton.chains import Chain
from ..._triton.codes import RAW_LOGPROBS, S_SAMPLING, S_TARGET
from ..._triton.digest import Digest
from ..._triton.laws import law_of
from ..._triton.look import digest_rows, look, on_chains
from ..._triton.plan import row_of
from ..._triton.race import pop
from ..._triton.records import BAD, Q_ARG, Q_STATE, R_MASS, R_RAW, get_record_f, get_record_i
from ..._triton.rows import is_active, logits_at, sampling_of, size_of
from ..._triton.settle import maxima_of, settle_row
from ..._triton.visit import GROUPS, Rest, View, is_excluded, least_kernel, race
from ..._types import SampleArguments


class Draw(NamedTuple):
    """What a draw reads and writes."""

    exclude: Any  # int64 [batch, excluded] or None
    excluded: Any  # a `launch.size`
    token_map: Any
    least: Any  # float32 [batch, blocks]: smallest noise of each block of columns, with a token_map
    blocks: Any
    token_ids: Any
    logprobs: Any
    logsumexp: Any
    threshold: Any
    status: Any


@host.entry
def _draw_kernel(
    digest, plan, target, sampling, noise, out, n, count, tiles, settles,
    PURPOSE: tl.constexpr, NP: tl.constexpr, LOGPROBS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ids = the n largest of log-weight - log E over the kept ids of a row, in order. Grid: batch."""
    b = tl.program_id(0).to(tl.int64)
    settings = sampling_of(sampling, b, target.vocab)
    inv_t, greedy = settings.inv_t, settings.greedy
    active, planned = is_active(sampling, b), row_of(plan, b)
    view = View(target, planned.offset, planned.number, maxima_of(digest, digest.blocks, b, TILE))
    digest = Digest(count, tiles, *digest[2:])
    if active & (settles > 0):
        settle_row(digest, view, None, b, sampling, b, True, False, LOGPROBS == RAW_LOGPROBS, False, TILE)
    bad = (active == 0) | (get_record_i(digest, b, Q_STATE, b >= 0) == BAD)  # an inactive row has no record
    law = law_of(digest, b)
    exclude, excluded = None, size_of(out.excluded)
    if out.exclude is not None:
        exclude = out.exclude + b * excluded
    lane = tl.arange(0, NP)
    argmax = get_record_i(digest, b, Q_ARG, active)
    columns = lane * 0 + argmax
    ids = columns
    if out.token_map is not None:
        ids = tl.load(out.token_map + columns)
    best = tl.where((lane == 0) & (bad == 0), 0.0, float("-inf"))
    if out.exclude is not None:
        best = tl.where(is_excluded(ids, exclude, excluded), float("-inf"), best)
    if (greedy == 0) & (bad == 0):
        least = None
        if out.token_map is not None:
            least = out.least + b * out.blocks
        best, ids, columns = race(
            view, law, inv_t, noise, b, planned.position, Rest(), exclude, excluded, out.token_map, least,
            n, PURPOSE, NP,
        )  # fmt: skip
    log_mass = tl.log(get_record_f(digest, b, R_MASS, b >= 0))
    tl.store(out.status + b, tl.where(settings.bad, S_SAMPLING, 0) | tl.where(bad & active, S_TARGET, 0))
    lse = tl.where(greedy, 0.0, law.maximum * inv_t + log_mass)
    unknown = tl.where(active, float("nan"), 0.0)
    tl.store(out.logsumexp + b, tl.where(bad, unknown, lse))
    tl.store(out.threshold + b, tl.where(bad, unknown, law.threshold))
    for j in range(0, n):
        _score, token, column, best = pop(best, ids, columns)
        drawn = column >= 0
        tl.store(out.token_ids + b * n + j, token.to(tl.int64))
        if LOGPROBS == RAW_LOGPROBS:
            value = tl.load(target.ptr + view.offset + column, mask=drawn, other=0.0).to(tl.float32)
            value -= get_record_f(digest, b, R_RAW, b >= 0)
        else:
            value = tl.where(
                greedy,
                0.0,
                (logits_at(target, view.offset, view.number, column, drawn) - law.maximum) * inv_t - log_mass,
            )
        tl.store(out.logprobs + b * n + j, tl.where(drawn, value, 0.0))


def sample_out(
    given: SampleArguments, token_ids: Tensor, logprobs: Tensor, logsumexp: Tensor, threshold: Tensor,
    status: Tensor,
) -> None:  # fmt: skip
    """Write the results of `reference.sample`."""
    logits, sampling, exclude_ids, token_map = given.logits, given.sampling, given.exclude_ids, given.token_map
    batch, vocab = logits.shape
    rows = scratch.rows_of(logits.unsqueeze(1), allowed=given.allowed, edits=given.edits)
    noise = scratch.noise_of(given.rng, given.lane)
    on = look(batch, rows, None, sampling, sampling, 1, 0)
    chain = Chain(noise.seed, None, host.size(0), host.size(0), on.sampling)
    on = on_chains(on, chain, noise)
    settles = on.work is None
    digest_rows(on, noise, raw=given.logprobs_mode == RAW_LOGPROBS.value, settles=not settles)
    least, blocks, excluded = None, triton.cdiv(vocab, 64), 0 if exclude_ids is None else exclude_ids.shape[1]
    if token_map is not None:
        least = torch.empty(batch * blocks, dtype=torch.float32, device=logits.device)
        spans = triton.cdiv(blocks, GROUPS.value)
        host.launch(least_kernel, batch * spans, least, token_map, noise, vocab, blocks, PURPOSE=given.purpose)
    out = Draw(
        exclude_ids if excluded else None, host.size(excluded), token_map, least, blocks,
        token_ids, logprobs, logsumexp, threshold, status,
    )  # fmt: skip
    host.launch_alone(
        _draw_kernel, batch, on.digest, on.plan, rows, on.sampling, noise, out, given.num_samples,
        on.rows, on.digest.tiles, int(settles), PURPOSE=given.purpose, NP=host.power(given.num_samples),
        LOGPROBS=given.logprobs_mode, TILE=host.TILE, seen=on.seen, **scratch.options_of(rows),
    )  # fmt: skip
