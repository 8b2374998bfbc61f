// The laws of one request of residual_probs and residual_sample.
#include "residual.h"

namespace specdec::cpu {

ResidualRows residual_rows(const Team& team, const ResidualParams& p,
                           const std::vector<int32_t>& inverse, int64_t i) {
  ResidualRows r;
  if (!p.sampling.active.get(i, true)) {
    r.law.bad = true;
    return r;
  }
  const RowParams draft_params = row_params(p.draft_sampling, i);
  r.a = p.a[i];
  r.b = p.b[i];
  r.law.source = row_source(p.target, 0, i, p.allowed.row(i), p.edits.row(i));
  r.law.params = row_params(p.sampling, i);
  RowLaw drafted;
  Examine asks[2] = {{&r.law, true}, {&drafted, true}};
  const bool reads_draft = p.draft && !draft_params.greedy;
  if (reads_draft) {
    drafted.source = row_source(p.draft, 0, i, nullptr, p.draft_edits.row(i));
    drafted.params = draft_params;
  }
  examine(team, asks, reads_draft ? 2 : 1);

  const int64_t id = p.draft_ids.get(i, -1);
  const bool known = id >= 0 && id < p.target.vocab;
  if (r.law.params.bad || (p.draft && draft_params.bad)) r.status |= kBadSampling;
  if (r.law.bad) r.status |= kBadTarget;
  if (drafted.bad) r.status |= kBadDraft;
  if (!known && id != -1) r.status |= kBadId;
  r.draft.point = !reads_draft && known;
  r.draft.id = known ? id : -1;
  r.draft.nothing = reads_draft ? drafted.bad : !known;
  if (reads_draft && !drafted.bad) {
    r.draft.source = drafted.source;
    r.draft.inverse = inverse.empty() ? nullptr : inverse.data();
    r.draft.weight = drafted.weighting(1 / drafted.mass);
    r.draft.widen();
  }
  r.plain = r.draft.nothing || r.b == 0;
  return r;
}

}  // namespace specdec::cpu
