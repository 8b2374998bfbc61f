// residual_sample: one id a row from norm((a p - b q)+). Kernels: rows.cu, pair.cu.
#include "residual.h"

namespace specdec {

void residual_sample_out(SPECDEC_RESIDUAL_SAMPLE_ARGS) {
  const DeviceGuard guard(target_logits);
  const Stream stream = current_stream(target_logits);
  Problem p = residual_problem(residual_params(
      target_logits, draft_logits, a, b, temperature, top_k, top_p, min_p, draft_temperature,
      draft_top_k, draft_top_p, draft_min_p, token_map, allowed, draft_ids));
  p.seed = GlobalVector(vector_of<int64_t>(seed));
  p.position = GlobalVector(vector_of<int64_t>(position));
  p.step = GlobalVector(vector_of<int64_t>(step));
  p.purpose = purpose;
  p.wants_draw = true;
  p.token_ids = GlobalIds(output<int64_t>(out_token_ids), true);
  p.mass = Global<float>(output<float>(out_mass));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  const Reserved reserved(&p, target_logits, stream);
  launch_rows(p, stream);
  launch_pairs(p, Pass::kDraw, stream);
}

}  // namespace specdec

SPECDEC_REGISTER(residual_sample, specdec::residual_sample_out)
