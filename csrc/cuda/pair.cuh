// A pair of rows that is read again: its tiles as weights w[v] = (a p[v] - b q[v])+.
#pragma once
#include "decide.cuh"

namespace specdec {

struct PairRows {
  PairTask task;
  Chain chain;
  LogitRow target, draft;
  Global<const int32_t> allowed;
  Race race;
};

__device__ inline PairRows load_pair(const Problem& p, int64_t b, const PairTask& task) {
  PairRows r{};
  r.task = task;
  if (task.kind == kNothing) return r;
  r.chain = load_chain(p, b);
  r.target = target_row(p, r.chain, b, task.row);
  r.allowed = allowed_row(p, r.chain, b, task.row);
  if (task.kind == kPair) r.draft = draft_row(p, r.chain, b, task.row);
  r.race.inv_t = task.target.inv_t;
  r.race.threshold = task.target.threshold;
  return r;
}

__device__ inline NoiseStream pair_noise(const Problem& p, int64_t b, int place) {
  const bool is_residual = p.task == Task::kResidual;
  return p.noise(b, is_residual ? 0 : place, is_residual ? p.purpose : kPurposeResidual);
}

// Draft logits at the target ids of this thread: through the map, or the tile itself.
__device__ inline void load_draft(const Problem& p, const PairRows& r, int64_t base,
                                  float (&l)[kPerThread]) {
  if (!p.token_map) {
    load_tile(r.draft, base, p.draft_vocab, l);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t id = id_of(base, j);
    const int64_t column = id < p.vocab ? column_of(p, id) : -1;
    l[j] = column < 0 ? -INFINITY : r.draft.at(column);
  }
}

__device__ inline float pair_q(const PairTask& t, float logit, int64_t id) {
  if (t.kind == kPair) return t.draft.at(logit, id);
  return t.kind == kPoint && id == t.x ? 1.f : 0.f;
}

// (a p - b q)+ with q a law over target ids; the products are rounded, so that every machine has
// the same weights.
__device__ inline float pair_weight(const PairTask& t, float p_logit, float q_logit, int64_t id) {
  const float ap = mul_rn(t.a, t.target.at(p_logit, id));
  return fmaxf(sub_rn(ap, mul_rn(t.b, pair_q(t, q_logit, id))), 0.f);
}

// Ids of the tile whose weights are listed, not computed; kPoint leaves them out of the race.
__device__ inline void apply_list(const Problem& p, const PairTask& t, int64_t b, int64_t base,
                                  float (&v)[kPerThread], float (&weight)[kPerThread]) {
  using List = Listed[kThreads];
  SPECDEC_SHARED(List, list);
  for (int first = 0; first < t.num_listed; first += kThreads) {
    const int left = t.num_listed - first, count = left < kThreads ? left : kThreads;
    const int mine = static_cast<int>(threadIdx.x);
    if (mine < count) list[mine] = p.work.listed.load(b * p.nodes + first + mine);
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const Listed one = list[i];
      if (one.id < base || one.id >= base + kTile) continue;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        if (id_of(base, j) != one.id) continue;
        weight[j] = one.value;
        if (t.kind == kPoint) v[j] = -INFINITY;
      }
    }
    __syncthreads();
  }
}

}  // namespace specdec
