// What residual_probs and residual_sample share: the laws of a request and the mass between them.
#pragma once
#include <cfloat>

#include "draw.h"

namespace specdec::cpu {

struct ResidualRows {
  RowLaw law;
  DraftRow draft;
  float a = 1.f, b = 1.f;
  bool plain = false;  // q is zero everywhere
  bool empty = false;  // no weight is normal
  int32_t status = 0;
  float mass = 0.f;

  Residual residual() const { return {&law, &draft, a, b}; }
};

// Examines both rows of request i; the draft is the row, a point mass, or nothing.
ResidualRows residual_rows(const Team& team, const ResidualParams& p,
                           const std::vector<int32_t>& inverse, int64_t i);

// Sets mass and empty by one pass over (a p - b q)+; visit(t, weights, n) sees every tile.
template <class Visit>
void sum_residual(const Team& team, ResidualRows& r, const Visit& visit) {
  double mass = 0;
  r.empty = true;
  for (const SumMax& f : weigh_tiles(team, r.residual(), visit)) {
    mass += f.sum;
    if (f.max >= FLT_MIN) r.empty = false;
  }
  r.mass = static_cast<float>(mass);
  if (r.empty) r.status |= kEmptyResidual;
}

}  // namespace specdec::cpu
