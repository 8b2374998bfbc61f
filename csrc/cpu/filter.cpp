// What top-k and min-p keep, found in the blocks that can hold it, and the search for top-p: the
// logits in question are narrowed by a sample and one pass over them, again and again.
#include "filter.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "../common/logmath.h"

namespace specdec::cpu {
namespace {

// Blocks whose logits may hold what top-p keeps, tried before the whole row is searched. 256 more
// next gain 8 % in rows like a language model's at temperature 1 and top-p .99, and lose 5 to 20 %
// in normal ones.
constexpr int64_t kNucleus = 32;
// min-p lists what it keeps where that lies in fewer than one block of so many.
constexpr size_t kSparse = 4;
// Logits of these blocks at most, else equal ones are many; a longer list is ranked by a sample.
constexpr size_t kCrowd = 4096;
// Columns of blocks a logit that top-k keeps: fewer are selected from faster, and bound it worse.
constexpr uint64_t kColumnShare = 4;
constexpr int64_t kBoundSlack = 8;  // one column of so many more may reach the bound
// Of fewer blocks than so many a kept logit, the maxima bound top-k ill: a sample says where to
// look.
constexpr size_t kBlocksOfEach = 2;
// Logits in question are sampled, so many at a time (4096: 4 % slower), and sorted once they are
// few.
constexpr int64_t kSample = 512;
constexpr size_t kSorted = 64;
constexpr int kBins = 512;  // of a sample, by value
// Standard deviations of the sampled mass that a bracket allows for; one that fails costs a pass.
constexpr double kDeviations = 2.5;

// T log(min_p): how far below the maximum a kept logit may lie.
float min_p_offset(const RowParams& params) {
  if (params.min_p >= 1.f) return 0.f;
  return mul_rn(params.temperature, log_normal(std::max(params.min_p, FLT_MIN)));
}

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

// Calls visit(i, length) for the tiles of a list, i its first value, padded like those of a row.
template <class Visit>
void for_list(std::vector<float>& values, const Visit& visit) {
  const size_t n = values.size();
  values.resize((n + kPad - 1) / kPad * kPad, -kInf);
  for (size_t i = 0; i < n; i += kTile) {
    visit(i, static_cast<int>(std::min<size_t>(kTile, values.size() - i)));
  }
  values.resize(n);
}

// The lists of all chunks, one behind the other.
std::vector<float> joined(std::vector<std::vector<float>>& lists) {
  for (size_t c = 1; c < lists.size(); ++c) {
    lists[0].insert(lists[0].end(), lists[c].begin(), lists[c].end());
  }
  return std::move(lists[0]);
}

// kSample of a list or fewer, evenly.
std::vector<float> sample_list(const std::vector<float>& values) {
  const size_t step = (values.size() + kSample - 1) / kSample;
  std::vector<float> sample;
  for (size_t i = 0; i < values.size(); i += step) sample.push_back(values[i]);
  return sample;
}

// The weights of a list of logits.
std::vector<float> weigh(const RowLaw& law, std::vector<float>& values) {
  std::vector<float> weights(values.size() + kPad);
  const Weighting w = law.weighting(1);
  for_list(values, [&](size_t i, int length) {
    tiles().residual(values.data() + i, nullptr, length, w, w, 1, 0, weights.data() + i);
  });
  weights.resize(values.size());
  return weights;
}

double sum_of(const std::vector<float>& weights) {
  return std::accumulate(weights.begin(), weights.end(), 0.0);
}

// Sums over the logits of a list that are kept.
void sum_list(RowLaw& law, std::vector<float>& values) {
  law.mass = law.mass_log = 0;
  const Weighting w = law.weighting(1);
  for_list(values, [&](size_t i, int length) {
    const ExpSums s = tiles().exp_sums(values.data() + i, length, w);
    law.mass += s.sum;
    law.mass_log += s.sum_log;
  });
}

// low <= threshold < high
struct Bracket {
  float low, high;
};

// Logits in question, in index order, with their mass and that of the larger ones.
struct Question {
  std::vector<float> values;
  double above = 0, inside = 0;

  bool holds(double wanted) const { return above < wanted && above + inside >= wanted; }
};

// A sample by value: bin 0 begins at its smallest logit, the last one ends at its largest.
struct Bins {
  float low, per_bin;
  double weight = 0, squares = 0, mass[kBins] = {};

