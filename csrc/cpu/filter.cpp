// Candidates of top-k and min-p, and the search for the top-p threshold.
#include "filter.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>

#include "../common/logmath.h"

namespace specdec::cpu {
namespace {

// At most this many kept logits are sorted; more are narrowed by passes over the row first.
constexpr int64_t kSortLimit = 2048;
constexpr int kColumns = 128;  // of column_max

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

// Sorted kept logits: raises the threshold to top-p's, then sums what is left. `above` is the mass
// of kept logits that are not in the list, all larger.
float sorted_top_p(const RowLaw& law, float* values, int64_t n, double above, double wanted) {
  std::sort(values, values + n, std::greater<>());
  double mass = above;
  for (int64_t i = 0; i < n; ++i) {
    mass += weight_of(law, values[i]);
    const bool ends_group = i + 1 == n || values[i + 1] != values[i];
    if (ends_group && mass >= wanted) return values[i];
  }
  return n > 0 ? values[n - 1] : law.threshold;
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
};

struct PivotTotals {
  double mass[kPivots];
  int64_t count[kPivots];
};

PivotTotals pivot_pass(const Team& team, const RowLaw& law, const float* pivots) {
  std::vector<PivotSums> sums(law.source.tile_count(), PivotSums{});
  const Weighting w = law.weighting(1);
  const float lowest = *std::min_element(pivots, pivots + kPivots);
  for_tiles(team, law, lowest, [&](int, int t, const float* tile, int n) {
    sums[t] = tiles().pivot_sums(tile, n, w, pivots);
  });
  PivotTotals out{};
  for (const PivotSums& s : sums) {
    for (int j = 0; j < kPivots; ++j) {
      out.mass[j] += s.mass[j];
      out.count[j] += s.count[j];
    }
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

// First pivots: the maximum (one pass settles rows of equal logits), and a level below which all
// logits together weigh less than what top-p may drop; later ones cut the bracket in four, by value
// while that works well, then by the order of floats.
void choose_pivots(const RowLaw& law, const Bracket& b, int pass, double mass, float* pivots) {
  if (pass == 0) {
    const double dropped = (1 - law.params.top_p) * mass / static_cast<double>(law.source.vocab);
    const double level = law.max + law.params.temperature * (std::log(dropped) - 1e-3);
    const float low = std::isfinite(level) ? static_cast<float>(level) : -FLT_MAX;
    pivots[0] = law.max;
    pivots[2] = std::min(std::max(low, b.low), law.max);
    pivots[1] = pivots[2] + 0.5f * (law.max - pivots[2]);
    return;
  }
  constexpr int kByValue = 6;
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

// The largest logit t of {l >= threshold} with mass{l >= t} >= wanted, by passes over the row.
float search_top_p(const Team& team, const RowLaw& law, int64_t count, double mass, double wanted) {
  Bracket b{std::max(law.threshold, -FLT_MAX), kInf, 0, count, 0};
  for (int pass = 0; b.count_low - b.count_high > kSortLimit; ++pass) {
    float pivots[kPivots];
    choose_pivots(law, b, pass, mass, pivots);
    narrow(b, pivots, pivot_pass(team, law, pivots), wanted);
    if (b.low == law.max || ordered(b.high) - ordered(b.low) <= 1) return b.low;
  }
  std::vector<std::vector<float>> found(team.chunks());
  for_tiles(team, law, b.low, [&](int chunk, int, const float* tile, int n) {
    std::vector<float>& list = found[chunk];
    const size_t before = list.size();
    list.resize(before + kTile + kPad);
    list.resize(before + tiles().gather(tile, n, b.low, b.high, list.data() + before));
  });
  for (size_t c = 1; c < found.size(); ++c) {
    found[0].insert(found[0].end(), found[c].begin(), found[c].end());
  }
  std::vector<float>& list = found[0];
  const auto n = static_cast<int64_t>(list.size());
  return n > 0 ? sorted_top_p(law, list.data(), n, b.mass_high, wanted) : b.low;
}

}  // namespace

float min_p_offset(const RowParams& params) {
  if (params.min_p >= 1.f) return 0.f;
  return mul_rn(params.temperature, log_normal(std::max(params.min_p, FLT_MIN)));
}

Candidates::Candidates(const RowParams& params, int64_t vocab)
    : k_(params.has_k(vocab) ? params.top_k : 0),
      offset_(params.has_m() ? min_p_offset(params) : -kInf),
      trim_at_(2 * k_ + 256) {}

void Candidates::reserve(int64_t size) {
  if (size <= capacity_) return;
  capacity_ = std::max(size, 2 * capacity_);
  auto larger = std::make_unique_for_overwrite<float[]>(capacity_);
  if (size_ > 0) std::memcpy(larger.get(), values_.get(), size_ * sizeof(float));
  values_ = std::move(larger);
}

void Candidates::append(const float* tile, int n) {
  reserve(size_ + n + kPad);
  size_ += tiles().gather(tile, n, std::max(cutoff_, -FLT_MAX), kInf, values_.get() + size_);
}

void Candidates::add(const float* tile, int n, float tile_max) {
  if (tile_max > best_) {
    best_ = tile_max;
    cutoff_ = std::max(cutoff_, add_rn(best_, offset_));
  }
  if (!(tile_max >= cutoff_) || tile_max == -kInf) return;
  if (k_ > 0 && k_ <= kColumns && size_ == 0 && n == kTile) {
    float column[kColumns];
    tiles().column_max(tile, n, column);
    std::nth_element(column, column + k_ - 1, column + kColumns, std::greater<>());
    cutoff_ = std::max(cutoff_, column[k_ - 1]);
  }
  append(tile, n);
  if (k_ > 0 && size_ >= trim_at_) trim();
}

void Candidates::trim() {
  if (k_ == 0 || size_ < k_) return;
  float* first = values_.get();
  std::nth_element(first, first + k_ - 1, first + size_, std::greater<>());
  cutoff_ = std::max(cutoff_, first[k_ - 1]);
  const float cutoff = cutoff_;
  size_ = std::remove_if(first, first + size_, [=](float v) { return v < cutoff; }) - first;
  trim_at_ = std::max(trim_at_, 2 * size_);
}

void Candidates::merge(const Candidates& other) {
  reserve(size_ + other.size_ + 1);
  if (other.size_ > 0) {
    std::memcpy(values_.get() + size_, other.values_.get(), other.size_ * sizeof(float));
  }
  size_ += other.size_;
}

float Candidates::finish(float max) {
  trim();
  float tau = offset_ == -kInf ? -kInf : add_rn(max, offset_);
  if (k_ > 0 && size_ >= k_) {
    tau = std::max(tau, *std::min_element(values_.get(), values_.get() + k_));
  }
  float* first = values_.get();
  size_ = std::remove_if(first, first + size_, [=](float v) { return v < tau; }) - first;
  return tau;
}

void finish_filters(const Team& team, RowLaw& law, Candidates* candidates, double mass) {
  int64_t count = law.source.vocab;
  if (candidates) {
    law.threshold = std::min(candidates->finish(law.max), law.max);
    count = candidates->size();
    if (count <= kSortLimit) {
      float* values = candidates->begin();
      std::sort(values, values + count, std::greater<>());
      sum_sorted(law, values, count);
      if (!law.params.has_p()) return;
      law.threshold =
          sorted_top_p(law, values, count, 0, static_cast<double>(law.params.top_p) * law.mass);
      return sum_sorted(law, values, count);
    }
    sum_kept(team, law);
    mass = law.mass;
  }
  if (!law.params.has_p()) return;
  const double wanted = static_cast<double>(law.params.top_p) * mass;
  const float edge = search_top_p(team, law, count, mass, wanted);
  law.threshold = std::min(std::max(law.threshold, edge), law.max);
  sum_kept(team, law);
}

}  // namespace specdec::cpu
