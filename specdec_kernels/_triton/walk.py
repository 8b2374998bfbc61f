# ruff: noqa: SIM109 - `if` on a constexpr prunes code, and tuples are taken apart by name
"""The decision of a request, from the records of its rows: how many ids are accepted and how the next is drawn.

All rows of a request are looked at as one vector; the first one that stops decides.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._codes import CHAIN_RULES
from .chains import chain_of, number_of, row_offset
from .codes import NO_LOGPROBS, PROCESSED_LOGPROBS, S_DRAFT, S_ID, S_LAYOUT, S_SAMPLING, S_TARGET, S_ZERO
from .laws import Law, draft_logits_at, kept, law_of, prob
from .noise import coins
from .records import BAD, Q_ARG, Q_RANK, Q_STATE, Q_WINNER, R_ENTROPY, R_MASS, R_RAW, get_record_f, get_record_i
from .rows import entry_or, logits_at, sampling_of, size_of
from .trees import any_of

RATIO, BLOCK, MATCH, GREEDY, TYPICAL, TOPM, DISTANCE = map(tl.constexpr, CHAIN_RULES.values())
# How the token after the accepted ones comes about: not at all, drawn from the row, from the residual, from the row
# without the rejected id; or it is known already.
NOTHING, PLAIN, RESIDUAL, POINT, FIXED = (tl.constexpr(i) for i in range(5))
# First half of rule block, int32: how the token comes about, status, examined ids, whether the row behind them is bad.
D_HOW, D_STATUS, D_LENGTH, D_BAD, D_FIELDS = (tl.constexpr(i) for i in range(5))


class Knobs(NamedTuple):
    """Parameters of the rules. `over_acceptances` float32 [batch], null: not given, None: not read by the rule."""

    over_acceptance: Any
    over_acceptances: Any
    typical: Any  # Typical, whose tensors are alike
    top_m: Any  # `launch.size`, as the next two
    max_distance: Any
    min_block: Any


class Call(NamedTuple):
    """Everything a verification reads, and where it writes."""

    chain: Any
    target: Any
    draft: Any
    columns: Any
    sampling: Any
    draft_sampling: Any
    noise: Any
    draft_logsumexp: Any  # float32, laid out like the draft rows, or None
    draft_threshold: Any
    knobs: Any
    ws: Any  # Digest: records of the rows
    plan: Any
    decision: Any  # rule block: int32 [batch, D_FIELDS]
    scale: Any  # rule block: float32 [batch, 2 * KP], w and the residual masses of point masses
    token_ids: Any  # [batch, width + 1]
    num_accepted: Any
    status: Any
    logprobs: Any


@triton.jit
def pick(values, i, at):
    """Entry `at` of a vector."""
    return tl.sum(tl.where(i == at, values, 0), axis=0)


@triton.jit
def target_logits_at(call, b, first, i, ids, mask):
    """Logits as asked of one id in each target row i; -inf where mask is off."""
    offset = row_offset(call.target, call.chain, first, b, i, 1)
    number = number_of(call.chain, first, b, i)
    return logits_at(call.target, offset, number, tl.where(mask, ids, 0), mask)


@triton.jit
def draft_at(call, b, first, i, ids, tested, has_row, row, ROWS: tl.constexpr, STATS: tl.constexpr):
    """(q at each drafted id, unreadable) of the draft rows i; q = 1 where the draft is a point mass."""
    q = tl.full(i.shape, 1.0, tl.float32)
    unreadable = i < 0
    if ROWS or STATS:
        inv_t = sampling_of(call.draft_sampling, b, call.draft.vocab).inv_t
        mask = tested & has_row
        at = tl.where(mask, row_offset(call.draft, call.chain, first, b, i, 0), 0)  # candidates are read without a mask
        number = number_of(call.chain, first, b, i)
        x = draft_logits_at(call.draft, call.columns, at, number, tl.where(mask, ids, 0), mask)
        shift = None
        if ROWS:
            unreadable = mask & (get_record_i(call.ws, row, Q_STATE, mask) == BAD)
            law = law_of(call.ws, tl.where(mask, row, -1))
        if STATS:
            shift = tl.load(call.draft_logsumexp + first + i, mask=mask, other=0.0)
            threshold = tl.load(call.draft_threshold + first + i, mask=mask, other=0.0)
            law = Law(0.0, 1.0, threshold)
            unreadable = unreadable | (mask & ((tl.abs(shift) == float("inf")) | (shift != shift) | (x != x)))
        q = tl.where(mask, prob(x, law, inv_t, shift), 1.0)
    return q, unreadable


@triton.jit
def setup(call, b, KP: tl.constexpr, RULE: tl.constexpr, HAS_LAW: tl.constexpr):
    """What every walk starts from: ids, K, flags, whether the request is greedy and has draft rows, status."""
    ids, k, bad_id, first, bad, lost = chain_of(call.chain, b, call.target.vocab, KP)
    greedy = b < 0
    has_row = b < 0
    status = tl.where(bad, S_LAYOUT, 0)
    inv_t = tl.full([], 1.0, tl.float32)
    if RULE <= MATCH or RULE == TYPICAL:
        settings = sampling_of(call.sampling, b, call.target.vocab)
        inv_t, greedy, bad_value = settings.inv_t, settings.greedy, settings.bad
        if HAS_LAW:
            of_draft = sampling_of(call.draft_sampling, b, call.draft.vocab)
            bad_value = bad_value | (of_draft.bad & (greedy == 0) & (k > 0))
            has_row = (greedy == 0) & (of_draft.greedy == 0)
        status = tl.where(bad_value, status | S_SAMPLING, status)
    return ids, k, bad_id, first, lost, greedy, has_row, inv_t, status


@triton.jit
def typical_limit(typical, b, entropy):
    """What the probability of an id must exceed."""
    epsilon = entry_or(typical.typical_epsilons, b, typical.typical_epsilon)
    delta = entry_or(typical.typical_deltas, b, typical.typical_delta)
    return tl.minimum(epsilon, delta * tl.exp(-entropy))


@triton.jit
def walk_ratio(call, b, KP: tl.constexpr, NT, NR, ROWS: tl.constexpr, STATS: tl.constexpr):
    """(accepted, how, status, argmax): accept while coin * q < p + over_acceptance."""
    ids, k, bad_id, first, lost, greedy, has_row, inv_t, status = setup(call, b, KP, RATIO, ROWS or STATS)
    i = tl.arange(0, KP)
    row = b * NR + i
    used = (i <= k) & (lost == 0)
    bad_row = used & (get_record_i(call.ws, row, Q_STATE, used) == BAD)
    argmax = get_record_i(call.ws, row, Q_ARG, used)
    tested = (i < k) & used & (bad_row == 0)
    x = target_logits_at(call, b, first, i, ids, tested)
    p = prob(x, law_of(call.ws, tl.where(used, row, -1)), inv_t)
    p = tl.where(greedy, (ids == argmax).to(tl.float32), p)
    q, unreadable = draft_at(call, b, first, i, ids, tested, has_row, row + NT, ROWS, STATS)
    u = coins(call.noise, b, tl.load(call.noise.position + b) + i, i * 0)
    extra = entry_or(call.knobs.over_acceptances, b, call.knobs.over_acceptance)
    passes = tested & (unreadable == 0) & (p > 0) & (q > 0) & (u * q < p + extra)
    accepted = tl.min(tl.where(passes, KP, i), axis=0)
    here = i == accepted
    bad_here = any_of(here & bad_row)
    unreadable_here = any_of(here & unreadable)
    tested_here = any_of(here & tested)
    zero_here = any_of(here & tested & (unreadable == 0) & (q == 0))
    status = tl.where((accepted == k) & bad_id, status | S_ID, status)
    status = tl.where(bad_here, status | S_TARGET, status)
    status = tl.where(unreadable_here, status | S_DRAFT, status)
    status = tl.where(zero_here, status | S_ZERO, status)
    rejected = tested_here & (unreadable_here == 0)
    how = tl.where(rejected, tl.where(has_row, RESIDUAL, POINT), PLAIN)
    how = tl.where(greedy, FIXED, how)
    how = tl.where(bad_here | lost, NOTHING, how)
    return tl.where(lost, 0, accepted), how, status, pick(argmax, i, accepted)


@triton.jit
def walk_target(call, b, KP: tl.constexpr, NR, RULE: tl.constexpr):
    """(accepted, how, status, token) of rules that look at the target rows alone; every row's emission is known."""
    ids, k, bad_id, first, lost, greedy, _, inv_t, status = setup(call, b, KP, RULE, False)
    i = tl.arange(0, KP)
    row = b * NR + i
    used = (i <= k) & (lost == 0)
    bad_row = used & (get_record_i(call.ws, row, Q_STATE, used) == BAD)
    argmax = get_record_i(call.ws, row, Q_ARG, used)
    tested = (i < k) & used & (bad_row == 0)
    token = argmax
    if RULE == MATCH or RULE == TYPICAL:
        token = tl.where(greedy, argmax, get_record_i(call.ws, row, Q_WINNER, used))
    if RULE == MATCH or RULE == GREEDY:
        passes = ids == token
    else:
        x = target_logits_at(call, b, first, i, ids, tested)
        if RULE == TYPICAL:
            p = prob(x, law_of(call.ws, tl.where(used, row, -1)), inv_t)
            p = tl.where(greedy, (ids == argmax).to(tl.float32), p)
            entropy = get_record_f(call.ws, row, R_ENTROPY, used)
            passes = (p > 0) & (p > typical_limit(call.knobs.typical, b, entropy))
        else:
            if RULE == TOPM:
                near = get_record_i(call.ws, row, Q_RANK, used) < size_of(call.knobs.top_m)
            else:
                near = tl.abs(ids - argmax) <= size_of(call.knobs.max_distance)
            passes = (tl.abs(x) < float("inf")) & (near | (i < size_of(call.knobs.min_block) - 1))
    accepted = tl.min(tl.where(tested & passes, KP, i), axis=0)
    bad_here = any_of((i == accepted) & bad_row)
    status = tl.where((accepted == k) & bad_id, status | S_ID, status)
    status = tl.where(bad_here, status | S_TARGET, status)
    how = tl.where(bad_here | lost, NOTHING, FIXED)
    return tl.where(lost, 0, accepted), how, status, pick(token, i, accepted)


