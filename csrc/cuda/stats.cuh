// Statistics of a row from its digest, by a warp: maximum, mass and, where it matters, the argmax.
#pragma once
#include "rows.cuh"

namespace specdec {

constexpr int kNowhere = 0x7fffffff;

// sum exp((l - maximum) / T), and e^s s with s = (l - maximum) / T.
struct Moments {
  float maximum = -INFINITY, mass = 0.f, entropy = 0.f;

  __device__ void shift_to(float most, float inv_t) {
    const float shift = (maximum - most) * inv_t, factor = expf(shift);
    if (maximum != most && mass != 0.f) {
      entropy = factor > 0.f ? factor * (entropy + shift * mass) : 0.f;
      mass *= factor;
    }
    maximum = most;
  }
  __device__ void add(Moments other, float inv_t) {
    const float most = max_nan(maximum, other.maximum);
    shift_to(most, inv_t);
    other.shift_to(most, inv_t);
    mass += other.mass;
    entropy += other.entropy;
  }
  // Over a warp.
  __device__ void merge(float inv_t, bool has_entropy) {
    shift_to(warp_reduce(maximum, [](float a, float b) { return max_nan(a, b); }), inv_t);
    mass = warp_reduce(mass, Plus{});
    if (has_entropy) entropy = warp_reduce(entropy, Plus{});
  }
};

struct RowSum {
  Moments own, raw;
  int tile;  // the first one that has the maximum; of a lane
};

// The tiles of a row, by one warp: lane l has the tiles l, l + 32, ...
__device__ inline RowSum merge_tiles(const Problem& p, const Row& row) {
  const float inv_t = row.parameters.inv_t;
  const bool has_raw = (p.flags & kWantsRaw) != 0;
  RowSum all{};
  float most = -INFINITY;
  for (int tile = threadIdx.x % 32; tile < row.tiles(); tile += 32) {
    const Partial part = p.work.partials.load(row.slot * p.tiles + tile);
    if (part.maximum > most) all.tile = tile;
    most = fmaxf(most, part.maximum);
    all.own.add({part.maximum, part.mass, part.entropy}, inv_t);
    if (has_raw) all.raw.add({part.raw_maximum, part.raw_mass, 0.f}, 1.f);
  }
  all.own.merge(inv_t, (p.flags & kWantsEntropy) != 0);
  if (has_raw) all.raw.merge(1.f, false);
  all.tile = warp_reduce(most == all.own.maximum ? all.tile : kNowhere, Smaller{});
  return all;
}

// First place of a number among 64, of which the first eight lanes have eight each.
__device__ inline int place_of(float number, const float (&v)[8]) {
  int place = kNowhere;
#pragma unroll
  for (int j = 7; j >= 0; --j) {
    if (v[j] == number) place = static_cast<int>(threadIdx.x) % 32 * 8 + j;
  }
  return warp_reduce(place, Smaller{});
}

// The first id of the maximum: in the first block of the tile that has it.
template <bool kEdited>
__device__ inline int find_argmax(const Problem& p, const Row& row, int tile, float maximum) {
  static_assert(kTileBlocks == 64 && kBlock == 64);
  const int lane = threadIdx.x % 32;
  float v[8];
#pragma unroll
  for (float& one : v) one = NAN;
  const int64_t block = tile * int64_t{kTileBlocks};
  if (lane < 8)
    block_maxima_of(p, row.slot, row.type<kEdited>()).load8(block + lane * 8, row.blocks(), v);
  const int64_t first = (block + place_of(maximum, v)) * kBlock;
  if (lane < 8) row.load8<kEdited>(first + lane * 8, v);
  return static_cast<int>(first) + place_of(maximum, v);
}

// Statistics of a row before its filters; by one warp, for its first lane.
template <bool kEdited>
__device__ inline RowStats plain_stats(const Problem& p, const Row& row) {
  const Parameters& s = row.parameters;
  const RowSum sum = merge_tiles(p, row);
  RowStats r{};
  r.maximum = sum.own.maximum;
  r.mass = s.greedy ? 1.f : sum.own.mass;
  r.threshold = s.greedy ? r.maximum : -INFINITY;
  if ((p.flags & kWantsEntropy) != 0 && !s.greedy) {
    r.entropy = logf(r.mass) - sum.own.entropy / r.mass;
  }
  r.raw_maximum = sum.raw.maximum;
  r.raw_mass = sum.raw.mass;
  r.bad = !is_finite(r.maximum);
  if ((s.greedy || is_argmax_rule(p)) && !r.bad) {
    r.argmax = find_argmax<kEdited>(p, row, sum.tile, r.maximum);
  }
  return r;
}

// Whether the kernel behind the digest of a chain settles its rows itself, two a warp at most: a
// kernel of their own takes 3.5 us (H200), which is a seventh of a call at batch 1.
SPECDEC_HD bool settles_rows(const Problem& p) {
  return p.task == Task::kChain && p.rows() <= 2 * kWarps && !p.filters && !races_rows(p) &&
         p.rule != Rule::kTopM && p.rule != Rule::kBlock && !p.is_kept && !p.edits &&
         !p.draft_edits;
}

using Settled = RowStats[2 * kWarps];

// Statistics of the rows of a request, a warp a row.
__device__ inline void settle_rows(const Problem& p, int64_t b, Settled& settled, Request* q) {
  using Rows = Row[kWarps];
  SPECDEC_SHARED(Rows, rows);
  Row& row = rows[threadIdx.x / 32];
  for (int r = static_cast<int>(threadIdx.x) / 32; r < p.rows(); r += kWarps) {
    if (threadIdx.x % 32 == 0) row = row_of(p, *q, b, p.row_slot(b, r));
    __syncwarp();
    if (row.active) {
      const RowStats s = plain_stats<false>(p, row);
      if (threadIdx.x % 32 == 0) settled[r] = s;
    }
    __syncwarp();
  }
  if (threadIdx.x == 0) q->settled = settled;
  __syncthreads();
}

}  // namespace specdec
