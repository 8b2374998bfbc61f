// acceptance_ratios: min(1, p / q) at each draft id and sum_v min(p[v], q[v]).
//   digest, settle    of every row (digest.cu, settle.cu)
//   ratios_kernel     grid = [batch]; a thread a position
//   overlap_kernel    grid = [batch * max_draft / kThreads]; behind the pass over pairs (pair.cu)
#include "../torch/args.h"
#include "kernels.h"
#include "pair.cuh"

namespace specdec {
namespace {

// min(1, p / q) at each id; the overlaps that need a pass over both rows become pair tasks. With
// the registers of four blocks it spills none.
__global__ void __launch_bounds__(kThreads, 4) ratios_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Request, q);
  const int64_t b = blockIdx.x;
  after_last_kernel();
  load_request(p, b, &q);
  __syncthreads();
  int status = q.status | (p.draft && q.draft.bad && q.chain.length > 0 ? kBadSampling : 0);
  if (!q.chain.lost) status |= q.chain.end_status;
  for (int i = threadIdx.x; i < p.max_draft; i += kThreads) {
    float ratio = 0.f, overlap = 0.f;
    PairTask task{};
    if (i < q.chain.length && !q.chain.lost) {
      const RowStats row = target_stats(p, b, i);
      const bool bad_draft = q.has_draft_law && draft_stats(p, b, i).bad;
      status |= (row.bad ? kBadTarget : 0) | (bad_draft ? kBadDraft : 0);
      if (!row.bad && !bad_draft) {
        const int64_t x = draft_id(p, q.chain, b, i);
        task.row = i;
        task.a = task.b = 1.f;
        task.x = -1;
        task.target = target_law(row, q.target);
        const float px = task.target.at(target_row(p, q.chain, b, i).at(x), x);
        float qx = 1.f;
        overlap = px;
        if (q.has_draft_law) {
          task.kind = kPair;
          task.draft = draft_law(p, q.chain, b, i, q.draft);
          const int64_t column = column_of(p, x);
          qx = column < 0 ? 0.f : task.draft.at(draft_row(p, q.chain, b, i).at(column), column);
        }
        if (qx == 0.f) status |= kZeroDraft;
        ratio = qx > 0.f ? fminf(px / qx, 1.f) : 0.f;
      }
    }
    p.ratio.store(b * p.max_draft + i, ratio);
    p.overlap.store(b * p.max_draft + i, overlap);
    p.work.tasks.store(b * p.pairs + i, task);
  }
  status = block_reduce(status, Or{});
  if (threadIdx.x == 0) p.status.store(b, status);
}

__global__ void __launch_bounds__(kThreads) overlap_kernel(const __grid_constant__ Problem p) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  after_last_kernel();
  if (slot >= p.batch * p.pairs || p.work.tasks.load(slot).kind == kNothing) return;
  p.overlap.store(slot, merged(p, slot).mass);
}

}  // namespace

void acceptance_ratios_out(const AcceptanceRatiosParams& v, const Tensor& like) {
  const OnDevice on(like);
  Problem p = chain_problem(Task::kRatios, v, v.draft);
  p.target_rows = p.max_draft > 0 ? p.max_draft : 1;
  p.draft_rows = p.draft ? p.max_draft : 0;
  p.filters = p.sampling.filters() || (p.draft && p.draft_sampling.filters());
  p.pairs = p.max_draft;
  p.ratio = Global<float>(v.ratio);
  p.overlap = Global<float>(v.overlap);
  p.flags = kWantsMass;
  const Reserved reserved(&p, like);
  launch_rows(p, on);
  launch_phase(ratios_kernel, p.batch, on, p);
  if (!p.draft) return;
  launch_pairs(p, Pass::kOverlap, on);
  launch_phase(overlap_kernel, (p.batch * p.pairs + kThreads - 1) / kThreads, on, p);
}

}  // namespace specdec

SPECDEC_REGISTER(
    acceptance_ratios,
    (specdec::Boxed<specdec::acceptance_ratios_params, specdec::acceptance_ratios_out>::call))
