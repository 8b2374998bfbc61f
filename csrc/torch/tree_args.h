// Arguments of the ops on candidate trees.
#pragma once
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

// How a mask is written, in the order of the op's FORMATS.
enum class MaskFormat : int64_t {
  kBool,
  kAdditive,
  kFlat,
  kFlatPacked,
  kInt32,
  kInt64,
  kXqa,
  kSglangPacked
};

}  // namespace specdec
