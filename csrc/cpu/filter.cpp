// What top-k and min-p keep, found in the blocks that can hold it, and the search for top-p.
#include "filter.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <functional>
#include <numeric>

#include "../common/logmath.h"

namespace specdec::cpu {
namespace {

// At most this many logits are sorted. bfloat16 rows hold hundreds of equal logits near the
// threshold, which no pass can part.
constexpr int64_t kSortLimit = 1024;
// Of a list that passes narrow, so many are left to the sort: a pass over 1000 costs 1 us, a
// sort 40.
constexpr int64_t kNarrowed = 96;
// Logits in question are listed once they are at most vocabulary / kListShare.
constexpr int64_t kListShare = 4;
// Columns of blocks a logit that top-k keeps: fewer are selected from faster, and bound it worse.
constexpr uint64_t kColumnShare = 4;
// Blocks whose logits may hold what top-p keeps, tried in turn before the whole row is searched.
constexpr int64_t kNuclei[] = {32, 256};

// A sample of 64 logits a tile is trusted if it weighs its share within kSampleError; the threshold
// then lies where it weighs top_p +- kSampleSlack. 128256 normal logits, top_p = .9: 2 passes, 4
// without the sample.
constexpr double kSampleError = 0.25, kSampleSlack = 0.03;
constexpr int kSamplePasses = 4;

double weight_of(const RowLaw& law, float logit) {
  return std::exp((static_cast<double>(logit) - law.max) * law.params.inv_t);
}

// Sums over the kept ids of a row by one more pass, in tile order.
void sum_kept(const Team& team, RowLaw& law) {
  const int n = law.source.tile_count();
  std::vector<ExpSums> sums(n, {0.f, 0.f});
  const Weighting w = law.weighting(1);
  for_tiles(team, law, law.threshold, [&](int, int t, const float* tile, int length) {
    sums[t] = tiles().exp_sums(tile, length, w);
  });
  law.mass = law.mass_log = 0;
  for (const ExpSums& s : sums) {
    law.mass += s.sum;
    law.mass_log += s.sum_log;
  }
}

// Sorts kept logits, raises the threshold to top-p's, and sets the mass. `above` is the mass of the
// kept logits that are not in the list, all of them larger.
void raise_to_top_p(RowLaw& law, float* values, int64_t n, double above, double wanted) {
  std::sort(values, values + n, std::greater<>());
  law.mass = above;
  for (int64_t i = 0; i < n; ++i) {
    law.mass += weight_of(law, values[i]);
    law.threshold = values[i];
    const bool ends_group = i + 1 == n || values[i + 1] != values[i];
    if (ends_group && law.mass >= wanted) return;
  }
}

void sum_sorted(RowLaw& law, const float* values, int64_t n) {
  law.mass = law.mass_log = 0;
  for (int64_t i = 0; i < n && values[i] >= law.threshold; ++i) {
    const double x = (static_cast<double>(values[i]) - law.max) * law.params.inv_t;
    const double w = std::exp(x);
    law.mass += w;
    law.mass_log += w * x;
  }
}

// Floats as integers of the same order, for bisection that always ends.
int64_t ordered(float x) {
  const uint32_t bits = float_bits(x);
  return bits & 0x80000000u ? -static_cast<int64_t>(bits & 0x7fffffffu)
                            : static_cast<int64_t>(bits);
}

float from_ordered(int64_t n) {
  return bits_float(n < 0 ? static_cast<uint32_t>(-n) | 0x80000000u : static_cast<uint32_t>(n));
}

// mass{l >= low} >= wanted > mass{l >= high}
struct Bracket {
  float low, high;
  double mass_high;
  int64_t count_low, count_high;

  int64_t count() const { return count_low - count_high; }
  bool is_one_value() const { return ordered(high) - ordered(low) <= 1; }
};

struct PivotTotals {
  double mass[kPivots] = {};
  int64_t count[kPivots] = {};

