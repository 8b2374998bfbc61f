// What residual_probs and residual_sample share: inputs, laws, and the mass of (a p - b q)+. A
// thread decides on a request: grid = [ceil(batch / kThreads)].
#pragma once
#include "../torch/args.h"
#include "kernels.h"
#include "pair.cuh"

namespace specdec {
namespace {

inline Problem residual_problem(const ResidualParams& r) {
  Problem p = pair_problem(Task::kResidual, r, r.draft, 1);
  p.target = LogitTable(r.target, r.target.row_stride, 0);
  p.draft = LogitTable(r.draft, r.draft.row_stride, 0);
  p.a = GlobalVector(r.a);
  p.b = GlobalVector(r.b);
  p.point_ids = GlobalVector(r.draft_ids);
  p.target_rows = 1;
  p.draft_rows = p.draft ? 1 : 0;
  p.filters = p.sampling.filters() || (p.draft && p.draft_sampling.filters());
  p.pairs = 1;
  set_noise(&p, r.noise);
  p.purpose = r.purpose;
  p.probs = Global<float>(r.probs);
  p.token_ids = GlobalIds(r.token_ids, true);
  p.mass = Global<float>(r.mass);
  p.flags = kWantsMass;
  return p;
}

// The pair of rows and its scales.
__global__ void __launch_bounds__(kThreads) residual_kernel(const __grid_constant__ Problem p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  after_last_kernel();
  if (b >= p.batch) return;
  if (open_chain(p, b).lost) {
    p.work.tasks.store(b, PairTask{});
    p.work.states.store(b, {1, 0, 0});
    return;
  }
  const Parameters target = checked(p.sampling.load(b), p.vocab);
  Parameters draft = neutral_parameters();
  const RowStats row = target_stats(p, b, 0);
  int status = (target.bad ? kBadSampling : 0) | (row.bad ? kBadTarget : 0);
  PairTask t{};
  t.a = p.a.load(b);
  t.b = p.b.load(b);
  t.point_left = -INFINITY;
  int64_t id = p.point_ids.get(b, -1);
  const bool known = id >= 0 && id < p.vocab;
  if (!known && id != -1) status |= kBadId;
  t.x = known ? id : -1;
  t.kind = known ? kPoint : kPlain;
  if (p.draft) {
    draft = checked(p.draft_sampling.load(b), p.draft_vocab);
    if (draft.bad) status |= kBadSampling;
    if (!draft.greedy) {
      const RowStats drafted = draft_stats(p, b, 0);
      t.kind = drafted.bad ? kPlain : kPair;
      if (drafted.bad) status |= kBadDraft;
      t.x = -1;
      t.draft = draft_law(p, Chain{}, b, 0, draft);
    }
  }
  if (t.b == 0.f) t.kind = kPlain;
  if (row.bad) {
    t.kind = kNothing;
  } else {
    t.target = target_law(row, target);
    if (t.kind == kPoint) {
      const float px = t.target.at(target_row(p, Chain{}, b, 0).at(id), id);
      const float rest = fmaxf(t.a * px - t.b, 0.f);
      if (rest >= kTiny) t.point_left = log_normal(fmaxf(rest / fmaxf(t.a * px, kTiny), kTiny));
    }
  }
  p.work.tasks.store(b, t);
  p.work.states.store(b, {1, status, 0});
}

// Everything before the results: p.work has the mass of each pair.
inline void launch_residual(const Problem& p, const OnDevice& on) {
  launch_rows(p, on);
  launch_phase(residual_kernel, (p.batch + kThreads - 1) / kThreads, on, p);
  launch_pairs(p, Pass::kMass, on);
}

}  // namespace
}  // namespace specdec
