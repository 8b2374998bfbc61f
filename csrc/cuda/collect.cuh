// Merging without filters: rows of a request from their tiles, and the best keys of a row that is
// sampled.
#pragma once
#include "decide.cuh"

namespace specdec {

// All rows of a request, a warp a row.
__device__ inline void merge_plain_rows(const Problem& p, const RowTask& t, int64_t b) {
  SPECDEC_SHARED(Request, q);
  if (threadIdx.x == 0) q = load_request(p, b);
  __syncthreads();
  RowTask other = t;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < p.rows(); r += kWarps) {
    if (!find_row(p, b, r, &other)) continue;
    other.parameters = other.is_target ? q.target : q.draft;
    const int tiles = tiles_of(other.is_target ? p.vocab : p.draft_vocab);
    const int64_t slot = p.row_slot(b, r);
    const RowSum sum = merge_row(p, slot, tiles, other.parameters.inv_t, row_races(p, other));
    if (threadIdx.x % 32 == 0) p.work.rows.store(slot, plain_stats(sum, other.parameters));
  }
  __syncthreads();
}

// best[0..num_samples) of request b, in order; 0 where the law has fewer ids.
template <bool kMany>
__device__ void collect_samples(const Problem& p, int64_t b, Key* best) {
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(Parameters, s);
  if (threadIdx.x == 0) {
    r = target_stats(p, b, 0);
    s = target_parameters(p, b);
  }
  __syncthreads();
  const int n = p.num_samples;
  if (!kMany || s.greedy || n == 1) {
    for (int i = threadIdx.x; i < n; i += kThreads) best[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0 && !r.bad) {
      best[0] = r.key;
      if (s.greedy)
        best[0] = row_race(p, b, 0, s).is_excluded(r.argmax) ? 0 : make_key(true, 0.f, r.argmax);
    }
    __syncthreads();
    return;
  }
  if constexpr (kMany) {
    const int64_t first = p.row_slot(b, 0) * p.tiles * n;
    // A filtered row has left its best keys in the place of the first tile.
    const int64_t entries = s.filters() ? n : static_cast<int64_t>(tiles_of(p.vocab)) * n;
    for (int64_t start = 0; start < entries; start += kTile) {
      RegisterKeys<kPerThread + 1> keys;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int64_t i = start + j * kThreads + threadIdx.x;
        keys.key[j] = i < entries ? p.work.keys.load(first + i) : 0;
      }
      const int mine = static_cast<int>(threadIdx.x);
      keys.key[kPerThread] = start > 0 && mine < n ? best[mine] : 0;
      __syncthreads();
      block_top_keys(keys, n, best);
    }
  }
}

}  // namespace specdec
