// Ids that have an edit, in the digest of a row. The stream leaves them out; then a lane takes one
// at a time. They are few: a lane that looked for the edits of each of its values would do little
// else.
#pragma once
#include "digest.cuh"

namespace specdec {

constexpr int kListedWarps = 2;  // of a tile, however many tiles a share has

// Of a float, for a maximum in which NaN stays; from_ordered_bits is the inverse.
__device__ __forceinline__ uint32_t max_bits(float x) {
  return x == x ? ordered_bits(x) : 0xffffffffu;
}

template <class D>
__device__ __forceinline__ void no_edits_yet(D& parts) {
  SPECDEC_ROLLED
  for (int i = threadIdx.x; i < D::kBlocks; i += kThreads) parts.edited[i] = 0;
}

// Where the edits of a warp's tile begin and end, in lanes 0 and 1: asked for with the row itself.
template <int kTiles>
__device__ __forceinline__ int listed_bound(const Share& t) {
  const int lane = static_cast<int>(threadIdx.x) % 32, tile = threadIdx.x / 32 / kListedWarps;
  if (!t.values.edits || tile >= kTiles || tile >= t.tiles || lane > 1) return 0;
  const int64_t last = (t.size + kBlock - 1) / kBlock;
  const int64_t block = t.base / kBlock + (tile + lane) * kTileBlocks;
  return t.values.edits.start.load(block < last ? block : last);
}

// The listed ids of each tile: into the maxima of its blocks, and into what its first warps have of
// it.
template <int kTiles, class D>
__device__ __forceinline__ void take_listed(const Share& t, int bound, D& parts) {
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = threadIdx.x / 32;
  const int tile = warp / kListedWarps, part = warp % kListedWarps;
  const int at = __shfl_sync(0xffffffffu, bound, 0), end = __shfl_sync(0xffffffffu, bound, 1);
  if (at == end) return;
  const EditedRow edits = t.values.edits;
  Weighed all{-INFINITY, {}};
  SPECDEC_ROLLED
  for (int i = at + part * 32 + lane; i < end; i += kListedWarps * 32) {
    const int64_t id = edits.id(i);
    const float x = t.values.listed_at(id, i);
    atomicMax(parts.edited + (id - t.base) / kBlock, max_bits(x));
    all = together<D::kEntropy>(all, {x, {x == -INFINITY ? 0.f : 1.f, 0.f}}, t.scale);
  }
  merge_lanes<32, D::kMass, D::kEntropy>(t.scale, &all.maximum, &all.sums);
  if (lane == 0) parts.own.add(tile * kWarps + part, all, t.scale);
}

// The maxima of the blocks, once all are taken: in float32 if the row has edits.
template <LogitType kType, int kTiles, class D>
__device__ __forceinline__ void store_blocks(const Share& t, const D& parts) {
  const int count = (t.tiles < kTiles ? t.tiles : kTiles) * kTileBlocks;
  SPECDEC_ROLLED
  for (int i = threadIdx.x; i < count; i += kThreads) {
    if (!t.values.edits) {
      t.maxima.as<typename D::Bits>().store(i, parts.blocks[i]);
      continue;
    }
    const float streamed = value_of<kType>(Words{{parts.blocks[i]}}, 0);
    const uint32_t edited = parts.edited[i];
    const float listed = edited == 0 ? -INFINITY : from_ordered_bits(edited);
    t.maxima.as<float>().store(i, max_nan(streamed, listed));
  }
}

}  // namespace specdec
