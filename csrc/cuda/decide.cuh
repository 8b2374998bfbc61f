// The laws of a request's rows, and the test of a drafted id on them. Thread i looks at position i.
#pragma once
#include "race.cuh"

namespace specdec {

__device__ inline Law target_law(const RowStats& r, const Parameters& s) {
  return {r.maximum, s.inv_t, 0.f, 1.f / r.mass, r.threshold, s.greedy ? r.argmax : -1};
}

__device__ inline RowStats target_stats(const Problem& p, int64_t b, int64_t i) {
  return p.work.rows.load(p.row_slot(b, static_cast<int>(i)));
}

__device__ inline RowStats draft_stats(const Problem& p, int64_t b, int64_t i) {
  return p.work.rows.load(p.row_slot(b, p.target_rows + static_cast<int>(i)));
}

__device__ inline int64_t stats_index(const Problem& p, const Chain& c, int64_t b, int64_t i) {
  return p.is_flat ? c.first + i : b * p.stats_batch_stride + i;
}

// Law of draft row i: from the statistics that `sample` returned, or from those of its row.
__device__ inline Law draft_law(const Problem& p, const Chain& c, int64_t b, int64_t i,
                                const Parameters& s) {
  if (p.has_stats) {
    const int64_t at = stats_index(p, c, b, i);
    return {0.f, s.inv_t, p.logsumexp.load(at), 1.f, p.draft_threshold.load(at), -1};
  }
  const RowStats r = draft_stats(p, b, i);
  return {r.maximum, s.inv_t, 0.f, 1.f / r.mass, r.threshold, -1};
}

// Draft column of a target id, or -1. The scratch is not initialised: an entry counts only if the
// map confirms it.
__device__ inline int64_t column_of(const Problem& p, int64_t id) {
  if (!p.token_map || p.task == Task::kSample) return id < p.draft_vocab ? id : -1;
  const int64_t column = p.work.columns.load(id);
  if (column < 0 || column >= p.draft_vocab) return -1;
  return p.token_map.load(column) == id ? column : -1;
}

// Log-probability of an id under the law that the mode names.
__device__ inline float token_logprob(const Problem& p, const RowStats& r, const Parameters& s,
                                      float logit, int64_t id) {
  if (p.logprobs_mode == LogprobsMode::kRaw) return logit - r.raw_maximum - logf(r.raw_mass);
  if (s.greedy) return id == r.argmax ? 0.f : -INFINITY;
  if (!(logit >= r.threshold) || logit == -INFINITY) return -INFINITY;
  return (logit - r.maximum) * s.inv_t - logf(r.mass);
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

struct Request {  // what all positions share
  Chain chain;
  Parameters target, draft;
  bool has_draft_law;
  bool is_draft_bad;  // the draft's sampling parameters are, and they would be read
  int status;
};

// By the first warp, for all behind the next barrier.
__device__ inline void load_request(const Problem& p, int64_t b, Request* shared) {
  if (threadIdx.x >= 32) return;
  Request q{};
  q.chain = load_chain(p, b);
  if (threadIdx.x != 0) return;
  q.target = target_parameters(p, b);
  q.draft = neutral_parameters();
  q.status = q.chain.status;
  if (p.draft_given) q.draft = load_parameters(p.draft_sampling, b, p.draft_vocab);
  q.has_draft_law = has_draft_law(p, q.target, q.draft);
  const bool reads_draft = p.draft_given && (p.rule == Rule::kRatio || p.rule == Rule::kBlock);
  q.is_draft_bad = reads_draft && q.draft.bad && !q.target.greedy;
  if (q.target.bad || (q.is_draft_bad && q.chain.length > 0)) q.status |= kBadSampling;
  *shared = q;
}

// The test of a draft id by a rule that looks at the target row alone.
__device__ inline bool passes_target_rule(const Problem& p, const Request& q, const RowStats& row,
                                          const Law& law, int64_t i, int64_t x, float logit) {
  if (p.rule == Rule::kTypical) {
    const float px = law.at(logit, x);
    return px > 0.f && px > fminf(p.typical_epsilon, p.typical_delta * expf(-row.entropy));
  }
  if (p.rule == Rule::kTopM || p.rule == Rule::kDistance) {
    const int64_t distance = x > row.argmax ? x - row.argmax : row.argmax - x;
    const bool near = p.rule == Rule::kTopM ? row.is_near != 0 : distance <= p.max_distance;
    return is_finite(logit) && (near || i < p.min_block - 1);
  }
  if (p.rule == Rule::kMatch && !q.target.greedy) return key_id(row.key) == x;
  return row.argmax == x;
}

// Position i <= length of request b, as if the walk reached it.
__device__ inline Fact examine(const Problem& p, const Request& q, int64_t b, int64_t i) {
  const Chain& c = q.chain;
  Fact f{kAccept, 0, 1.f, 0.f};
  if (i == c.length) f.status |= c.end_status;
  const RowStats row = target_stats(p, b, i);
  if (row.bad) {
    f.status |= kBadTarget;
    f.verdict = kStop;
    return f;
  }
  if (i == c.length) {
    f.verdict = kEnd;
    return f;
  }
  const int64_t x = draft_id(p, c, b, i);
  const float logit = target_row(p, c, b, i).at(x);
  const Law law = target_law(row, q.target);
  if ((p.rule != Rule::kRatio && p.rule != Rule::kBlock) || q.target.greedy) {
    f.verdict = passes_target_rule(p, q, row, law, i, x, logit) ? kAccept : kReject;
    return f;
  }
  const float px = law.at(logit, x);
  float qx = 1.f;
  if (q.has_draft_law) {
    const int64_t column = column_of(p, x);
    const float drafted = column < 0 ? -INFINITY : draft_row(p, c, b, i).at(column);
    const Law other = draft_law(p, c, b, i, q.draft);
    bool bad = drafted != drafted || (p.has_stats && !is_finite(other.shift));
    if (!p.has_stats || p.rule == Rule::kBlock) bad = bad || draft_stats(p, b, i).bad;
    if (bad) {
      f.status |= kBadDraft;
      f.verdict = kEnd;
      return f;
    }
    qx = column < 0 ? 0.f : other.at(drafted, column);
    if (qx == 0.f) f.status |= kZeroDraft;
  }
  f.point_mass = px;
  f.ratio = qx > 0.f ? px / qx : 0.f;
  if (p.rule == Rule::kBlock) return f;
  const bool passes =
      px > 0.f && qx > 0.f && mul_rn(p.coin_of(b, i), qx) < add_rn(px, p.over_acceptance);
  f.verdict = passes ? kAccept : kReject;
  return f;
}

// Writes ids and log-probabilities: prefix, `token` (-1: none yet) at `accepted`, -1 behind.
__device__ inline void write_chain(const Problem& p, const Request& q, int64_t b, int accepted,
                                   int64_t token) {
  const int64_t width = p.max_draft + 1;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    int64_t id = -1;
    if (i < accepted) id = draft_id(p, q.chain, b, i);
    if (i == accepted) id = token;
    p.token_ids.store(b * width + i, id);
    if (p.logprobs_mode == LogprobsMode::kNone) continue;
    float logprob = 0.f;
    if (id >= 0) {
      const float logit = target_row(p, q.chain, b, i).at(id);
      logprob = token_logprob(p, target_stats(p, b, i), q.target, logit, id);
    }
    p.logprobs.store(b * width + i, logprob);
  }
}

// How the token at row `accepted` is drawn. kPlain rows that have raced already have their winner.
__device__ inline PairTask draw_task(const Problem& p, const Request& q, int64_t b, int accepted,
                                     bool is_rejected, float scale) {
  PairTask t{};
  t.kind = kPlain;
  t.row = t.place = t.slot = accepted;
  t.a = scale;
  t.b = 1.f;
  t.x = -1;
  t.point_left = -INFINITY;
  t.target = target_law(target_stats(p, b, accepted), q.target);
  if (!is_rejected || p.rejected_from_target) return t;
  if (p.rule != Rule::kRatio && p.rule != Rule::kBlock) return t;
  t.kind = q.has_draft_law ? kPair : kPoint;
  t.x = draft_id(p, q.chain, b, accepted);
  if (!q.has_draft_law) return t;
  t.draft = draft_law(p, q.chain, b, accepted, q.draft);
  t.watch_draft = p.has_stats && p.rule == Rule::kRatio;
  return t;
}

}  // namespace specdec