@triton.jit
def walk_block(call, b, KP: tl.constexpr, NT, NR, ROWS: tl.constexpr, STATS: tl.constexpr):
    """First half of block verification: w, the examined length, and the statuses on the way, into memory."""
    ids, k, bad_id, first, lost, greedy, has_row, inv_t, status = setup(call, b, KP, BLOCK, ROWS or STATS)
    i = tl.arange(0, KP)
    row = b * NR + i
    used = (i <= k) & (lost == 0)
    bad_row = used & (get_record_i(call.ws, row, Q_STATE, used) == BAD)
    argmax = get_record_i(call.ws, row, Q_ARG, used)
    tested = (i < k) & used & (bad_row == 0)
    x = target_logits_at(call, b, first, i, ids, tested)
    p = prob(x, law_of(call.ws, tl.where(used, row, -1)), inv_t)
    p = tl.where(greedy, (ids == argmax).to(tl.float32), p)
    q, unreadable = draft_at(call, b, first, i, ids, tested, has_row, row + NT, ROWS, STATS)
    stop = tl.min(tl.where(tested & (unreadable == 0), KP, i), axis=0)
    # A greedy request is decided at its first miss; what lies behind is not examined.
    miss = tl.min(tl.where(greedy & tested & (p == 0), i, KP), axis=0)
    length = tl.where(lost, 0, tl.minimum(stop, miss + 1))
    reached = (i == stop) & (stop <= miss) & (lost == 0)
    bad_here = any_of(reached & bad_row)
    unreadable_here = any_of(reached & unreadable)
    zero = any_of((i < length) & (q == 0))
    status = tl.where((stop == k) & (stop <= miss) & bad_id & (lost == 0), status | S_ID, status)
    status = tl.where(bad_here, status | S_TARGET, status)
    status = tl.where(unreadable_here, status | S_DRAFT, status)
    status = tl.where(zero, status | S_ZERO, status)

    # w[i + 1] = min(1, w[i] p / q), kept beside 1 - p(x), the residual's share where the draft is a point mass.
    ratio = tl.where(q > 0, tl.div_rn(p, tl.where(q > 0, q, 1.0)), 0.0)
    w = tl.full([], 1.0, tl.float32)
    at = call.scale + b * 2 * KP
    tl.store(at, w)
    for j in range(0, size_of(call.chain.width)):
        w = tl.minimum(w * pick(ratio, i, j), 1.0)
        tl.store(at + j + 1, w)
    tl.store(at + KP + i, tl.maximum(1.0 - p, 0.0))
    how = tl.where(greedy, FIXED, tl.where(has_row, RESIDUAL, POINT))
    at = call.decision + b * D_FIELDS
    tl.store(at + D_HOW, how.to(tl.int32))
    tl.store(at + D_STATUS, status.to(tl.int32))
    tl.store(at + D_LENGTH, length.to(tl.int32))
    tl.store(at + D_BAD, bad_here.to(tl.int32))