  Bins(const std::vector<float>& values, const std::vector<float>& weights) {
    float least[8], most[8];  // eight chains each, that no sum waits for the one before
    double sum[8] = {}, sum2[8] = {};
    std::fill(least, least + 8, kInf);
    std::fill(most, most + 8, -kInf);
    const size_t whole = values.size() / 8 * 8;
    const auto take = [&](size_t i, int j) {
      const float v = values[i + j];
      const double w = weights[i + j];
      least[j] = v < least[j] ? v : least[j];
      most[j] = v > most[j] ? v : most[j];
      sum[j] += w;
      sum2[j] += w * w;
    };
    for (size_t i = 0; i < whole; i += 8) {
      for (int j = 0; j < 8; ++j) take(i, j);
    }
    for (size_t i = whole; i < values.size(); ++i) take(i, 0);
    low = *std::min_element(least, least + 8);
    const float high = *std::max_element(most, most + 8);
    weight = std::accumulate(sum, sum + 8, 0.0);
    squares = std::accumulate(sum2, sum2 + 8, 0.0);
    per_bin = kBins / (high - low);
    if (!has_width()) return;
    int bin[kPad];
    for (size_t i = 0; i < values.size(); i += kPad) {
      const size_t n = std::min<size_t>(kPad, values.size() - i);
      for (size_t j = 0; j < n; ++j) bin[j] = static_cast<int>((values[i + j] - low) * per_bin);
      for (size_t j = 0; j < n; ++j) mass[std::min(bin[j], kBins - 1)] += weights[i + j];
    }
  }
  bool has_width() const { return per_bin > 0 && per_bin <= FLT_MAX; }
  float edge(int bin) const { return low + static_cast<float>(bin) / per_bin; }
};

// Narrows what is in question by a sample of it, or by all of it.
Bracket narrow(const RowLaw& law, const Question& asked, std::vector<float>& sample, bool is_all,
               double wanted, Bracket now) {
  const std::vector<float> weights = weigh(law, sample);
  const Bins bins(sample, weights);
  if (!(bins.weight > 0) || !bins.has_width()) return now;
  const double unit = asked.inside / bins.weight;
  const double share = std::clamp((wanted - asked.above) / asked.inside, 0.0, 1.0);
  const double slack =
      is_all ? 0 : kDeviations * unit * std::sqrt(bins.squares * share * (1 - share));
  double above = asked.above;
  int bin = kBins;
  for (; bin > 0 && above + unit * bins.mass[bin - 1] < wanted - slack; --bin) {
    above += unit * bins.mass[bin - 1];
  }
  if (bin < kBins) now.high = std::min(bins.edge(bin), now.high);
  for (; bin > 0 && above < wanted + slack; --bin) above += unit * bins.mass[bin - 1];
  if (bin > 0) now.low = std::max(bins.edge(bin), now.low);
  return now;
}

// Of the logits in question those inside a bracket.
Question look_into(const RowLaw& law, Question& asked, const Bracket& b) {
  const Weighting w = law.weighting(1);
  Question out;
  out.above = asked.above;
  out.values.resize(asked.values.size() + kPad);
  size_t count = 0;
  for_list(asked.values, [&](size_t i, int length) {
    const Bracketed in = tiles().bracket(asked.values.data() + i, length, w, b.low, b.high,
                                         out.values.data() + count);
    out.above += in.above;
    out.inside += in.inside;
    count += in.count;
  });
  out.values.resize(count);
  return out;
}

// Where the threshold lies in `all` if the bracket inside of it, looked into, does not hold it.
Bracket beside(const Bracket& missed, const Question& found, double wanted, const Bracket& all) {
  if (found.above >= wanted) return {missed.high, all.high};
  return {all.low, missed.low};
}

// The half of a bracket, by value, that holds the threshold: where a few logits weigh nearly all,
// no sample shows them.
Question halve(const RowLaw& law, Question& asked, const Bracket& b, double wanted) {
  const float least = *std::min_element(asked.values.begin(), asked.values.end());
  const float low = std::max(b.low, least), high = std::min(b.high, law.max);
  const float middle = low / 2 + high / 2;
  if (middle > low && middle < high) {
    for (const Bracket& half : {Bracket{middle, b.high}, Bracket{b.low, middle}}) {
      Question found = look_into(law, asked, half);
      if (found.holds(wanted)) return found;
    }
  }
  return look_into(law, asked, b);
}

// Raises the threshold to top-p's, which is one of the values in question, and sets the mass.
void raise_to_top_p(RowLaw& law, Question& asked, double wanted) {
  std::vector<float>& values = asked.values;
  const auto are_equal = [&] {
    return std::equal(values.begin() + 1, values.end(), values.begin());
  };
  while (values.size() > kSorted && !are_equal()) {
    std::vector<float> sample = sample_list(values);
    const bool is_all = sample.size() == values.size();
    const Bracket all{-FLT_MAX, kInf}, b = narrow(law, asked, sample, is_all, wanted, all);
    Question next = look_into(law, asked, b);
    const bool is_missed = !next.holds(wanted);
    if (is_missed || next.values.size() == values.size()) {
      next = halve(law, asked, is_missed ? beside(b, next, wanted, all) : b, wanted);
    }
    if (!next.holds(wanted) || next.values.size() == values.size()) break;
    asked = std::move(next);
  }
  if (are_equal()) {
    law.threshold = values[0];
    law.mass = asked.above + static_cast<double>(values.size()) * weight_of(law, values[0]);
    return;
  }
  std::sort(values.begin(), values.end(), std::greater<>());
  law.mass = asked.above;
  for (size_t i = 0; i < values.size(); ++i) {
    law.mass += weight_of(law, values[i]);
    law.threshold = values[i];
    const bool ends_group = i + 1 == values.size() || values[i + 1] != values[i];
    if (ends_group && law.mass >= wanted) return;
  }
}

int64_t count_blocks(const RowLaw& law, float low) {
  const Counts c = tiles().count(law.block_max.data(), static_cast<int>(law.block_max.size()), low);
  return int64_t{c.greater} + c.equal;
}

// Whether few blocks hold a logit of at least `low`.
bool is_sparse(const RowLaw& law, float low) {
  return count_blocks(law, low) < static_cast<int64_t>(law.block_max.size() / kSparse);
}

// The logits of at least `low`, in index order.
std::vector<float> gather_from(const Team& team, const RowLaw& law, float low) {
  std::vector<std::vector<float>> found(team.chunks());
  const auto take = [&](int chunk, const float* span, int n) {
    float kept[kTile + kPad];
    const int count = tiles().gather(span, n, low, kInf, kept);
    found[chunk].insert(found[chunk].end(), kept, kept + count);
  };
  if (!is_sparse(law, low)) {
    for_tiles(team, law, low,
              [&](int chunk, int, const float* tile, int n) { take(chunk, tile, n); });
    return joined(found);
  }
  const std::vector<int> blocks = blocks_from(law, low);
  const auto take_blocks = [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float buffer[kNoiseBlock];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = int64_t{blocks[i]} * kNoiseBlock;
      take(chunk, law.source.span(first, kNoiseBlock, buffer), kNoiseBlock);
    }
  };
  const auto count = static_cast<int64_t>(blocks.size());
  if (count * kNoiseBlock < kSplitTiles * kTile) {
    take_blocks(0, 0, count);
  } else {
    team.run(count, take_blocks);
  }
  return joined(found);
}

// Those of a list with low <= value < high.
std::vector<float> between(std::vector<float>& values, float low, float high) {
  std::vector<float> kept(values.size() + kPad);
  size_t count = 0;
  for_list(values, [&](size_t i, int length) {
    count += tiles().gather(values.data() + i, length, low, high, kept.data() + count);
  });
  kept.resize(count);
  return kept;
}

int64_t count_from(std::vector<float>& values, float low) {
  int64_t n = 0;
  for_list(values, [&](size_t i, int length) {
    const Counts c = tiles().count(values.data() + i, length, low);
    n += c.greater + c.equal;
  });
  return n;
}

// Where the k-th largest of a list lies.
struct Rank {
  int64_t k;
  float least, most;
};

// Its value; or with a slack of at least 0 some lower one that so many more may reach.
float kth_of_few(std::vector<float>& values, const Rank& rank, int64_t slack = -1) {
  uint32_t low = ordered_bits(rank.least), high = ordered_bits(rank.most);
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int64_t n = count_from(values, from_ordered_bits(middle));
    if (n < rank.k) {
      high = middle - 1;
    } else {
      low = middle;
      if (n <= rank.k + slack) break;
    }
  }
  return from_ordered_bits(low);
}

