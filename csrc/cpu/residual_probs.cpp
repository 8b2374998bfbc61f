// residual_probs: norm((a p - b q)+) as a probability row; p itself where nothing is left.
#include <algorithm>
#include <cstring>

#include "../torch/args.h"
#include "residual.h"

namespace specdec::cpu {
namespace {

void write_row(const Team& team, ResidualRows& r, float* probs) {
  const int64_t vocab = r.law.source.vocab;
  const auto place = [&](int t, const float* weights, int) {
    const int64_t first = int64_t{t} * kTile;
    const int64_t n = std::min<int64_t>(kTile, vocab - first);
    std::memcpy(probs + first, weights, n * sizeof(float));
  };
  sum_residual(team, r, place);
  double scale = 1 / static_cast<double>(r.mass);
  if (r.empty) {  // the target's law: the residual of (1, 0)
    ResidualRows target;
    target.law = r.law;
    target.b = 0.f;
    target.draft.nothing = true;
    sum_residual(team, target, place);
    scale = 1;
  }
  for (int64_t v = 0; v < vocab; ++v) probs[v] = static_cast<float>(probs[v] * scale);
}

void residual_probs(const ResidualParams& p, const Tensor& /*like*/) {
  const std::vector<int32_t> inverse = invert(p.token_map, p.draft, p.target.vocab);
  for_requests(p.batch, [&](int64_t i, const Team& team) {
    ResidualRows r = residual_rows(team, p, inverse, i);
    float* probs = p.probs + i * p.target.vocab;
    if (r.law.bad) {
      std::fill(probs, probs + p.target.vocab, 0.f);
    } else {
      write_row(team, r, probs);
    }
    p.mass[i] = r.mass;
    p.status[i] = r.status;
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(residual_probs_out, Boxed<residual_probs_params, residual_probs>::call)
}  // namespace specdec::cpu
