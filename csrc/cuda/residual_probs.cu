// residual_probs: norm((a p - b q)+), materialised by a third pass (pair.cu);
// mass_kernel: grid = [ceil(batch / kThreads)].
#include "residual.cuh"

namespace specdec {
namespace {

__global__ void __launch_bounds__(kThreads) mass_kernel(const __grid_constant__ Problem p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  after_last_kernel();
  if (b >= p.batch) return;
  PairResult left{0.f, 1};
  if (p.work.tasks.load(b).kind != kNothing) left = merged(p, b);
  p.mass.store(b, left.mass);
  p.status.store(b, p.work.states.load(b).status | (left.any != 0 ? 0 : kEmptyResidual));
}

}  // namespace

void residual_probs_out(SPECDEC_RESIDUAL_PROBS_ARGS) {
  const DeviceGuard guard(target_logits);
  const Stream stream = current_stream(target_logits);
  Problem p = residual_problem(residual_params(
      target_logits, draft_logits, a, b, temperature, top_k, top_p, min_p, draft_temperature,
      draft_top_k, draft_top_p, draft_min_p, token_map, allowed, draft_ids));
  p.probs = Global<float>(output<float>(out_probs));
  p.mass = Global<float>(output<float>(out_mass));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  const Reserved reserved(&p, target_logits);
  launch_residual(p, stream);
  launch_phase(mass_kernel, (p.batch + kThreads - 1) / kThreads, kThreads, stream, p);
  launch_pairs(p, Pass::kProbs, stream);
}

}  // namespace specdec

SPECDEC_REGISTER(residual_probs, specdec::residual_probs_out)
