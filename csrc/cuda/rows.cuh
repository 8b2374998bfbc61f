// A row of a request: where it lies, under which parameters, and eight of its values.
#pragma once
#include "block.cuh"
#include "problem.cuh"

namespace specdec {

struct Row {
  bool active, is_target;
  int index;         // among the request's target or draft rows; of a tree: the node
  int place;         // of the token it speaks of, behind the position
  int has_children;  // of the node
  int64_t size;
  MaskedRow values;
  Parameters parameters;
  Chain chain;

  __device__ int tiles() const { return tiles_of(size); }
  __device__ int64_t blocks() const { return (size + kBlock - 1) / kBlock; }
  __device__ LogitType type() const { return values.logits.type(); }
  // The values from id `first` on, a multiple of 8; -inf past the end and where not allowed.
  __device__ __forceinline__ void load8(int64_t first, float* v) const {
    values.load8(first, size, v);
  }
  __device__ float at(int64_t id) const { return values.at(id); }
};

// The node of a tree whose row this is. Rows of a level are those of the nodes in the queue; all at
// once, each node has its own.
__device__ inline bool find_tree_row(const Problem& p, int64_t b, Row* t, int count) {
  int node = t->index;
  if (!p.at_once) {
    if (node >= count) return false;
    const WalkState s = p.work.walks.load(b);
    node = p.work.queue.load(b * (p.nodes + 1) + s.head + node);
  }
  const Candidate c = p.work.candidates.load(b * p.nodes + node);
  t->index = node;
  t->place = c.depth;
  t->has_children = c.has_children;
  return c.depth >= 0 && (t->is_target || c.has_children != 0);
}

// Row r of request b, target rows first. A whole warp calls it, its first lane gets the row.
__device__ inline Row make_row(const Problem& p, int64_t b, int r) {
  Row t{};
  t.chain = load_chain(p, b);
  if (threadIdx.x % 32 != 0) return t;
  t.is_target = r < p.target_rows;
  t.index = t.place = t.is_target ? r : r - p.target_rows;
  const Parameters target = target_parameters(p, b);
  Parameters draft = neutral_parameters();
  bool uses_draft = t.is_target;
  if (!t.is_target) {
    draft = load_parameters(p.draft_sampling, b, p.draft_vocab);
    uses_draft = has_draft_law(p, target, draft) && !(p.has_stats && p.rule == Rule::kRatio);
  }
  if (t.chain.lost || !uses_draft) return t;
  if (p.task == Task::kTree) {
    const WalkState s = p.work.walks.load(b);
    t.active = find_tree_row(p, b, &t, t.is_target ? s.targets : s.drafts);
  } else {
    const bool has_bonus = p.task == Task::kChain || p.task == Task::kSample;
    t.active = t.index < t.chain.length + (t.is_target && has_bonus ? 1 : 0);
  }
  if (!t.active) return t;
  t.size = t.is_target ? p.vocab : p.draft_vocab;
  t.parameters = t.is_target ? target : draft;
  if (t.is_target) {
    t.values = target_row(p, t.chain, b, t.index);
  } else {
    t.values.logits = draft_row(p, t.chain, b, t.index);
  }
  return t;
}

// Largest logit of each block of a row.
__device__ inline LogitRow block_maxima_of(const Problem& p, int64_t slot, LogitType type) {
  return LogitRow((p.work.maxima + slot * p.maxima_bytes).data(), 0, type);
}

}  // namespace specdec
