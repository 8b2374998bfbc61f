// Draws of one id from a row.
#include "draw.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

namespace specdec::cpu {
namespace {

// So many blocks are weighed one by one, each of them read for itself; then the row as a whole.
constexpr int kCrowd = 256;

// Tiles of [begin, end), `first` first if it is there: the tile of the maximum most likely holds
// the winner, whose score saves the noise of most other tiles.
template <class F>
void tiles_from(int64_t begin, int64_t end, int64_t first, const F& f) {
  if (first >= begin && first < end) f(static_cast<int>(first));
  for (int64_t t = begin; t < end; ++t) {
    if (t != first) f(static_cast<int>(t));
  }
}

// f(first id, word) for each block of `found`.
template <class F>
void for_blocks(uint32_t found, int t, const uint32_t* words, const F& f) {
  for (; found != 0; found &= found - 1) {
    const int block = std::countr_zero(found);
    f(int64_t{t} * kTile + block * kNoiseBlock, words[block]);
  }
}

// a p - b q of one id, for the ids that a point mass or a hidden id sets apart.
float residual_weight(const Residual& r, int64_t id) {
  const double w = r.a * r.target->prob(id) - r.b * r.draft->prob(id);
  return w > 0 ? static_cast<float>(w) : 0.f;
}

}  // namespace

void set_row(Race& race, const RowLaw& law) {
  race.max = law.max;
  race.inv_t = law.params.inv_t;
  race.threshold = law.threshold;
}

void race_plain(const RowLaw& law, Race& race) {
  set_row(race, law);
  race.offer_logit(law.argmax, law.max);
  if (law.params.greedy) return;
  tiles_from(0, law.source.tile_count(), law.argmax / kTile, [&](int t) {
    alignas(64) float buffer[kNoiseBlock];
    uint32_t words[kTileBlocks];
    const uint32_t found = tiles().race_logits(law.tile_blocks(t), int64_t{t} * kTile, race, words);
    for_blocks(found, t, words, [&](int64_t first, uint32_t word) {
      race.offer_logits(first, law.source.span(first, kNoiseBlock, buffer), word);
    });
  });
}

void race_logits(Race& race, int t, const float* tile, const float* blocks) {
  uint32_t words[kTileBlocks];
  const int64_t start = int64_t{t} * kTile;
  const uint32_t found = tiles().race_logits(blocks, start, race, words);
  for_blocks(found, t, words, [&](int64_t first, uint32_t word) {
    race.offer_logits(first, tile + (first - start), word);
  });
}

int64_t DraftRow::column(int64_t target_id) const {
  if (inverse) return inverse[target_id];
  return target_id < source.vocab ? target_id : -1;
}

double DraftRow::prob(int64_t target_id) const {
  if (nothing) return 0;
  if (point) return target_id == id ? 1 : 0;
  if (std::binary_search(hidden.begin(), hidden.end(), target_id)) return 0;
  float l = -kInf;
  if (kept) {
    const auto at = std::ranges::lower_bound(*kept, target_id, {}, &Candidate::id);
    if (at == kept->end() || at->id != target_id) return 0;
    l = at->logit;
  } else {
    const int64_t c = column(target_id);
    if (c < 0) return 0;
    l = source.logit(c);
  }
  if (!(l >= weight.threshold)) return 0;
  const double x = (static_cast<double>(l) - weight.max) * weight.inv_t - weight.shift;
  return std::exp(x) * weight.scale;
}

void DraftRow::widen() {
  if (!inverse || point || nothing || !columns.empty()) return;
  columns.resize(1 + int64_t{source.tile_count()} * kTile);
  columns[0] = -kInf;
  for (int t = 0; t < source.tile_count(); ++t) {
    float* to = columns.data() + 1 + int64_t{t} * kTile;
    const float* from = source.tile(t, to);
    if (from != to) std::copy(from, from + source.length(t), to);
  }
}

const float* DraftRow::span(int64_t first, int n, float* buffer) const {
  if (nothing || point) return nullptr;
  if (kept) {
    auto at = std::ranges::lower_bound(*kept, first, {}, &Candidate::id);
    if (at == kept->end() || at->id >= first + n) return nullptr;
    std::fill(buffer, buffer + n, -kInf);
    for (; at != kept->end() && at->id < first + n; ++at) buffer[at->id - first] = at->logit;
    return buffer;
  }
  if (inverse) {  // padded with -1 to whole tiles; column -1 is the -inf before the row
    for (int j = 0; j < n; ++j) buffer[j] = columns[inverse[first + j] + 1];
    return buffer;
  }
  if (first >= source.vocab) return nullptr;
  const float* own = source.span(first, n, buffer);
  const int64_t length = (source.vocab - first + kPad - 1) / kPad * kPad;
  if (own == buffer && length < n) std::fill(buffer + length, buffer + n, -kInf);
  return own;
}

void read_kept(const Kept& kept, int64_t number, int64_t vocab, RowLaw& law) {
  if (!kept || law.bad) return;
  const int64_t count = law.source.vocab;
  law.kept.reserve(count);
  for (int64_t j = 0; j < count; ++j) {
    const Candidate one{kept.id(number * count + j), law.source.logit(j)};
    if (one.id == -1 && one.logit == -kInf) continue;
    law.bad |= one.id < 0 || one.id >= vocab;
    law.kept.push_back(one);
  }
  std::ranges::sort(law.kept, {}, &Candidate::id);
  for (size_t j = 1; j < law.kept.size(); ++j) law.bad |= law.kept[j - 1].id == law.kept[j].id;
  const double given = kept.logsumexp[number];
  const double own = static_cast<double>(law.max) * law.params.inv_t + std::log(law.mass);
  if (!(std::fabs(own - given) <= kept_tolerance(given))) law.bad = true;
}

std::vector<int32_t> invert(const Vector<int32_t>& token_map, const Logits& rows, int64_t vocab) {
  if (!token_map || !rows) return {};
  std::vector<int32_t> inverse((vocab + kTile - 1) / kTile * kTile, -1);
  for (int64_t c = 0; c < rows.vocab; ++c) {
    const int32_t id = token_map[c];
    if (id >= 0 && id < vocab) inverse[id] = static_cast<int32_t>(c);
  }
  return inverse;
}

void residual_span(const Residual& r, int64_t first, int n, float* scratch, float* out) {
  const RowLaw& law = *r.target;
  const bool has_mass = !law.params.greedy && law.tile_max[first / kTile] >= law.threshold;
  // `out` holds the target's logits until its weights replace them, lane by lane.
  const float* p = has_mass ? law.source.span(first, n, out) : nullptr;
  const float* q = r.draft->span(first, n, scratch);
  tiles().residual(p, q, n, law.weighting(1 / law.mass), r.draft->weight, r.a, r.b, out);
  const auto weigh_alone = [&](int64_t id) {
    if (id >= first && id < first + n) out[id - first] = residual_weight(r, id);
  };
  if (law.params.greedy) weigh_alone(law.argmax);
  if (r.draft->point) weigh_alone(r.draft->id);
  for (const int64_t id : r.draft->hidden) weigh_alone(id);
}

SumMax residual_tile(const Residual& r, int t, float* scratch, float* out) {
  const int n = r.target->source.length(t);
  residual_span(r, int64_t{t} * kTile, n, scratch, out);
  return tiles().sum_max(out, n);
}

double residual_mass(const Team& team, const Residual& r) {
  if (r.a >= 0) {
    const auto weight = [&](int64_t id) { return double{residual_weight(r, id)}; };
    if (const auto sum = sum_over_kept(*r.target, *r.draft, r.a, weight)) return *sum;
  }
  double mass = 0;
  for (const SumMax& s : weigh_tiles(team, r, [](int, const float*, int) {})) mass += s.sum;
  return mass;
}

int64_t draw_weighted(const Team& team, const RowLaw& law, double scale, const TileWeights& weights,
                      const NoiseStream& stream) {
  const bool bounded = std::isfinite(scale);
  std::vector<Race> part(team.chunks(), Race(stream));
  team.run_tiles(law.source.tile_count(), [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float weight[kTile], blocks[kTileBlocks];
    Race& race = part[chunk];
    tiles_from(begin, end, law.argmax / kTile, [&](int t) {
      const double p_max = std::exp((law.tile_max[t] - law.max) * law.params.inv_t) / law.mass;
      const double limit = 1.001 * scale * p_max * std::exp(kMaxRaceNoise);
      if (bounded && (limit < race.linear_cut() || !(law.tile_max[t] >= law.threshold))) return;
      if (weights(t, weight).max < FLT_MIN) return;
      std::fill_n(blocks, kTileBlocks, -kInf);
      tiles().digest[0](float_tile(weight), law.source.length(t), blocks);
      uint32_t words[kTileBlocks];
      const int64_t start = int64_t{t} * kTile;
      const uint32_t found = tiles().race_weights(blocks, start, race, words);
      for_blocks(found, t, words, [&](int64_t first, uint32_t word) {
        race.offer_weights(first, weight + (first - start), word);
      });
    });
  });
  Race race(stream);
  for (const Race& p : part) race.merge(p);
  return race.winner();
}

int64_t draw_residual(const Team& team, const Residual& r, const NoiseStream& stream) {
  const RowLaw& law = *r.target;
  const auto weights = [&](int t, float* out) {
    alignas(64) float scratch[kTile];
    return residual_tile(r, t, scratch, out);
  };
  const bool bounded = r.a >= 0 && r.b >= 0 && !law.params.greedy;  // by a p
  if (!bounded) return draw_weighted(team, law, kInf, weights, stream);
  const double scale = r.a / law.mass;
  if (scale == 0) return -1;
  Race race(stream);
  set_row(race, law);
  const double log_scale = std::log(scale);
  race.log_bound = static_cast<float>(log_scale + 1e-3 + 1e-6 * std::fabs(log_scale));
  int weighed = 0;
  tiles_from(0, law.source.tile_count(), law.argmax / kTile, [&](int t) {
    if (weighed > kCrowd) return;
    alignas(64) float scratch[kNoiseBlock], weight[kNoiseBlock];
    uint32_t words[kTileBlocks];
    const uint32_t found = tiles().race_logits(law.tile_blocks(t), int64_t{t} * kTile, race, words);
    weighed += std::popcount(found);
    if (weighed > kCrowd) return;
    for_blocks(found, t, words, [&](int64_t first, uint32_t word) {
      residual_span(r, first, kNoiseBlock, scratch, weight);
      race.offer_weights(first, weight, word);
    });
  });
  return weighed > kCrowd ? draw_weighted(team, law, scale, weights, stream) : race.winner();
}

}  // namespace specdec::cpu
