// The statistics of a request's rows: what a kernel does before its decision. Without filters the
// block that arrives last for a request merges its rows, a warp a row, and calls
// decide(request, best keys); with filters the second kernel does.
#pragma once
#include "collect.cuh"
#include "handshake.cuh"
#include "refine.cuh"

namespace specdec {

struct BlockIndex {
  int64_t b, slot;
  int r, tile;
};

__device__ inline BlockIndex block_index(const Problem& p, int tiles) {
  const int64_t block = blockIdx.x;
  const int64_t slot = block / tiles, b = slot / p.rows();
  return {b, slot, static_cast<int>(slot - b * p.rows()), static_cast<int>(block - slot * tiles)};
}

// Races the tile and stores its best keys.
template <bool kMany>
__device__ void race_tile(const Problem& p, const RowTask& t, int64_t base, int64_t entry,
                          const float (&v)[kPerThread], Key* best) {
  if constexpr (!kMany) {
    const Key key = block_reduce(race_best<false>(t.race, v, base, t.size), Larger{});
    if (threadIdx.x == 0) p.work.keys.store(entry, key);
  } else {
    RegisterKeys<kPerThread> keys;
    race_all(t.race, v, base, t.size, &keys);
    block_top_keys(keys, p.num_samples, best);
    for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
      p.work.keys.store(entry * p.num_samples + i, best[i]);
    }
  }
}

// A block owns kTile ids of one row in registers; grid = [batch * rows * tiles].
template <bool kFilters, bool kMany, class Decide>
__device__ __forceinline__ void read_tile(const Problem& p, Decide decide) {
  using Best = Key[kMaxSamples];
  SPECDEC_SHARED(RowTask, t);
  SPECDEC_SHARED(Best, best);
  const BlockIndex at = block_index(p, p.tiles);
  if (threadIdx.x == 0) t = make_row_task(p, at.b, at.r);
  __syncthreads();
  // A request without rows is decided by its first block.
  if (t.request_blocks == 0) {
    if (!kFilters && at.r == 0 && at.tile == 0) decide(at.b, best);
    return;
  }
  if (!t.active || at.tile >= t.tiles) return;

  const int64_t base = static_cast<int64_t>(at.tile) * kTile;
  const int64_t entry = at.slot * p.tiles + at.tile;
  float v[kPerThread];
  load_tile(t.row, base, t.size, v);
  Partial raw{};
  if (t.wants_raw) raw_partial(v, &raw);
  mask_tile(t.allowed, base, t.size, v);
  Partial part = tile_partial(t, base, v);
  part.raw_maximum = raw.raw_maximum;
  part.raw_mass = raw.raw_mass;
  if (threadIdx.x == 0) p.work.partials.store(entry, part);
  const bool filters = kFilters && t.parameters.filters();
  if (t.races && !filters) race_tile<kMany>(p, t, base, entry, v, best);
  if constexpr (kFilters) {
    SPECDEC_SHARED(FilterScratch, scratch);
    if (filters) list_tile(p, t, base, entry, part.maximum, v, scratch);
    if (!is_last_block(p.work.row_tickets + at.slot, t.tiles)) return;
    merge_filtered_row(p, t, at.slot, scratch, best);
  } else {
    if (!is_last_block(p.work.request_tickets + at.b, t.request_blocks)) return;
    merge_plain_rows(p, t, at.b);
    decide(at.b, best);
  }
}

// A block owns one row; grid = [batch * rows].
template <class Decide>
__device__ __forceinline__ void refine_rows(const Problem& p, Decide decide) {
  using Best = Key[kMaxSamples];
  SPECDEC_SHARED(RowTask, t);
  SPECDEC_SHARED(Best, best);
  SPECDEC_SHARED(FilterScratch, scratch);
  SPECDEC_SHARED(RowStats, stats);
  const BlockIndex at = block_index(p, 1);
  if (threadIdx.x == 0) {
    t = make_row_task(p, at.b, at.r);
    if (t.active) stats = p.work.rows.load(at.slot);
  }
  __syncthreads();
  if (t.request_rows == 0) {
    if (at.r == 0) decide(at.b, best);
    return;
  }
  if (!t.active) return;
  if (stats.unresolved) refine_row(p, t, at.slot, stats, scratch, best);
  if (!is_last_block(p.work.request_tickets + at.b, t.request_rows)) return;
  decide(at.b, best);
}

}  // namespace specdec
