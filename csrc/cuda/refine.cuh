// Second reading of a row whose thresholds the lists did not tell: values inside the brackets are
// gathered in shared memory, all others only counted and summed, and the thresholds selected
// exactly.
#pragma once
#include "filter.cuh"

namespace specdec {

// Cell of a value: 0 above the bracket of top-p, 1 its tie, 2 its low end, 3 between, 4 and 5 the
// same for top-k; kCells: gathered; -1: surely not kept.
__device__ __forceinline__ int cell_of(const Bracket& r, float v) {
  if (v >= r.high_p) return 0;
  if (v > r.low_p) return v == r.tie_p ? 1 : kCells;
  if (v >= r.high_k) return v == r.low_p ? 2 : 3;
  if (v > r.low_k) return v == r.tie_k ? 4 : kCells;
  return v == r.low_k ? 5 : -1;
}

__device__ inline void load_masked_tile(const RowTask& t, int64_t base, float (&v)[kPerThread]) {
  load_tile(t.row, base, t.size, v);
  mask_tile(t.allowed, base, t.size, v);
}

// Counts by reading the row: only where a bracket holds more values than shared memory does.
struct RowMeasure {
  const RowTask* t;
  float maximum, inv_t;

  template <class T, class F>
  __device__ T sum(F f) const {
    T all = 0;
    for (int64_t base = 0; base < t->size; base += kTile) {
      float v[kPerThread];
      load_masked_tile(*t, base, v);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) all += v[j] > -INFINITY ? f(v[j]) : T{0};
    }
    return block_reduce(all, Plus{});
  }
  __device__ int count_from(float low) const {
    return sum<int>([&](float v) { return v >= low ? 1 : 0; });
  }
  __device__ double mass_from(float low) const {
    return sum<double>(
        [&](float v) { return v >= low ? static_cast<double>(expf((v - maximum) * inv_t)) : 0.; });
  }
};

template <class Measure>
__device__ void select_thresholds(const Measure& m, const Parameters& s, RowStats* r) {
  const Bracket& q = r->bracket;
  const float tau12 = select_tau12(m, s, r->maximum, q.low_k);
  r->threshold = tau12;
  if (s.top_p < 1.f) {
    const double mass12 = tau12 == -INFINITY ? static_cast<double>(r->mass) : m.mass_from(tau12);
    const float low = q.low_p < INFINITY ? fmaxf(q.low_p, tau12) : tau12;
    r->threshold = select_edge(m, s, r->maximum, low, mass12);
  }
  if (r->threshold > -INFINITY) r->mass = static_cast<float>(m.mass_from(r->threshold));
}

// Entropy and race over the kept values, by one more reading.
__device__ inline void finish_row(const Problem& p, const RowTask& t, int64_t slot, RowStats* r,
                                  Key* best) {
  Race race = t.race;
  race.threshold = r->threshold;
  double weighted = 0.;
  Key key = 0;
  bool is_first = true;
  for (int64_t base = 0; base < t.size; base += kTile) {
    float v[kPerThread];
    load_masked_tile(t, base, v);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const float shift = (v[j] - r->maximum) * t.parameters.inv_t;
      if (v[j] >= r->threshold && v[j] > -INFINITY) weighted += expf(shift) * shift;
    }
    if (!t.races) continue;
    if (p.num_samples == 1) {
      const Key one = race_best<true>(race, v, base, t.size);
      key = one > key ? one : key;
      continue;
    }
    RegisterKeys<kPerThread> tile;
    race_all(race, v, base, t.size, &tile);
    RegisterKeys<kPerThread + 1> keys;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) keys.key[j] = tile.key[j];
    const int mine = static_cast<int>(threadIdx.x);
    keys.key[kPerThread] = !is_first && mine < p.num_samples ? best[mine] : 0;
    __syncthreads();
    block_top_keys(keys, p.num_samples, best);
    is_first = false;
  }
  if (t.wants_entropy) {
    weighted = block_reduce(weighted, Plus{});
    r->entropy = logf(r->mass) - static_cast<float>(weighted) / r->mass;
  }
  if (!t.races) return;
  r->key = p.num_samples == 1 ? block_reduce(key, Larger{}) : best[0];
  if (p.num_samples == 1) return;
  for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
    p.work.keys.store(slot * p.tiles * p.num_samples + i, best[i]);
  }
}

