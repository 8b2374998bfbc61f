// Filters as thresholds, from the largest logit of each block of 64 ids.
//   top-k    the k-th largest block maximum bounds the k-th largest logit from below, and every
//            logit >= it lies in a block whose maximum is >= it: these blocks are read.
//   top-p    the largest t with mass{l >= t} >= p mass{kept so far}: from the blocks whose maxima
//            alone have that mass, if all maxima together do.
// What these do not tell (normal logits, large k, many ties): bracket.cuh.
#pragma once
#include "race.cuh"

namespace specdec {

constexpr int kMostBlocks = 1344;  // that are read again at once; top_k up to kMostRank
constexpr int kMostRank = 1024;
constexpr int kAtOnce = 4;        // blocks that eight threads read at once
constexpr int kHeld = 16;         // numbers that a thread keeps in registers
constexpr int kList = 4096;       // values of the blocks that are read again
constexpr int kLong = 2 * kList;  // values of a sample, or between the ends of a bracket
static_assert(kList <= kHeld * kThreads);

struct FilterScratch {
  union {
    float list[kLong];
    RaceScratch race;  // behind the filters
  };
  int block[kMostBlocks];
};

struct FilteredRow {
  const Problem& p;
  const Row& row;
  LogitRow maxima;
  FilterScratch& scratch;
  float maximum, total;  // of the row; total: its mass before the filters

  __device__ float weight(float l) const {
    return l > -INFINITY ? expf((l - maximum) * row.parameters.inv_t) : 0.f;
  }
};

constexpr int kTried = 3;  // that a step of a search measures

// The largest number in [from, to] whose measure, which falls, is >= goal; that of `from` is. The
// search may end at one whose measure is more by `slack` at most. add(place, sum): this thread's
// part of the measure of each place. A step leaves a quarter.
template <class U, class T, class F>
__device__ U last_with(U from, U to, T goal, T slack, const F& add) {
  struct Measured {
    T part[2][kWarps][kTried];  // two steps, so that one barrier orders them
  };
  SPECDEC_SHARED(Measured, measured);
  for (int turn = 0; from < to; turn ^= 1) {
    const U quarter = (to - from) / (kTried + 1), rest = (to - from) % (kTried + 1);
    U place[kTried];
    T sum[kTried] = {};
#pragma unroll
    for (int k = 0; k < kTried; ++k) {
      const U more = static_cast<U>(k) + 1;
      place[k] = static_cast<U>(from + quarter * more + (more < rest ? more : rest));
    }
    add(place, sum);
#pragma unroll
    for (int k = 0; k < kTried; ++k) {
      sum[k] = warp_reduce(sum[k], Plus{});
      if (threadIdx.x % 32 == 0) measured.part[turn][threadIdx.x / 32][k] = sum[k];
    }
    __syncthreads();
    int reached = 0;
    bool is_near = false;
    U low = from, high = to;
#pragma unroll
    for (int k = 0; k < kTried; ++k) {
      T all = measured.part[turn][0][k];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) all += measured.part[turn][w][k];
      if (reached == k && all >= goal) {
        ++reached;
        low = place[k];
        is_near = all <= goal + slack;
      } else if (reached == k) {
        high = static_cast<U>(place[k] - 1);
        break;
      }
    }
    from = low;
    to = high;
    if (is_near) break;
  }
  __syncthreads();
  return from;
}

// The numbers of a dtype in their order: no threshold lies between two of them.
struct Scale {
  int shift;

  __device__ explicit Scale(LogitType type)
      : shift(type == LogitType::kFloat32    ? 0
              : type == LogitType::kBFloat16 ? 16
                                             : 13) {}
  __device__ uint32_t place_of(float x) const { return ordered_bits(x) >> shift; }
  __device__ float at(uint32_t place) const {
    const uint32_t ordered = place << shift;
    return from_ordered_bits((ordered >> 31) != 0 ? ordered : ordered | ((1u << shift) - 1));
  }
};

