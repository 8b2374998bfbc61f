// residual_probs: norm((a p - b q)+), materialised by a third pass (pair.cu);
// mass_kernel: grid = [ceil(batch / kThreads)].
#include "residual.cuh"

namespace specdec {
namespace {

__global__ void __launch_bounds__(kThreads) mass_kernel(const __grid_constant__ Problem p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  after_last_kernel();
  if (b >= p.batch) return;
  PairPartial left{0.f, 1};
  if (p.work.tasks.load(b).kind != kNothing) left = merged(p, b);
  p.mass.store(b, left.mass);
  p.status.store(b, p.work.states.load(b).status | (left.any != 0 ? 0 : kEmptyResidual));
}

}  // namespace

void residual_probs_out(const ResidualParams& r, const Tensor& like) {
  const OnDevice on(like);
  Problem p = residual_problem(r);
  const Reserved reserved(&p, like);
  launch_residual(p, on);
  launch_phase(mass_kernel, (p.batch + kThreads - 1) / kThreads, on, p);
  launch_pairs(p, Pass::kProbs, on);
}

}  // namespace specdec

SPECDEC_REGISTER(
    residual_probs,
    (specdec::Boxed<specdec::residual_probs_params, specdec::residual_probs_out>::call))
