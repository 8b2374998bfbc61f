// Arguments of the ops on candidate trees.
#pragma once
#include "../common/tree_params.h"
#include "args.h"

namespace specdec {

#define SPECDEC_TREE_LAYOUT_ARGS                                                                   \
  Tensor parents, OptTensor lengths, int64_t max_depth, int64_t max_leaves, Tensor out_depth,      \
      Tensor out_positions, Tensor out_first_child, Tensor out_next_sibling, Tensor out_ancestors, \
      Tensor out_leaf_paths, Tensor out_status

#define SPECDEC_TREE_MASK_ARGS                                                                \
  Tensor parents, OptTensor past, OptTensor left_padding, int64_t window, int64_t size,       \
      int64_t format, [[maybe_unused]] ScalarType dtype, Tensor out_mask, Tensor out_offsets, \
      Tensor out_status

#define SPECDEC_SELECT_TREE_ARGS                                                            \
  Tensor token_ids, Tensor parents, Tensor scores, int64_t num_nodes, Tensor out_token_ids, \
      Tensor out_parents, Tensor out_source, Tensor out_status

#define SPECDEC_TREE_FROM_SEQUENCES_ARGS                                         \
  Tensor token_ids, int64_t num_nodes, Tensor out_token_ids, Tensor out_parents, \
      Tensor out_source, Tensor out_status

#define SPECDEC_TREE_FROM_MARGINALS_ARGS                                                \
  Tensor candidate_ids, Tensor logprobs, int64_t num_nodes, OptTensor root_ids,         \
      OptTensor max_nodes, Tensor out_token_ids, Tensor out_parents, Tensor out_source, \
      Tensor out_status

// A tree that is built: [batch, nodes] each, -1 where there is no node.
struct TreeOutput {
  int64_t nodes;
  void* token_ids;
  bool wide;  // token_ids are int64
  int32_t *parents, *source, *status;

  void write(int64_t b, int64_t n, int64_t id, int32_t parent, int64_t from) const {
    const int64_t at = b * nodes + n;
    if (wide) {
      static_cast<int64_t*>(token_ids)[at] = id;
    } else {
      static_cast<int32_t*>(token_ids)[at] = static_cast<int32_t>(id);
    }
    parents[at] = parent;
    source[at] = static_cast<int32_t>(from);
  }
  void clear(int64_t b, int32_t bits) const {
    for (int64_t n = 0; n < nodes; ++n) write(b, n, -1, -1, -1);
    status[b] = bits;
  }
};

inline TreeOutput tree_output(const Tensor& token_ids, const Tensor& parents, const Tensor& source,
                              const Tensor& status) {
  return {parents.size(1),          output<void>(token_ids), ids_of(token_ids).wide,
          output<int32_t>(parents), output<int32_t>(source), output<int32_t>(status)};
}

#define SPECDEC_VERIFY_TREE_ARGS                                                              \
  Tensor token_ids, Tensor parents, Tensor target_logits, OptTensor draft_logits,             \
      int64_t max_depth, SPECDEC_SAMPLING_ARGS(), SPECDEC_SAMPLING_ARGS(draft_), Tensor seed, \
      Tensor position, OptTensor step, int64_t rule, bool replacement, OptTensor token_map,   \
      OptTensor draft_kept_ids, OptTensor draft_kept_logsumexp, OptTensor allowed,            \
      SPECDEC_EDITS_ARGS(), SPECDEC_EDITS_ARGS(draft_), SPECDEC_TYPICAL_ARGS,                 \
      int64_t logprobs_mode, Tensor out_token_ids, Tensor out_path, Tensor out_num_accepted,  \
      Tensor out_status, Tensor out_logprobs

inline VerifyTreeParams verify_tree_params(SPECDEC_VERIFY_TREE_ARGS) {
  VerifyTreeParams p{};
  fill_pair(&p, SPECDEC_PAIR_NAMES);
  fill_verify(&p, token_ids, SPECDEC_VERIFY_NAMES);
  p.nodes = parents.size(1);
  p.max_depth = max_depth;
  p.ids = ids_of(token_ids);
  p.parents = ids_of(parents);
  p.rule = static_cast<TreeRule>(rule);
  p.replacement = replacement;
  p.path = output<int32_t>(out_path);
  return p;
}

}  // namespace specdec
