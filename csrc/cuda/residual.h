// The inputs that residual_probs and residual_sample share.
#pragma once
#include "../torch/args.h"
#include "kernels.h"

namespace specdec {

inline Problem residual_problem(const ResidualParams& r) {
  Problem p =
      base_problem(Task::kResidual, r.batch, r.target, r.draft, r.sampling, r.draft_sampling);
  p.target = LogitTable(r.target, r.target.row_stride, 0);
  p.draft = LogitTable(r.draft, r.draft.row_stride, 0);
  p.draft_given = static_cast<bool>(p.draft);
  p.a = GlobalVector(r.a);
  p.b = GlobalVector(r.b);
  p.point_ids = GlobalVector(r.draft_ids);
  p.token_map = GlobalVector(r.token_map);
  p.allowed = Global<const int32_t>(r.allowed.data);
  p.allowed_row_stride = r.allowed.row_stride;
  p.allowed_rows = 1;
  p.target_rows = 1;
  p.draft_rows = p.draft ? 1 : 0;
  p.filters = p.sampling.filters() || (p.draft && p.draft_sampling.filters());
  p.pairs = 1;
  p.wants_mass = true;
  return p;
}

}  // namespace specdec
