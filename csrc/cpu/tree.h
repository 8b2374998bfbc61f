// One request's tree of candidates, checked. Node 0 is the root; a parent comes before its
// children, so one pass in node order settles depths and ancestors, and one backwards the links.
#pragma once
#include <vector>

#include "../common/params.h"

namespace specdec::cpu {

// The children of one node in ascending order, as a range.
struct Children {
  struct Iterator {
    int64_t node;
    const int32_t* next_sibling;
    int64_t operator*() const { return node; }
    bool operator!=(const Iterator& other) const { return node != other.node; }
    void operator++() { node = next_sibling[node]; }
  };
  Iterator first;
  Iterator begin() const { return first; }
  Iterator end() const { return {-1, nullptr}; }
};

// -1 stands for no node: the root's parent, a leaf's child, and everything about padding.
struct Tree {
  // A malformed tree, or one deeper than max_depth, is its root alone.
  Tree(const Ids& parents, int64_t b, int64_t nodes, int64_t max_depth);

  int64_t nodes;
  bool bad;
  std::vector<int32_t> parent, depth, first_child, next_sibling;  // [nodes]; siblings ascend

  bool has(int64_t node) const { return depth[node] >= 0; }
  Children children(int64_t node) const { return {{first_child[node], next_sibling.data()}}; }
  int32_t status() const { return bad ? kBadLayout : 0; }
  void keep_root_only();  // and call it bad
  // Rank of each node among the nodes of its depth: the index of its coin.
  std::vector<int32_t> ranks() const;
};

inline int64_t bit_words(int64_t nodes) { return (nodes + 31) / 32; }

// Bit j % 32 of word j / 32 of row n: j is n or an ancestor less than `window` above it (0: any).
// Padding has its own bit alone. rows: [nodes, bit_words(nodes)].
void ancestor_bits(const Tree& tree, int64_t window, uint32_t* rows);

}  // namespace specdec::cpu