// A value of a sample that most likely lies below (side 1) or above (-1) the one of a rank among
// `of` values; none where the sample ends before.
std::optional<float> likely_beside(std::vector<float>& sample, const Rank& rank, int64_t of,
                                   int side) {
  const auto size = static_cast<double>(sample.size());
  const double share = static_cast<double>(rank.k) / static_cast<double>(of);
  const double slack = kDeviations * std::sqrt(size * share * (1 - share)) + 1;
  const double place = size * share + side * slack;
  if (!(place >= 1 && place <= size)) return {};
  return kth_of_few(sample, {static_cast<int64_t>(place), rank.least, rank.most});
}

// The k-th largest of a list.
float kth_largest(std::vector<float>& values, Rank rank) {
  if (values.size() <= kCrowd) return kth_of_few(values, rank);
  std::vector<float> sample = sample_list(values);
  float beyond = from_ordered_bits(ordered_bits(rank.most) + 1);
  for (const int side : {1, -1}) {
    const auto value = likely_beside(sample, rank, static_cast<int64_t>(values.size()), side);
    if (!value) continue;
    if (count_from(values, *value) >= rank.k) {
      rank.least = *value;
    } else {
      beyond = std::min(*value, beyond);
    }
  }
  rank.k -= count_from(values, beyond);
  rank.most = from_ordered_bits(ordered_bits(beyond) - 1);
  std::vector<float> inside = between(values, rank.least, beyond);
  return kth_of_few(inside, rank);
}

