// What every rule of verify_tree does on its walk: look at a node's children, go to one of them, or
// end. Called by all threads of a request's block. The nodes whose rows a level reads stand in the
// request's queue.
#pragma once
#include "draw.cuh"
#include "tree.cuh"

namespace specdec {

struct Stand {  // a node whose children are tried
  Candidate self;
  int node, slot;  // slot: of its statistics among the request's
  RowStats row;
  Law target, draft;
  bool has_draft_law, bad_draft;
  float coin;    // of all its children
  double score;  // rule typical
};

struct Children {  // of a node, among kThreads nodes
  int count;
  int node[kThreads], id[kThreads];
  float px[kThreads], qx[kThreads], coin[kThreads];
};

__device__ inline Candidate candidate(const Problem& p, int64_t b, int node) {
  return p.work.candidates.load(b * p.nodes + node);
}

// The coin of a node `depth` levels down, of the given rank among the nodes of its depth.
__device__ inline float node_coin(const Problem& p, int64_t b, int64_t depth, int rank) {
  return mul_rn(static_cast<float>(noise_word(p.noise(b, depth, kPurposeCoin), rank) >> 8),
                0x1p-24f);
}

__device__ inline float target_prob(const Problem& p, const Stand& s, int64_t b, int id) {
  return s.target.at(target_row(p, Chain{}, b, s.node).at(id), id);
}

__device__ inline float draft_prob(const Problem& p, const Stand& s, int64_t b, int id) {
  if (!s.has_draft_law) return 1.f;
  const int64_t column = draft_column(p, Chain{}, b, s.node, id);
  return column < 0 ? 0.f : s.draft.at(draft_row(p, Chain{}, b, s.node).at(column), column);
}

__device__ inline Stand load_stand(const Problem& p, const Request& q, int64_t b, int node,
                                   int slot) {
  Stand s{};
  s.node = node;
  s.slot = slot;
  s.self = candidate(p, b, node);
  s.row = target_stats(p, b, slot);
  s.target = target_law(s.row, q.target);
  s.coin = node_coin(p, b, s.self.depth, s.self.rank);
  s.has_draft_law = q.has_draft_law && s.self.has_children != 0;
  if (!s.has_draft_law) return s;
  s.bad_draft = draft_stats(p, b, slot).bad != 0;
  s.draft = draft_law(p, Chain{}, b, slot, q.draft);
  return s;
}

// The children among nodes base .. base + kThreads - 1, in their order.
__device__ inline void load_children(const Problem& p, const Stand& s, int64_t b, int base,
                                     Children& c) {
  const int n = base + static_cast<int>(threadIdx.x);
  Candidate one{};
  if (n < p.nodes) one = candidate(p, b, n);
  const int is_child = n > 0 && n < p.nodes && one.parent == s.node ? 1 : 0;
  int total = 0;
  const int at = block_exclusive_sum(is_child, &total);
  if (is_child != 0) {
    c.node[at] = n;
    c.id[at] = one.id;
    const bool is_tested = one.id >= 0 && s.row.bad == 0;
    c.px[at] = is_tested ? target_prob(p, s, b, one.id) : 0.f;
    c.qx[at] = is_tested && !s.bad_draft ? draft_prob(p, s, b, one.id) : 0.f;
    c.coin[at] = node_coin(p, b, one.depth - 1, one.rank);
  }
  if (threadIdx.x == 0) c.count = total;
  __syncthreads();
}

// f(child) for every child in node order until one returns true; the same in all threads.
template <class F>
__device__ void for_children(const Problem& p, const Stand& s, int64_t b, Children& c, F f) {
  if (s.self.has_children == 0) return;
  for (int base = 0; base < p.nodes; base += kThreads) {
    load_children(p, s, b, base, c);
    bool found = false;
    for (int i = 0; i < c.count && !found; ++i) found = f(i);
    __syncthreads();
    if (found) return;
  }
}

__device__ inline PairTask node_task(const Stand& s, int kind, double a, double b) {
  PairTask t{};
  t.kind = kind;
  t.row = s.node;
  t.place = s.self.depth;
  t.slot = s.slot;
  t.a = static_cast<float>(a);
  t.b = static_cast<float>(b);
  t.x = -1;
  t.point_left = -INFINITY;
  t.target = s.target;
  t.draft = s.draft;
  return t;
}

__device__ inline void list_id(const Problem& p, int64_t b, int at, int id, double weight) {
  if (threadIdx.x == 0) p.work.listed.store(b * p.nodes + at, {static_cast<float>(weight), id});
}

// One node of the queue is read next; none: the walk is over.
__device__ inline void read_next(const Problem& p, int64_t b, WalkState s, int node, int status) {
  s.targets = s.drafts = 0;
  s.head = s.tail;
  s.status = status;
  if (node >= 0) {
    p.work.queue.store(b * (p.nodes + 1) + s.tail++, node);
    s.targets = 1;
    s.drafts = candidate(p, b, node).has_children;
  }
  p.work.walks.store(b, s);
}

__device__ inline float prob_log(const Problem& p, const Parameters& target, const Stand& s,
                                 int64_t b, int64_t id) {
  if (p.logprobs_mode == LogprobsMode::kNone) return 0.f;
  return token_logprob(p, s.row, target, target_row(p, Chain{}, b, s.node), id);
}

// Writes the path to `stand`, `accepted` levels down, and the token that follows it.
__device__ inline void write_tree(const Problem& p, int64_t b, int stand, int accepted,
                                  int64_t token, float logprob, int status) {
  const bool has_logprobs = p.logprobs_mode != LogprobsMode::kNone;
  const int64_t width = p.max_draft + 1, row = b * width;
  for (int64_t i = accepted + static_cast<int64_t>(threadIdx.x); i < width; i += kThreads) {
    p.token_ids.store(row + i, i == accepted ? token : -1);
    p.path.store(row + i, -1);
    if (has_logprobs) p.logprobs.store(row + i, i == accepted ? logprob : 0.f);
  }
  if (threadIdx.x != 0) return;
  for (int n = stand; n > 0;) {
    const Candidate c = candidate(p, b, n);
    p.token_ids.store(row + c.depth - 1, c.id);
    p.path.store(row + c.depth - 1, n);
    if (has_logprobs) {
      p.logprobs.store(row + c.depth - 1, p.work.marks.load(b * p.nodes + n).logprob);
    }
    n = c.parent;
  }
  p.num_accepted.store(b, accepted);
  p.status.store(b, status);
}

// Out of line: it needs many registers, what calls it keeps few.
static __device__ SPECDEC_NOINLINE Drawn draw_apart(const Problem& p, int64_t b,
                                                    const PairTask& task) {
  return draw(p, b, task, false);
}

// The token that follows s if the walk ends there; drawn as `task` says unless it is known.
__device__ inline Drawn follow(const Problem& p, const Request& q, const Stand& s, int64_t b,
                               const PairTask& task) {
  if (s.row.bad != 0) return {-1, kBadTarget};
  if (q.target.greedy || is_argmax_rule(p)) return {s.row.argmax, 0};
  if (task.kind == kPlain && s.row.key != 0) return {key_id(s.row.key), 0};
  return draw_apart(p, b, task);
}

__device__ inline void end_walk(const Problem& p, const Request& q, const Stand& s, int64_t b,
                                const Drawn& drawn, int status) {
  const bool writes = drawn.token >= 0 && threadIdx.x == 0;
  const float logprob = writes ? prob_log(p, q.target, s, b, drawn.token) : 0.f;
  write_tree(p, b, s.node, s.self.depth, drawn.token, logprob, status | q.status | drawn.status);
}

__device__ inline void accept(const Problem& p, const Parameters& target, const Stand& s, int64_t b,
                              int node) {
  if (threadIdx.x != 0 || p.logprobs_mode == LogprobsMode::kNone) return;
  Mark m{};
  m.logprob = prob_log(p, target, s, b, candidate(p, b, node).id);
  p.work.marks.store(b * p.nodes + node, m);
}

// Rule greedy_multi_draft: the child that carries the token, if it is not the last one; 0: none.
__device__ inline int child_drawn(const Problem& p, const Stand& s, int64_t b, int64_t token) {
  int last = 0, found = 0;
  for (int n = threadIdx.x; n < p.nodes; n += kThreads) {
    const Candidate c = candidate(p, b, n);
    if (n == 0 || c.parent != s.node) continue;
    last = n;
    if (c.id >= 0 && c.id == token) found = n;
  }
  last = block_reduce(last, Larger{});
  found = block_reduce(found, Larger{});
  return found == last ? 0 : found;
}

}  // namespace specdec
