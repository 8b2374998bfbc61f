// The rules of verify_tree that go down from the root, at one node: which child is accepted, or
// what the rejections leave to draw from. All threads compute the same.
#pragma once
#include "tree_mass.cuh"

namespace specdec {

struct Outcome {
  int next;       // the accepted child; 0: none
  int status;     // bits of this node
  PairTask task;  // of the draw, if there is no child
};

__device__ inline Outcome no_child(const Stand& s) { return {0, 0, node_task(s, kPlain, 1., 1.)}; }

__device__ inline void take_first(int* next, int node) {
  if (*next == 0) *next = node;
}

// match, greedy; every rule where the request is greedy: the child that carries the one token.
__device__ inline Outcome match_child(const Problem& p, const Request& q, const Stand& s, int64_t b,
                                      Children& c) {
  Outcome o = no_child(s);
  const bool is_argmax = q.target.greedy || is_argmax_rule(p);
  const int64_t token = is_argmax ? s.row.argmax : key_id(s.row.key);
  for_children(p, s, b, c, [&](int i) {
    if (c.id[i] == kOutside) o.status |= kBadId;
    if (c.id[i] >= 0 && s.row.bad == 0 && c.id[i] == token) take_first(&o.next, c.node[i]);
    return false;
  });
  return o;
}

// target_only: one coin u; the first child x_j with u < p(x_1) + ... + p(x_j).
__device__ inline Outcome cover_coin(const Problem& p, const Stand& s, int64_t b, Children& c) {
  Outcome o = no_child(s);
  double sum = 0.;
  int tried = 0;
  for_children(p, s, b, c, [&](int i) {
    if (c.id[i] == kOutside) o.status |= kBadId;
    if (c.id[i] < 0 || s.row.bad != 0) return false;
    sum += c.px[i];
    if (c.px[i] > 0.f && s.coin < static_cast<float>(sum)) take_first(&o.next, c.node[i]);
    list_id(p, b, tried++, c.id[i], 0.);
    return false;
  });
  if (o.next != 0 || tried == 0) return o;
  o.task.kind = kPoint;
  o.task.num_listed = tried;
  return o;
}

// recursive: C = 0, Z = 1, Q = 0; x is accepted iff u q(x) Z < (p(x) - C q(x)) (1 - Q), else
// C += Z / (1 - Q), Z = sum (p - C q)+, and without replacement Q += q(x). Point masses: accepted
// iff u Z < p(x), Z = mass of p without the rejected ids.
struct Correction {
  double scale = 0., mass = 1., room = 1., gone = 0.;
  int tried = 0;         // listed ids
  bool is_late = false;  // mass and room are those before the last rejection
};

// Mass and room after a rejection: only if another child is tried.
__device__ inline void update_correction(const Problem& p, const Stand& s, int64_t b,
                                         Correction* k) {
  if (!k->is_late) return;
  k->is_late = false;
  __syncthreads();  // the list
  if (!s.has_draft_law) {
    k->mass = mass_left(p, s, b, k->gone, k->tried, false);
    return;
  }
  k->mass = residual_mass(p, b, node_task(s, kPair, 1., k->scale));
  if (p.replacement) return;
  const double left = mass_left(p, s, b, k->gone, k->tried, true);
  k->room = left > 0. ? left : 0.;
}

__device__ inline Outcome reject_in_turn(const Problem& p, const Stand& s, int64_t b, Children& c) {
  Outcome o = no_child(s);
  Correction k;
  bool rejected = false;
  for_children(p, s, b, c, [&](int i) {
    const int x = c.id[i];
    const float px = c.px[i], qx = c.qx[i];
    if (x == kOutside) o.status |= kBadId;
    if (x < 0 || s.row.bad != 0) return false;
    if (s.bad_draft) {
      o.status |= kBadDraft;
      return false;
    }
    if (qx == 0.f) o.status |= kZeroDraft;
    update_correction(p, s, b, &k);
    const bool repeats = p.replacement && !s.has_draft_law && is_listed(p, b, k.tried, x);
    const double rest = s.has_draft_law ? px - k.scale * qx : repeats ? 0. : px;
    const float left = mul_rn(c.coin[i], static_cast<float>(qx * k.mass));
    if (px > 0.f && qx > 0.f && left < static_cast<float>(rest * k.room)) {
      o.next = c.node[i];
      return true;
    }
    rejected = k.is_late = true;
    if (s.has_draft_law && k.room > 0.) k.scale += k.mass / k.room;
    if (!repeats) {
      k.gone += s.has_draft_law ? qx : px;
      list_id(p, b, k.tried++, x, 0.);
    }
    return false;
  });
  if (o.next != 0 || !rejected) return o;
  o.task = node_task(s, s.has_draft_law ? kPair : kPoint, 1., k.scale);
  o.task.num_listed = s.has_draft_law ? 0 : k.tried;
  return o;
}

// greedy_multi_draft: the last child X was drawn from q' = norm(q without the others); accepted iff
// u q'(X) < p(X). Else the draw from norm((p - q')+) may be another child: `descend`.
__device__ inline Outcome test_last(const Problem& p, const Stand& s, int64_t b, Children& c) {
  Outcome o = no_child(s);
  int last = 0;
  for (int n = threadIdx.x; n < p.nodes; n += kThreads) {
    if (n > 0 && candidate(p, b, n).parent == s.node) last = n;
  }
  last = block_reduce(last, Larger{});
  int x = kNoId, others = 0;
  float px = 0.f, qx = 0.f, u = 0.f;
  double hidden = 0.;
  for_children(p, s, b, c, [&](int i) {
    if (c.id[i] == kOutside) o.status |= kBadId;
    if (c.node[i] == last) {
      x = c.id[i];
      px = c.px[i];
      qx = c.qx[i];
      u = c.coin[i];
    } else if (c.id[i] >= 0 && s.has_draft_law) {
      hidden += c.qx[i];
      list_id(p, b, others++, c.id[i], 0.);
    }
    return false;
  });
  if (s.row.bad != 0 || last == 0) return o;
  const bool tested = x >= 0;
  if (s.bad_draft) {
    if (tested) o.status |= kBadDraft;
    return o;
  }
  o.task.descends = 1;
  if (!tested) return o;
  __syncthreads();  // the list
  const double room = s.has_draft_law ? mass_left(p, s, b, hidden, others, true) : 1.;
  const double scale = room > 0. ? 1. / room : 0.;
  const float scaled = static_cast<float>(scale * qx);
  if (scaled == 0.f) o.status |= kZeroDraft;
  if (px > 0.f && scaled > 0.f && mul_rn(u, scaled) < px) {
    o.next = last;
    return o;
  }
  o.task = node_task(s, s.has_draft_law ? kPair : kPoint, 1., scale);
  o.task.descends = 1;
  o.task.num_listed = s.has_draft_law ? others : 1;
  if (!s.has_draft_law) list_id(p, b, 0, x, 0.);
  for (int64_t i = b * p.nodes + threadIdx.x; i < b * p.nodes + others; i += kThreads) {
    const int id = p.work.listed.load(i).id;  // all of p is left of it
    p.work.listed.store(i, {target_prob(p, s, b, id), id});
  }
  return o;
}

__device__ inline Outcome choose_child(const Problem& p, const Request& q, const Stand& s,
                                       int64_t b, Children& c) {
  if (p.tree_rule == TreeRule::kRecursive) return reject_in_turn(p, s, b, c);
  if (q.target.greedy) return match_child(p, q, s, b, c);
  if (p.tree_rule == TreeRule::kTargetOnly) return cover_coin(p, s, b, c);
  if (p.tree_rule == TreeRule::kGreedyMultiDraft) return test_last(p, s, b, c);
  return match_child(p, q, s, b, c);
}

// The rules that stand at one node at a time.
__device__ inline void walk_on(const Problem& p, const Request& q, const WalkState& w, int64_t b,
                               Children& c) {
  SPECDEC_SHARED(Stand, s);
  if (threadIdx.x == 0) {
    const int node = p.work.queue.load(b * (p.nodes + 1) + w.head);
    s = load_stand(p, q, b, node, p.at_once ? node : 0);
  }
  __syncthreads();
  const Outcome o = choose_child(p, q, s, b, c);
  const int status = w.status | o.status;
  int next = o.next;
  Drawn drawn{};
  if (next == 0) {
    drawn = follow(p, q, s, b, o.task);
    if (o.task.descends != 0 && s.row.bad == 0) next = child_drawn(p, s, b, drawn.token);
  }
  if (next != 0) {
    accept(p, q.target, s, b, next);
  } else {
    end_walk(p, q, s, b, drawn, status);
  }
  if (threadIdx.x == 0) read_next(p, b, w, next != 0 ? next : -1, status | drawn.status);
}

// typical: x is accepted iff p(x) > min(epsilon, delta exp(-H(p))); every accepted node is looked
// at.
__device__ inline void accept_typical(const Problem& p, const Request& q, const Stand& s, int64_t b,
                                      Children& c, WalkState* w) {
  const float least = fminf(q.typical_epsilon, q.typical_delta * expf(-s.row.entropy));
  for_children(p, s, b, c, [&](int i) {
    if (c.id[i] == kOutside) w->status |= kBadId;
    if (c.id[i] < 0 || s.row.bad != 0 || !(c.px[i] > 0.f && c.px[i] > least)) return false;
    const double score = s.score + log(static_cast<double>(c.px[i]));
    const int depth = s.self.depth + 1, node = c.node[i];
    if (threadIdx.x == 0) {
      Mark m{};
      m.score = score;
      m.logprob = prob_log(p, q.target, s, b, c.id[i]);
      p.work.marks.store(b * p.nodes + node, m);
    }
    const bool ties = depth == w->depth && score == w->score && node < w->best;
    if (depth > w->depth || (depth == w->depth && score > w->score) || ties) {
      w->depth = depth;
      w->best = node;
      w->score = score;
    }
    if (candidate(p, b, node).has_children != 0) {
      if (threadIdx.x == 0) p.work.queue.store(b * (p.nodes + 1) + w->tail, node);
      ++w->tail;
    }
    return false;
  });
}

// What follows s if the walk ends there.
__device__ inline void mark_draw(const Problem& p, const Request& q, const Stand& s, int64_t b) {
  Mark m = p.work.marks.load(b * p.nodes + s.node);
  const int64_t drawn = q.target.greedy ? s.row.argmax : key_id(s.row.key);
  m.token = s.row.bad != 0 ? -1 : static_cast<int>(drawn);
  m.token_logprob = s.row.bad != 0 ? 0.f : prob_log(p, q.target, s, b, drawn);
  p.work.marks.store(b * p.nodes + s.node, m);
}

__device__ inline void walk_typical(const Problem& p, const Request& q, const WalkState& state,
                                    int64_t b, Children& c) {
  SPECDEC_SHARED(Stand, s);
  WalkState w = state;
  for (int i = 0; i < state.targets; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const int node = p.work.queue.load(b * (p.nodes + 1) + state.head + i);
      s = load_stand(p, q, b, node, p.at_once ? node : i);
      s.score = s.node == 0 ? 0. : p.work.marks.load(b * p.nodes + s.node).score;
    }
    __syncthreads();
    if (s.row.bad != 0) w.status |= kBadTarget;
    if (w.is_last != 0) {
      end_walk(p, q, s, b, follow(p, q, s, b, node_task(s, kPlain, 1., 1.)), w.status);
      continue;
    }
    accept_typical(p, q, s, b, c, &w);
    if (threadIdx.x == 0) mark_draw(p, q, s, b);
  }
  __syncthreads();
  w.head += state.targets;
  w.targets = w.tail - w.head < p.target_rows ? w.tail - w.head : p.target_rows;
  if (w.targets == 0 && w.is_last == 0) {
    w.is_last = 1;
    SPECDEC_SHARED(Mark, m);
    SPECDEC_SHARED(int, was_read);
    if (threadIdx.x == 0) {
      m = p.work.marks.load(b * p.nodes + w.best);
      was_read = w.best == 0 || candidate(p, b, w.best).has_children != 0;
    }
    __syncthreads();
    if (was_read != 0) {
      write_tree(p, b, w.best, w.depth, m.token, m.token_logprob, w.status | q.status);
    } else {  // a leaf: its row is still to be read
      w.targets = 1;
      if (threadIdx.x == 0) p.work.queue.store(b * (p.nodes + 1) + w.tail, w.best);
      ++w.tail;
    }
  }
  if (threadIdx.x != 0) return;
  p.work.walks.store(b, w);
}

}  // namespace specdec