// Some kept logits of every tile that lie below a value.
std::vector<float> sample_row(const RowLaw& law, float below) {
  alignas(64) float buffer[kPad], kept[2 * kPad];
  std::vector<float> sample;
  for (int64_t first = 0; first + kPad <= law.source.vocab; first += kTile) {
    const float* span = law.source.span(first, kPad, buffer);
    const int n = tiles().gather(span, kPad, law.weighting(1).threshold, below, kept);
    sample.insert(sample.end(), kept, kept + n);
  }
  return sample;
}

// Raises the threshold to that of top-k, k > 0, and returns the logits from there on.
std::vector<float> keep_largest(const Team& team, RowLaw& law, int64_t k, float bound) {
  const float low = std::max({law.threshold, bound, -FLT_MAX});
  float from = low;
  if (k > static_cast<int64_t>(law.block_max.size() / kBlocksOfEach)) {
    std::vector<float> sample = sample_row(law, kInf);
    const int64_t share = law.source.vocab / (law.source.tile_count() * int64_t{kPad});
    const auto of = share * static_cast<int64_t>(sample.size());
    from = std::max(likely_beside(sample, {k, -FLT_MAX, law.max}, of, 1).value_or(low), low);
  }
  std::vector<float> values = gather_from(team, law, from);
  if (from > low && static_cast<int64_t>(values.size()) < k) {  // the sample misled
    from = low;
    values = gather_from(team, law, low);
  }
  if (static_cast<int64_t>(values.size()) >= k) {
    law.threshold = std::max(law.threshold, kth_largest(values, {k, from, law.max}));
  }
  return between(values, std::max(law.threshold, -FLT_MAX), kInf);
}

