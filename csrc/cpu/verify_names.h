// Names of the arguments of SPECDEC_VERIFY_CHAIN_ARGS and SPECDEC_VERIFY_TREE_ARGS, for a call with
// the same and more.
#pragma once
#include "../torch/tree_args.h"

#define SPECDEC_VERIFY_CHAIN_NAMES                                                                 \
  draft_ids, target_logits, draft_logits, draft_logsumexp, draft_threshold, cu_draft, max_draft,   \
      SPECDEC_SAMPLING_NAMES(), SPECDEC_SAMPLING_NAMES(draft_), seed, position, step, rule,        \
      over_acceptance, rejected_from_target, token_map, draft_kept_ids, draft_kept_logsumexp,      \
      allowed, SPECDEC_EDITS_NAMES(), SPECDEC_EDITS_NAMES(draft_), typical_epsilon, typical_delta, \
      top_m, max_distance, min_block, logprobs_mode, out_token_ids, out_num_accepted, out_status,  \
      out_logprobs

#define SPECDEC_VERIFY_TREE_NAMES                                                                \
  token_ids, parents, target_logits, draft_logits, max_depth, SPECDEC_SAMPLING_NAMES(),          \
      SPECDEC_SAMPLING_NAMES(draft_), seed, position, step, rule, replacement, token_map,        \
      draft_kept_ids, draft_kept_logsumexp, allowed, SPECDEC_EDITS_NAMES(),                      \
      SPECDEC_EDITS_NAMES(draft_), typical_epsilon, typical_delta, logprobs_mode, out_token_ids, \
      out_path, out_num_accepted, out_status, out_logprobs