  void add(const PivotSums& s) {
    for (int j = 0; j < kPivots; ++j) {
      mass[j] += s.mass[j];
      count[j] += s.count[j];
    }
  }
};

PivotTotals pivot_row(const Team& team, const RowLaw& law, const float* pivots) {
  std::vector<PivotSums> sums(law.source.tile_count(), PivotSums{});
  const Weighting w = law.weighting(1);
  const float lowest = *std::min_element(pivots, pivots + kPivots);
  for_tiles(team, law, lowest, [&](int, int t, const float* tile, int n) {
    sums[t] = tiles().pivot_sums(tile, n, w, pivots);
  });
  PivotTotals out;
  for (const PivotSums& s : sums) out.add(s);
  return out;
}

// The same over a list of the logits of one bracket, which is padded like a tile.
PivotTotals pivot_list(const RowLaw& law, const std::vector<float>& list, const Bracket& listed,
                       const float* pivots) {
  const Weighting w = law.weighting(1);
  PivotTotals out;
  for (size_t i = 0; i < list.size(); i += kTile) {
    const auto n = static_cast<int>(std::min<size_t>(kTile, list.size() - i));
    out.add(tiles().pivot_sums(list.data() + i, n, w, pivots));
  }
  for (int j = 0; j < kPivots; ++j) {
    out.mass[j] += listed.mass_high;
    out.count[j] += listed.count_high;
  }
  return out;
}

void narrow(Bracket& b, const float* pivots, const PivotTotals& found, double wanted) {
  for (int j = 0; j < kPivots; ++j) {
    if (found.mass[j] >= wanted) {
      if (pivots[j] > b.low) {
        b.low = pivots[j];
        b.count_low = found.count[j];
      }
    } else if (pivots[j] < b.high) {
      b.high = pivots[j];
      b.mass_high = found.mass[j];
      b.count_high = found.count[j];
    }
  }
}

// Cuts a bracket in four, by value while that works well, then by the order of floats.
void cut(const Bracket& b, int pass, float* pivots) {
  constexpr int kByValue = 8;
  for (int j = 0; j < kPivots; ++j) {
    if (pass < kByValue) {
      const float part = static_cast<float>(j + 1) / (kPivots + 1);
      pivots[j] = b.low * (1 - part) + b.high * part;
    } else {
      const int64_t low = ordered(b.low), high = ordered(b.high);
      pivots[j] = from_ordered(low + ((high - low) * (j + 1) + kPivots) / (kPivots + 1));
    }
  }
}

// A few logits of every tile.
std::vector<float> sample_row(const RowSource& row) {
  alignas(64) float buffer[kPad];
  std::vector<float> sample;
  for (int64_t first = 0; first + kPad <= row.vocab; first += kTile) {
    const float* span = row.span(first, kPad, buffer);
    sample.insert(sample.end(), span, span + kPad);
  }
  return sample;
}

// Pivots of the first pass. Below `level` all logits together weigh less than top-p may drop. Where
// a sample weighs about what it should, they enclose the threshold that it suggests.
void first_pivots(const RowLaw& law, const Bracket& b, double mass, float* pivots) {
  const auto vocab = static_cast<double>(law.source.vocab);
  const double dropped = (1 - law.params.top_p) * mass / vocab;
  const double level = law.max + law.params.temperature * (std::log(dropped) - 1e-3);
  float low = std::isfinite(level) ? static_cast<float>(level) : -FLT_MAX;
  low = std::min(std::max(low, b.low), law.max);
  float high = law.max;
  const std::vector<float> sample = sample_row(law.source);
  const auto found = [&](const float* at) { return pivot_list(law, sample, {}, at); };
  const float all[kPivots] = {b.low, law.max, law.max};
  const double weight = found(all).mass[0];
  const double share = mass * static_cast<double>(sample.size()) / vocab;
  if (std::abs(weight - share) <= kSampleError * share) {
    Bracket part[2] = {{low, high, 0, 0, 0}, {low, high, 0, 0, 0}};
    for (int j = 0; j < 2; ++j) {
      const double wanted = weight * (law.params.top_p + (j == 0 ? kSampleSlack : -kSampleSlack));
      for (int pass = 0; pass < kSamplePasses; ++pass) {
        float at[kPivots];
        cut(part[j], pass, at);
        narrow(part[j], at, found(at), wanted);
      }
    }
    low = part[0].low;
    high = part[1].high;
  }
  pivots[0] = low;
  pivots[1] = low * 0.5f + high * 0.5f;
  pivots[2] = high;
}

// The logits in [low, high) of a row's spans of n ids, given by number.
std::vector<float> gather_spans(const Team& team, const RowSource& row,
                                const std::vector<int>& spans, int n, float low, float high) {
  std::vector<std::vector<float>> found(team.chunks());
  const auto take = [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile], kept[kTile + kPad];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = int64_t{spans[i]} * n;
      const float* span = row.span(first, n, buffer);
      const auto length = static_cast<int>(std::min<int64_t>(n, row.padded() - first));
      const int count = tiles().gather(span, length, low, high, kept);
      found[chunk].insert(found[chunk].end(), kept, kept + count);
    }
  };
  const auto count = static_cast<int64_t>(spans.size());
  if (count * n < kSplitTiles * kTile) {
    take(0, 0, count);
  } else {
    team.run(count, take);
  }
  for (size_t c = 1; c < found.size(); ++c) {
    found[0].insert(found[0].end(), found[c].begin(), found[c].end());
  }
  return std::move(found[0]);
}

