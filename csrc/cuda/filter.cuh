// Filters as thresholds, from the largest logit of each block of 64 ids.
//   top-k    the k-th largest block maximum bounds the k-th largest logit from below, and every
//            logit >= it lies in a block whose maximum is >= it: these blocks are read.
//   top-p    the largest t with mass{l >= t} >= p mass{kept so far}: from the blocks whose maxima
//            alone have that mass, if all maxima together do.
// What these do not tell (normal logits, large k, many ties): bracket.cuh.
#pragma once
#include "search.cuh"

namespace specdec {

constexpr int kMostBlocks = 1344;  // that are read again at once; top_k up to kMostRank
constexpr int kMostRank = 1024;
constexpr int kAtOnce = 4;        // blocks that eight threads read at once
constexpr int kHeld = 16;         // numbers that a thread keeps in registers
constexpr int kList = 4096;       // values of the blocks that are read again
constexpr int kLong = 2 * kList;  // values of a sample, or between the ends of a bracket
static_assert(kList <= kHeld * kThreads && 2 * kList <= kLong);

struct alignas(16) Four {
  float v[4];
};

struct FilterScratch {
  union {
    float list[kLong];
    Four fours[kLong / 4];  // the same
    RaceScratch race;       // behind the filters
  };
  int block[kMostBlocks];
  int id[kThreads];  // of the values of a short list
  int sorted;        // values of the row that its sorted list holds; 0: it is not short
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

  // Read 16 bytes at once, through the list.
  __device__ explicit HeldMaxima(const FilteredRow& f) : maxima(f.maxima), blocks(f.row.blocks()) {
    constexpr int64_t kMost = kHeld * kThreads;
    const int64_t count = blocks < kMost ? blocks : kMost;
    for (int64_t first = threadIdx.x * 8; first < count; first += kThreads * 8) {
      float v[8];
      maxima.load8(first, count, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) f.scratch.list[first + j] = v[j];
    }
    __syncthreads();
    held.load(count, [&](int64_t i) { return f.scratch.list[i]; });
    __syncthreads();
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

// A lower bound of the k-th largest logit that few blocks more than k reach. each(f): f(block, its
// largest logit) for blocks of this thread.
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

// Values >= least into the list, and the ids of the first; returns how many there are, or kList + 1
// if there is no room.
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
        if (!(v[k][j] >= least)) continue;
        if (filled <= kThreads) {
          f.scratch.id[to] =
              f.scratch.block[first + k * kGroupsOf8 + group] * kBlock + lane * 8 + j;
        }
        f.scratch.list[to++] = v[k][j];
      }
    }
  }
  return filled;
}

__device__ inline float min_p_floor(const Parameters& s, float maximum) {
  if (s.min_p <= 0.f) return -INFINITY;
  if (s.min_p >= 1.f) return maximum;
  return add_rn(maximum, mul_rn(s.temperature, log_normal(fmaxf(s.min_p, kTiny))));
}

// The listed values of this thread; their weights lie behind the list.
struct HeldList {
  Held values;
  float* weights;

  __device__ HeldList(const FilteredRow& f, int count)
      : weights(f.scratch.list + kList + threadIdx.x) {
    __syncthreads();
    values.load(count, [&](int64_t i) { return f.scratch.list[i]; });
    values.each([&](int j, float l) { weights[j * kThreads] = f.weight(l); });
  }
  template <class F>
  __device__ void each(const F& f) const {
    values.each([&](int j, float l) { f(l, weights[j * kThreads]); });
  }
  __device__ float rank(const FilteredRow& f, float least, int k) const {
    const auto count = [&](const float (&t)[kTried], int (&sum)[kTried]) {
      each([&](float l, float) { add_to_reached(t, l, 1, sum); });
    };
    return largest_with(f.row.type(), least, f.maximum, k, -1, count);
  }
  __device__ float edge(const FilteredRow& f, float least, double goal) const {
    const auto mass = [&](const float (&t)[kTried], double (&sum)[kTried]) {
      each([&](float l, float w) { add_to_reached(t, l, static_cast<double>(w), sum); });
    };
    return largest_with(f.row.type(), least, f.maximum, goal, -1., mass);
  }
};

// A list of at most kThreads values in falling order, and their ids: each counts those before it. A
// search among as many takes eight steps with a barrier in each.
__device__ inline void sort_list(FilterScratch& scratch, int count) {
  constexpr int kRun = 4;  // loads of four under way
  float* list = scratch.list;
  const int own = static_cast<int>(threadIdx.x);
  if (own < 4 * kRun) list[count + own] = -INFINITY;
  __syncthreads();
  int place = 0, id = 0;
  float value = 0.f;
  if (own < count) {
    value = list[own];
    id = scratch.id[own];
    for (int i = 0; i < count; i += 4 * kRun) {
      Four four[kRun];
#pragma unroll
      for (int k = 0; k < kRun; ++k) four[k] = scratch.fours[i / 4 + k];
#pragma unroll
      for (int j = 0; j < 4 * kRun; ++j) {
        const float other = four[j / 4].v[j % 4];
        place += other > value || (other == value && i + j < own) ? 1 : 0;
      }
    }
  }
  __syncthreads();
  if (own < count) {
    list[place] = value;
    scratch.id[place] = id;
  }
  __syncthreads();
}

