// acceptance_ratios: min(1, p(x) / q(x)) at each draft token x, and sum_v min(p(v), q(v)).
#include <algorithm>

#include "../torch/args.h"
#include "chain.h"

namespace specdec::cpu {
namespace {

double overlap_mass(const Team& team, const RowLaw& law, const DraftRow& q) {
  if (q.point) return std::min(law.prob(q.id), 1.0);
  if (law.params.greedy) return std::min(q.prob(law.argmax), 1.0);
  std::vector<float> sums(law.source.tile_count(), 0.f);
  const Weighting w = law.weighting(1 / law.mass);
  for_tiles(team, law, law.threshold, [&](int, int t, const float* p, int n) {
    alignas(64) float scratch[kTile], least[kTile];
    const float* drafted = q.span(int64_t{t} * kTile, n, scratch);
    if (!drafted) return;
    tiles().overlap(p, drafted, n, w, q.weight, 1, 1, least);
    sums[t] = tiles().sum_max(least, n).sum;
  });
  double mass = 0;
  for (const float s : sums) mass += s;
  return mass;
}

// Ratio and overlap of draft position i of a request; status bits of its rows.
int32_t position(const Team& team, const Chain& chain, const std::vector<int32_t>& inverse,
                 const RowParams& params, const RowParams& draft_params, int64_t i, int64_t x,
                 float* ratio, float* overlap) {
  RowLaw law, drafted;
  law.source = chain.target(i);
  law.params = params;
  const bool reads_draft = chain.layout->draft && !draft_params.greedy;
  Examine asks[2] = {{&law, true}, {&drafted, true}};
  if (reads_draft) {
    drafted.source = chain.draft(i);
    drafted.params = draft_params;
  }
  examine(team, asks, reads_draft ? 2 : 1);
  if (law.bad || drafted.bad) return (law.bad ? kBadTarget : 0) | (drafted.bad ? kBadDraft : 0);
  DraftRow q;
  q.id = x;
  q.point = !reads_draft;
  if (reads_draft) {
    q.source = drafted.source;
    q.inverse = inverse.empty() ? nullptr : inverse.data();
    q.weight = drafted.weighting(1 / drafted.mass);
    q.widen();
  }
  const double qx = q.prob(x);
  *ratio = qx > 0 ? static_cast<float>(std::min(1.0, law.prob(x) / qx)) : 0.f;
  *overlap = static_cast<float>(overlap_mass(team, law, q));
  return qx == 0 ? kZeroDraft : 0;
}

void acceptance_ratios(const AcceptanceRatiosParams& p, const Tensor& /*like*/) {
  const ChainLayout layout{p, p.max_draft, p.total, p.draft_ids, p.cu_draft};
  const std::vector<int32_t> inverse = invert(p.token_map, p.draft, p.target.vocab);
  for_requests(p.batch, [&](int64_t slot, const Team& team) {
    const Chain chain = chain_of(layout, slot);
    const RowParams params = row_params(p.sampling, slot);
    const RowParams draft_params = row_params(p.draft_sampling, slot);
    const bool bad_sampling = params.bad || (p.draft && draft_params.bad && chain.has_drafts());
    int32_t status = (chain.bad ? kBadLayout : 0) | (bad_sampling ? kBadSampling : 0);
    bool used = !chain.lost;
    for (int64_t i = 0; i < p.max_draft; ++i) {
      float* ratio = p.ratio + slot * p.max_draft + i;
      float* overlap = p.overlap + slot * p.max_draft + i;
      *ratio = *overlap = 0.f;
      const int64_t x = used && i < chain.length ? chain.id(i) : -1;
      if (x < -1 || x >= p.target.vocab) status |= kBadId;
      used = used && x >= 0 && x < p.target.vocab;
      if (!used) continue;
      status |= position(team, chain, inverse, params, draft_params, i, x, ratio, overlap);
    }
    p.status[slot] = status;
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(acceptance_ratios_out, Boxed<acceptance_ratios_params, acceptance_ratios>::call)
}  // namespace specdec::cpu