@triton.jit
def settle_block(call, b, mass, KP: tl.constexpr, NR):
    """Second half: (accepted, how, status, argmax, w) from w and the residual masses S [KP] of the rows."""
    lost = chain_of(call.chain, b, call.target.vocab, KP).lost
    i = tl.arange(0, KP)
    at = call.decision + b * D_FIELDS
    length = tl.load(at + D_LENGTH)
    how = tl.load(at + D_HOW)
    w = tl.load(call.scale + b * 2 * KP + i, mask=i <= size_of(call.chain.width), other=0.0)
    point_mass = w * tl.load(call.scale + b * 2 * KP + KP + i)
    mass = tl.where(how == RESIDUAL, mass, point_mass)
    free = mass + (1.0 - w)
    h = tl.where(free > 0, tl.div_rn(mass, tl.where(free > 0, free, 1.0)), 1.0)
    h = tl.where(i == length, w, h)
    u = coins(call.noise, b, tl.load(call.noise.position + b) + i - 1, i * 0)
    accepted = tl.max(tl.where((i >= 1) & (i <= length) & (u < h), i, 0), axis=0)
    full = accepted == length
    argmax = get_record_i(call.ws, b * NR + accepted, Q_ARG, b >= 0)
    how = tl.where(full & (how != FIXED), PLAIN, how)
    how = tl.where(lost | (full & (tl.load(at + D_BAD) > 0)), NOTHING, how)
    return accepted, how, tl.load(at + D_STATUS), argmax, pick(w, i, accepted)


