"""Host side of what every op does first: digest its rows, settle them; gather where filters need it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._types import Sampling
from . import launch as host
from . import scratch
from .chains import Chain, Columns
from .digest import T_FIELDS, Digest, digest_kernel
from .direct import Seen
from .gather import S_FIELDS, SHARE, gather_kernel
from .kept import check_kernel
from .listed import listed_kernel
from .plan import P_FIELDS, Chains, Plan, Strides
from .records import Q_FIELDS, R_FIELDS
from .rows import Noise, Rows
from .settle import settle_kernel
from .thresholds import Work
from .visit import SPAN

# Programs that ask for rows to read again, eight a multiprocessor of an H200: more of them find out later that there
# are none, and the rows of a batch keep as many busy.
MOST_PARTS = 1056
# Tiles that a program streams one after the other where rows are many, so that it finds its row once for all: `ratio`
# of 64 requests takes 44 us instead of 60, says the model of an H200. Fewer where there would be few programs.
MOST_TOGETHER, TOGETHER = 4, 2048


class Look(NamedTuple):
    """The rows of a call and the scratch of its phases."""

    digest: Digest
    plan: Plan
    work: Work | None  # of the target's filters
    draft_work: Work | None
    target: Rows
    draft: Rows | None
    sampling: Sampling
    draft_sampling: Sampling
    nt: int  # target rows of a request
    nd: int
    rows: int  # of all requests
    seen: Seen  # by launches of the call


def _dtype(given: Rows) -> torch.dtype:
    """Of logits that are kept: an edit makes any float32 of one."""
    return given.ptr.dtype if given.changes is None else torch.float32


def _work(given: Rows, rows: int, tiles: int, sampling: Sampling) -> Work | None:
    """Scratch of the filters; None where no filter is given."""
    if not sampling.has_filters:
        return None
    make, dtype = given.ptr.new_empty, _dtype(given)
    return Work(
        make(rows * SPAN.value, dtype=torch.int32), make(rows * host.CAPACITY, dtype=dtype), host.CAPACITY,
        make(rows * 2, dtype=torch.int32), make(rows * tiles * S_FIELDS.value, dtype=torch.int64),
        make(rows * tiles * host.TILE // SHARE.value, dtype=dtype),
    )  # fmt: skip


def look(
    batch: int, target: Rows, draft: Rows | None, sampling: Sampling, draft_sampling: Sampling, nt: int, nd: int
) -> Look:
    """Scratch for the rows of a call: nt target rows and nd draft rows a request."""
    device = target.ptr.device
    rows, draft = batch * (nt + nd), draft if nd else None
    tiles = max(host.tiles_of(target.vocab), 0 if draft is None else host.tiles_of(draft.vocab))

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    blocks = make(rows, tiles * host.TILE // 64, dtype=_dtype(target))
    draft_blocks = None
    if draft is not None:
        draft_blocks = blocks if _dtype(draft) == blocks.dtype else torch.empty_like(blocks, dtype=_dtype(draft))
    digest = Digest(
        0, tiles, make(T_FIELDS.value, rows, tiles), blocks, draft_blocks, make(rows, R_FIELDS.value),
        make(rows, Q_FIELDS.value, dtype=torch.int32),
    )  # fmt: skip
    return Look(
        digest, Plan(None, None),
        _work(target, rows, tiles, sampling),
        None if draft is None else _work(draft, rows, tiles, draft_sampling),
        target, draft, scratch.sampling_of(sampling, device), scratch.sampling_of(draft_sampling, device),
        nt, nd, rows, {},
    )  # fmt: skip


def on_table(on: Look) -> Look:
    """The rows of trees: a table, which the walk writes."""
    device = on.target.ptr.device
    table = torch.empty(on.rows, P_FIELDS.value, dtype=torch.int64, device=device)
    return on._replace(plan=Plan(table, torch.empty(on.rows, dtype=torch.float32, device=device)))


def _strides(rows: Rows) -> Strides:
    return Strides(rows.request, host.size(rows.row))


def on_chains(
    on: Look, chain: Chain, noise: Noise | None, *, more_target: int = 1, more_draft: int = 0,
    skips_greedy: bool = False,
) -> Look:  # fmt: skip
    """The rows of chains."""
    words = host.size(chain.ids.itemsize // 4)
    chains = Chains(
        chain._replace(ids=chain.ids.view(torch.int32)), words, host.size(on.target.vocab), _strides(on.target),
        _strides(on.draft or on.target), host.size(on.nt), host.size(on.nd), more_target, more_draft,
        int(skips_greedy), on.sampling.temperature, on.draft_sampling.temperature,
        None if noise is None else noise.position,
    )  # fmt: skip
    return on._replace(plan=Plan(None, None, chains))


def _pointers(rows: Rows | None) -> Rows | None:
    """Rows without the sizes that a plan makes needless."""
    return None if rows is None else rows._replace(request=0, row=0, vocab=0)


def digest_rows(
    on: Look, noise: Noise | None, *, purpose: int = -1, top_m: int = 0, mass: bool = True, entropy: bool = False,
    raw: bool = False, columns: Columns | None = None, settles: bool = True,
) -> host.Launches:  # fmt: skip
    """Digest and settle the planned rows; `purpose` of the draws of target rows, if they race.

    settles: False where the caller settles them.

    The launches are made, and returned for rows that are planned later.
    """
    launches = host.Launches(on.seen)
    draft, tiles = on.draft is not None, on.digest.tiles
    edited = scratch.options_of(on.target, on.draft or on.target)
    # Sizes go apart: kernels are not specialised on them.
    digest, (target, drafts) = on.digest._replace(rows=0, tiles=0), (_pointers(rows) for rows in (on.target, on.draft))
    sizes = (on.rows, tiles, on.target.vocab, on.draft.vocab if on.draft is not None else 0)
    parts = -(-tiles // min(max(round(on.rows * tiles / TOGETHER), 1), MOST_TOGETHER))
    launches.add(
        digest_kernel, on.rows * parts, digest, on.plan, target, drafts, *sizes, parts,
        MASS=mass, ENTROPY=entropy, RAW=raw, DRAFT=draft, TILE=host.TILE,
        registers=host.STREAM_REGISTERS,
        num_warps=host.SUM_WARPS if mass and not (entropy or raw) else host.STREAM_WARPS,
    )  # fmt: skip
    if edited:
        launches.add(
            listed_kernel, on.rows * tiles, digest, on.plan, target, drafts, *sizes,
            MASS=mass, ENTROPY=entropy, DRAFT=draft, TILE=host.TILE, num_warps=1,
        )  # fmt: skip
    filters: dict[str, Any] = {"FILTERS": on.work is not None, "DRAFT_FILTERS": on.draft_work is not None}
    common = {"PURPOSE": purpose, "DRAFT": draft, "TILE": host.TILE, **filters}
    given = (
        digest, on.plan, on.work, on.draft_work, target, drafts, on.sampling, on.draft_sampling, *sizes, on.nt, on.nd,
    )  # fmt: skip
    has_filters = any(filters.values())
    races = purpose >= 0
    if edited and (races or top_m > 0):
        alone = edited
    elif has_filters:
        alone = host.SEARCH_ALONE
    elif races or top_m > 0:
        alone = host.ROW_ALONE if top_m > 0 else host.RACE_ALONE
    else:
        alone = host.FEW_LANES
    if settles:
        launches.add(
            settle_kernel, on.rows, *given, noise, top_m, RANKS=top_m > 0, MASS=mass, ENTROPY=entropy, RAW=raw,
            AGAIN=False, **common, **alone,
        )  # fmt: skip
    if has_filters:
        parts = max(1, min(tiles, MOST_PARTS // max(on.rows, 1)))
        edits_spill = {"registers": 255} if edited else {}  # on sm_100, at 168
        launches.add(
            gather_kernel, on.rows * parts, *given, parts, ENTROPY=entropy, TILE=host.TILE,
            **(host.MANY_REGISTERS if edited or entropy else host.ROW_ALONE), **filters,
        )  # fmt: skip
        launches.add(
            settle_kernel, on.rows, *given, noise, top_m, RANKS=False, MASS=False, ENTROPY=False, RAW=False,
            AGAIN=True, **common, **{**alone, **edits_spill},
        )  # fmt: skip
    if on.draft is not None and columns is not None and columns.kept is not None:
        launches.add(
            check_kernel, on.rows, digest, on.plan, columns, on.draft.ptr, on.draft_sampling, on.draft.vocab,
            on.target.vocab, on.nt, on.nd, num_warps=2,
        )  # fmt: skip
    launches()
    return launches