// How many logits equal the maximum.
int64_t count_largest(const Team& team, const RowLaw& law) {
  std::vector<int64_t> counts(team.chunks(), 0);
  for_tiles(team, law, law.max, [&](int chunk, int, const float* tile, int n) {
    counts[chunk] += tiles().count(tile, n, law.max).equal;
  });
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Only the largest logits are kept.
void set_largest(RowLaw& law, double count) {
  law.threshold = law.max;
  law.mass = count;
  law.mass_log = 0;
}

// The largest logits of a row: all of at least `low`.
struct Nucleus {
  float low;
  double mass;
};

// Top-p alone, where a few of the largest logits weigh enough; true where they do. Else `nucleus`
// holds what is known of them. Logits below `level` are not needed.
bool close_top_p(const Team& team, RowLaw& law, double wanted, float level, Nucleus& nucleus) {
  const float bound = bound_of(law, kNucleus);
  if (bound == -kInf || count_blocks(law, bound) > 4 * kNucleus) return false;
  const float low = std::max(bound, level);
  Question asked{gather_from(team, law, low)};
  if (asked.values.size() > kCrowd) return false;
  asked.inside = sum_of(weigh(law, asked.values));
  nucleus = {low, asked.inside};
  if (nucleus.mass < wanted && low > level) return false;
  raise_to_top_p(law, asked, wanted);
  return true;
}

// The logits of a row inside a bracket.
Question look_into(const Team& team, const RowLaw& law, const Bracket& b) {
  std::vector<std::vector<float>> found(team.chunks());
  std::vector<Bracketed> sums(law.source.tile_count(), Bracketed{});
  const Weighting w = law.weighting(1);
  for_tiles(team, law, b.low, [&](int chunk, int t, const float* tile, int n) {
    float kept[kTile + kPad];
    sums[t] = tiles().bracket(tile, n, w, b.low, b.high, kept);
    found[chunk].insert(found[chunk].end(), kept, kept + sums[t].count);
  });
  Question out{joined(found)};
  for (const Bracketed& s : sums) {
    out.above += s.above;
    out.inside += s.inside;
  }
  return out;
}

// Raises the threshold of a row that weighs law.mass to top-p's, and sets its mass: one pass over
// the row, two where the sample misled, three where rounding decides, then passes over what lies
// in question.
void search_top_p(const Team& team, RowLaw& law) {
  const double mass = law.mass, wanted = static_cast<double>(law.params.top_p) * mass;
  // Below this level all logits together weigh less than top-p may drop.
  const double dropped = (1 - law.params.top_p) * mass / static_cast<double>(law.source.vocab);
  const double loose = law.max + law.params.temperature * (std::log(dropped) - 1e-3);
  const float least = law.weighting(1).threshold;
  const float level = loose > least ? static_cast<float>(loose) : least;
  Nucleus nucleus{kInf, 0};
  if (close_top_p(team, law, wanted, level, nucleus)) return;
  if (nucleus.low > law.max) {  // equal logits: they may hold the threshold, and no pass parts them
    nucleus = {law.max, static_cast<double>(count_largest(team, law))};
    if (nucleus.mass >= wanted) return set_largest(law, nucleus.mass);
  }
  const Bracket all{level, nucleus.low};
  const Question rest{{}, nucleus.mass, mass - nucleus.mass};
  std::vector<float> sample = sample_row(law, nucleus.low);
  const Bracket b = narrow(law, rest, sample, false, wanted, all);
  Question asked = look_into(team, law, b);
  if (!asked.holds(wanted)) asked = look_into(team, law, beside(b, asked, wanted, all));
  if (asked.values.empty()) {  // only rounding parts what counts from the row's mass
    asked = {gather_from(team, law, level)};
    asked.inside = sum_of(weigh(law, asked.values));
  }
  raise_to_top_p(law, asked, wanted);
}

}  // namespace

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
  return kth_of_few(best, {k, -kInf, law.max}, k / kBoundSlack);
}

std::vector<int> blocks_from(const RowLaw& law, float low) {
  std::vector<int> found;
  for (int t = 0; t < law.source.tile_count(); ++t) {
    if (!(law.tile_max[t] >= low)) continue;
    const float* maxima = law.tile_blocks(t);
    for (int i = 0; i < kTileBlocks; ++i) {
      if (!(maxima[i] >= low)) continue;
      found.push_back(t * kTileBlocks + i);
      law.source.prefetch(int64_t{found.back()} * kNoiseBlock, kNoiseBlock);
    }
  }
  return found;
}

void finish_filters(const Team& team, RowLaw& law, bool entropy) {
  const int64_t k = law.params.has_k(law.source.vocab) ? law.params.top_k : 0;
  if (law.params.has_m()) {
    law.threshold = std::min(add_rn(law.max, min_p_offset(law.params)), law.max);
  }
  const float bound = k > 0 ? bound_of(law, k) : -kInf;
  if (k > 0 && bound >= law.max) {
    return set_largest(law, static_cast<double>(count_largest(team, law)));
  }
  if (k > 0 || (law.params.has_m() && is_sparse(law, law.threshold))) {
    std::vector<float> values =
        k > 0 ? keep_largest(team, law, k, bound) : gather_from(team, law, law.threshold);
    sum_list(law, values);
    if (!law.params.has_p()) return;
    Question asked{values, 0, law.mass};
    raise_to_top_p(law, asked, static_cast<double>(law.params.top_p) * law.mass);
    return sum_list(law, values);
  }
  if (law.params.has_m()) sum_kept(team, law);
  if (!law.params.has_p()) return;
  search_top_p(team, law);
  if (entropy) sum_kept(team, law);
}

}  // namespace specdec::cpu
