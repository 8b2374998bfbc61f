// verify_chain: accept a prefix of the draft and draw the token after it. Statistics and decision:
// rows.cu, decide.cuh; the masses of rule block and the draw: pair.cu.
#include "../torch/args.h"
#include "kernels.h"

namespace specdec {

namespace {

void fill_inputs(const VerifyChainParams& v, Problem* problem) {
  Problem& p = *problem;
  p.rule = v.rule;
  p.max_draft = static_cast<int>(v.max_draft);
  p.total = v.total;
  p.is_flat = static_cast<bool>(v.cu_draft);
  p.target = LogitTable(v.target, v.target.batch_stride, v.target.row_stride);
  p.draft = LogitTable(v.draft, v.draft.batch_stride, v.draft.row_stride);
  p.draft_ids = GlobalIds(const_cast<void*>(v.draft_ids.data), v.draft_ids.wide);
  p.ids_batch_stride = v.max_draft;
  p.ids_stride = v.draft_ids.stride;
  p.cu_draft = GlobalVector(v.cu_draft);
  p.has_stats = static_cast<bool>(v.draft_logsumexp) && static_cast<bool>(v.draft);
  p.logsumexp = GlobalVector(Vector<float>{v.draft_logsumexp.data, 1});
  p.draft_threshold = GlobalVector(Vector<float>{v.draft_threshold.data, 1});
  p.stats_batch_stride = v.max_draft;
  p.seed = GlobalVector(v.noise.seed);
  p.position = GlobalVector(v.noise.position);
  p.step = GlobalVector(v.noise.step);
  p.token_map = GlobalVector(v.token_map);
  p.allowed = Global<const int32_t>(v.allowed.data);
  p.allowed_row_stride = v.allowed.row_stride;
  p.allowed_rows = v.max_draft + 1;
}

void fill_knobs_and_results(const VerifyChainParams& v, Problem* problem) {
  Problem& p = *problem;
  p.over_acceptance = v.over_acceptance;
  p.rejected_from_target = v.rejected_from_target;
  p.typical_epsilon = v.typical_epsilon;
  p.typical_delta = v.typical_delta;
  p.top_m = v.top_m;
  p.max_distance = v.max_distance;
  p.min_block = v.min_block;
  p.logprobs_mode = v.logprobs_mode;
  p.token_ids = GlobalIds(v.token_ids, v.draft_ids.wide);
  p.num_accepted = Global<int32_t>(v.num_accepted);
  p.status = Global<int32_t>(v.status);
  p.logprobs = Global<float>(v.logprobs);
}

}  // namespace

void verify_chain_out(SPECDEC_VERIFY_CHAIN_ARGS) {
  const DeviceGuard guard(target_logits);
  const Stream stream = current_stream(target_logits);
  const VerifyChainParams v = verify_chain_params(
      draft_ids, target_logits, draft_logits, draft_logsumexp, draft_threshold, cu_draft, max_draft,
      temperature, top_k, top_p, min_p, draft_temperature, draft_top_k, draft_top_p, draft_min_p,
      seed, position, step, rule, over_acceptance, rejected_from_target, token_map, allowed,
      typical_epsilon, typical_delta, top_m, max_distance, min_block, logprobs_mode, out_token_ids,
      out_num_accepted, out_status, out_logprobs);
  const bool reads_draft = v.rule == Rule::kRatio || v.rule == Rule::kBlock;
  const bool is_argmax =
      v.rule == Rule::kGreedy || v.rule == Rule::kTopM || v.rule == Rule::kDistance;
  Logits draft = v.draft;
  if (!reads_draft) draft = Logits{};
  Problem p = base_problem(Task::kChain, v.batch, v.target, draft, v.sampling, v.draft_sampling);
  fill_inputs(v, &p);
  fill_knobs_and_results(v, &p);
  if (!reads_draft) p.draft = LogitTable();
  p.draft_given = draft_logits.has_value();
  p.target_rows = p.max_draft + 1;
  const bool reads_draft_rows = p.draft && !(p.has_stats && v.rule == Rule::kRatio);
  p.draft_rows = reads_draft_rows ? p.max_draft : 0;
  p.filters =
      !is_argmax && (p.sampling.filters() || (reads_draft_rows && p.draft_sampling.filters()));
  p.pairs = v.rule == Rule::kBlock ? p.max_draft + 1 : 1;
  const Reserved reserved(&p, target_logits, stream);
  launch_rows(p, stream);
  if (v.rule == Rule::kBlock && p.draft && p.max_draft > 1) launch_pairs(p, Pass::kMass, stream);
  if (reads_draft) launch_pairs(p, Pass::kDraw, stream);
}

}  // namespace specdec

SPECDEC_REGISTER(verify_chain, specdec::verify_chain_out)
