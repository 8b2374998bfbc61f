// Masses that a block sums alone while it tries the children of a node: the rows were just read,
// and how many are needed no host knows.
#pragma once
#include "tree_walk.cuh"

namespace specdec {

// Sum over the ids of (a p - b q)+; listed ids count with their listed weights. Out of line: it
// needs many registers, what calls it keeps few.
static __device__ SPECDEC_NOINLINE float residual_mass(const Problem& p, int64_t b,
                                                       const PairTask& task) {
  SPECDEC_SHARED(PairRows, r);
  if (threadIdx.x == 0) load_pair(p, b, task, &r);
  __syncthreads();
  if (p.is_kept && task.kind == kPair) {
    const float mass = kept_mass(p, r, b);
    __syncthreads();
    return mass;
  }
  float all = 0.f;
  for (int64_t base = 0; base < p.vocab; base += kTile) {
    float v[kPerThread], weight[kPerThread];
    load_pair_tile(p, r, base, v, weight);
    float mass = 0.f;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t id = id_of(base, j);
      weight[j] = id < p.vocab ? pair_weight(r.task, v[j], weight[j], id) : 0.f;
    }
    apply_list(p, r.task, b, base, weight);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) mass += weight[j];
    all += block_reduce(mass, Plus{});
  }
  __syncthreads();
  return all;
}

// 1 - gone, the mass that a law has left without the `count` listed ids of weight 0. A difference
// that has lost its digits is summed anew.
constexpr double kSureDifference = 1. / 16;
__device__ inline double mass_left(const Problem& p, const Stand& s, int64_t b, double gone,
                                   int count, bool of_draft) {
  if (1. - gone >= kSureDifference) return 1. - gone;
  PairTask t = node_task(s, of_draft ? kPair : kPlain, of_draft ? 0. : 1., of_draft ? -1. : 0.);
  t.num_listed = count;
  return residual_mass(p, b, t);
}

}  // namespace specdec
