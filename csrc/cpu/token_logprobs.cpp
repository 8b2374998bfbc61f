// token_logprobs: log p(x) = (l(x) - max) / T - log Z, the rank of x, and the ids of the largest
// logits. A row is read once; then only blocks of 64 ids whose largest logit can matter.
#include "../torch/args.h"
#include "listing.h"

namespace specdec::cpu {
namespace {

void answer_row(const TokenLogprobsParams& p, int64_t b, const Team& team) {
  const Listing listing{p.top, p.ranks, p.top_ids, p.token_ids.wide, p.top_logprobs};
  p.logprobs[b] = 0.f;
  p.status[b] = 0;
  if (!p.sampling.active.get(b, true)) return listing.clear(b, 0.f);
  RowLaw law;
  law.source = row_source(p.logits, 0, b, p.allowed.row(b), p.edits.row(b));
  law.params = row_params(p.sampling, b);
  Examine ask{&law, true};
  examine(team, &ask, 1);
  const int64_t id = p.token_ids.at(0, b);
  const bool has = id >= 0 && id < p.logits.vocab;
  p.status[b] = (law.params.bad ? kBadSampling : 0) | (law.bad ? kBadTarget : 0) |
                (has || id == -1 ? 0 : kBadId);
  if (has) p.logprobs[b] = law.logprob(id);
  listing.write(team, b, law, has ? id : -1);
}

void token_logprobs(const TokenLogprobsParams& p, const Tensor& /*like*/) {
  for_requests(p.rows, [&](int64_t b, const Team& team) { answer_row(p, b, team); });
}

}  // namespace

SPECDEC_CPU_KERNEL(token_logprobs_out, Boxed<token_logprobs_params, token_logprobs>::call)
}  // namespace specdec::cpu
