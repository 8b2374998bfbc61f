// Draws of one id from a row: plain, or from the residual (a p - b q)+.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "row.h"

namespace specdec::cpu {

// Tells `race` about a plain row.
void set_row(Race& race, const RowLaw& law);

// Runs `race` over a plain row, which it is told about here. Of a greedy row the argmax wins.
void race_plain(const RowLaw& law, Race& race);

// Offers the blocks of tile t that may win, given its logits and the largest of each block.
void race_logits(Race& race, int t, const float* tile, const float* blocks);

// The draft's law over target ids.
struct DraftRow {
  RowSource source;
  const int32_t* inverse = nullptr;  // [vocab] column of a target id, -1 none; null: identity
  Weighting weight{};
  bool point = false;    // all mass on `id`; the row is not read
  bool nothing = false;  // no mass anywhere
  int64_t id = -1;
  std::optional<std::vector<Candidate>> kept;  // by id, of a row that holds no other ids
  std::vector<int64_t> hidden;  // ascending: ids of the row that have no mass after all

  std::vector<float> columns;  // widen(): -inf, then the row's logits

  int64_t column(int64_t target_id) const;  // -1: none
  double prob(int64_t target_id) const;
  // Makes a mapped row ready for tile(); nothing to do for others, or twice.
  void widen();
  // n logits over target ids, hidden ones too, as RowSource::span; null where there is no mass.
  const float* span(int64_t first, int n, float* buffer) const;
};

// Lists the candidates of an examined draft row; the law is bad where they are no distribution.
void read_kept(const Kept& kept, int64_t number, int64_t vocab, RowLaw& law);

// Column of each target id, from the token_map of rows; empty without one of the two.
std::vector<int32_t> invert(const Vector<int32_t>& token_map, const Logits& rows, int64_t vocab);

struct Residual {
  const RowLaw* target;
  const DraftRow* draft;
  float a, b;
};

// Writes n weights from id `first` to `out`, at most a tile of them; `scratch` is as large.
void residual_span(const Residual& r, int64_t first, int n, float* scratch, float* out);

// The same of tile t. Returns sum and largest of them.
SumMax residual_tile(const Residual& r, int t, float* scratch, float* out);

// sum_v f(p, v), where f(p, v) = scale p but for the candidates of the draft. None where p without
// them is a difference that has lost its digits.
template <class F>
std::optional<double> sum_over_kept(const RowLaw& law, const DraftRow& draft, double scale,
                                    const F& f) {
  if (!draft.kept) return {};
  double here = 0, sum = 0;
  for (const Candidate& one : *draft.kept) {
    here += law.prob(one.id);
    sum += f(one.id);
  }
  if (1 - here < 1e-3) return {};
  return scale * (1 - here) + sum;
}

// Sum and largest of (a p - b q)+ in each tile; visit(t, weights, n) sees them.
template <class Visit>
std::vector<SumMax> weigh_tiles(const Team& team, const Residual& r, const Visit& visit) {
  std::vector<SumMax> found(r.target->source.tile_count());
  team.run_tiles(r.target->source.tile_count(), [&](int, int64_t begin, int64_t end) {
    alignas(64) float scratch[kTile], weights[kTile];
    for (auto t = static_cast<int>(begin); t < end; ++t) {
      found[t] = residual_tile(r, t, scratch, weights);
      visit(t, weights, r.target->source.length(t));
    }
  });
  return found;
}

// sum_v (a p - b q)+, tiles merged in order.
double residual_mass(const Team& team, const Residual& r);

// Writes the weights of tile t (kTile floats), and returns sum and largest of them.
using TileWeights = std::function<SumMax(int t, float* out)>;

// The winner among weights of at least FLT_MIN, or -1. No weight exceeds the row's own law `scale`
// times over; an infinite scale knows no bound.
int64_t draw_weighted(const Team& team, const RowLaw& law, double scale, const TileWeights& weights,
                      const NoiseStream& stream);

// The same of (a p - b q)+. Where that is at most a p, the target's blocks bound it, and only those
// that may win are weighed: a rejected draft row is hardly read again.
int64_t draw_residual(const Team& team, const Residual& r, const NoiseStream& stream);

}  // namespace specdec::cpu
