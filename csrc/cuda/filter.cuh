// Filters as thresholds, without a sorted row. Of each tile the kListed largest values and the
// least value and mass of each group of the sorted tile are kept. A threshold among the listed
// values of every tile is exact at once (tau12: the larger of min-p's threshold and the k-th value;
// top-p: the largest t with mass{l >= t} >= p mass{l >= tau12}). Elsewhere the groups bound where
// it lies, and refine.cuh reads the row once more.
#pragma once
#include "rows.cuh"
#include "sort.cuh"

namespace specdec {

constexpr int kMaxGroups = 2048;  // of a row in shared memory: 64 tiles

struct GroupTable {
  float least[kMaxGroups], above[kMaxGroups],
      mass[kMaxGroups];  // above: no value of the group is larger
};
union FilterScratch {
  float sorted[kTile];
  Listed items[kTile];
  GroupTable groups;
};

__device__ __forceinline__ float next_up(float x) { return from_ordered_bits(ordered_bits(x) + 1); }

// Lists the tile's largest values and its groups.
__device__ inline void list_tile(const Problem& p, const RowTask& t, int64_t base, int64_t entry,
                                 float maximum, const float (&v)[kPerThread],
                                 FilterScratch& scratch) {
  SPECDEC_SHARED(float, last_listed);
  SPECDEC_SHARED(float, first_left);
  float s[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) s[j] = v[j];
  sort_tile(s, scratch.sorted);
  if (threadIdx.x == kListed / kPerThread - 1) last_listed = s[kPerThread - 1];
  if (threadIdx.x == kListed / kPerThread) first_left = s[0];
  float mass = 0.f;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    mass += s[j] > -INFINITY ? expf((s[j] - maximum) * t.parameters.inv_t) : 0.f;
  }
  constexpr int kThreadsPerGroup = kGroup / kPerThread;
#pragma unroll
  for (int mask = 1; mask < kThreadsPerGroup; mask *= 2) {
    mass += __shfl_xor_sync(0xffffffffu, mass, mask);
  }
  const float least = __shfl_sync(0xffffffffu, s[kPerThread - 1],
                                  static_cast<int>(threadIdx.x % 32 | (kThreadsPerGroup - 1)));
  if (threadIdx.x % kThreadsPerGroup == 0) {
    p.work.groups.store(entry * kGroups + threadIdx.x / kThreadsPerGroup, {least, mass});
  }
  __syncthreads();
  const float floor = first_left == -INFINITY    ? -INFINITY
                      : last_listed > first_left ? last_listed
                                                 : next_up(last_listed);
  int count = 0, total = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) count += v[j] >= floor && v[j] > -INFINITY ? 1 : 0;
  int at = block_exclusive_sum(count, &total);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (v[j] >= floor && v[j] > -INFINITY) {
      p.work.lists.store(entry * kListed + at++, {v[j], static_cast<int>(id_of(base, j))});
    }
  }
  if (threadIdx.x == 0) p.work.heads.store(entry, {floor, total});
}

// Values in shared memory plus up to kCells sums over values that were only counted.
constexpr int kCells = 6;
struct Cells {
  float bound[kCells];  // all values of the cell are >= it, and above every smaller bound
  int count[kCells];
  float mass[kCells];
};

struct ListMeasure {
  const Listed* items;
  int count;
  const Cells* cells;  // or nullptr
  float maximum, inv_t;

  __device__ int count_from(float t) const {
    int n = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) n += items[i].value >= t ? 1 : 0;
    n = block_reduce(n, Plus{});
    for (int c = 0; cells != nullptr && c < kCells; ++c) {
      if (cells->bound[c] >= t) n += cells->count[c];
    }
    return n;
  }
  __device__ double mass_from(float t) const {
    double mass = 0.;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      if (items[i].value >= t) mass += expf((items[i].value - maximum) * inv_t);
    }
    mass = block_reduce(mass, Plus{});
    for (int c = 0; cells != nullptr && c < kCells; ++c) {
      if (cells->bound[c] >= t) mass += cells->mass[c];
    }
    return mass;
  }
};

// The largest t in [low, high] that `holds`, which is true from some t downwards; low if none is.
template <class Holds>
__device__ float largest_that(float low, float high, Holds holds) {
  uint32_t least = ordered_bits(low), most = ordered_bits(high);
  while (least < most) {
    const uint32_t middle = least + (most - least + 1) / 2;
    if (holds(from_ordered_bits(middle))) {
      least = middle;
    } else {
      most = middle - 1;
    }
  }
  return from_ordered_bits(least);
}

__device__ inline float min_p_threshold(const Parameters& s, float maximum) {
  if (s.min_p <= 0.f) return -INFINITY;
  if (s.min_p >= 1.f) return maximum;
  return add_rn(maximum, mul_rn(s.temperature, log_normal(fmaxf(s.min_p, kTiny))));
}

