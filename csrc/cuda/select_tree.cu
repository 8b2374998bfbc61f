// select_tree: the root and the num_nodes - 1 best candidates, where a candidate counts
// score[n] = min(score[n], score[parents[n]]), ties to the smaller index. A child never comes
// before its parent in that order, so what is kept is connected. grid = [batch]; a block owns a
// request, its scores in shared memory.
#include "../torch/tree_args.h"
#include "tree.cuh"

namespace specdec {
namespace {

struct SelectParams {
  GlobalIds token_ids, parents;  // [batch, candidates]
  LogitTable scores;             // [batch, candidates]
  int candidates, num_nodes;
  GlobalIds out_ids;  // [batch, num_nodes]
  Global<int32_t> out_parents, source, status;
};

using Scores = float[kMaxNodes];
using Numbers = int[kMaxNodes];

// Whether fewer than num_nodes candidates come before n, and n can be chosen at all.
__device__ bool is_chosen(const Scores& score, int nodes, int num_nodes, int n) {
  const float mine = score[n];
  if (mine == -INFINITY) return false;
  int before = 0;
  for (int m = 0; m < nodes; ++m) {
    before += score[m] > mine || (score[m] == mine && m < n) ? 1 : 0;
  }
  return before < num_nodes;
}

__global__ void __launch_bounds__(kThreads)
    select_tree_kernel(const __grid_constant__ SelectParams p) {
  SPECDEC_SHARED(TreeTable, tree);
  SPECDEC_SHARED(Scores, score);
  SPECDEC_SHARED(Numbers, number);  // of a chosen candidate in the result, else -1
  const int64_t b = blockIdx.x;
  const int nodes = p.candidates;
  const bool bad = load_parents(p.parents, b, nodes, tree);
  const LogitRow row = p.scores.row(0, b);
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    const bool usable = tree.parent[n] >= 0 && p.token_ids.load(b * nodes + n) >= 0;
    const float given = usable ? row.at(n) : -INFINITY;
    score[n] = n == 0 ? INFINITY : given == given ? given : -INFINITY;
  }
  follow_parents(tree, nodes, score, [](float a, float b) { return fminf(a, b); });
  int filled = 0;
  for (int base = 0; base < nodes; base += kThreads) {
    const int n = base + static_cast<int>(threadIdx.x);
    const int chosen = n < nodes && is_chosen(score, nodes, p.num_nodes, n) ? 1 : 0;
    int total = 0;
    const int at = filled + block_exclusive_sum(chosen, &total);
    if (n < nodes) number[n] = chosen != 0 ? at : -1;
    filled += total;
  }
  __syncthreads();
  const int64_t first = b * p.num_nodes;
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    if (number[n] < 0) continue;
    const int64_t at = first + number[n];
    p.out_ids.store(at, p.token_ids.load(b * nodes + n));
    p.out_parents.store(at, tree.parent[n] < 0 ? -1 : number[tree.parent[n]]);
    p.source.store(at, n);
  }
  for (int i = filled + static_cast<int>(threadIdx.x); i < p.num_nodes; i += kThreads) {
    p.out_ids.store(first + i, -1);
    p.out_parents.store(first + i, -1);
    p.source.store(first + i, -1);
  }
  if (threadIdx.x == 0) p.status.store(b, bad ? kBadLayout : 0);
}

void select_tree(SPECDEC_SELECT_TREE_ARGS) {
  const OnDevice on(parents);
  SelectParams p{};
  p.token_ids = GlobalIds(ids_of(token_ids));
  p.parents = GlobalIds(ids_of(parents));
  const Logits rows = logits_of(scores);
  p.scores = LogitTable(rows, 0, rows.row_stride);
  p.candidates = static_cast<int>(parents.size(1));
  p.num_nodes = static_cast<int>(num_nodes);
  p.out_ids = GlobalIds(ids_of(out_token_ids));
  p.out_parents = Global<int32_t>(output<int32_t>(out_parents));
  p.source = Global<int32_t>(output<int32_t>(out_source));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  launch(select_tree_kernel, parents.size(0), on, p);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(select_tree, specdec::select_tree)