// The same of a list of at most kThreads values, which is sorted.
struct SortedList {
  float value, weight;

  __device__ SortedList(const FilteredRow& f, int count) {
    sort_list(f.scratch, count);
    if (threadIdx.x == 0) f.scratch.sorted = count;
    value = static_cast<int>(threadIdx.x) < count ? f.scratch.list[threadIdx.x] : -INFINITY;
    weight = f.weight(value);
  }
  template <class F>
  __device__ void each(const F& f) const {
    f(value, weight);
  }
  __device__ float rank(const FilteredRow& f, float /*least*/, int k) const {
    return f.scratch.list[k - 1];
  }
  __device__ float edge(const FilteredRow& f, float least, double goal) const {
    const double own = weight;
    double all;
    const bool reaches = block_exclusive_sum(own, &all) + own >= goal;
    const int place = block_reduce(reaches ? static_cast<int>(threadIdx.x) : kThreads, Smaller{});
    return place < kThreads ? fmaxf(f.scratch.list[place], least) : least;
  }
};

// What blocks say of the filters: every value >= least is listed, which are all that min-p and
// top-k keep (is_whole) or, of top-p alone, what reaches its mass.
struct Bounds {
  float floor, least;
  bool is_whole;
};

// Threshold and kept mass, from a list.
template <class List>
__device__ inline void conclude(const FilteredRow& f, Bounds given, int count, RowStats* r) {
  const Parameters& s = f.row.parameters;
  const List list(f, count);
  const auto mass_from = [&](float least) {
    double mass = 0.;
    list.each([&](float l, float w) { mass += l >= least ? w : 0.f; });
    return block_reduce(mass, Plus{});
  };
  float threshold = given.floor;
  if (s.top_k > 0 && count >= s.top_k) threshold = list.rank(f, given.least, s.top_k);
  if (s.top_p < 1.f) {
    const double whole = given.is_whole ? mass_from(threshold) : f.total;
    const float least = fmaxf(threshold, given.least);
    threshold = list.edge(f, least, static_cast<double>(s.top_p) * whole);
  }
  r->threshold = threshold;
  r->mass = static_cast<float>(mass_from(threshold));
  if ((f.p.flags & kWantsEntropy) == 0) return;
  float sum = 0.f;
  list.each([&](float l, float w) {
    sum += l >= threshold && w > 0.f ? w * ((l - f.maximum) * f.row.parameters.inv_t) : 0.f;
  });
  r->entropy = logf(r->mass) - block_reduce(sum, Plus{}) / r->mass;
}

// Out of line: both in the settle kernel are more than its registers hold.
static __device__ SPECDEC_NOINLINE void conclude_short(const FilteredRow& f, Bounds given,
                                                       int count, RowStats* r) {
  conclude<SortedList>(f, given, count, r);
}

// Threshold and kept mass from blocks with large maxima; false if they do not tell.
__device__ inline bool settle_from_blocks(const FilteredRow& f, RowStats* r) {
  const Parameters& s = f.row.parameters;
  Bounds bounds{min_p_floor(s, f.maximum), kLowest, true};
  const HeldMaxima blocks(f);
  bounds.is_whole = s.top_k > 0 || bounds.floor > -INFINITY || blocks.blocks <= kList / kBlock;
  bounds.least = fmaxf(bounds.floor, kLowest);
  if (s.top_k > 0 && s.top_k < blocks.blocks) {
    if (s.top_k > kMostRank) return false;
    // Of few, the largest of each thread's blocks tell nearly as much, in a third of the time.
    float largest = -INFINITY;
    blocks.each([&](int, float most) { largest = fmaxf(largest, most); });
    const auto largest_of_threads = [&](const auto& count) { count(0, largest); };
    const auto all = [&](const auto& count) { blocks.each(count); };
    const LogitType type = f.maxima.type();
    const float reached = s.top_k <= kThreads / 2
                              ? bound_of_rank(type, f.maximum, s.top_k, largest_of_threads)
                              : bound_of_rank(type, f.maximum, s.top_k, all);
    bounds.least = fmaxf(bounds.least, reached);
  } else if (!bounds.is_whole) {
    bounds.least = bound_of_mass(f, blocks, static_cast<double>(s.top_p) * f.total);
    if (bounds.least == -INFINITY) return false;
  }
  const int count = collect(f, blocks, bounds.least);
  if (count > kList) return false;
  if (count <= kThreads) {
    conclude_short(f, bounds, count, r);
  } else {
    conclude<HeldList>(f, bounds, count, r);
  }
  return true;
}

}  // namespace specdec