@triton.jit
def logprob_at(call, b, first, i, ids, on, row, RULE: tl.constexpr, LOGPROBS: tl.constexpr):
    """Log-probability of one id under each target row i, whose record is `row`; 0 where `on` is not set."""
    if LOGPROBS == PROCESSED_LOGPROBS:
        x = target_logits_at(call, b, first, i, ids, on)
        inv_t = tl.full([], 1.0, tl.float32)
        greedy = b < 0
        if RULE <= MATCH or RULE == TYPICAL:
            settings = sampling_of(call.sampling, b, call.target.vocab)
            inv_t, greedy = settings.inv_t, settings.greedy
        law = law_of(call.ws, row)
        log_mass = tl.log(get_record_f(call.ws, row, R_MASS, on))
        value = (x - law.maximum) * inv_t - log_mass
        argmax = get_record_i(call.ws, row, Q_ARG, on)
        value = tl.where(greedy, tl.where(ids == argmax, 0.0, float("-inf")), value)
        value = tl.where(kept(x, law.threshold), value, float("-inf"))
    else:
        offset = row_offset(call.target, call.chain, first, b, i, 1)
        x = tl.load(call.target.ptr + offset + ids, mask=on, other=0.0).to(tl.float32)
        value = x - get_record_f(call.ws, row, R_RAW, on)
    return tl.where(on, value, 0.0)


@triton.jit
def write_outputs(
    call, b, KP: tl.constexpr, NR, RULE: tl.constexpr, LOGPROBS: tl.constexpr, accepted, token, how, status
):
    """Accepted prefix, the token, -1 behind; and the log-probability of each emitted id."""
    drafted = chain_of(call.chain, b, call.target.vocab, KP)
    j = tl.arange(0, KP)
    width = size_of(call.chain.width) + 1
    emitted = tl.where(j < accepted, drafted.ids, -1)
    emitted = tl.where((j == accepted) & (how != NOTHING), token.to(tl.int64), emitted)
    tl.store(call.token_ids + b * width + j, emitted, mask=j < width)
    tl.store(call.num_accepted + b, accepted.to(tl.int32))
    tl.store(call.status + b, status)
    if LOGPROBS != NO_LOGPROBS:
        on = (emitted >= 0) & (j < width)
        row = tl.where(on, b * NR + j, -1)
        value = logprob_at(call, b, drafted.first, j, emitted, on, row, RULE, LOGPROBS)
        tl.store(call.logprobs + b * width + j, value, mask=j < width)