// The largest t in [low, high] with measure{l >= t} >= goal, as last_with: a value of the row.
// add(t, sum): this thread's part of the measure of three t.
template <class T, class F>
__device__ float largest_with(LogitType type, float low, float high, T goal, T slack,
                              const F& add) {
  const Scale scale(type);
  const auto at_places = [&](const uint32_t (&place)[kTried], T(&sum)[kTried]) {
    float t[kTried];
#pragma unroll
    for (int k = 0; k < kTried; ++k) t[k] = scale.at(place[k]);
    add(t, sum);
  };
  const uint32_t found =
      last_with(scale.place_of(low), scale.place_of(high), goal, slack, at_places);
  return fmaxf(scale.at(found), low);
}

// Adds `amount` to the measure of each t that a value reaches.
template <class T>
__device__ __forceinline__ void add_to_reached(const float (&t)[kTried], float value, T amount,
                                               T (&sum)[kTried]) {
#pragma unroll
  for (int k = 0; k < kTried; ++k) sum[k] += value >= t[k] ? amount : T{0};
}

// Numbers i, i + kThreads, ... of this thread, i its index: a search reads them again and again.
struct Held {
  float v[kHeld];
  int rounds;  // that all threads have

  template <class F>
  __device__ void load(int64_t count, const F& number) {
    rounds = static_cast<int>((count + kThreads - 1) / kThreads);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      v[j] = -INFINITY;
      const int64_t i = j * kThreads + static_cast<int64_t>(threadIdx.x);
      if (j < rounds && i < count) v[j] = number(i);
    }
  }
  template <class F>
  __device__ void each(const F& f) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (j < rounds) f(j, v[j]);
    }
  }
};

// The largest logits of a row's blocks, the first of them held.
struct HeldMaxima {
  const LogitRow& maxima;
  int64_t blocks;
  Held held;

  __device__ HeldMaxima(const LogitRow& all, int64_t count) : maxima(all), blocks(count) {
    constexpr int64_t kMost = kHeld * kThreads;
    held.load(count < kMost ? count : kMost, [&](int64_t i) { return all.at(i); });
  }
  // Of this thread.
  template <class F>
  __device__ void each(const F& f) const {
    held.each([&](int j, float most) { f(j * kThreads + static_cast<int>(threadIdx.x), most); });
    for (int64_t i = kHeld * kThreads + threadIdx.x; i < blocks; i += kThreads) {
      f(static_cast<int>(i), maxima.at(i));
    }
  }
};

// A lower bound of the k-th largest logit that only k blocks and few more reach. each(f): f(block,
// its largest logit) for all blocks of this thread.
template <class E>
__device__ float bound_of_rank(LogitType type, float maximum, int k, const E& each) {
  const auto count = [&](const float (&t)[kTried], int (&sum)[kTried]) {
    each([&](int, float most) { add_to_reached(t, most, 1, sum); });
  };
  return largest_with(type, kLowest, maximum, k, k / 4 + 8, count);
}

// A t above which the blocks' largest logits alone have the mass `goal`; -inf: they have less.
__device__ inline float bound_of_mass(const FilteredRow& f, const HeldMaxima& blocks, double goal) {
  float weights[kHeld], all = 0.f;
  blocks.held.each([&](int j, float most) {
    weights[j] = f.weight(most);
    all += weights[j];
  });
  // Sums of another order differ; a little more is asked for.
  const auto wanted = static_cast<float>(goal * (1. + 1e-5));
  if (block_reduce(all, Plus{}) < wanted) return -INFINITY;
  const auto mass = [&](const float (&t)[kTried], float (&sum)[kTried]) {
    blocks.held.each([&](int j, float most) { add_to_reached(t, most, weights[j], sum); });
  };
  return largest_with(f.maxima.type(), kLowest, f.maximum, wanted, -1.f, mass);
}

// Values >= least into the list; returns how many there are, or kList + 1 if there is no room.
__device__ inline int collect(const FilteredRow& f, const HeldMaxima& blocks, float least) {
  int reaching = 0, picked;
  blocks.each([&](int, float most) { reaching += most >= least ? 1 : 0; });
  int at = block_exclusive_sum(reaching, &picked);
  if (picked > kMostBlocks) return kList + 1;
  blocks.each([&](int block, float most) {
    if (most >= least) f.scratch.block[at++] = block;
  });
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
    int to = filled + block_exclusive_sum(own, &total);
    filled += total;
    if (filled > kList) return kList + 1;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (v[k][j] >= least) f.scratch.list[to++] = v[k][j];
      }
    }
  }
  __syncthreads();
  return filled;
}

