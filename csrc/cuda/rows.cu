// Statistics of every row that a request has, and the decision on them.
//   maximum, argmax, mass = sum_v exp((l[v] - maximum) / T), entropy, rank of the drafted id,
//   winner of the race
// grid = [batch * rows * tiles]; a block owns kTile ids of one row in registers. The block that
// arrives last for a request merges its rows, a warp a row, and decides. With filters there are two
// kernels: the first also lists the largest values of each tile and resolves the thresholds of a
// row in the block that arrives last for it; the second has one block a row, which reads the row
// again only where the lists did not suffice, and then decides.
#include "collect.cuh"
#include "decide_op.cuh"
#include "handshake.cuh"
#include "kernels.h"
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
    const Key key = block_reduce(race_best(t.race, v, base, t.size), Larger{});
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

// Out of line: it runs once a request, and must not cost the tiles their registers.
static __device__ SPECDEC_NOINLINE void decide(const Problem& p, int64_t b, const Key* keys) {
  switch (p.task) {
    case Task::kSample:
      return decide_sample(p, b, keys);
    case Task::kChain:
      return decide_chain(p, b);
    case Task::kRatios:
      return decide_ratios(p, b);
    case Task::kResidual:
      return decide_residual(p, b);
  }
}

template <bool kMany>
__device__ void decide_request(const Problem& p, int64_t b, Key* best) {
  if (p.task == Task::kSample) collect_samples<kMany>(p, b, best);
  __syncthreads();
  decide(p, b, best);
}

// kMany: more than one sample a row, which needs more registers.
template <bool kFilters, bool kMany>
__global__ void __launch_bounds__(kThreads, kFilters || kMany ? 2 : 3)
    rows_kernel(const __grid_constant__ Problem p) {
  using Best = Key[kMaxSamples];
  SPECDEC_SHARED(RowTask, t);
  SPECDEC_SHARED(Best, best);
  const BlockIndex at = block_index(p, p.tiles);
  if (threadIdx.x == 0) t = make_row_task(p, at.b, at.r);
  __syncthreads();
  // A request without rows is decided by its first block.
  if (t.request_blocks == 0) {
    if (!kFilters && at.r == 0 && at.tile == 0) decide_request<kMany>(p, at.b, best);
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
    decide_request<kMany>(p, at.b, best);
  }
}

// grid = [batch * rows]; a block owns one row.
__global__ void __launch_bounds__(kThreads, 1) refine_kernel(const __grid_constant__ Problem p) {
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
    if (at.r == 0) decide_request<true>(p, at.b, best);
    return;
  }
  if (!t.active) return;
  if (stats.unresolved) refine_row(p, t, at.slot, stats, scratch, best);
  if (!is_last_block(p.work.request_tickets + at.b, t.request_rows)) return;
  decide_request<true>(p, at.b, best);
}

// columns[token_map[c]] = c; grid = [ceil(draft_vocab / kThreads)].
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ Problem p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.draft_vocab) return;
  const int64_t id = p.token_map.load(column);
  if (id >= 0 && id < p.vocab) p.work.columns.store(id, static_cast<int32_t>(column));
}

void launch_rows(const Problem& p, Stream stream) {
  if (p.work.columns) {
    launch(columns_kernel, (p.draft_vocab + kThreads - 1) / kThreads, kThreads, stream, p);
  }
  const int64_t rows = p.batch * (p.target_rows + p.draft_rows);
  if (p.filters) {
    if (p.num_samples == 1) {
      launch(rows_kernel<true, false>, rows * p.tiles, kThreads, stream, p);
    } else {
      launch(rows_kernel<true, true>, rows * p.tiles, kThreads, stream, p);
    }
    launch(refine_kernel, rows, kThreads, stream, p);
  } else if (p.num_samples == 1) {
    launch(rows_kernel<false, false>, rows * p.tiles, kThreads, stream, p);
  } else {
    launch(rows_kernel<false, true>, rows * p.tiles, kThreads, stream, p);
  }
}

}  // namespace specdec
