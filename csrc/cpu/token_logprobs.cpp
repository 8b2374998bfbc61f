// token_logprobs: log p(x) = (l(x) - max) / T - log Z, the rank of x, and the ids of the largest
// logits. A row is read once; then only blocks of 64 ids whose largest logit can matter.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "../torch/args.h"
#include "filter.h"

namespace specdec::cpu {
namespace {

struct Ranked {
  float logit;
  int64_t id;
  bool operator<(const Ranked& o) const {  // comes before
    return logit > o.logit || (logit == o.logit && id < o.id);
  }
};

// How many ids of a row are kept and larger than `logit`; of a tile, neighbouring blocks at once.
int64_t count_larger(const Team& team, const RowLaw& law, float logit) {
  std::vector<int64_t> counts(team.chunks(), 0);
  team.run_tiles(law.source.tile_count(), [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile];
    for (auto t = static_cast<int>(begin); t < end; ++t) {
      if (!(law.tile_max[t] > logit)) continue;
      const float* maxima = law.tile_blocks(t);
      const int blocks = law.source.length(t) / kNoiseBlock;
      for (int i = 0; i < blocks; ++i) {
        const int first = i;
        while (i < blocks && maxima[i] > logit) ++i;
        const int n = (i - first) * kNoiseBlock;
        if (n == 0) continue;
        const int64_t id = int64_t{t} * kTile + int64_t{first} * kNoiseBlock;
        counts[chunk] += tiles().count(law.source.span(id, n, buffer), n, logit).greater;
      }
    }
  });
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// The largest float below one that is not -inf.
float below(float value) { return std::nextafter(value, -kInf); }

int64_t rank_of(const Team& team, const RowLaw& law, int64_t id) {
  const float logit = law.source.logit(id);
  if (law.params.greedy) return id == law.argmax ? 1 : 2;
  const float least = std::max(law.threshold, -FLT_MAX);
  return 1 + count_larger(team, law, law.keeps(id, logit) ? logit : below(least));
}

// The best of a list stay, and whatever comes later must be larger than the last of them.
float keep_best(std::vector<Ranked>& list, int64_t top) {
  std::nth_element(list.begin(), list.begin() + (top - 1), list.end());
  list.resize(top);
  return list[top - 1].logit;
}

// The first `top` kept ids by falling logit, then by id.
std::vector<Ranked> largest(const RowLaw& law, int64_t top) {
  if (top == 0) return {};
  if (law.params.greedy) return {{law.max, law.argmax}};
  float beaten = below(std::max({law.threshold, bound_of(law, top), -FLT_MAX}));
  const size_t most = 4 * top + kNoiseBlock;
  std::vector<Ranked> list;
  alignas(64) float buffer[kNoiseBlock];
  for (size_t i = 0; i < law.block_max.size(); ++i) {
    if (!(law.block_max[i] > beaten)) continue;
    const int64_t first = static_cast<int64_t>(i) * kNoiseBlock;
    const float* block = law.source.span(first, kNoiseBlock, buffer);
    for (int64_t j = 0; j < kNoiseBlock; ++j) {
      if (block[j] > beaten) list.push_back({block[j], first + j});
    }
    if (list.size() > most) beaten = std::max(beaten, keep_best(list, top));
  }
  if (list.size() > static_cast<size_t>(top)) keep_best(list, top);
  std::sort(list.begin(), list.end());
  return list;
}

struct Answer {
  float logprob = 0.f;
  int64_t rank = 0;
  std::vector<Ranked> best;
  int32_t status = 0;
};

void write_row(const TokenLogprobsParams& p, int64_t b, const RowLaw& law, const Answer& answer,
               float missing) {
  p.logprobs[b] = answer.logprob;
  p.ranks[b] = static_cast<int32_t>(answer.rank);
  p.status[b] = answer.status;
  for (int64_t j = 0; j < p.top; ++j) {
    const bool is_there = j < static_cast<int64_t>(answer.best.size());
    const int64_t at = b * p.top + j, id = is_there ? answer.best[j].id : -1;
    if (p.token_ids.wide) {
      static_cast<int64_t*>(p.top_ids)[at] = id;
    } else {
      static_cast<int32_t*>(p.top_ids)[at] = static_cast<int32_t>(id);
    }
    p.top_logprobs[at] = is_there ? law.logprob_of(answer.best[j].logit) : missing;
  }
}

void answer_row(const TokenLogprobsParams& p, int64_t b, const Team& team) {
  RowLaw law;
  Answer answer;
  if (!p.sampling.active.get(b, true)) return write_row(p, b, law, answer, 0.f);
  law.source = row_source(p.logits, 0, b, p.allowed.row(b), p.edits.row(b));
  law.params = row_params(p.sampling, b);
  Examine ask{&law, true};
  examine(team, &ask, 1);
  const int64_t id = p.token_ids.at(0, b);
  const bool has = id >= 0 && id < p.logits.vocab;
  answer.status = (law.params.bad ? kBadSampling : 0) | (law.bad ? kBadTarget : 0) |
                  (has || id == -1 ? 0 : kBadId);
  if (has) answer.logprob = law.logprob(id);
  if (!law.bad) {
    if (has) answer.rank = rank_of(team, law, id);
    answer.best = largest(law, p.top);
  }
  write_row(p, b, law, answer, -kInf);
}

void token_logprobs(const TokenLogprobsParams& p, const Tensor& /*like*/) {
  for_requests(p.rows, [&](int64_t b, const Team& team) { answer_row(p, b, team); });
}

}  // namespace
}  // namespace specdec::cpu

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) {
  m.impl("token_logprobs_out.cpu",
         TORCH_BOX((
             &specdec::Boxed<specdec::token_logprobs_params, specdec::cpu::token_logprobs>::call)));
}
