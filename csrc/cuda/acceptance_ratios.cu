// acceptance_ratios: min(1, p / q) at each draft id and sum_v min(p[v], q[v]). Kernels: rows.cu,
// pair.cu.
#include "../torch/args.h"
#include "kernels.h"

namespace specdec {

void acceptance_ratios_out(SPECDEC_ACCEPTANCE_RATIOS_ARGS) {
  const DeviceGuard guard(target_logits);
  const Stream stream = current_stream(target_logits);
  const AcceptanceRatiosParams v = acceptance_ratios_params(
      draft_ids, target_logits, draft_logits, cu_draft, max_draft, temperature, top_k, top_p, min_p,
      draft_temperature, draft_top_k, draft_top_p, draft_min_p, token_map, allowed, out_ratio,
      out_overlap, out_status);
  Problem p = base_problem(Task::kRatios, v.batch, v.target, v.draft, v.sampling, v.draft_sampling);
  p.max_draft = static_cast<int>(v.max_draft);
  p.total = v.total;
  p.is_flat = static_cast<bool>(v.cu_draft);
  p.target = LogitTable(v.target, v.target.batch_stride, v.target.row_stride);
  p.draft = LogitTable(v.draft, v.draft.batch_stride, v.draft.row_stride);
  p.draft_given = static_cast<bool>(p.draft);
  p.draft_ids = GlobalIds(const_cast<void*>(v.draft_ids.data), v.draft_ids.wide);
  p.ids_batch_stride = v.max_draft;
  p.ids_stride = v.draft_ids.stride;
  p.cu_draft = GlobalVector(v.cu_draft);
  p.token_map = GlobalVector(v.token_map);
  p.allowed = Global<const int32_t>(v.allowed.data);
  p.allowed_row_stride = v.allowed.row_stride;
  p.allowed_rows = v.max_draft + 1;
  p.target_rows = p.max_draft > 0 ? p.max_draft : 1;
  p.draft_rows = p.draft ? p.max_draft : 0;
  p.filters = p.sampling.filters() || (p.draft && p.draft_sampling.filters());
  p.pairs = p.max_draft;
  p.ratio = Global<float>(v.ratio);
  p.overlap = Global<float>(v.overlap);
  p.status = Global<int32_t>(v.status);
  const Reserved reserved(&p, target_logits, stream);
  launch_rows(p, stream);
  if (p.draft) launch_pairs(p, Pass::kOverlap, stream);
}

}  // namespace specdec

SPECDEC_REGISTER(acceptance_ratios, specdec::acceptance_ratios_out)