// A bound of the k-th largest logit from below: the k-th largest of k and more block maxima.
// Blocks are folded into columns first, which are fewer to select from.
float bound_of(const RowLaw& law, int64_t k) {
  const std::vector<float>& blocks = law.block_max;
  const size_t columns = std::min<size_t>(std::bit_ceil(kColumnShare * k), blocks.size());
  if (static_cast<size_t>(k) > columns) return -kInf;
  std::vector<float> best(blocks.begin(), blocks.begin() + columns);
  for (size_t i = columns; i < blocks.size(); i += columns) {
    const size_t n = std::min(columns, blocks.size() - i);
    for (size_t j = 0; j < n; ++j) best[j] = std::max(best[j], blocks[i + j]);
  }
  std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<>());
  return best[k - 1];
}

// The logits of at least `low`, in index order.
std::vector<float> gather_from(const Team& team, const RowLaw& law, float low) {
  std::vector<int> blocks;
  for (size_t i = 0; i < law.block_max.size(); ++i) {
    if (law.block_max[i] >= low) blocks.push_back(static_cast<int>(i));
  }
  return gather_spans(team, law.source, blocks, kNoiseBlock, low, kInf);
}

// Sets the threshold of top-k and min-p, and returns the logits that they keep.
std::vector<float> keep_largest(const Team& team, RowLaw& law) {
  const int64_t k = law.params.has_k(law.source.vocab) ? law.params.top_k : 0;
  float tau = law.params.has_m() ? add_rn(law.max, min_p_offset(law.params)) : -kInf;
  const float bound = k > 0 ? bound_of(law, k) : -kInf;
  std::vector<float> values = gather_from(team, law, std::max({tau, bound, -FLT_MAX}));
  if (k > 0 && static_cast<int64_t>(values.size()) >= k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
    tau = std::max(tau, values[k - 1]);
  }
  std::erase_if(values, [=](float v) { return v < tau; });
  law.threshold = std::min(tau, law.max);
  return values;
}

// The logits of a bracket in index order, padded with -inf.
std::vector<float> list_bracket(const Team& team, const RowLaw& law, const Bracket& b) {
  std::vector<int> kept;
  for (int t = 0; t < law.source.tile_count(); ++t) {
    if (law.tile_max[t] >= b.low) kept.push_back(t);
  }
  std::vector<float> list = gather_spans(team, law.source, kept, kTile, b.low, b.high);
  list.resize((list.size() + kPad - 1) / kPad * kPad, -kInf);
  return list;
}

void set_one_value(RowLaw& law, const Bracket& b) {
  law.threshold = b.low;
  law.mass = b.mass_high + static_cast<double>(b.count()) * weight_of(law, b.low);
}

