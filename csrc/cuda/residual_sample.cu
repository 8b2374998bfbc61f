// residual_sample: one id a row from norm((a p - b q)+), drawn behind its mass (residual.cuh);
// grid = [batch].
#include "draw.cuh"
#include "residual.cuh"

namespace specdec {
namespace {

__global__ void __launch_bounds__(kThreads) draw_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(PairTask, task);
  const int64_t b = blockIdx.x;
  after_last_kernel();
  if (threadIdx.x == 0) task = p.work.tasks.load(b);
  __syncthreads();
  Drawn drawn{-1, 0};
  PairResult left{};
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
  p.token_ids = GlobalIds(output<int64_t>(out_token_ids), true);
  p.mass = Global<float>(output<float>(out_mass));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  const Reserved reserved(&p, target_logits);
  launch_residual(p, stream);
  launch_phase(draw_kernel, p.batch, kThreads, stream, p);
}

}  // namespace specdec

SPECDEC_REGISTER(residual_sample, specdec::residual_sample_out)
