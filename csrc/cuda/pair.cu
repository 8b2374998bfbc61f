// A second pass over pairs of rows, with weights w[v] = (a p[v] - b q[v])+:
//   mass     sum_v w[v]      overlap   sum_v min(p[v], q[v])      probs    w[v] / mass
// grid = [batch * pairs * tiles]; a block owns kTile target ids of one pair. Sums of tiles are
// merged in index order by the kernel that needs the sum (`merged`).
#include "kernels.h"
#include "pair.cuh"

namespace specdec {
namespace {

__device__ inline void write_probs(const Problem& p, const PairRows& r, int64_t b, int64_t base,
                                   const float (&v)[kPerThread],
                                   const float (&weight)[kPerThread]) {
  SPECDEC_SHARED(float, mass);
  SPECDEC_SHARED(int, status);
  if (threadIdx.x == 0) {
    mass = p.mass.load(b);
    status = p.status.load(b);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t id = id_of(base, j);
    if (id >= p.vocab) continue;
    float prob = 0.f;
    if (r.task.kind != kNothing) {
      prob = (status & kEmptyResidual) != 0 ? r.task.target.at(v[j], id) : weight[j] / mass;
    }
    p.probs.store(b * p.vocab + id, prob);
  }
}

// Edits need more registers than three blocks have.
template <Pass kPass, bool kEdited>
__global__ void __launch_bounds__(kThreads, kEdited ? 2 : 3)
    pair_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(PairRows, r);
  const int tiles = tiles_of(p.vocab);
  const int64_t slot = blockIdx.x / tiles, b = slot / p.pairs;
  const int tile = static_cast<int>(blockIdx.x - slot * tiles);
  after_last_kernel();
  if (threadIdx.x == 0) load_pair(p, b, p.work.tasks.load(slot), &r);
  __syncthreads();
  if (kPass != Pass::kProbs && r.task.kind == kNothing) return;

  const int64_t base = static_cast<int64_t>(tile) * kTile;
  float v[kPerThread], weight[kPerThread];
  if (r.task.kind != kNothing) load_pair_tile<kEdited>(p, r, base, v, weight);
  float mass = 0.f;
  int any = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t id = id_of(base, j);
    if (r.task.kind == kNothing || id >= p.vocab) {
      weight[j] = 0.f;
    } else if (kPass == Pass::kOverlap) {
      weight[j] = fminf(r.task.target.at(v[j], id), pair_q(r.task, weight[j], id));
    } else {
      weight[j] = pair_weight(r.task, v[j], weight[j], id);
    }
    mass += weight[j];
    any |= weight[j] >= kTiny ? 1 : 0;
  }
  if (kPass == Pass::kProbs) return write_probs(p, r, b, base, v, weight);
  mass = block_reduce(mass, Plus{});
  any = block_reduce(any, Or{});
  if (threadIdx.x == 0) p.work.pair_partials.store(slot * p.tiles + tile, {mass, any});
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

template <Pass kPass>
void launch_pass(const Problem& p, Stream stream) {
  const int64_t blocks = p.batch * p.pairs * tiles_of(p.vocab);
  if (p.edits || p.draft_edits) {
    return launch_phase(pair_kernel<kPass, true>, blocks, kThreads, stream, p);
  }
  launch_phase(pair_kernel<kPass, false>, blocks, kThreads, stream, p);
}

}  // namespace

void launch_pairs(const Problem& p, Pass pass, Stream stream) {
  switch (pass) {
    case Pass::kMass:
      if (p.is_kept) return launch_phase(kept_pair_kernel, p.batch * p.pairs, kThreads, stream, p);
      return launch_pass<Pass::kMass>(p, stream);
    case Pass::kOverlap:
      return launch_pass<Pass::kOverlap>(p, stream);
    case Pass::kProbs:
      return launch_pass<Pass::kProbs>(p, stream);
  }
}

}  // namespace specdec