template <class Measure>
__device__ float select_tau12(const Measure& m, const Parameters& s, float maximum, float low) {
  const float tau1 = min_p_threshold(s, maximum);
  if (s.top_k <= 0) return tau1;
  const float kth = largest_that(low, maximum, [&](float t) { return m.count_from(t) >= s.top_k; });
  return fmaxf(tau1, kth);
}

template <class Measure>
__device__ float select_edge(const Measure& m, const Parameters& s, float maximum, float low,
                             double mass12) {
  if (s.top_p >= 1.f) return low;
  const double wanted = static_cast<double>(s.top_p) * mass12;
  return largest_that(low, maximum, [&](float t) { return m.mass_from(t) >= wanted; });
}

// Sums over the groups that surely lie at or above t, or that may reach t.
struct GroupMeasure {
  const GroupTable* groups;
  int count;
  __device__ int sure_count(float t) const {
    int n = 0;
    for (int g = threadIdx.x; g < count; g += kThreads) n += groups->least[g] >= t ? kGroup : 0;
    return block_reduce(n, Plus{});
  }
  __device__ int most_count(float t) const {
    int n = 0;
    for (int g = threadIdx.x; g < count; g += kThreads) n += groups->above[g] >= t ? kGroup : 0;
    return block_reduce(n, Plus{});
  }
  __device__ double sure_mass(float t) const {
    double m = 0.;
    for (int g = threadIdx.x; g < count; g += kThreads)
      m += groups->least[g] >= t ? groups->mass[g] : 0.f;
    return block_reduce(m, Plus{});
  }
  __device__ double most_mass(float t) const {
    double m = 0.;
    for (int g = threadIdx.x; g < count; g += kThreads)
      m += groups->above[g] >= t ? groups->mass[g] : 0.f;
    return block_reduce(m, Plus{});
  }
};

// Loads the groups of a row, their masses relative to the row's maximum.
__device__ inline GroupMeasure load_groups(const Problem& p, const RowTask& t, int64_t slot,
                                           float maximum, GroupTable* table) {
  const int count = t.tiles * kGroups;
  for (int g = threadIdx.x; g < count; g += kThreads) {
    const int tile = g / kGroups;
    const int64_t entry = slot * p.tiles + tile;
    const Group group = p.work.groups.load(entry * kGroups + g % kGroups);
    // A group's least value bounds the next one; a tile's first group is bounded by the row's
    // maximum.
    table->least[g] = group.least;
    table->mass[g] = group.mass;
  }
  __syncthreads();
  // One writer a bound: those of first groups are stored below, and no barrier lies in between.
  for (int g = threadIdx.x; g < count; g += kThreads) {
    if (g % kGroups != 0) table->above[g] = table->least[g - 1];
  }
  for (int tile = threadIdx.x; tile < t.tiles; tile += kThreads) {
    const float top = p.work.partials.load(slot * p.tiles + tile).maximum;
    const float factor = top > -INFINITY ? expf((top - maximum) * t.parameters.inv_t) : 0.f;
    for (int g = 0; g < kGroups; ++g) table->mass[tile * kGroups + g] *= factor;
    table->above[tile * kGroups] = top;
  }
  __syncthreads();
  return {table, count};
}

// Where the thresholds must lie. Sums of rounded masses get a margin.
__device__ inline Bracket find_bracket(const GroupMeasure& g, const Parameters& s, float maximum,
                                       double total) {
  constexpr double kMargin = 1e-5;
  const float tau1 = min_p_threshold(s, maximum);
  Bracket r{INFINITY, INFINITY, INFINITY, tau1, tau1, tau1};
  if (s.top_k > 0) {
    r.low_k = largest_that(-INFINITY, maximum, [&](float t) { return g.sure_count(t) >= s.top_k; });
    r.tie_k = largest_that(-INFINITY, maximum, [&](float t) { return g.most_count(t) >= s.top_k; });
    r.high_k = next_up(r.tie_k);
    if (r.low_k < tau1) r.low_k = tau1;
    if (r.high_k < tau1) r.high_k = r.tie_k = tau1;
  }
  if (s.top_p < 1.f) {
    const bool all = r.low_k == -INFINITY && r.high_k == -INFINITY;
    const double least = s.top_p * (all ? total : g.sure_mass(r.high_k)) * (1. - kMargin);
    const double most = s.top_p * (all ? total : g.most_mass(r.low_k)) * (1. + kMargin);
    r.low_p = largest_that(-INFINITY, maximum, [&](float t) { return g.sure_mass(t) >= most; });
    r.tie_p = largest_that(-INFINITY, maximum, [&](float t) { return g.most_mass(t) >= least; });
    r.high_p = next_up(r.tie_p);
    if (r.low_p < r.low_k) r.low_p = r.low_k;
    if (r.high_k > r.low_p) {  // one bracket holds both
      r.high_p = fmaxf(r.high_p, r.high_k);
      r.low_p = r.high_k = r.tie_k = r.low_k;
    }
  }
  return r;
}

