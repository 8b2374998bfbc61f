// Rule traversal of verify_tree, on the statistics of all rows of a request. weight(root) = 1,
// weight(child) = min(1, weight p(x) / q(x)). The first leaf in depth-first order is accepted iff
// its coin < its weight; else it is deleted, and at its parent, with S = sum (weight p - q)+:
//   p = norm((weight p - q)+),  weight = S / (S + 1 - weight),  q = norm(q without x).
// Of an id that is not deleted p is (a p - b q)+, with two numbers a node; of a deleted one what
// was left of it is kept.
#pragma once
#include "tree_mass.cuh"

namespace specdec {

constexpr int kMaxTraversal = 64;

struct Deletion {  // of a node's children so far
  double a, b, room, gone;
  int count, is_empty;
};

struct Traversal {
  Candidate self[kMaxTraversal];
  float px[kMaxTraversal], qx[kMaxTraversal];  // of the node's id at its parent
  double weight[kMaxTraversal];
  double left[kMaxTraversal];  // p of a deleted id
  int alive[kMaxTraversal], deleted[kMaxTraversal], bad_target[kMaxTraversal];
  int bad_draft[kMaxTraversal];
  Deletion of[kMaxTraversal];  // of the node's children
  int leaf, from, accepted, status;
};

__device__ inline double current_p(const Traversal& t, int n) {
  const Deletion& d = t.of[t.self[n].parent];
  const double p = d.a * t.px[n] - d.b * t.qx[n];
  return p > 0. ? p : 0.;
}

__device__ inline double current_q(const Traversal& t, int n, bool is_point) {
  const Deletion& d = t.of[t.self[n].parent];
  return is_point ? 1. : d.room > 0. ? t.qx[n] / d.room : 0.;
}

__device__ inline double child_weight(const Traversal& t, int n, bool is_point) {
  const double q = current_q(t, n, is_point);
  const double w = q > 0. ? t.weight[t.self[n].parent] * current_p(t, n) / q : 0.;
  return w < 1. ? w : 1.;
}

// Probabilities of every candidate; one thread a node.
__device__ inline void load_traversal(const Problem& p, const Request& q, int64_t b, Traversal& t) {
  const int n = threadIdx.x;
  if (n < p.nodes) {
    t.self[n] = candidate(p, b, n);
    const bool is_there = t.self[n].depth >= 0;
    t.deleted[n] = 0;
    t.left[n] = 0.;
    t.of[n] = {1., 0., 1., 0., 0, 0};
    Stand s{};
    if (is_there) s = load_stand(p, q, b, n, n);
    t.bad_target[n] = s.row.bad != 0;
    t.bad_draft[n] = s.bad_draft;
  }
  __syncthreads();
  if (n > 0 && n < p.nodes) {
    t.px[n] = t.qx[n] = 0.f;
    const int f = t.self[n].parent;
    if (f >= 0 && t.self[n].id >= 0 && !t.bad_target[f] && !t.bad_draft[f]) {
      const Stand s = load_stand(p, q, b, f, f);
      t.px[n] = target_prob(p, s, b, t.self[n].id);
      t.qx[n] = draft_prob(p, s, b, t.self[n].id);
    }
  }
  __syncthreads();
}

// Which nodes take part: a child behind a bad row and one that is no id is cut off with its
// subtree. One thread.
__device__ inline void examine_tree(const Problem& p, const Request& q, Traversal& t) {
  for (int n = 0; n < p.nodes; ++n) {
    const int f = t.self[n].parent;
    t.alive[n] = n == 0;
    t.weight[n] = 1.;
    if (n > 0) {
      // A greedy request is decided at its first miss; what lies behind is not examined.
      bool here = f >= 0 && t.alive[f] && !(q.target.greedy && t.weight[f] == 0.);
      if (here && t.self[n].id == kOutside) t.status |= kBadId;
      here = here && t.self[n].id >= 0 && !t.bad_target[f];
      if (here && t.bad_draft[f]) t.status |= kBadDraft;
      here = here && !t.bad_draft[f];
      if (here && t.qx[n] == 0.f) t.status |= kZeroDraft;
      t.alive[n] = here;
      t.weight[n] = here ? child_weight(t, n, !q.has_draft_law) : 0.;
    }
    const bool misses = q.target.greedy && t.weight[n] == 0.;
    if (t.alive[n] && t.bad_target[n] && !misses) t.status |= kBadTarget;
  }
  t.leaf = 0;
  t.from = 1;
}

// Goes down from t.leaf to the first leaf, whose children below t.from are deleted. One thread.
__device__ inline void find_leaf(const Problem& p, const Request& q, int64_t b, Traversal& t) {
  for (int n = t.from; n < p.nodes; ++n) {  // children come behind their parents
    if (t.self[n].parent != t.leaf || !t.alive[n]) continue;
    t.weight[n] = child_weight(t, n, !q.has_draft_law);
    t.leaf = n;
  }
  const Candidate& c = t.self[t.leaf];
  t.accepted =
      t.leaf == 0 || node_coin(p, b, c.depth - 1, c.rank) < static_cast<float>(t.weight[t.leaf]);
}

// Lists the deleted children of a node with what is left of them, times `factor`; how many there
// are.
__device__ inline int list_deleted(const Problem& p, const Traversal& t, int64_t b, int node,
                                   double factor) {
  int count = 0;
  for (int n = node + 1; n < p.nodes; ++n) {
    if (t.self[n].parent == node && t.deleted[n]) {
      list_id(p, b, count++, t.self[n].id, factor * t.left[n]);
    }
  }
  return count;
}

// Deletes t.leaf from the laws of its parent. All threads.
__device__ inline void delete_leaf(const Problem& p, const Request& q, int64_t b, Traversal& t) {
  SPECDEC_SHARED(Stand, s);
  const int x = t.leaf, f = t.self[x].parent;
  const double w = t.weight[f], px = current_p(t, x), qx = current_q(t, x, !q.has_draft_law);
  const Deletion d = t.of[f];
  if (threadIdx.x == 0) s = load_stand(p, q, b, f, f);
  const int before = list_deleted(p, t, b, f, w);
  __syncthreads();
  const double b_next = w * d.b + (d.room > 0. ? 1. / d.room : 0.);
  double mass = w * (1. - px);
  if (q.has_draft_law) {
    PairTask excess = node_task(s, kPair, w * d.a, b_next);
    excess.num_listed = before;
    mass = residual_mass(p, b, excess);
  }
  if (threadIdx.x == 0) {
    t.deleted[x] = 1;
    t.alive[x] = 0;
  }
  __syncthreads();
  const int count = list_deleted(p, t, b, f, 0.);
  __syncthreads();
  const double gone = d.gone + (q.has_draft_law ? t.qx[x] : t.px[x]);
  const double left = mass_left(p, s, b, gone, count, q.has_draft_law);
  const bool is_empty = !(mass > 0.) || (!q.has_draft_law && !(left > 0.));
  const double free = mass + 1. - w;
  __syncthreads();
  if (threadIdx.x != 0) return;
  t.weight[f] = free > 0. ? mass / free : 1.;
  Deletion& now = t.of[f];
  now.gone = gone;
  now.count = count;
  now.is_empty |= is_empty ? 1 : 0;
  if (q.has_draft_law) {
    now.room = left;
    t.left[x] = px;
    if (!is_empty) {
      now.a = w * d.a / mass;
      now.b = b_next / mass;
      for (int n = f + 1; n < p.nodes; ++n) {
        if (t.self[n].parent == f && t.deleted[n] && n != x) t.left[n] *= w / mass;
      }
      t.left[x] = w * px > qx ? (w * px - qx) / mass : 0.;
    }
  } else if (!is_empty) {
    now.a = 1. / left;
  }
  t.leaf = f;
  t.from = x + 1;
}

__device__ inline void traverse(const Problem& p, const Request& q, const WalkState& w, int64_t b) {
  SPECDEC_SHARED(Traversal, t);
  SPECDEC_SHARED(Stand, s);
  load_traversal(p, q, b, t);
  if (threadIdx.x == 0) {
    t.status = w.status;
    examine_tree(p, q, t);
  }
  __syncthreads();
  for (int i = 0; i < p.nodes; ++i) {
    if (threadIdx.x == 0) find_leaf(p, q, b, t);
    __syncthreads();
    if (t.accepted) break;
    delete_leaf(p, q, b, t);
    __syncthreads();
  }
  const int stand = t.leaf;
  if (threadIdx.x == 0) {
    s = load_stand(p, q, b, stand, stand);
    for (int n = stand; n > 0; n = t.self[n].parent) {
      const int f = t.self[n].parent;
      accept(p, q.target, load_stand(p, q, b, f, f), b, n);
    }
    list_deleted(p, t, b, stand, 1.);
  }
  __syncthreads();
  const Deletion& d = t.of[stand];
  PairTask task = node_task(s, kPlain, 1., 1.);
  if (d.count > 0 && q.has_draft_law && d.is_empty) {
    if (threadIdx.x == 0) t.status |= kEmptyResidual;
    __syncthreads();
  } else if (d.count > 0) {
    task = node_task(s, q.has_draft_law ? kPair : kPoint, d.a, d.b);
    task.num_listed = d.count;
  }
  __syncthreads();
  end_walk(p, q, s, b, follow(p, q, s, b, task), t.status);
  if (threadIdx.x == 0) read_next(p, b, w, -1, t.status);
}

}  // namespace specdec
