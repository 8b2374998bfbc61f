// Statistics of every row that a request has, and the decision on them.
//   maximum, argmax, mass = sum_v exp((l[v] - maximum) / T), entropy, rank of the drafted id,
//   winner of the race
// grid = [batch * rows * tiles]; a block owns kTile ids of one row in registers. The block that
// arrives last for a request merges its rows, a warp a row, and decides. With filters there are two
// kernels: the first also lists the largest values of each tile and resolves the thresholds of a
// row in the block that arrives last for it; the second has one block a row, which reads the row
// again only where the lists did not suffice, and then decides.
#include "decide_op.cuh"
#include "kernels.h"
#include "read_rows.cuh"

namespace specdec {

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
    case Task::kTree:  // verify_tree.cu
      return;
  }
}

template <bool kMany>
__device__ void decide_request(const Problem& p, int64_t b, Key* best) {
  if (p.task == Task::kSample) collect_samples<kMany>(p, b, best);
  __syncthreads();
  decide(p, b, best);
}

// kMany: more than one sample a row, or ids that are mapped or excluded: needs more registers.
template <bool kFilters, bool kMany>
__global__ void __launch_bounds__(kThreads, kFilters || kMany ? 2 : 3)
    rows_kernel(const __grid_constant__ Problem p) {
  read_tile<kFilters, kMany>(p, [&](int64_t b, Key* best) { decide_request<kMany>(p, b, best); });
}

__global__ void __launch_bounds__(kThreads, 1) refine_kernel(const __grid_constant__ Problem p) {
  refine_rows(p, [&](int64_t b, Key* best) { decide_request<true>(p, b, best); });
}

// columns[token_map[c]] = c; grid = [ceil(draft_vocab / kThreads)].
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ Problem p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.draft_vocab) return;
  const int64_t id = p.token_map.load(column);
  if (id >= 0 && id < p.vocab) p.work.columns.store(id, static_cast<int32_t>(column));
}

void launch_columns(const Problem& p, Stream stream) {
  if (!p.work.columns) return;
  launch(columns_kernel, (p.draft_vocab + kThreads - 1) / kThreads, kThreads, stream, p);
}

void launch_rows(const Problem& p, Stream stream) {
  launch_columns(p, stream);
  const int64_t rows = p.batch * (p.target_rows + p.draft_rows);
  const bool is_named = p.task == Task::kSample && (p.num_exclude > 0 || p.token_map);
  const bool is_alone = p.num_samples == 1 && !is_named;
  if (p.filters) {
    if (is_alone) {
      launch(rows_kernel<true, false>, rows * p.tiles, kThreads, stream, p);
    } else {
      launch(rows_kernel<true, true>, rows * p.tiles, kThreads, stream, p);
    }
    launch(refine_kernel, rows, kThreads, stream, p);
  } else if (is_alone) {
    launch(rows_kernel<false, false>, rows * p.tiles, kThreads, stream, p);
  } else {
    launch(rows_kernel<false, true>, rows * p.tiles, kThreads, stream, p);
  }
}

}  // namespace specdec
