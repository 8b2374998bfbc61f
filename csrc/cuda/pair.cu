// A second pass over pairs of rows, with weights w[v] = (a p[v] - b q[v])+:
//   mass     sum_v w[v]      overlap   sum_v min(p[v], q[v])      probs    w[v] / mass
// grid = [batch * pairs * parts]; a block has every parts-th tile of one pair. Sums of tiles are
// merged in index order by the kernel that needs the sum (`merged`).
#include "kernels.h"
#include "pair.cuh"

namespace specdec {
namespace {

// A thread has eight ids behind one another: 16 bytes at once where the results lie so.
__device__ inline void store_eight(const Problem& p, int64_t b, int64_t first,
                                   const float (&prob)[8]) {
  const Global<float> to = p.probs + (b * p.vocab + first);
  if (to.is_aligned() && first + 8 <= p.vocab) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const Words four{{float_bits(prob[j]), float_bits(prob[j + 1]), float_bits(prob[j + 2]),
                        float_bits(prob[j + 3])}};
      to.as<Words>().store(j / 4, four);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (first + j < p.vocab) to.store(j, prob[j]);
  }
}

struct Kept {  // of a request: 1 / the sum of its weights
  float part;
  int status;
};

__device__ inline void write_probs(const Problem& p, const PairRows& r, const Kept& kept, int64_t b,
                                   int64_t base, const float (&v)[kPerThread],
                                   const float (&weight)[kPerThread]) {
#pragma unroll
  for (int run = 0; run < 2; ++run) {
    const int64_t first = first_of(base, run);
    float prob[8] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (r.task.kind == kNothing) continue;
      const int i = 8 * run + j;
      prob[j] = (kept.status & kEmptyResidual) != 0 ? r.task.target.at(v[i], first + j)
                                                    : weight[i] * kept.part;
    }
    store_eight(p, b, first, prob);
  }
}

// Of a tile; `turn` changes from tile to tile, so that one barrier orders two.
__device__ inline PairPartial tile_sum(float mass, bool any, int turn) {
  using PerWarp = PairPartial[2][kWarps];
  SPECDEC_SHARED(PerWarp, sums);
  mass = warp_reduce(mass, Plus{});
  const int some = warp_reduce(any ? 1 : 0, Or{});
  if (threadIdx.x % 32 == 0) sums[turn][threadIdx.x / 32] = {mass, some};
  __syncthreads();
  PairPartial all = sums[turn][0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    all.mass += sums[turn][w].mass;
    all.any |= sums[turn][w].any;
  }
  return all;
}

template <Pass kPass>
__device__ __forceinline__ float weight_of(const PairTask& t, float p_logit, float q_logit,
                                           int64_t id) {
  if (kPass != Pass::kOverlap) return pair_weight(t, p_logit, q_logit, id);
  return fminf(t.target.at(p_logit, id), pair_q(t, q_logit, id));
}

// Weights of a tile, `weight` holding the draft logits.
template <Pass kPass>
__device__ __forceinline__ void weigh(const PairTask& t, int64_t base, int64_t vocab,
                                      const float (&v)[kPerThread], float (&weight)[kPerThread]) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t id = id_of(base, j);
    const bool is_there = t.kind != kNothing && id < vocab;
    weight[j] = is_there ? weight_of<kPass>(t, v[j], weight[j], id) : 0.f;
  }
}

// The same of a whole tile of two rows that are both drawn from: half of the instructions.
template <Pass kPass>
__device__ __forceinline__ void weigh_usual(const PairTask& task, const float (&v)[kPerThread],
                                            float (&weight)[kPerThread]) {
  PairTask t = task;
  t.kind = kPair;
  t.target.only = t.draft.only = -1;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) weight[j] = weight_of<kPass>(t, v[j], weight[j], 0);
}

