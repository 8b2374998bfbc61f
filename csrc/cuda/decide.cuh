// The laws of a request's rows, and the test of a drafted id on them. Thread i looks at position i.
#pragma once
#include "race.cuh"

namespace specdec {

__device__ inline Law target_law(const RowStats& r, const Parameters& s) {
  return {
      r.maximum, s.inv_t, 0.f, 1.f / r.mass, fmaxf(r.threshold, kLowest), s.greedy ? r.argmax : -1};
}

// Statistics of a row; settled: of all rows of the request, where the caller has settled them.
__device__ inline RowStats target_stats(const Problem& p, int64_t b, int64_t i,
                                        const RowStats* settled = nullptr) {
  const int row = static_cast<int>(i);
  return settled ? settled[row] : p.work.rows.load(p.row_slot(b, row));
}

__device__ inline RowStats draft_stats(const Problem& p, int64_t b, int64_t i,
                                       const RowStats* settled = nullptr) {
  return target_stats(p, b, p.target_rows + i, settled);
}

// Law of draft row i: from the statistics that `sample` returned, or from those of its row.
__device__ inline Law draft_law(const Problem& p, const Chain& c, int64_t b, int64_t i,
                                const Parameters& s, const RowStats* settled = nullptr) {
  if (p.has_stats) {
    const int64_t at = draft_number(p, c, b, i);
    return {0.f, s.inv_t, p.logsumexp.load(at), 1.f, fmaxf(p.draft_threshold.load(at), kLowest),
            -1};
  }
  const RowStats r = draft_stats(p, b, i, settled);
  return {r.maximum, s.inv_t, 0.f, 1.f / r.mass, fmaxf(r.threshold, kLowest), -1};
}

// Draft column of a target id, or -1. The scratch is not initialised: an entry counts only if the
// map confirms it.
__device__ inline int64_t column_of(const Problem& p, int64_t id) {
  if (!p.token_map || p.task == Task::kSample) return id < p.draft_vocab ? id : -1;
  const int64_t column = p.work.columns.load(id);
  if (column < 0 || column >= p.draft_vocab) return -1;
  return p.token_map.load(column) == id ? column : -1;
}

// Column of a target id in draft row i, or -1.
__device__ inline int64_t draft_column(const Problem& p, const Chain& c, int64_t b, int64_t i,
                                       int64_t id) {
  if (!p.is_kept) return column_of(p, id);
  const int64_t start = draft_number(p, c, b, i) * p.draft_vocab;
  for (int64_t j = 0; j < p.draft_vocab; ++j) {
    if (p.kept_ids.load(start + j) == id) return j;
  }
  return -1;
}

// Log-probability of an id with this logit, of a row that is not greedy. Rounded after each step: a
// compiler would fuse it in one kernel and not in another.
__device__ __forceinline__ float logprob_of(const RowStats& r, const Parameters& s, float logit) {
  if (!(logit >= r.threshold) || logit == -INFINITY) return -INFINITY;
  return sub_rn(mul_rn(sub_rn(logit, r.maximum), s.inv_t), logf(r.mass));
}

// Log-probability of an id under the law that the mode names; the raw one knows no edits.
template <bool kEdited = true>
__device__ inline float token_logprob(const Problem& p, const RowStats& r, const Parameters& s,
                                      const MaskedRow& row, int64_t id) {
  const bool is_raw = p.logprobs_mode == LogprobsMode::kRaw;
  const float logit = kEdited && is_raw ? row.logits.at(id) : row.at<kEdited>(id);
  if (is_raw) return logit - r.raw_maximum - logf(r.raw_mass);
  if (s.greedy) return id == r.argmax ? 0.f : -INFINITY;
  return logprob_of(r, s, logit);
}

enum Verdict : int {
  kAccept,
  kReject,
  kEnd,
  kStop
};  // kEnd: draw as from a bonus row; kStop: emit nothing

struct Fact {  // of one position
  int verdict, status;
  float ratio, point_mass;  // rule block: p / q at the drafted id; p there if q is a point mass
};

// By the first warp, for all behind the next barrier.
__device__ inline void load_request(const Problem& p, int64_t b, Request* shared) {
  if (threadIdx.x >= 32) return;
  const Request q = make_request(p, b);
  if (threadIdx.x == 0) *shared = q;
}

// The test of a draft id by a rule that looks at the target row alone.
__device__ inline bool passes_target_rule(const Problem& p, const Request& q, const RowStats& row,
                                          const Law& law, int64_t i, int64_t x, float logit) {
  if (p.rule == Rule::kTypical) {
    const float px = law.at(logit, x);
    return px > 0.f && px > fminf(q.typical_epsilon, q.typical_delta * expf(-row.entropy));
  }
  if (p.rule == Rule::kTopM || p.rule == Rule::kDistance) {
    const int64_t distance = x > row.argmax ? x - row.argmax : row.argmax - x;
    const bool near = p.rule == Rule::kTopM ? row.is_near != 0 : distance <= p.max_distance;
    return is_finite(logit) && (near || i < p.min_block - 1);
  }
  if (p.rule == Rule::kMatch && !q.target.greedy) return key_id(row.key) == x;
  return row.argmax == x;
}

struct Drafted {      // what a call is given of position i <= length: no kernel of it writes that
  int64_t x, column;  // the drafted id; -1 behind the last
  float logit, drafted, coin;
};

__device__ inline Drafted load_drafted(const Problem& p, const Request& q, int64_t b, int64_t i) {
  const Chain& c = q.chain;
  Drafted d{-1, -1, 0.f, -INFINITY, 0.f};
  if (i >= c.length) return d;
  d.x = draft_id(p, c, b, i);
  if (p.rule == Rule::kRatio && !q.target.greedy) d.coin = p.coin_of(b, i);
  if (q.has_draft_law) d.column = draft_column(p, c, b, i, d.x);
  d.logit = target_row(p, c, b, i).at(d.x);
  if (d.column >= 0) d.drafted = draft_row(p, c, b, i).at(d.column);
  return d;
}

struct Position {  // what lies at known places of position i <= length
  RowStats row;
  Law target, draft;  // draft: where it has a law and there is an id
  int64_t x;          // the drafted id; -1 behind the last
  bool has_draft, is_draft_bad;
};

// x: what is drafted there.
__device__ inline Position load_position(const Problem& p, const Request& q, int64_t b, int64_t i,
                                         int64_t x) {
  Position at{};
  at.row = target_stats(p, b, i, q.settled);
  at.x = x;
  at.has_draft = q.has_draft_law && i < q.chain.length;
  if (at.has_draft) {
    at.draft = draft_law(p, q.chain, b, i, q.draft, q.settled);
    const bool is_stored = !p.has_stats || p.rule == Rule::kBlock;
    at.is_draft_bad = is_stored && draft_stats(p, b, i, q.settled).bad;
  }
  at.target = target_law(at.row, q.target);
  return at;
}

// The test of position i, as if the walk reached it.
__device__ inline Fact examine(const Problem& p, const Request& q, int64_t i, const Position& at,
                               const Drafted& d) {
  const RowStats& row = at.row;
  const Law &law = at.target, &other = at.draft;
  const int64_t x = d.x, column = d.column;
  Fact f{kAccept, x < 0 ? q.chain.end_status : 0, 1.f, 0.f};
  if (row.bad) {
    f.status |= kBadTarget;
    f.verdict = kStop;
    return f;
  }
  if (x < 0) {
    f.verdict = kEnd;
    return f;
  }
  if ((p.rule != Rule::kRatio && p.rule != Rule::kBlock) || q.target.greedy) {
    f.verdict = passes_target_rule(p, q, row, law, i, x, d.logit) ? kAccept : kReject;
    return f;
  }
  const float px = law.at(d.logit, x);
  float qx = 1.f;
  if (at.has_draft) {
    if (at.is_draft_bad || d.drafted != d.drafted || (p.has_stats && !is_finite(other.shift))) {
      f.status |= kBadDraft;
      f.verdict = kEnd;
      return f;
    }
    qx = column < 0 ? 0.f : other.at(d.drafted, column);
    if (qx == 0.f) f.status |= kZeroDraft;
  }
  f.point_mass = px;
  f.ratio = qx > 0.f ? px / qx : 0.f;
  if (p.rule == Rule::kBlock) return f;
  const bool passes = px > 0.f && qx > 0.f && mul_rn(d.coin, qx) < add_rn(px, q.over_acceptance);
  f.verdict = passes ? kAccept : kReject;
  return f;
}

// Writes the id of position i, or -1, and its log-probability.
__device__ inline void write_id(const Problem& p, const Request& q, int64_t b, int64_t i,
                                int64_t id) {
  const int64_t at = b * (p.max_draft + 1) + i;
  p.token_ids.store(at, id);
  if (p.logprobs_mode == LogprobsMode::kNone) return;
  float logprob = 0.f;
  if (id >= 0) {
    logprob = token_logprob(p, target_stats(p, b, i, q.settled), q.target,
                            target_row(p, q.chain, b, i), id);
  }
  p.logprobs.store(at, logprob);
}

// All positions but the one behind what is accepted, which may not be known yet. x: what is drafted
// at this thread's first position.
__device__ inline void write_prefix(const Problem& p, const Request& q, int64_t b, int accepted,
                                    int64_t x) {
  for (int64_t i = threadIdx.x; i <= p.max_draft; i += kThreads) {
    if (i == accepted) continue;
    if (i >= kThreads && i < accepted) x = draft_id(p, q.chain, b, i);
    write_id(p, q, b, i, i < accepted ? x : -1);
  }
}

// How the token at position i is drawn. kPlain rows that have raced already have their winner.
__device__ inline PairTask draw_task(const Problem& p, const Position& at, int i, bool is_rejected,
                                     float scale) {
  const bool is_residual =
      is_rejected && !p.rejected_from_target && (p.rule == Rule::kRatio || p.rule == Rule::kBlock);
  PairTask t{};
  t.kind = !is_residual ? kPlain : at.has_draft ? kPair : kPoint;
  t.row = t.place = t.slot = i;
  t.a = scale;
  t.b = 1.f;
  t.x = is_residual ? at.x : -1;
  t.point_left = -INFINITY;
  t.target = at.target;
  t.draft = at.draft;
  t.watch_draft = t.kind == kPair && p.has_stats && p.rule == Rule::kRatio;
  return t;
}

}  // namespace specdec
