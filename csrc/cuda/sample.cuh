// What sample writes of a row that is settled: log-sum, threshold, and the best ids in order.
#pragma once
#include "decide.cuh"

namespace specdec {

__device__ inline bool is_excluded(const Problem& p, int64_t b, int64_t column) {
  if (p.num_exclude == 0) return false;  // other ops map the columns of drafts alone
  const int64_t id = p.token_map ? p.token_map.load(column) : column;
  for (int64_t i = 0; i < p.num_exclude; ++i) {
    if (p.exclude_ids.load(b * p.num_exclude + i) == id) return true;
  }
  return false;
}

// Out of line: within the settle kernel it makes three registers spill (sm_90).
template <bool kEdited>
static __device__ SPECDEC_NOINLINE void write_sample(const Problem& p, int64_t b, const Row& row,
                                                     const RowStats& r, const Key* best) {
  const Parameters& s = row.parameters;
  if (threadIdx.x == 0) {
    p.status.store(b, (s.bad ? kBadSampling : 0) | (r.bad ? kBadTarget : 0));
    p.out_logsumexp.store(b, r.bad ? NAN : s.greedy ? 0.f : r.maximum * s.inv_t + logf(r.mass));
    p.out_threshold.store(b, r.bad ? NAN : r.threshold);
  }
  for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
    const Key key = i == 0 ? r.key : best[i];
    int64_t column = r.bad || key == 0 ? -1 : key_id(key);
    if (!r.bad && s.greedy && i == 0 && !is_excluded(p, b, r.argmax)) column = r.argmax;
    const float logprob = column < 0 ? 0.f : token_logprob<kEdited>(p, r, s, row.values, column);
    p.token_ids.store(b * p.num_samples + i,
                      column >= 0 && p.token_map ? p.token_map.load(column) : column);
    p.logprobs.store(b * p.num_samples + i, logprob);
  }
}

// Of a request that is not active.
__device__ inline void write_no_sample(const Problem& p, int64_t b) {
  if (threadIdx.x == 0) {
    p.status.store(b, 0);
    p.out_logsumexp.store(b, 0.f);
    p.out_threshold.store(b, 0.f);
  }
  for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
    p.token_ids.store(b * p.num_samples + i, -1);
    p.logprobs.store(b * p.num_samples + i, 0.f);
  }
}

}  // namespace specdec
