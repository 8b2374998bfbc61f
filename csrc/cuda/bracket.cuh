// Thresholds that blocks do not tell. A sample of the row gives a bracket, one pass over the row
// sums what lies above it and lists what lies inside (gather_tile), and the search ends there. If
// the bracket has missed, the row itself is searched.
#pragma once
#include "filter.cuh"

namespace specdec {

// A sample of the row into the list: 64 blocks that lie evenly, more of long rows. Returns how many
// values there are; what is past the end or not allowed is -inf.
__device__ inline int take_sample(const FilteredRow& f) {
  const int64_t blocks = f.row.blocks();
  const int taken = blocks > 2560 ? kLong / kBlock : kLong / kBlock / 2;
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  __syncthreads();
  for (int i = group; i < taken; i += kGroupsOf8) {
    f.row.load8(i * blocks / taken * kBlock + lane * 8, f.scratch.list + i * kBlock + lane * 8);
  }
  __syncthreads();
  return taken * kBlock;
}

struct Bracket {
  float low, high;
};

// Where the search ends, with 3.5 standard deviations to each side: one row of 2000 misses. The
// goal is a count of values >= t (kRank), or a mass of them (kEdge).
__device__ inline Bracket bracket_of(const FilteredRow& f, Unknown unknown, double goal,
                                     float floor) {
  const int size = take_sample(f);
  const bool is_rank = unknown == kRank;
  const float scale = f.row.parameters.inv_t * kLog2E;
  const auto weight = [&](float l) {
    if (l == -INFINITY) return 0.f;
    return is_rank ? 1.f : fast_exp2(fmaxf((l - f.maximum) * scale, -1000.f));
  };
  // What lies below t in the sample: the sum, or that of squares.
  const auto below = [&](float t, bool squares) {
    float sum = 0.f;
#pragma unroll 4
    for (int i = threadIdx.x; i < size; i += kThreads) {
      const float l = f.scratch.list[i], w = weight(l);
      sum += l < t ? (squares ? w * w : w) : 0.f;
    }
    return block_reduce(sum, Plus{});
  };
  const float ids = static_cast<float>(f.row.size) / static_cast<float>(size);  // for one sampled
  const float all = below(INFINITY, false);
  const float rest =
      is_rank ? all - static_cast<float>(goal) / ids : static_cast<float>((f.total - goal) / ids);
  // A t below which lies as much as `most` of the sample, but for `slack`: where many are tied, it
  // is the value they are tied at.
  const auto quantile = [&](float most, float slack) {
    const auto left = [&](const float (&t)[kTried], float (&sum)[kTried]) {
#pragma unroll 4
      for (int i = threadIdx.x; i < size; i += kThreads) {
        const float l = f.scratch.list[i], w = weight(l);
#pragma unroll
        for (int k = 0; k < kTried; ++k) sum[k] -= l < t[k] ? w : 0.f;
      }
    };
    return largest_with(f.row.type(), kLowest, f.maximum, -most, slack, left);
  };
  const float middle = quantile(fmaxf(rest, 0.f), 0.05f * rest);
  float spread = below(middle, true);
  if (is_rank) spread = fminf(spread, all - spread);
  // At most as wide as a list is long: where ids crowd, a bracket that misses now and then costs
  // less than one that never fits.
  const float room = 0.4f * kLong / ids * weight(middle);
  const float error = fminf(3.5f * sqrtf(spread) + (is_rank ? 8.f : 4.f) * weight(middle), room);
  const float slack = 0.1f * error;
  Bracket out{rest > error ? quantile(rest - error, slack) : -INFINITY,
              rest + error < all ? quantile(rest + error + slack, slack) : f.maximum};
  if (!is_rank && f.total > goal) {  // ids below this one cannot sum to the rest
    const double least = log((f.total - goal) / static_cast<double>(f.row.size));
    out.low = fmaxf(out.low, static_cast<float>(f.maximum + least * f.row.parameters.temperature));
  }
  out.low = fmaxf(out.low, floor);
  out.high = fmaxf(out.low, fminf(out.high, f.maximum));
  __syncthreads();
  return out;
}

// Sums of a tile's values above the bracket and at its ends, and those between into `list`.
template <bool kEdited = true>
__device__ inline Gathered gather_tile(const FilteredRow& f, int tile, Bracket q, float* list,
                                       int room) {
  float v[16];
  const int64_t base = static_cast<int64_t>(tile) * kTile + threadIdx.x * 8;
#pragma unroll
  for (int run = 0; run < 2; ++run) f.row.load8<kEdited, 8>(base + run * (kTile / 2), v + 8 * run);
  float mass[3] = {};
  int count[3] = {}, own = 0, listed;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int cell = v[j] > q.high    ? 0
                     : v[j] == q.high ? 1
                     : v[j] == q.low  ? 2
                     : v[j] > q.low   ? 3
                                      : 4;
    own += cell == 3 ? 1 : 0;
    if (v[j] == -INFINITY) continue;
    const float w = cell < 3 ? f.weight(v[j]) : 0.f;
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      mass[c] += cell == c ? w : 0.f;
      count[c] += cell == c ? 1 : 0;
    }
  }
  int at = block_exclusive_sum(own, &listed);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (v[j] < q.high && v[j] > q.low) {
      if (at < room) list[at] = v[j];
      ++at;
    }
  }
  using Parts = Part[kWarps][3];
  SPECDEC_SHARED(Parts, parts);
  SPECDEC_SHARED(Gathered, out);
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const Part of_warp{warp_reduce(mass[c], Plus{}), warp_reduce(count[c], Plus{})};
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][c] = of_warp;
  }
  __syncthreads();
  if (threadIdx.x < 3) {
    Part all = parts[0][threadIdx.x];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      all.mass += parts[w][threadIdx.x].mass;
      all.count += parts[w][threadIdx.x].count;
    }
    out.part[threadIdx.x] = all;
  }
  if (threadIdx.x == 0) out.listed = listed;
  __syncthreads();
  return out;
}

