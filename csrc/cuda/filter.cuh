// Filters as thresholds, from the largest logit of each block of 64 ids.
//   top-k    the k-th largest block maximum bounds the k-th largest logit from below, and every
//            logit >= it lies in a block whose maximum is >= it: these blocks are read.
//   top-p    the largest t with mass{l >= t} >= p mass{kept so far}: from the blocks with the 32,
//            128, 512 largest maxima, if they hold enough mass.
// What these do not tell (normal logits, large k, many ties): bracket.cuh.
#pragma once
#include "race.cuh"

namespace specdec {

constexpr int kMostBlocks = 1344;  // that are read again at once; top_k up to kMostRank
constexpr int kMostRank = 1024;
constexpr int kAtOnce = 4;            // blocks that eight threads read at once
constexpr int kKept = 4096;           // block maxima in shared memory: 262144 ids
constexpr int kList = 4096;           // values beside them
constexpr int kLong = kList + kKept;  // values of a sample, or between the ends of a bracket

struct FilterScratch {
  union {
    float list[kLong];  // the maxima behind the first kList, while there are any
    RaceScratch race;   // behind the filters
  };
  int block[kMostBlocks];
};

struct FilteredRow {
  const Problem& p;
  const Row& row;
  LogitRow maxima;
  FilterScratch& scratch;
  float maximum, total;  // of the row; total: its mass before the filters

  __device__ float most_of(int64_t block) const {
    return block < kKept ? scratch.list[kList + block] : maxima.at(block);
  }
  __device__ float weight(float l) const {
    return l > -INFINITY ? expf((l - maximum) * row.parameters.inv_t) : 0.f;
  }
};

// Who sums: all threads, or each warp for itself.
struct Block {
  static constexpr int kSize = kThreads;
  static __device__ __forceinline__ int rank() { return static_cast<int>(threadIdx.x); }
  template <class T>
  static __device__ __forceinline__ T sum(T value) {
    return block_reduce(value, Plus{});
  }
};
struct Warp {
  static constexpr int kSize = 32;
  static __device__ __forceinline__ int rank() { return static_cast<int>(threadIdx.x) % 32; }
  template <class T>
  static __device__ __forceinline__ T sum(T value) {
    return warp_reduce(value, Plus{});
  }
};

// The largest number in [from, to] of a measure >= goal, where the measure falls and that of `from`
// reaches it; the search may end at one whose measure is more by `slack` at most. measure(x): by a
// Team. Each measures at a place of its own: with warps a step leaves a ninth, with the block half.
template <class Team, class U, class T, class F>
__device__ U last_with(U from, U to, T goal, const F& measure, T slack = -1) {
  constexpr int kTeams = kThreads / Team::kSize;
  using Measured = T[kTeams];
  SPECDEC_SHARED(Measured, measured);
  while (from < to) {
    const U part = (to - from) / (kTeams + 1), rest = (to - from) % (kTeams + 1);
    const auto place = [&](int team) {
      const U more = static_cast<U>(team) + 1;
      return static_cast<U>(from + part * more + (more < rest ? more : rest));
    };
    const int team = static_cast<int>(threadIdx.x) / Team::kSize;
    const T mine = measure(place(team));
    if (Team::rank() == 0) measured[team] = mine;
    __syncthreads();
    int reached = 0;
    while (reached < kTeams && measured[reached] >= goal) ++reached;
    const bool is_near = reached > 0 && measured[reached - 1] <= goal + slack;
    __syncthreads();
    const U low = reached > 0 ? place(reached - 1) : from;
    if (reached < kTeams) to = place(reached) - 1;
    from = low;
    if (is_near) break;
  }
  return from;
}

// The largest t in [low, high] with measure(t) >= goal, as last_with: a value, if the measure is
// one of values >= t.
template <class Team, class T, class F>
__device__ float largest_with(float low, float high, T goal, const F& measure, T slack = -1) {
  const auto of_bits = [&](uint32_t bits) { return measure(from_ordered_bits(bits)); };
  return from_ordered_bits(
      last_with<Team>(ordered_bits(low), ordered_bits(high), goal, of_bits, slack));
}

// A lower bound of the k-th largest logit that only k blocks and few more reach. F: FilteredRow, or
// what else knows row, maximum and most_of.
template <class F>
__device__ inline float block_bound(const F& f, int k) {
  const auto count = [&](float t) {
    int count = 0;
    for (int64_t i = Block::rank(); i < f.row.blocks(); i += Block::kSize) {
      count += f.most_of(i) >= t ? 1 : 0;
    }
    return Block::sum(count);
  };
  return largest_with<Block>(kLowest, f.maximum, k, count, k / 4 + 8);
}

// Values >= least into the list, in the order of their ids in each block; returns how many there
// are, or kList + 1 if there is no room.
__device__ inline int collect(const FilteredRow& f, float least) {
  int picked = 0;
  for (int64_t first = 0; first < f.row.blocks(); first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const int takes = i < f.row.blocks() && f.most_of(i) >= least ? 1 : 0;
    int total;
    const int at = picked + block_exclusive_sum(takes, &total);
    if (takes != 0 && at < kMostBlocks) f.scratch.block[at] = static_cast<int>(i);
    picked += total;
  }
  if (picked > kMostBlocks) return kList + 1;
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  int filled = 0;
  for (int first = 0; first < picked; first += kAtOnce * kGroupsOf8) {
    float v[kAtOnce][8];
    int own = 0, total;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = first + k * kGroupsOf8 + group;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[k][j] = -INFINITY;
      if (i < picked) f.row.load8(f.scratch.block[i] * int64_t{kBlock} + lane * 8, v[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) own += v[k][j] >= least ? 1 : 0;
    }
    int at = filled + block_exclusive_sum(own, &total);
    filled += total;
    if (filled > kList) return kList + 1;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (v[k][j] >= least) f.scratch.list[at++] = v[k][j];
      }
    }
  }
  __syncthreads();
  return filled;
}

