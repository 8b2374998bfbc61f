// Draws of one id from a row.
#include "draw.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace specdec::cpu {
namespace {

// Weighing 64 logits around each of this many costs about as much as the whole tile.
constexpr int kCrowd = 16;

// Largest kept logits first, ties to the lowest id: the rule where no score is finite.
std::vector<int64_t> largest_logits(const RowLaw& law, const Race& race, int64_t wanted) {
  std::vector<Entrant> kept;
  for (int64_t id = 0; id < law.source.vocab; ++id) {
    const float l = law.source.logit(id);
    if (law.keeps(id, l) && !race.is_excluded(id)) kept.push_back({l, id});
  }
  std::sort(kept.begin(), kept.end(),
            [](const Entrant& x, const Entrant& y) { return x.beats(y); });
  std::vector<int64_t> ids;
  for (const Entrant& e : kept) {
    if (static_cast<int64_t>(ids.size()) < wanted) ids.push_back(e.id);
  }
  return ids;
}

// Tiles of [begin, end), `first` first if it is there: the tile of the maximum most likely holds
// the winner, whose score saves the noise of most other tiles.
template <class F>
void tiles_from(int64_t begin, int64_t end, int64_t first, const F& f) {
  if (first >= begin && first < end) f(static_cast<int>(first));
  for (int64_t t = begin; t < end; ++t) {
    if (t != first) f(static_cast<int>(t));
  }
}

// Offers the weights of a tile; the largest first.
void race_weights(const float* weights, int n, int64_t first, const SumMax& found, Race& race) {
  if (found.max < FLT_MIN) return;
  race.offer_weight(first + tiles().find(weights, n, found.max), found.max);
  tiles().race_weights(weights, n, first, race);
}

// Races the logits of a row; where `race` weighs them, a crowded tile is weighed as a whole.
void race_row(const Team& team, const RowLaw& law, Race& race, const Residual* weighed = nullptr) {
  std::vector<Race> part(team.chunks(), race);
  team.run_tiles(law.source.tile_count(), [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile], scratch[kTile];
    Race& mine = part[chunk];
    tiles_from(begin, end, law.argmax / kTile, [&](int t) {
      mine.allow(kCrowd);
      const float top = law.tile_max[t];
      if (!(top >= mine.threshold) || top == -kInf) return;
      if (top * mine.inv_t + kMaxRaceNoise < mine.cut()) return;
      const int n = law.source.length(t);
      const int64_t first = int64_t{t} * kTile;
      const RawTile tile = law.source.raw_tile(t, buffer);
      tiles().race_logits[tile.index()](tile.logits, n, first, mine, law.source.ahead(t));
      if (!mine.crowded()) return;
      const SumMax found = residual_tile(*weighed, t, scratch, buffer);
      race_weights(buffer, n, first, found, mine);
    });
  });
  for (const Race& p : part) race.merge(p);
}

// a p - b q of one id, for the ids that a point mass or a hidden id sets apart.
float residual_weight(const Residual& r, int64_t id) {
  const double w = r.a * r.target->prob(id) - r.b * r.draft->prob(id);
  return w > 0 ? static_cast<float>(w) : 0.f;
}

// One id's weight, the same bits as in its tile.
class ResidualWeigher : public Weigher {
 public:
  explicit ResidualWeigher(const Residual& r) : r_(r) {}
  float weight(int64_t id) const override {
    alignas(64) float scratch[kPad], weights[kPad];
    residual_span(r_, id / kPad * kPad, kPad, scratch, weights);
    return weights[id % kPad];
  }

 private:
  const Residual& r_;
};

}  // namespace

std::vector<int64_t> finish_draw(const RowLaw& law, const Race& race, int64_t wanted) {
  if (race.empty()) return largest_logits(law, race, wanted);
  std::vector<int64_t> ids;
  for (const Entrant& e : race.best()) ids.push_back(e.id);
  return ids;
}

std::vector<int64_t> draw_plain(const Team& team, const RowLaw& law, Race& race, int64_t wanted) {
  race.inv_t = law.params.inv_t;
  race.threshold = law.threshold;
  if (law.params.greedy) {
    return race.is_excluded(law.argmax) ? std::vector<int64_t>{} : std::vector<int64_t>{law.argmax};
  }
  race.offer_logit(law.argmax, law.max);
  race_row(team, law, race);
  return finish_draw(law, race, wanted);
}

int64_t DraftRow::column(int64_t target_id) const {
  if (inverse) return inverse[target_id];
  return target_id < source.vocab ? target_id : -1;
}

double DraftRow::prob(int64_t target_id) const {
  if (nothing) return 0;
  if (point) return target_id == id ? 1 : 0;
  if (std::binary_search(hidden.begin(), hidden.end(), target_id)) return 0;
  const int64_t c = column(target_id);
  if (c < 0) return 0;
  const float l = source.logit(c);
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

std::vector<int32_t> invert(const Vector<int32_t>& token_map, int64_t columns, int64_t vocab) {
  if (!token_map) return {};
  std::vector<int32_t> inverse((vocab + kTile - 1) / kTile * kTile, -1);
  for (int64_t c = 0; c < columns; ++c) {
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
  std::vector<float> sums(r.target->source.tile_count());
  team.run_tiles(r.target->source.tile_count(), [&](int, int64_t begin, int64_t end) {
    alignas(64) float scratch[kTile], weights[kTile];
    for (auto t = static_cast<int>(begin); t < end; ++t) {
      sums[t] = residual_tile(r, t, scratch, weights).sum;
    }
  });
  double mass = 0;
  for (const float s : sums) mass += s;
  return mass;
}

int64_t draw_weighted(const Team& team, const RowLaw& law, double scale, const TileWeights& weights,
                      const NoiseStream& stream) {
  const bool bounded = std::isfinite(scale);
  std::vector<Race> part(team.chunks(), Race(stream, 1.f, -kInf));
  team.run_tiles(law.source.tile_count(), [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float weight[kTile];
    Race& race = part[chunk];
    tiles_from(begin, end, law.argmax / kTile, [&](int t) {
      const double p_max = std::exp((law.tile_max[t] - law.max) * law.params.inv_t) / law.mass;
      const double limit = 1.001 * scale * p_max * std::exp(kMaxRaceNoise);
      if (bounded && (limit < race.linear_cut() || !(law.tile_max[t] >= law.threshold))) return;
      const SumMax found = weights(t, weight);
      race_weights(weight, law.source.length(t), int64_t{t} * kTile, found, race);
    });
  });
  Race race(stream, 1.f, -kInf);
  for (const Race& p : part) race.merge(p);
  return race.empty() ? -1 : race.winner();
}

int64_t draw_residual(const Team& team, const Residual& r, const NoiseStream& stream) {
  const RowLaw& law = *r.target;
  if (!(r.a >= 0 && r.b >= 0) || law.params.greedy) {  // w may exceed a p
    const auto weights = [&](int t, float* out) {
      alignas(64) float scratch[kTile];
      return residual_tile(r, t, scratch, out);
    };
    return draw_weighted(team, law, kInf, weights, stream);
  }
  const double scale = r.a / law.mass;
  if (scale == 0) return -1;
  const ResidualWeigher weigher(r);
  Race race(stream, law.params.inv_t, law.threshold);
  race.weigh_by(&weigher, std::log(scale) - static_cast<double>(law.max) * law.params.inv_t);
  race.allow(1);
  race.offer_logit(law.argmax, law.max);
  race_row(team, law, race, &r);
  return race.empty() ? -1 : race.winner();
}

}  // namespace specdec::cpu