struct GatheredRow {  // the values between the ends are in the list
  double mass[3];     // above the bracket, at its high end, at its low end
  int count[3], listed;

  __device__ void add(const Gathered& g) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      mass[i] += g.part[i].mass;
      count[i] += g.part[i].count;
    }
    listed += g.listed;
  }
};

// The tiles of a row, one after the other, by this block alone.
__device__ inline GatheredRow gather_row(const FilteredRow& f, Bracket q) {
  GatheredRow all{};
  for (int tile = 0; tile < f.row.tiles(); ++tile) {
    const int at = all.listed < kLong ? all.listed : kLong;
    all.add(gather_tile(f, tile, q, f.scratch.list + at, kLong - at));
  }
  __syncthreads();
  return all;
}

// What the gather kernel has left of a row. Lists that ran over count as too long.
__device__ inline GatheredRow load_gathered(const FilteredRow& f, int64_t slot) {
  using Counts = int[kThreads];
  SPECDEC_SHARED(Counts, start);
  SPECDEC_SHARED(Counts, count);
  const LogitRow lists(f.p.work.lists.data(), 0, f.row.type());
  GatheredRow own{};
  int listed = 0;
  for (int first = 0; first < f.row.tiles(); first += kThreads) {
    const int tile = first + static_cast<int>(threadIdx.x), mine = static_cast<int>(threadIdx.x);
    Gathered g{};
    if (tile < f.row.tiles()) g = f.p.work.gathered.load(slot * f.p.tiles + tile);
    own.add(g);
    int total;
    const int runs_over = block_reduce(g.listed > kListed ? 1 : 0, Or{});
    const int at = listed + block_exclusive_sum(g.listed, &total);
    listed += total;
    if (runs_over != 0 || listed > kLong) listed = kLong + 1;
    __syncthreads();
    start[mine] = at;
    count[mine] = g.listed;
    __syncthreads();
    for (int t = 0; listed <= kLong && t < kThreads && first + t < f.row.tiles(); ++t) {
      if (mine >= count[t]) continue;
      const int64_t from = (slot * f.p.tiles + first + t) * kListed;
      f.scratch.list[start[t] + mine] = lists.at(from + mine);
    }
  }
  GatheredRow all;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    all.mass[i] = block_reduce(own.mass[i], Plus{});
    all.count[i] = block_reduce(own.count[i], Plus{});
  }
  all.listed = listed;
  return all;
}

// Count and mass of the values >= t of a whole row, read by this block.
struct Whole {
  int count;
  double mass, entropy;  // entropy: sum e^s s, s = (l - maximum) / T
};
__device__ inline Whole whole_from(const FilteredRow& f, float t) {
  Whole own{};
  for (int64_t first = threadIdx.x * 8; first < f.row.size; first += kThreads * 8) {
    float v[8];
    f.row.load8(first, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (v[j] == -INFINITY || !(v[j] >= t)) continue;
      const float s = (v[j] - f.maximum) * f.row.parameters.inv_t, w = expf(s);
      ++own.count;
      own.mass += w;
      own.entropy += w > 0.f ? w * s : 0.f;
    }
  }
  return {block_reduce(own.count, Plus{}), block_reduce(own.mass, Plus{}),
          block_reduce(own.entropy, Plus{})};
}

// Count or mass of the listed values >= least.
__device__ inline double listed_from(const FilteredRow& f, int count, float least, bool counts) {
  double sum = 0.;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float l = f.scratch.list[i];
    if (l >= least) sum += counts ? 1. : f.weight(l);
  }
  return block_reduce(sum, Plus{});
}

