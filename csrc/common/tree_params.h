// The arguments of verify_tree as a plain struct: what a kernel sees, on the host and on a device.
#pragma once
#include "params.h"

namespace specdec {

struct VerifyTreeParams {
  int64_t batch, nodes, max_depth;
  Ids ids, parents;      // [batch, nodes]
  Logits target, draft;  // [batch, nodes, vocab]; draft.data == nullptr: deterministic candidates
  Sampling sampling, draft_sampling;
  Noise noise;
  TreeRule rule;
  bool replacement;
  Vector<int32_t> token_map;  // [draft vocab]
  Kept kept;
  Allowed allowed;  // row b * nodes + n
  RowEdits edits, draft_edits;
  Knob typical_epsilon, typical_delta;
  LogprobsMode logprobs_mode;
  void* token_ids;        // [batch, max_depth + 1], the type of ids
  int32_t* path;          // [batch, max_depth + 1]
  int32_t* num_accepted;  // [batch]
  int32_t* status;        // [batch]
  float* logprobs;        // [batch, max_depth + 1], unused when mode is none
};

}  // namespace specdec
