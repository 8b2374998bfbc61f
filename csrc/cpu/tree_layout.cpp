// tree_layout: depth[n] = depth[parents[n]] + 1, ancestors[n] = ancestors[parents[n]] | bit n.
#include <algorithm>

#include "../torch/tree_args.h"
#include "team.h"
#include "tree.h"

namespace specdec::cpu {
namespace {

// Nodes from the root to each leaf, the last leaf first; false if there are more than rows.
bool write_leaf_paths(const Tree& tree, int64_t max_depth, int64_t max_leaves, int32_t* paths) {
  const int64_t width = max_depth + 1;
  std::fill(paths, paths + max_leaves * width, -1);
  int64_t leaves = 0;
  for (int64_t n = tree.nodes - 1; n >= 0; --n) {
    if (!tree.has(n) || tree.first_child[n] >= 0) continue;
    if (leaves == max_leaves) return false;
    int32_t* path = paths + leaves++ * width;
    for (auto node = static_cast<int32_t>(n); node >= 0; node = tree.parent[node]) {
      path[tree.depth[node]] = node;
    }
  }
  return true;
}

void tree_layout(SPECDEC_TREE_LAYOUT_ARGS) {
  const int64_t batch = parents.size(0), nodes = parents.size(1);
  const Ids given = ids_of(parents);
  const auto length = vector_of<int64_t>(lengths);
  auto* depth = output<int32_t>(out_depth);
  auto* positions = output<int64_t>(out_positions);
  auto* first_child = output<int32_t>(out_first_child);
  auto* next_sibling = output<int32_t>(out_next_sibling);
  auto* ancestors = output<uint32_t>(out_ancestors);
  auto* leaf_paths = output<int32_t>(out_leaf_paths);
  auto* status = output<int32_t>(out_status);
  for_requests(batch, [&](int64_t b, const Team&) {
    const Tree tree(given, b, nodes, max_depth);
    const int64_t first = b * nodes, root_position = length.get(b, 0);
    std::copy(tree.depth.begin(), tree.depth.end(), depth + first);
    std::copy(tree.first_child.begin(), tree.first_child.end(), first_child + first);
    std::copy(tree.next_sibling.begin(), tree.next_sibling.end(), next_sibling + first);
    for (int64_t n = 0; n < nodes; ++n) {
      positions[first + n] = root_position + std::max(tree.depth[n], 0);
    }
    ancestor_bits(tree, 0, ancestors + first * bit_words(nodes));
    int32_t* paths = leaf_paths + b * max_leaves * (max_depth + 1);
    const bool fits = write_leaf_paths(tree, max_depth, max_leaves, paths);
    status[b] = fits ? tree.status() : kBadLayout;
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(tree_layout_out, tree_layout)
}  // namespace specdec::cpu
