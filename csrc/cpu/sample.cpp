// sample: the best num_samples ids of one race a row, with the row's logsumexp and threshold.
// A row is read once; the race looks into the few blocks that may win it.
#include <algorithm>
#include <limits>

#include "../torch/args.h"
#include "draw.h"
#include "listing.h"

namespace specdec::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The race over a reduced vocabulary: noise and ties go by target id, so the row is spread over the
// target ids and raced there.
void race_mapped(const Team& team, const RowLaw& law, Race& race, const Vector<int32_t>& map,
                 const std::vector<int32_t>& inverse) {
  set_row(race, law);
  const int64_t largest = map[law.argmax];  // a negative entry maps to no id
  if (largest >= 0) race.offer_logit(largest, law.max);
  if (law.params.greedy) return;
  DraftRow row;
  row.source = law.source;
  row.inverse = inverse.data();
  row.widen();
  std::vector<Race> part(team.chunks(), race);
  team.run_tiles(static_cast<int64_t>(inverse.size()) / kTile,
                 [&](int chunk, int64_t begin, int64_t end) {
                   alignas(64) float buffer[kTile], blocks[kTileBlocks];
                   for (auto t = static_cast<int>(begin); t < end; ++t) {
                     const float* tile = row.span(int64_t{t} * kTile, kTile, buffer);
                     tiles().digest[0](float_tile(tile), kTile, blocks);
                     race_logits(part[chunk], t, tile, blocks);
                   }
                 });
  for (const Race& p : part) race.merge(p);
}

void write_row(const SampleParams& p, const Scores& scores, const Team& team, int64_t b,
               const RowLaw& law, const RowLaw& scored, const std::vector<int64_t>& ids,
               const std::vector<int32_t>& inverse) {
  for (int64_t j = 0; j < p.num_samples; ++j) {
    const bool drawn = j < static_cast<int64_t>(ids.size());
    const int64_t at = b * p.num_samples + j;
    p.token_ids[at] = drawn ? ids[j] : -1;
    if (drawn && scores) {
      scores.write(team, at, scored, p.token_map ? inverse[ids[j]] : ids[j]);
    } else {
      scores.clear(at);
    }
  }
  p.logsumexp[b] = law.logsumexp();
  p.threshold[b] = law.threshold;
}

void sample_row(const SampleParams& p, const Listing& listing, const std::vector<int32_t>& inverse,
                int64_t b, const Team& team) {
  const Scores scores{p.logprobs_mode, p.logprobs, listing};
  RowLaw law, raw;
  if (!p.sampling.active.get(b, true)) {
    write_row(p, scores, team, b, law, law, {}, inverse);
    p.logsumexp[b] = p.threshold[b] = 0.f;
    p.status[b] = 0;
    return;
  }
  law.source = row_source(p.logits, 0, b, p.allowed.row(b), p.edits.row(b));
  law.params = row_params(p.sampling, b);
  const int64_t step = p.purpose == kPurposeTarget ? 0 : p.noise.step.get(b, 0);
  Race race(noise_stream(p.noise.seed[b], p.noise.position[b], step, p.purpose, p.lane.get(b, 0)),
            p.num_samples);
  for (int64_t j = 0; j < p.num_exclude; ++j) race.exclude(p.exclude_ids[b * p.num_exclude + j]);
  const bool is_raw = !law.params.greedy && law.params.inv_t == 1.f && law.source.is_plain() &&
                      !law.params.filtered(p.logits.vocab);
  const bool asks_raw = scores.raw() && !is_raw;
  raw.source = row_source(p.logits, 0, b);
  Examine ask{&law, true, false, asks_raw ? &raw : nullptr};
  examine(team, &ask, 1);
  p.status[b] = (law.params.bad ? kBadSampling : 0) | (law.bad ? kBadTarget : 0);
  if (law.bad) {
    write_row(p, scores, team, b, law, law, {}, inverse);
    p.logsumexp[b] = p.threshold[b] = kNan;
    return;
  }
  if (p.token_map) {
    race_mapped(team, law, race, p.token_map, inverse);
  } else {
    race_plain(law, race);
  }
  write_row(p, scores, team, b, law, asks_raw ? raw : law, race.ids(), inverse);
}

void draw(const SampleParams& p, const Listing& listing) {
  std::vector<int32_t> inverse;  // token id -> column
  if (p.token_map) {
    int32_t largest = 0;
    for (int64_t c = 0; c < p.logits.vocab; ++c) largest = std::max(largest, p.token_map[c]);
    inverse = invert(p.token_map, p.logits, int64_t{largest} + 1);
  }
  for_requests(p.batch,
               [&](int64_t b, const Team& team) { sample_row(p, listing, inverse, b, team); });
}

void sample(const SampleParams& p, const Tensor& /*like*/) { draw(p, {}); }

}  // namespace

SPECDEC_CPU_KERNEL(sample_out, Boxed<sample_params, sample>::call)
SPECDEC_CPU_KERNEL(sample_listed_out, BoxedListed<sample_params, draw>::call)
}  // namespace specdec::cpu
