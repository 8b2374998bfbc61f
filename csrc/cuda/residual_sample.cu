// residual_sample: one id a row from norm((a p - b q)+), drawn behind its mass (residual.cuh);
// grid = [batch].
#include "draw.cuh"
#include "residual.cuh"

namespace specdec {
namespace {

__global__ void __launch_bounds__(kThreads, 2) draw_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(PairTask, task);
  const int64_t b = blockIdx.x;
  after_last_kernel();
  if (threadIdx.x == 0) task = p.work.tasks.load(b);
  __syncthreads();
  Drawn drawn{-1, 0};
  PairPartial left{};
  if (task.kind != kNothing) {
    left = merged(p, b);
    drawn = draw(p, b, task, left.any == 0);
    drawn.status = left.any == 0 ? kEmptyResidual : 0;
  }
  if (threadIdx.x != 0) return;
  p.token_ids.store(b, drawn.token);
  p.mass.store(b, left.mass);
  p.status.store(b, p.work.states.load(b).status | drawn.status);
}

}  // namespace

void residual_sample_out(const ResidualParams& r, const Tensor& like) {
  const OnDevice on(like);
  Problem p = residual_problem(r);
  const Reserved reserved(&p, like);
  launch_residual(p, on);
  launch_phase(draw_kernel, p.batch, on, p);
}

}  // namespace specdec

SPECDEC_REGISTER(
    residual_sample,
    (specdec::Boxed<specdec::residual_sample_params, specdec::residual_sample_out>::call))
