"""Draws as races: the largest log-weight - log E wins, ties go to the lowest id."""

import triton
import triton.language as tl


@triton.jit
def race_scores(logweight, competes, neg_log_e):
    """Score of each competitor, -inf for the others and where it is not finite."""
    score = logweight + neg_log_e
    return tl.where(competes & (tl.abs(score) < float("inf")), score, float("-inf"))


@triton.jit
def _ahead(best, at, score, v):
    ahead = (score > best) | ((score == best) & (v < at))
    return tl.where(ahead, score, best), tl.where(ahead, v, at)


@triton.jit
def winner(score, v):
    """(best score, lowest id that has it); (-inf, 2^31 - 1) if nobody competes."""
    best, at = tl.reduce((score, v), 0, _ahead)
    return best, tl.where(best > float("-inf"), at, 0x7FFFFFFF)


@triton.jit
def better(best, at, score, who, counts):
    """The better of two winners; the second only if it counts."""
    wins = counts & ((score > best) | ((score == best) & (score > float("-inf")) & (who < at)))
    return tl.where(wins, score, best), tl.where(wins, who, at)


@triton.jit
def pop(score, v, column):
    """(best score, its id, its column, scores without it); id and column are -1 if nobody is left."""
    best, at = winner(score, v)
    hit = (score == best) & (v == at) & (score > float("-inf"))
    place = tl.max(tl.where(hit, column, -1), axis=0)
    return best, tl.where(place < 0, -1, at), place, tl.where(hit, float("-inf"), score)