// Entropy and races over the kept items of a resolved row.
__device__ inline void finish_items(const Problem& p, const RowTask& t, int64_t slot,
                                    const ListMeasure& m, RowStats* stats, Key* best) {
  if (t.wants_entropy) {
    double weighted = 0.;
    for (int i = threadIdx.x; i < m.count; i += kThreads) {
      const float shift = (m.items[i].value - m.maximum) * m.inv_t;
      if (m.items[i].value >= stats->threshold) weighted += expf(shift) * shift;
    }
    weighted = block_reduce(weighted, Plus{});
    stats->entropy = logf(stats->mass) - static_cast<float>(weighted) / stats->mass;
  }
  if (!t.races) return;
  Race race = t.race;
  race.threshold = stats->threshold;
  RegisterKeys<kPerThread> keys;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = j * kThreads + static_cast<int>(threadIdx.x);
    keys.key[j] = 0;
    if (i >= m.count || !race.competes(m.items[i].value, m.items[i].id)) continue;
    const Listed one = m.items[i];
    keys.key[j] =
        score_key(mul_rn(one.value, race.inv_t), one.value, race.exponential_of(one.id), one.id);
  }
  block_top_keys(keys, p.num_samples, best);
  stats->key = best[0];
  if (p.num_samples == 1) return;
  for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
    p.work.keys.store(slot * p.tiles * p.num_samples + i, best[i]);
  }
}

// Gathers the listed values >= floor; returns how many there are, stored or not.
__device__ inline int gather_lists(const Problem& p, const RowTask& t, int64_t slot, float floor,
                                   Listed* items) {
  int filled = 0;
  constexpr int kTilesAtOnce = kThreads / kListed;
  for (int first = 0; first < t.tiles; first += kTilesAtOnce) {
    const int tile = first + static_cast<int>(threadIdx.x) / kListed;
    const int i = static_cast<int>(threadIdx.x) % kListed;
    const int64_t entry = slot * p.tiles + tile;
    int count = 0;
    if (tile < t.tiles && threadIdx.x % 32 == 0) count = p.work.heads.load(entry).count;
    count = __shfl_sync(0xffffffffu, count, 0);
    Listed one{-INFINITY, 0};
    if (i < count) one = p.work.lists.load(entry * kListed + i);
    const int is_kept = i < count && one.value >= floor ? 1 : 0;
    int total = 0;
    const int at = filled + block_exclusive_sum(is_kept, &total);
    if (is_kept != 0 && at < kTile) items[at] = one;
    filled += total;
  }
  __syncthreads();
  return filled;
}

// The block that arrives last for a row: its numbers, exact if the lists suffice, else the bracket.
__device__ inline void merge_filtered_row(const Problem& p, const RowTask& t, int64_t slot,
                                          FilterScratch& scratch, Key* best) {
  SPECDEC_SHARED(RowStats, stats);
  const Parameters& s = t.parameters;
  if (threadIdx.x < 32) {
    const RowSum sum = merge_row(p, slot, t.tiles, s.inv_t, t.races && !s.filters());
    if (threadIdx.x == 0) stats = plain_stats(sum, s);
  }
  __syncthreads();
  if (stats.bad || !s.filters()) {
    if (threadIdx.x == 0) p.work.rows.store(slot, stats);
    return;
  }
  RowStats r = stats;
  float floor = -INFINITY;
  for (int tile = threadIdx.x; tile < t.tiles; tile += kThreads) {
    floor = fmaxf(floor, p.work.heads.load(slot * p.tiles + tile).floor);
  }
  floor = block_reduce(floor, Larger{});
  const int count = gather_lists(p, t, slot, floor, scratch.items);
  const ListMeasure m{scratch.items, count < kTile ? count : kTile, nullptr, r.maximum, s.inv_t};
  bool resolved = count <= kTile && (s.top_k <= 0 || count >= s.top_k || floor == -INFINITY);
  if (resolved) {
    const float tau12 = select_tau12(m, s, r.maximum, floor);
    const bool all = tau12 == -INFINITY;
    if (s.top_p < 1.f) {
      const double mass12 = all && floor > -INFINITY ? r.mass : m.mass_from(tau12);
      resolved =
          floor == -INFINITY ||
          ((all || tau12 >= floor) && m.mass_from(floor) >= static_cast<double>(s.top_p) * mass12);
      r.threshold = select_edge(m, s, r.maximum, fmaxf(tau12, floor), mass12);
    } else {
      r.threshold = tau12;
      resolved = tau12 >= floor;
    }
  }
  if (resolved) {
    r.mass = static_cast<float>(m.mass_from(r.threshold));
    finish_items(p, t, slot, m, &r, best);
  } else {
    r.unresolved = 1;
    r.bracket = {INFINITY, INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    __syncthreads();
    if (t.tiles * kGroups <= kMaxGroups) {
      const GroupMeasure g = load_groups(p, t, slot, r.maximum, &scratch.groups);
      r.bracket = find_bracket(g, s, r.maximum, r.mass);
    }
  }
  if (threadIdx.x == 0) p.work.rows.store(slot, r);
}

}  // namespace specdec