// The largest t with count (kRank) or mass (kEdge) of {l >= t} >= goal, of what was gathered; the
// kept mass beside it. NaN: the bracket has missed.
struct Found {
  float threshold;
  double mass;
};
__device__ inline Found search(const FilteredRow& f, Unknown unknown, double goal, Bracket q,
                               const GatheredRow& g) {
  const bool is_rank = unknown == kRank;
  const auto part = [&](int i) { return is_rank ? g.count[i] : g.mass[i]; };
  const double above = part(0), high = part(1), low = part(2);
  if (unknown == kFloor) return {q.low, g.mass[0] + g.mass[1]};
  if (above >= goal) return {NAN, 0.};
  if (above + high >= goal) return {q.high, g.mass[0] + g.mass[1]};
  if (g.listed > kLong) return {NAN, 0.};
  const auto listed = [&](const float (&t)[kTried], double (&sum)[kTried]) {
    for (int i = threadIdx.x; i < g.listed; i += kThreads) {
      const float l = f.scratch.list[i];
      add_to_reached(t, l, is_rank ? 1. : static_cast<double>(f.weight(l)), sum);
    }
  };
  const double rest = goal - (above + high), inside = listed_from(f, g.listed, kLowest, is_rank);
  if (inside + low < rest) return {NAN, 0.};
  const bool is_low = inside < rest;
  float t = q.low;
  if (!is_low) {
    t = largest_with(f.row.type(), fmaxf(q.low, kLowest), q.high, rest, -1., listed);
  }
  const double mass = listed_from(f, g.listed, t, false);
  return {t, g.mass[0] + g.mass[1] + mass + (is_low ? g.mass[2] : 0.)};
}

// The same by reading the row a dozen times: rare.
__device__ inline Found search_row(const FilteredRow& f, Unknown unknown, double goal,
                                   float floor) {
  const bool is_rank = unknown == kRank;
  const auto from = [&](float t) {
    const Whole w = whole_from(f, t);
    return is_rank ? static_cast<double>(w.count) : w.mass;
  };
  const auto measure = [&](const float (&t)[kTried], double (&sum)[kTried]) {
    for (int64_t first = threadIdx.x * 8; first < f.row.size; first += kThreads * 8) {
      float v[8];
      f.row.load8(first, v);
#pragma unroll
      for (const float l : v) {
        add_to_reached(t, l, is_rank ? 1. : static_cast<double>(f.weight(l)), sum);
      }
    }
  };
  const float least = fmaxf(floor, kLowest);
  if (from(least) < goal) return {floor, whole_from(f, least).mass};
  const float t = largest_with(f.row.type(), least, f.maximum, goal, -1., measure);
  return {t, whole_from(f, t).mass};
}

// What blocks did not tell first: the k-th value, the mass above min-p's floor, or top-p's edge.
__device__ inline Unknown first_unknown(const Parameters& s) {
  return s.top_k > 0 ? kRank : s.min_p > 0.f ? kFloor : kEdge;
}

__device__ inline double first_goal(const FilteredRow& f, Unknown unknown) {
  const Parameters& s = f.row.parameters;
  return unknown == kRank ? s.top_k : static_cast<double>(s.top_p) * f.total;
}

static __device__ SPECDEC_NOINLINE void open_row(const FilteredRow& f, RowStats* r) {
  const Unknown unknown = first_unknown(f.row.parameters);
  const float floor = min_p_floor(f.row.parameters, f.maximum);
  const Bracket q = unknown == kFloor ? Bracket{floor, floor}
                                      : bracket_of(f, unknown, first_goal(f, unknown), floor);
  r->unknown = unknown;
  r->low = q.low;
  r->high = q.high;
}

static __device__ SPECDEC_NOINLINE void close_row(const FilteredRow& f, int64_t slot, RowStats* r) {
  const Parameters& s = f.row.parameters;
  const auto unknown = static_cast<Unknown>(r->unknown);
  const float floor = min_p_floor(s, f.maximum);
  const Bracket q{r->low, r->high};
  GatheredRow g = load_gathered(f, slot);
  if (g.listed > kLong) g = gather_row(f, q);  // a tile had more than its share of the list
  Found found = search(f, unknown, first_goal(f, unknown), q, g);
  if (found.threshold != found.threshold) {
    found = search_row(f, unknown, first_goal(f, unknown), floor);
  }
  if (unknown != kEdge && s.top_p < 1.f && found.threshold < f.maximum) {
    // A share of what is kept so far: in the same bracket, or in one of its own.
    const double goal = static_cast<double>(s.top_p) * found.mass;
    const float before = found.threshold;
    found = search(f, kEdge, goal, q, g);
    if (found.threshold != found.threshold) {
      const Bracket next = bracket_of(f, kEdge, goal, before);
      found = search(f, kEdge, goal, next, gather_row(f, next));
    }
    if (found.threshold != found.threshold) found = search_row(f, kEdge, goal, before);
  }
  r->threshold = found.threshold;
  r->mass = static_cast<float>(found.mass);
  r->unknown = kSettled;
  if ((f.p.flags & kWantsEntropy) != 0) {
    const Whole kept = whole_from(f, r->threshold);
    r->entropy = static_cast<float>(log(kept.mass) - kept.entropy / kept.mass);
  }
}

}  // namespace specdec
