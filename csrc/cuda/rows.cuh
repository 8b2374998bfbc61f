// A row of a request: where it lies, under which parameters, and eight of its values.
#pragma once
#include "block.cuh"
#include "request.cuh"

namespace specdec {

struct Row {
  bool active, is_target;
  int index;  // among the request's target or draft rows; of a tree: the node
  int place;  // of the token it speaks of, behind the position
  int64_t slot, b, size;
  MaskedRow values;
  Parameters parameters;
  Chain chain;

  __device__ int tiles() const { return tiles_of(size); }
  __device__ int64_t blocks() const { return (size + kBlock - 1) / kBlock; }
  template <bool kEdited = true>
  __device__ LogitType type() const {
    return kEdited ? values.type() : values.logits.type();
  }
  // The values from id `first` on, a multiple of 8; -inf past the end and where not allowed.
  template <bool kEdited = true, int kAtOnce = 1>
  __device__ __forceinline__ void load8(int64_t first, float* v) const {
    values.load8<kEdited, kAtOnce>(first, size, v);
  }
  template <bool kEdited = true>
  __device__ float at(int64_t id) const {
    return values.at<kEdited>(id);
  }
};

// The node of a tree whose row this is; whether it is read. Rows of a level are those of the nodes
// in the queue; all at once, each node has its own.
__device__ inline bool find_tree_row(const Problem& p, Row* t) {
  int node = t->index;
  if (!p.at_once) {
    const WalkState s = p.work.walks.load(t->b);
    if (node >= (t->is_target ? s.targets : s.drafts)) return false;
    node = p.work.queue.load(t->b * (p.nodes + 1) + s.head + node);
  }
  const Candidate c = p.work.candidates.load(t->b * p.nodes + node);
  t->index = node;
  t->place = c.depth;
  return c.depth >= 0 && (t->is_target || c.has_children != 0);
}

// Row `slot` of request `b`; those of a request lie together, target rows first. Without its edits.
__device__ inline Row row_of(const Problem& p, const Request& q, int64_t b, int64_t slot) {
  Row t{};
  t.slot = slot;
  t.b = b;
  const int r = static_cast<int>(slot - t.b * p.rows());
  t.is_target = r < p.target_rows;
  t.index = t.place = t.is_target ? r : r - p.target_rows;
  t.chain = q.chain;
  t.parameters = t.is_target ? q.target : q.draft;
  t.size = t.is_target ? p.vocab : p.draft_vocab;
  if (q.chain.lost || (!t.is_target && !q.has_draft_law)) return t;
  if (p.task == Task::kTree) {
    t.active = find_tree_row(p, &t);
  } else {
    const bool has_bonus =
        p.task == Task::kChain || p.task == Task::kSample || p.task == Task::kLogprobs;
    t.active = t.index < t.chain.length + (t.is_target && has_bonus ? 1 : 0);
  }
  if (t.is_target) {
    t.values = plain_target_row(p, t.chain, t.b, t.index);
  } else {
    t.values.logits = plain_draft_row(p, t.chain, t.b, t.index);
  }
  return t;
}

// A whole warp calls it, its first lane gets the row.
__device__ inline Row make_row(const Problem& p, int64_t slot) {
  const int64_t b = static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.rows());
  const Request q = make_request(p, b);
  return threadIdx.x % 32 == 0 ? row_of(p, q, b, slot) : Row{};
}

// By one warp, for all that meet it behind.
template <bool kEdited = true>
__device__ inline void load_row(const Problem& p, int64_t slot, Row* shared) {
  const Row t = make_row(p, slot);
  if (threadIdx.x % 32 != 0) return;
  *shared = t;
  if constexpr (kEdited) {
    const int64_t number = row_number(p, t.chain, t.b, t.index);
    shared->values.edits = t.is_target ? p.edits.row(number) : p.draft_edits.row(number);
  }
}

// Largest logit of each block of a row.
__device__ inline LogitRow block_maxima_of(const Problem& p, int64_t slot, LogitType type) {
  return LogitRow((p.work.maxima + slot * p.maxima_bytes).data(), 0, type);
}

}  // namespace specdec
