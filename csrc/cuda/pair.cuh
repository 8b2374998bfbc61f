// A pair of rows that is read again: its tiles as weights w[v] = (a p[v] - b q[v])+.
#pragma once
#include "decide.cuh"

namespace specdec {

struct PairRows {
  PairTask task;
  MaskedRow target, draft;
  int64_t kept;  // the first of the row's candidates
  KeptIds ids;   // of them, for a draw

  // Draft logit of a target id; -inf: it has none.
  __device__ float draft_at(const Problem& p, int64_t id) const {
    const int64_t column = p.is_kept || p.token_map ? mapped(p, id) : id < p.draft_vocab ? id : -1;
    return column < 0 ? -INFINITY : draft.at(column);
  }
  __device__ SPECDEC_NOINLINE int64_t mapped(const Problem& p, int64_t id) const {
    if (!p.is_kept) return column_of(p, id);
    int place = -1;
    for (int i = 0; i < p.draft_vocab; ++i) place = ids[i] == id ? i : place;
    return place;
  }

  // Draft logits of eight target ids.
  template <bool kEdited = true>
  __device__ void load_draft8(const Problem& p, int64_t first, float* v) const {
    if (!p.token_map) return draft.load_unmasked8<kEdited, 8>(first, p.draft_vocab, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int64_t column = first + j < p.vocab ? column_of(p, first + j) : -1;
      v[j] = column < 0 ? -INFINITY : draft.at(column);
    }
  }
};

// First id of value 8 run of this thread in the tile at `base`.
__device__ __forceinline__ int64_t first_of(int64_t base, int run) {
  return base + run * (kTile / 2) + threadIdx.x * 8;
}
// Id of value j of this thread in the tile at `base`: two runs of 8 consecutive ids.
__device__ __forceinline__ int64_t id_of(int64_t base, int j) {
  return first_of(base, j >> 3) + (j & 7);
}

// By one thread, field by field: together they are more than its registers.
__device__ inline void load_pair(const Problem& p, int64_t b, const PairTask& task, PairRows* r) {
  r->task = task;
  if (task.kind == kNothing) return;
  const Chain chain = open_chain(p, b);
  r->target = target_row(p, chain, b, task.row);
  if (task.kind != kPair) return;
  r->draft = draft_row(p, chain, b, task.row);
  if (p.is_kept) r->kept = draft_number(p, chain, b, task.row) * p.draft_vocab;
}

__device__ inline NoiseStream pair_noise(const Problem& p, int64_t b, int place) {
  const bool is_residual = p.task == Task::kResidual;
  return p.noise(b, is_residual ? 0 : place, is_residual ? p.purpose : kPurposeResidual);
}

// The target and draft logits of a tile; not of a draft row of candidates.
template <bool kEdited = true>
__device__ inline void load_pair_tile(const Problem& p, const PairRows& r, int64_t base,
                                      float (&v)[kPerThread], float (&l)[kPerThread]) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) l[j] = -INFINITY;
#pragma unroll
  for (int run = 0; run < 2; ++run)
    r.target.load8<kEdited, 8>(first_of(base, run), p.vocab, v + 8 * run);
  if (r.task.kind != kPair) return;
#pragma unroll
  for (int run = 0; run < 2; ++run) r.load_draft8<kEdited>(p, first_of(base, run), l + 8 * run);
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

// Sum over the ids of (a p - b q)+, with q in candidates: as p is normalised, a (1 - what p has of
// them) lies elsewhere. Listed ids count with their listed weights. By all threads.
__device__ inline float kept_mass(const Problem& p, const PairRows& r, int64_t b) {
  const PairTask& t = r.task;
  float here = 0.f, sum = 0.f;
  for (int64_t j = threadIdx.x; j < p.draft_vocab; j += kThreads) {
    const int64_t id = p.kept_ids.load(r.kept + j);
    if (id < 0 || id >= p.vocab) continue;
    const float logit = r.target.at(id);
    float weight = pair_weight(t, logit, r.draft.at(j), id);
    for (int i = 0; i < t.num_listed; ++i) {
      const Listed one = p.work.listed.load(b * p.nodes + i);
      if (one.id == id) weight = one.value;
    }
    here += t.target.at(logit, id);
    sum += weight;
  }
  for (int i = threadIdx.x; i < t.num_listed; i += kThreads) {
    const Listed one = p.work.listed.load(b * p.nodes + i);
    if (draft_column(p, Chain{}, b, t.row, one.id) >= 0) continue;
    here += t.target.at(r.target.at(one.id), one.id);
    sum += one.value;
  }
  here = block_reduce(here, Plus{});
  sum = block_reduce(sum, Plus{});
  return sum + t.a * fmaxf(1.f - here, 0.f);
}

// Ids of the tile whose weights are listed, not computed.
__device__ inline void apply_list(const Problem& p, const PairTask& t, int64_t b, int64_t base,
                                  float (&weight)[kPerThread]) {
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
        if (id_of(base, j) == one.id) weight[j] = one.value;
      }
    }
    __syncthreads();
  }
}

// The tiles of a pair in index order.
__device__ inline PairPartial merged(const Problem& p, int64_t slot) {
  PairPartial all{0.f, 0};
  for (int tile = 0; tile < tiles_of(p.vocab); ++tile) {
    const PairPartial part = p.work.pair_partials.load(slot * p.tiles + tile);
    all.mass += part.mass;
    all.any |= part.any;
  }
  return all;
}

}  // namespace specdec