__device__ inline float min_p_floor(const Parameters& s, float maximum) {
  if (s.min_p <= 0.f) return -INFINITY;
  if (s.min_p >= 1.f) return maximum;
  return add_rn(maximum, mul_rn(s.temperature, log_normal(fmaxf(s.min_p, kTiny))));
}

// The listed values of this thread and their weights.
struct HeldList {
  Held values;
  float weights[kHeld];

  __device__ HeldList(const FilteredRow& f, int count) {
    values.load(count, [&](int64_t i) { return f.scratch.list[i]; });
    values.each([&](int j, float l) { weights[j] = f.weight(l); });
  }
  __device__ double mass_from(float least) const {
    double mass = 0.;
    values.each([&](int j, float l) { mass += l >= least ? weights[j] : 0.f; });
    return block_reduce(mass, Plus{});
  }
  __device__ float entropy_from(const FilteredRow& f, float least, float mass) const {
    float sum = 0.f;
    values.each([&](int j, float l) {
      const float w = l >= least ? weights[j] : 0.f;
      sum += w > 0.f ? w * ((l - f.maximum) * f.row.parameters.inv_t) : 0.f;
    });
    return logf(mass) - block_reduce(sum, Plus{}) / mass;
  }
  __device__ float rank(const FilteredRow& f, float least, int k) const {
    const auto count = [&](const float (&t)[kTried], int (&sum)[kTried]) {
      values.each([&](int, float l) { add_to_reached(t, l, 1, sum); });
    };
    return largest_with(f.row.type(), least, f.maximum, k, -1, count);
  }
  __device__ float edge(const FilteredRow& f, float least, double goal) const {
    const auto mass = [&](const float (&t)[kTried], double (&sum)[kTried]) {
      values.each(
          [&](int j, float l) { add_to_reached(t, l, static_cast<double>(weights[j]), sum); });
    };
    return largest_with(f.row.type(), least, f.maximum, goal, -1., mass);
  }
};

// Threshold and kept mass from blocks with large maxima; false if they do not tell.
__device__ inline bool settle_from_blocks(const FilteredRow& f, RowStats* r) {
  const Parameters& s = f.row.parameters;
  const float floor = min_p_floor(s, f.maximum);
  const bool has_rank = s.top_k > 0, has_edge = s.top_p < 1.f;
  // The list holds all that min-p and top-k keep, or, of top-p alone, what reaches its mass.
  const HeldMaxima blocks(f.maxima, f.row.blocks());
  const bool is_whole = has_rank || floor > -INFINITY || blocks.blocks <= kList / kBlock;
  float least = fmaxf(floor, kLowest);
  if (has_rank && s.top_k < blocks.blocks) {
    if (s.top_k > kMostRank) return false;
    const auto each = [&](const auto& count) { blocks.each(count); };
    least = fmaxf(least, bound_of_rank(f.maxima.type(), f.maximum, s.top_k, each));
  } else if (!is_whole) {
    least = bound_of_mass(f, blocks, static_cast<double>(s.top_p) * f.total);
    if (least == -INFINITY) return false;
  }
  const int count = collect(f, blocks, least);
  if (count > kList) return false;
  const HeldList list(f, count);
  float threshold = floor;
  if (has_rank && count >= s.top_k) threshold = list.rank(f, least, s.top_k);
  if (has_edge) {
    const double whole = is_whole ? list.mass_from(threshold) : f.total;
    threshold = list.edge(f, fmaxf(threshold, least), static_cast<double>(s.top_p) * whole);
  }
  r->threshold = threshold;
  r->mass = static_cast<float>(list.mass_from(threshold));
  if ((f.p.flags & kWantsEntropy) != 0) r->entropy = list.entropy_from(f, threshold, r->mass);
  return true;
}

}  // namespace specdec