// How many logits equal the maximum.
int64_t count_largest(const Team& team, const RowLaw& law) {
  std::vector<int64_t> counts(team.chunks(), 0);
  for_tiles(team, law, law.max, [&](int chunk, int, const float* tile, int n) {
    counts[chunk] += tiles().count(tile, n, law.max).equal;
  });
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Raises the threshold of a law whose {l >= threshold} weighs `mass` to top-p's, and sets its mass:
// passes over the row until few logits are in question, then passes over those, then a sort.
void search_top_p(const Team& team, RowLaw& law, int64_t count, double mass) {
  const double wanted = static_cast<double>(law.params.top_p) * mass;
  // Equal rows and capped ones may end at the maximum, whose logits no pass can part.
  const int64_t ties = count_largest(team, law);
  if (static_cast<double>(ties) >= wanted) {
    law.threshold = law.max;
    law.mass = static_cast<double>(ties);
    return;
  }
  Bracket b{std::max(law.threshold, -FLT_MAX), law.max, static_cast<double>(ties), count, ties};
  const int64_t few = std::max(kSortLimit, law.source.vocab / kListShare);
  int pass = 0;
  float pivots[kPivots];
  for (; b.count() > few && !b.is_one_value(); ++pass) {
    if (pass == 0) {
      first_pivots(law, b, mass, pivots);
    } else {
      cut(b, pass, pivots);
    }
    narrow(b, pivots, pivot_row(team, law, pivots), wanted);
  }
  if (b.is_one_value()) return set_one_value(law, b);
  const Bracket listed = b;
  std::vector<float> list = list_bracket(team, law, b);
  for (pass = std::max(pass, 1); b.count() > kNarrowed && !b.is_one_value(); ++pass) {
    cut(b, pass, pivots);
    narrow(b, pivots, pivot_list(law, list, listed, pivots), wanted);
  }
  if (b.is_one_value()) return set_one_value(law, b);
  std::vector<float> left(list.size() + kPad);
  int64_t n = 0;
  for (size_t i = 0; i < list.size(); i += kTile) {
    const auto length = static_cast<int>(std::min<size_t>(kTile, list.size() - i));
    n += tiles().gather(list.data() + i, length, b.low, b.high, left.data() + n);
  }
  raise_to_top_p(law, left.data(), n, b.mass_high, wanted);
}

// Top-p alone, where a few of the largest logits weigh enough; false where they do not.
bool close_top_p(const Team& team, RowLaw& law) {
  const double wanted = static_cast<double>(law.params.top_p) * law.mass;
  for (const int64_t blocks : kNuclei) {
    const float low = bound_of(law, blocks);
    const auto is_read = [=](float max) { return max >= low; };
    if (low == -kInf) return false;
    if (std::count_if(law.block_max.begin(), law.block_max.end(), is_read) > 4 * blocks)
      return false;
    std::vector<float> values = gather_from(team, law, low);
    const auto count = static_cast<int64_t>(values.size());
    if (count > kSortLimit) return false;
    double weight = 0;
    for (const float v : values) weight += weight_of(law, v);
    if (weight < wanted) continue;
    raise_to_top_p(law, values.data(), count, 0, wanted);
    return true;
  }
  return false;
}

}  // namespace

float min_p_offset(const RowParams& params) {
  if (params.min_p >= 1.f) return 0.f;
  return mul_rn(params.temperature, log_normal(std::max(params.min_p, FLT_MIN)));
}

void finish_filters(const Team& team, RowLaw& law, bool entropy) {
  const bool is_whole = !law.params.has_k(law.source.vocab) && !law.params.has_m();
  int64_t count = law.source.vocab;
  if (is_whole) {
    if (close_top_p(team, law)) return entropy ? sum_kept(team, law) : void();
  } else {
    std::vector<float> values = keep_largest(team, law);
    count = static_cast<int64_t>(values.size());
    if (count <= kSortLimit) {
      std::sort(values.begin(), values.end(), std::greater<>());
      sum_sorted(law, values.data(), count);
      if (!law.params.has_p()) return;
      const double wanted = static_cast<double>(law.params.top_p) * law.mass;
      raise_to_top_p(law, values.data(), count, 0, wanted);
      return sum_sorted(law, values.data(), count);
    }
    sum_kept(team, law);
  }
  if (!law.params.has_p()) return;
  search_top_p(team, law, count, law.mass);
  if (entropy) sum_kept(team, law);
}

}  // namespace specdec::cpu
