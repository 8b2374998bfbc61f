// tree_layout: depth[n] = depth[parents[n]] + 1, ancestors[n] = ancestors[parents[n]] | bit n,
// links and leaf paths. grid = [batch * groups]; a block loads the whole tree and owns kRows nodes
// and as many leaves of it, a warp a row.
#include "../torch/tree_args.h"
#include "tree.cuh"

namespace specdec {
namespace {

constexpr int kRows = 32;

struct LayoutParams {
  GlobalIds parents;  // [batch, nodes]
  GlobalVector<int64_t> lengths;
  int64_t max_depth, max_leaves;
  int nodes, groups;
  Global<int32_t> depth, first_child, next_sibling;  // [batch, nodes]
  Global<int64_t> positions;
  Global<int32_t> ancestors;   // [batch, nodes, ceil(nodes / 32)]
  Global<int32_t> leaf_paths;  // [batch, max_leaves, max_depth + 1]
  Global<int32_t> status;
};

// First child and next sibling of a node: the lowest numbers behind it. For a warp.
__device__ void write_links(const LayoutParams& p, const TreeTable& t, int n, int64_t at) {
  const int lane = threadIdx.x % 32, none = -kMaxNodes;
  int child = none, sibling = none;  // negated, so that the larger one is wanted
  for (int m = n + 1 + lane; m < p.nodes; m += 32) {
    if (t.parent[m] == n && -m > child) child = -m;
    if (t.parent[m] >= 0 && t.parent[m] == t.parent[n] && -m > sibling) sibling = -m;
  }
  child = warp_reduce(child, Larger{});
  sibling = warp_reduce(sibling, Larger{});
  if (lane != 0) return;
  p.first_child.store(at, child == none ? -1 : -child);
  p.next_sibling.store(at, sibling == none ? -1 : -sibling);
}

__device__ void write_node(const LayoutParams& p, const TreeTable& t, int64_t b, int n) {
  const int lane = threadIdx.x % 32, words = (p.nodes + 31) / 32;
  const int64_t at = b * p.nodes + n;
  int depth = 0;
  const uint32_t word = ancestor_word(t, n, p.nodes, &depth);
  if (lane < words) p.ancestors.store(at * words + lane, static_cast<int32_t>(word));
  write_links(p, t, n, at);
  if (lane != 0) return;
  p.depth.store(at, depth);
  p.positions.store(at, p.lengths.get(b, 0) + (depth > 0 ? depth : 0));
}

// Nodes from the root to `leaf` (-1: none), from the last 32 columns down. For a warp.
__device__ void write_path(const LayoutParams& p, const TreeTable& t, int leaf, int64_t row) {
  const int lane = threadIdx.x % 32;
  for (int64_t base = p.max_depth / 32 * 32; base >= 0; base -= 32) {
    int node = -1;
    for (; leaf >= 0 && t.depth[leaf] >= base; leaf = t.parent[leaf]) {
      if (t.depth[leaf] - base == lane) node = leaf;
    }
    if (base + lane <= p.max_depth) p.leaf_paths.store(row * (p.max_depth + 1) + base + lane, node);
  }
}

__global__ void __launch_bounds__(kThreads)
    tree_layout_kernel(const __grid_constant__ LayoutParams p) {
  using Leaves = int[kRows];
  SPECDEC_SHARED(TreeTable, tree);
  SPECDEC_SHARED(Leaves, leaves);  // of this block's rows; the largest number comes first
  const int64_t b = blockIdx.x / static_cast<unsigned>(p.groups);
  const int first = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.groups)) * kRows;
  const bool bad = load_tree(p.parents, b, p.nodes, p.max_depth, tree);
  mark_parents(tree, p.nodes, tree.jump);
  int num_leaves = 0;
  for (int base = 0; base < p.nodes; base += kThreads) {
    const int n = p.nodes - 1 - base - static_cast<int>(threadIdx.x);
    const int is_leaf = n >= 0 && tree.present(n) && tree.jump[n] == 0 ? 1 : 0;
    int total = 0;
    const int at = num_leaves + block_exclusive_sum(is_leaf, &total) - first;
    if (is_leaf != 0 && at >= 0 && at < kRows) leaves[at] = n;
    num_leaves += total;
  }
  __syncthreads();
  if (first == 0 && threadIdx.x == 0) {
    p.status.store(b, bad || num_leaves > p.max_leaves ? kBadLayout : 0);
  }
  for (int i = static_cast<int>(threadIdx.x) / 32; i < kRows; i += kWarps) {
    const int row = first + i;
    if (row < p.nodes) write_node(p, tree, b, row);
    if (row < p.max_leaves) {
      write_path(p, tree, row < num_leaves ? leaves[i] : -1, b * p.max_leaves + row);
    }
  }
}

void tree_layout(SPECDEC_TREE_LAYOUT_ARGS) {
  const OnDevice on(parents);
  LayoutParams p{};
  p.parents = GlobalIds(ids_of(parents));
  p.lengths = GlobalVector(vector_of<int64_t>(lengths));
  p.nodes = static_cast<int>(parents.size(1));
  p.max_depth = max_depth;
  p.max_leaves = max_leaves;
  const int64_t rows = max_leaves > p.nodes ? max_leaves : p.nodes;
  p.groups = static_cast<int>((rows + kRows - 1) / kRows);
  p.depth = Global<int32_t>(output<int32_t>(out_depth));
  p.positions = Global<int64_t>(output<int64_t>(out_positions));
  p.first_child = Global<int32_t>(output<int32_t>(out_first_child));
  p.next_sibling = Global<int32_t>(output<int32_t>(out_next_sibling));
  p.ancestors = Global<int32_t>(output<int32_t>(out_ancestors));
  p.leaf_paths = Global<int32_t>(output<int32_t>(out_leaf_paths));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  const int64_t blocks = parents.size(0) * p.groups;
  launch(tree_layout_kernel, blocks, on, p);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(tree_layout, specdec::tree_layout)
