// residual_probs: norm((a p - b q)+), materialised. Kernels: rows.cu, pair.cu.
#include "residual.h"

namespace specdec {

void residual_probs_out(SPECDEC_RESIDUAL_PROBS_ARGS) {
  const DeviceGuard guard(target_logits);
  const Stream stream = current_stream(target_logits);
  Problem p = residual_problem(residual_params(
      target_logits, draft_logits, a, b, temperature, top_k, top_p, min_p, draft_temperature,
      draft_top_k, draft_top_p, draft_min_p, token_map, allowed, draft_ids));
  p.probs = Global<float>(output<float>(out_probs));
  p.mass = Global<float>(output<float>(out_mass));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  const Reserved reserved(&p, target_logits, stream);
  launch_rows(p, stream);
  launch_pairs(p, Pass::kMass, stream);
  launch_pairs(p, Pass::kProbs, stream);
}

}  // namespace specdec

SPECDEC_REGISTER(residual_probs, specdec::residual_probs_out)
