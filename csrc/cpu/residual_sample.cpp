// residual_sample: one id a row from norm((a p - b q)+), drawn without materialising it.
#include <algorithm>
#include <cfloat>

#include "../torch/args.h"
#include "residual.h"

namespace specdec::cpu {
namespace {

// q is a point mass at x: the other ids keep their plain log-weights, as verify_chain draws them,
// and x what is left of its own: log((a p - b) / (a p)) less.
int64_t draw_point(const ResidualRows& r, const NoiseStream& stream) {
  const RowLaw& law = r.law;
  const int64_t x = r.draft.id;
  Race race(stream);
  race.exclude(x);
  race_plain(law, race);
  const double ap = static_cast<double>(r.a) * law.prob(x);
  const auto rest = static_cast<float>(ap - r.b);
  if (!(rest >= FLT_MIN)) return race.winner();
  const float share = rest / std::max(static_cast<float>(ap), FLT_MIN);
  const float plain = mul_rn(sub_rn(law.source.logit(x), law.max), law.params.inv_t);
  const float weight = add_rn(plain, log_normal(std::max(share, FLT_MIN)));
  const Entrant left{race_score(weight, noise_of(stream, x)), x};
  return race.best().empty() || left.beats(race.best().front()) ? x : race.winner();
}

void residual_sample(const ResidualParams& p, const Tensor& /*like*/) {
  const std::vector<int32_t> inverse = invert(p.token_map, p.draft, p.target.vocab);
  for_requests(p.batch, [&](int64_t i, const Team& team) {
    ResidualRows r = residual_rows(team, p, inverse, i);
    const NoiseStream stream =
        noise_stream(p.noise.seed[i], p.noise.position[i],
                     p.purpose == kPurposeTarget ? 0 : p.noise.step.get(i, 0), p.purpose);
    int64_t id = -1;
    if (!r.law.bad) {
      sum_residual(team, r, [](int, const float*, int) {});
      if (r.empty || r.plain) {
        Race race(stream);
        race_plain(r.law, race);
        id = race.winner();
      } else if (r.draft.point) {
        id = draw_point(r, stream);
      } else {
        id = draw_residual(team, r.residual(), stream);
      }
    }
    p.token_ids[i] = id;
    p.mass[i] = r.mass;
    p.status[i] = r.status;
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(residual_sample_out, Boxed<residual_sample_params, residual_sample>::call)
}  // namespace specdec::cpu