// Winners among the values that are not gathered: those above the bracket, and the two that its
// ends may tie with.
struct SureRaces {
  Key above, tie, low;

  __device__ static bool has_top_p(const Bracket& q) { return q.high_p < INFINITY; }
  template <class Takes>
  __device__ static Key race(const RowTask& t, int64_t base, const float (&v)[kPerThread],
                             Takes takes) {
    float taken[kPerThread];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) taken[j] = takes(v[j]) ? v[j] : -INFINITY;
    return race_best<true>(t.race, taken, base, t.size);
  }
  __device__ void add(const RowTask& t, const Bracket& q, int64_t base,
                      const float (&v)[kPerThread]) {
    const bool p = has_top_p(q);
    const float from = p ? q.high_p : q.high_k, tied = p ? q.tie_p : q.tie_k,
                end = p ? q.low_p : q.low_k;
    const Key one = race(t, base, v, [&](float x) { return x >= from; });
    const Key two = race(t, base, v, [&](float x) { return x == tied && x < from && x > end; });
    const Key three = race(t, base, v, [&](float x) { return x == end && x < from; });
    above = one > above ? one : above;
    tie = two > tie ? two : tie;
    low = three > low ? three : low;
  }
  __device__ Key best(const Bracket& q, float threshold) const {
    const bool p = has_top_p(q);
    Key key = above;
    if ((p ? q.tie_p : q.tie_k) >= threshold) key = tie > key ? tie : key;
    if ((p ? q.low_p : q.low_k) >= threshold) key = low > key ? low : key;
    return block_reduce(key, Larger{});
  }
};

__device__ inline void refine_row(const Problem& p, const RowTask& t, int64_t slot,
                                  const RowStats& stats, FilterScratch& scratch, Key* best) {
  SPECDEC_SHARED(Cells, cells);
  RowStats r = stats;
  const Parameters& s = t.parameters;
  const Bracket& q = r.bracket;
  const float bounds[kCells] = {q.high_p, q.tie_p, q.low_p, q.high_k, q.tie_k, q.low_k};
  int count[kCells] = {};
  float mass[kCells] = {};
  int filled = 0;
  SureRaces races{};
  const bool races_at_once = t.races && p.num_samples == 1;
  for (int64_t base = 0; base < t.size; base += kTile) {
    float v[kPerThread];
    load_masked_tile(t, base, v);
    if (races_at_once) races.add(t, q, base, v);
    int own = 0, total = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int cell = v[j] > -INFINITY ? cell_of(q, v[j]) : -1;
      const float weight = cell < 0 ? 0.f : expf((v[j] - r.maximum) * s.inv_t);
      own += cell == kCells ? 1 : 0;
#pragma unroll
      for (int c = 0; c < kCells; ++c) {
        count[c] += cell == c ? 1 : 0;
        mass[c] += cell == c ? weight : 0.f;
      }
    }
    int at = filled + block_exclusive_sum(own, &total);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (v[j] == -INFINITY || cell_of(q, v[j]) != kCells) continue;
      if (at < kTile) scratch.items[at] = {v[j], static_cast<int>(id_of(base, j))};
      ++at;
    }
    filled += total;
  }
#pragma unroll
  for (int c = 0; c < kCells; ++c) {
    const int n = block_reduce(count[c], Plus{});
    const double sum = block_reduce(static_cast<double>(mass[c]), Plus{});
    if (threadIdx.x == 0) {
      cells.bound[c] = bounds[c];
      cells.count[c] = n;
      cells.mass[c] = static_cast<float>(sum);
    }
  }
  __syncthreads();
  if (filled <= kTile) {
    select_thresholds(ListMeasure{scratch.items, filled, &cells, r.maximum, s.inv_t}, s, &r);
  } else {
    select_thresholds(RowMeasure{&t, r.maximum, s.inv_t}, s, &r);
  }
  if (races_at_once && !t.wants_entropy && filled <= kTile) {
    finish_items(p, t, slot, {scratch.items, filled, nullptr, r.maximum, s.inv_t}, &r, best);
    const Key key = races.best(q, r.threshold);
    r.key = key > r.key ? key : r.key;
  } else if (t.races || t.wants_entropy) {
    finish_row(p, t, slot, &r, best);
  }
  if (threadIdx.x == 0) p.work.rows.store(slot, r);
}

}  // namespace specdec