template <class Team>
__device__ inline double list_mass(const FilteredRow& f, int count, float least) {
  double mass = 0.;
  for (int i = Team::rank(); i < count; i += Team::kSize) {
    const float l = f.scratch.list[i];
    mass += l >= least ? f.weight(l) : 0.f;
  }
  return Team::sum(mass);
}

__device__ inline float list_entropy(const FilteredRow& f, int count, float least, float mass) {
  if ((f.p.flags & kWantsEntropy) == 0) return 0.f;
  float sum = 0.f;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float l = f.scratch.list[i], w = l >= least ? f.weight(l) : 0.f;
    sum += w > 0.f ? w * ((l - f.maximum) * f.row.parameters.inv_t) : 0.f;
  }
  return logf(mass) - block_reduce(sum, Plus{}) / mass;
}

template <class Team>
__device__ inline int list_count(const FilteredRow& f, int count, float least) {
  int own = 0;
  for (int i = Team::rank(); i < count; i += Team::kSize) own += f.scratch.list[i] >= least ? 1 : 0;
  return Team::sum(own);
}

__device__ inline float min_p_floor(const Parameters& s, float maximum) {
  if (s.min_p <= 0.f) return -INFINITY;
  if (s.min_p >= 1.f) return maximum;
  return add_rn(maximum, mul_rn(s.temperature, log_normal(fmaxf(s.min_p, kTiny))));
}

// Threshold and kept mass from blocks with large maxima; false if they do not tell.
__device__ inline bool settle_from_blocks(const FilteredRow& f, RowStats* r) {
  const Parameters& s = f.row.parameters;
  const float floor = min_p_floor(s, f.maximum);
  const int blocks = static_cast<int>(f.row.blocks());
  for (int i = threadIdx.x; i < blocks && i < kKept; i += kThreads) {
    f.scratch.list[kList + i] = f.maxima.at(i);
  }
  __syncthreads();
  const bool has_rank = s.top_k > 0, has_edge = s.top_p < 1.f;
  if (has_rank && s.top_k > kMostRank && blocks > kMostBlocks) return false;
  double before = 0.;  // mass that the blocks so far have left, the time before
  for (int wanted = has_rank ? s.top_k : 32;; wanted *= 4) {
    float least = fmaxf(floor, kLowest);
    const bool bounded = (has_rank || has_edge) && wanted < blocks;
    if (bounded && wanted > kMostRank) return false;
    if (bounded) least = fmaxf(least, block_bound(f, wanted));
    const int count = collect(f, least);
    if (count > kList) return false;
    float threshold = floor;
    if (has_rank && count >= s.top_k) {
      const auto rank = [&](float t) { return list_count<Warp>(f, count, t); };
      threshold = largest_with<Warp>(least, f.maximum, s.top_k, rank);
    }
    // The list holds all that min-p and top-k keep, or a share of the row's mass.
    const bool is_whole = has_rank || !bounded || least == floor;
    if (has_edge) {
      if (!is_whole && floor > -INFINITY) continue;
      const auto mass = [&](float t) { return list_mass<Warp>(f, count, t); };
      const double whole = is_whole ? list_mass<Block>(f, count, threshold) : f.total;
      const double goal = static_cast<double>(s.top_p) * whole;
      if (!is_whole) {
        // Four times as many blocks leave about the same share of what is not yet found.
        const double left = f.total - list_mass<Block>(f, count, least),
                     next = before > 0. ? left * left / before : 0.2 * left;
        if (left > f.total - goal) {
          if (next > 1.25 * (f.total - goal)) return false;
          before = left;
          continue;
        }
      }
      threshold = largest_with<Warp>(fmaxf(threshold, least), f.maximum, goal, mass);
    }
    r->threshold = threshold;
    r->mass = static_cast<float>(list_mass<Block>(f, count, threshold));
    r->entropy = list_entropy(f, count, threshold, r->mass);
    return true;
  }
}

}  // namespace specdec
