// Checking and linking a tree of candidates.
#include "tree.h"

#include <algorithm>

namespace specdec::cpu {

Tree::Tree(const Ids& parents, int64_t b, int64_t nodes, int64_t max_depth)
    : nodes(nodes),
      bad(parents.at(b, 0) != -1),
      parent(nodes, -1),
      depth(nodes, -1),
      first_child(nodes, -1),
      next_sibling(nodes, -1) {
  depth[0] = 0;
  for (int64_t n = 1; n < nodes && !bad; ++n) {
    const int64_t above = parents.at(b, n);
    if (above == -1) continue;
    bad = above < 0 || above >= n || !has(above) || depth[above] >= max_depth;
    if (bad) break;
    parent[n] = static_cast<int32_t>(above);
    depth[n] = depth[above] + 1;
  }
  if (bad) {
    keep_root_only();
    return;
  }
  for (int64_t n = nodes - 1; n > 0; --n) {
    if (parent[n] < 0) continue;
    next_sibling[n] = first_child[parent[n]];
    first_child[parent[n]] = static_cast<int32_t>(n);
  }
}

void Tree::keep_root_only() {
  bad = true;
  for (auto* of : {&parent, &depth, &first_child, &next_sibling}) {
    std::fill(of->begin(), of->end(), -1);
  }
  depth[0] = 0;
}

std::vector<int32_t> Tree::ranks() const {
  std::vector<int32_t> rank(nodes, 0), seen(nodes, 0);
  for (int64_t n = 0; n < nodes; ++n) {
    if (has(n)) rank[n] = seen[depth[n]]++;
  }
  return rank;
}

void ancestor_bits(const Tree& tree, int64_t window, uint32_t* rows) {
  const int64_t words = bit_words(tree.nodes);
  for (int64_t n = 0; n < tree.nodes; ++n) {
    uint32_t* row = rows + n * words;
    if (tree.parent[n] < 0) {
      std::fill(row, row + words, 0u);
    } else {
      std::copy_n(rows + tree.parent[n] * words, words, row);
    }
    row[n / 32] |= 1u << (n % 32);
    if (window == 0 || tree.depth[n] < window) continue;
    int64_t left_behind = n;  // the parent's row still holds the one ancestor that is too far now
    for (int64_t step = 0; step < window; ++step) left_behind = tree.parent[left_behind];
    row[left_behind / 32] &= ~(1u << (left_behind % 32));
  }
}

}  // namespace specdec::cpu