// Edits and results need more registers than four blocks have.
template <Pass kPass, bool kEdited>
__global__ void __launch_bounds__(kThreads, kEdited || kPass == Pass::kProbs ? 3 : 4)
    pair_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(PairRows, r);
  SPECDEC_SHARED(Kept, kept);
  const int64_t slot = blockIdx.x / static_cast<unsigned>(p.parts), b = slot / p.pairs;
  after_last_kernel();
  if (threadIdx.x == 0) load_pair(p, b, p.work.tasks.load(slot), &r);
  if (kPass == Pass::kProbs && threadIdx.x == 32) kept = {1.f / p.mass.load(b), p.status.load(b)};
  __syncthreads();
  if (kPass != Pass::kProbs && r.task.kind == kNothing) return;

  int turn = 0;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x - slot * p.parts); tile < tiles_of(p.vocab);
       tile += p.parts) {
    const int64_t base = static_cast<int64_t>(tile) * kTile;
    float v[kPerThread], weight[kPerThread];
    if (r.task.kind != kNothing) load_pair_tile<kEdited>(p, r, base, v, weight);
    const bool is_usual = r.task.kind == kPair && r.task.target.only < 0 && r.task.draft.only < 0;
    if (is_usual && base + kTile <= p.vocab) {
      weigh_usual<kPass>(r.task, v, weight);
    } else {
      weigh<kPass>(r.task, base, p.vocab, v, weight);
    }
    float mass = 0.f, most = 0.f;
#pragma unroll
    for (const float one : weight) {
      mass += one;
      most = fmaxf(most, one);
    }
    if constexpr (kPass == Pass::kProbs) {
      write_probs(p, r, kept, b, base, v, weight);
    } else {
      const PairPartial sum = tile_sum(mass, most >= kTiny, turn);
      if (threadIdx.x == 0) p.work.pair_partials.store(slot * p.tiles + tile, sum);
      turn ^= 1;
    }
  }
}

// The mass of a pair whose draft row holds candidates, as its first tile's. grid = [batch * pairs]
__global__ void __launch_bounds__(kThreads) kept_pair_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(PairRows, r);
  const int64_t slot = blockIdx.x, b = slot / p.pairs;
  after_last_kernel();
  if (threadIdx.x == 0) load_pair(p, b, p.work.tasks.load(slot), &r);
  __syncthreads();
  if (r.task.kind == kNothing) return;
  const float mass = kept_mass(p, r, b);
  for (int tile = threadIdx.x; tile < tiles_of(p.vocab); tile += kThreads) {
    const PairPartial part = {tile == 0 ? mass : 0.f, tile == 0 && mass >= kTiny ? 1 : 0};
    p.work.pair_partials.store(slot * p.tiles + tile, part);
  }
}

// Thread blocks a multiprocessor: finding a pair takes as long as a tile, and the last blocks run
// alone.
constexpr int64_t kBlocksEach = 16;

template <Pass kPass>
void launch_pass(const Problem& problem, const OnDevice& on) {
  Problem p = problem;
  const int64_t pairs = p.batch * p.pairs, tiles = tiles_of(p.vocab);
  if (pairs == 0) return;
  const int64_t wanted = (kBlocksEach * multiprocessors() + pairs - 1) / pairs;
  p.parts = static_cast<int>(wanted < tiles ? wanted : tiles);
  if (p.edits || p.draft_edits) {
    return launch_phase(pair_kernel<kPass, true>, pairs * p.parts, on, p);
  }
  launch_phase(pair_kernel<kPass, false>, pairs * p.parts, on, p);
}

}  // namespace

void launch_pairs(const Problem& p, Pass pass, const OnDevice& on) {
  switch (pass) {
    case Pass::kMass:
      if (p.is_kept) return launch_phase(kept_pair_kernel, p.batch * p.pairs, on, p);
      return launch_pass<Pass::kMass>(p, on);
    case Pass::kOverlap:
      return launch_pass<Pass::kOverlap>(p, on);
    case Pass::kProbs:
      return launch_pass<Pass::kProbs>(p, on);
  }
}

}  // namespace specdec
