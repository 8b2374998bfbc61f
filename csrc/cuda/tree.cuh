// Trees given by their parents, in shared memory: checked and followed by all threads of a block.
// parents[0] = -1, 0 <= parents[n] < n; -1 for n > 0 is padding. Parents come before their
// children, so whoever walks up from a checked node ends at the root.
#pragma once
#include "block.cuh"
#include "global.cuh"

namespace specdec {

constexpr int kMaxNodes = 1024, kNodesPerThread = kMaxNodes / kThreads;

struct TreeTable {
  int parent[kMaxNodes];  // -1 at the root and at padding
  int depth[kMaxNodes];   // 0 at the root, -1 at padding
  int jump[kMaxNodes];    // free once the tree is loaded

  __device__ bool present(int n) const { return n == 0 || parent[n] >= 0; }
};

// Nothing is left but the root.
__device__ inline void keep_root(TreeTable& t, int nodes) {
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    t.parent[n] = -1;
    t.depth[n] = n == 0 ? 0 : -1;
  }
  __syncthreads();
}

// Parents of request b. Returns, to all threads, whether they are malformed: then the root is left.
__device__ inline bool load_parents(const GlobalIds& parents, int64_t b, int nodes, TreeTable& t) {
  int bad = 0;
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    const int64_t given = parents.load(b * nodes + n);
    const bool fits = given == -1 || (given >= 0 && given < n);
    bad |= fits ? 0 : 1;
    t.parent[n] = fits ? static_cast<int>(given) : -1;
  }
  __syncthreads();
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    const int parent = t.parent[n];
    if (parent > 0 && t.parent[parent] < 0) bad = 1;
  }
  bad = block_reduce(bad, Or{});
  if (bad != 0) keep_root(t, nodes);
  return bad != 0;
}

// value[n] = merge of the values from n up to the root, by doubling: after round i a node has
// jumped 2^i steps. The root is merged more than once.
template <class T, class Merge>
__device__ inline void follow_parents(TreeTable& t, int nodes, T (&value)[kMaxNodes], Merge merge) {
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    t.jump[n] = t.parent[n] >= 0 ? t.parent[n] : n;
  }
  __syncthreads();
  for (int steps = 1; steps < nodes; steps *= 2) {
    T merged[kNodesPerThread];
    int jump[kNodesPerThread];
#pragma unroll
    for (int i = 0; i < kNodesPerThread; ++i) {
      const int n = i * kThreads + static_cast<int>(threadIdx.x);
      if (n >= nodes) continue;
      merged[i] = merge(value[n], value[t.jump[n]]);
      jump[i] = t.jump[t.jump[n]];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNodesPerThread; ++i) {
      const int n = i * kThreads + static_cast<int>(threadIdx.x);
      if (n >= nodes) continue;
      value[n] = merged[i];
      t.jump[n] = jump[i];
    }
    __syncthreads();
  }
}

// The tree of request b; deeper than max_depth is malformed too. Returns whether it is malformed.
__device__ inline bool load_tree(const GlobalIds& parents, int64_t b, int nodes, int64_t max_depth,
                                 TreeTable& t) {
  const bool bad = load_parents(parents, b, nodes, t);
  for (int n = threadIdx.x; n < nodes; n += kThreads) t.depth[n] = t.parent[n] >= 0 ? 1 : 0;
  follow_parents(t, nodes, t.depth, Plus{});
  int deep = 0;
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    if (!t.present(n)) t.depth[n] = -1;
    deep |= t.depth[n] > max_depth ? 1 : 0;
  }
  deep = block_reduce(deep, Or{});
  if (deep != 0) keep_root(t, nodes);
  return bad || deep != 0;
}

// has[n]: whether n has a child. Siblings set one place: atomic, for equal stores would race too.
__device__ inline void mark_parents(const TreeTable& t, int nodes, int* has) {
  for (int n = threadIdx.x; n < nodes; n += kThreads) has[n] = 0;
  __syncthreads();
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    if (t.parent[n] >= 0) atomicOr(has + t.parent[n], 1);
  }
  __syncthreads();
}

// Bits of `node` and the ancestors less than `reach` steps above it; lane l of the warp gets word
// l. Also the depth of `node`.
__device__ inline uint32_t ancestor_word(const TreeTable& t, int node, int64_t reach, int* depth) {
  const int lane = threadIdx.x % 32;
  uint32_t word = 0;
  int steps = 0;
  for (int m = node; m >= 0; m = t.parent[m], ++steps) {
    if (m >> 5 == lane && steps < reach) word |= 1u << (m & 31);
  }
  *depth = t.present(node) ? steps - 1 : -1;
  return word;
}

}  // namespace specdec
