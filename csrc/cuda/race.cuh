// Races: the id with the largest log-weight - log E(id) wins, ties to the lowest id. One 64-bit key
// orders them all: 62..31: score, order preserving; 30..0: 2^31 - 1 - id. Key 0: nobody competes.
//
// No id of a block of 64 can beat (its largest log-weight) - log(its smallest E): a thread block
// looks only into the blocks whose bound reaches the best score so far, and scores only the ids
// whose own weight does with that E. These are 64 Exp(1) ids of a row, whatever its weights are.
#pragma once
#include "../common/noise.h"
#include "rows.cuh"

namespace specdec {

using Key = unsigned long long;
constexpr Key kNobody = 1;  // below every key of an id
constexpr float kTiny = 0x1p-126f;
constexpr int kLanes = 8, kGroupsOf8 = kThreads / kLanes;  // eight threads look into a block

__device__ __forceinline__ int64_t key_id(Key key) {
  return 0x7fffffff - static_cast<int64_t>(key & 0x7fffffffu);
}

__device__ __forceinline__ float key_score(Key key) {
  return key <= kNobody ? -INFINITY : from_ordered_bits(static_cast<uint32_t>(key >> 31));
}

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }

// Key of an exact score; 0 if it is not finite.
__device__ __forceinline__ Key key_of(float score, int64_t id) {
  if (!is_finite(score)) return 0;
  return static_cast<Key>(ordered_bits(score)) << 31 | static_cast<Key>(0x7fffffff - id);
}

__device__ __forceinline__ Key score_key(float log_weight, float e, int64_t id) {
  return key_of(race_score(log_weight, e), id);
}

struct Race {
  NoiseStream noise;
  GlobalVector<int32_t> token_map;  // noise is indexed by target id
  int64_t size;                     // ids

  // Out of line: it needs more registers than what is around it.
  __device__ SPECDEC_NOINLINE float exponential_of(int64_t id) const {
    return noise_of(noise, token_map ? token_map.load(id) : id);
  }
};

// At least -log of the smallest noise of a block, from its word: -log1p(-x) is more than the first
// terms of its series.
constexpr float kLogBlock = 4.15888308f, kMargin = 3e-3f;
__device__ __forceinline__ float luck_of(uint32_t word) {
  const float x = fmaf(static_cast<float>(word), 0x1p-32f, 0x1p-33f);
  const float least = x * fmaf(x, fmaf(x, fmaf(x, 0.25f, 0.3333f), 0.5f), 1.f);
  return kLogBlock + kMargin - fast_log(least);
}

__device__ __forceinline__ int lowest_bit(unsigned bits) { return __popc((bits & -bits) - 1); }

// With a token_map: the least of a block's columns, which the eight threads of a group share; all
// lanes of a warp call it.
__device__ inline float mapped_minimum(const Race& race, int64_t block) {
  const int64_t first = block * kNoiseBlock + threadIdx.x % kLanes * 8;
  float least = INFINITY, minimum = INFINITY;
  int64_t last = -1;
  for (int64_t c = first; c < first + 8 && c < race.size; ++c) {
    const int64_t target = race.token_map.load(c) / kNoiseBlock;
    if (target != last) {  // neighbours mostly share a block
      minimum = block_minimum(noise_word(race.noise, kMinima + target));
      last = target;
    }
    least = fminf(least, minimum);
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    least = fminf(least, __shfl_xor_sync(0xffffffffu, least, mask));
  }
  return least;
}

// What the blocks of a row may score. A thread keeps eight blocks behind one another, those of its
// group lie kGroupsOf8 * 8 apart.
constexpr int kWindow = kThreads * 8;  // blocks
constexpr int kMarked = 2 * kThreads;

struct Bounded {
  int block;  // -1: none
  float bound;
};
struct Marked {
  int id;  // -1: none
  float logit;
};

struct RaceScratch {  // in shared memory: a look needs the registers
  float bounds[kWindow];
  Bounded looks[kThreads];  // blocks to look into
  Marked marked[kMarked];   // ids to score
  int count;                // of them, and of those that found no room
};

// The ids of a row. The log-weight of a logit l is (l - maximum) inv_t + shift at most; out: l <
// threshold, a finite number. load8(first, v): logits of eight ids, -inf: out. other(id): what else
// the log-weight is made of, weight(id, logit, other); it is asked for before the noise is made.
template <class L, class O, class W>
struct Entrants {
  float maximum, inv_t, shift, threshold;
  L load8;
  O other;
  W weight;

  __device__ __forceinline__ float above(float logit) const { return (logit - maximum) * inv_t; }
  __device__ __forceinline__ float bound(float logit) const {
    return logit >= threshold ? above(logit) + shift : -INFINITY;
  }
};

struct BlockQueue {
  RaceScratch& scratch;
  int window;

  // The first of the eight blocks of this thread, or of the first thread of its group.
  __device__ int place() const { return window + static_cast<int>(threadIdx.x) / kLanes * 8; }
  __device__ int first() const { return place() + threadIdx.x % kLanes * (kGroupsOf8 * 8); }
  __device__ __forceinline__ float& bound(int k) const {
    return scratch.bounds[k * kThreads + threadIdx.x];
  }

  // What its noise adds to the best log-weight of each block, at most.
  __device__ void set_luck(const Race& race) {
    if (race.token_map) {
#pragma unroll 1
      for (int i = 0; i < kLanes * 8; ++i) {
        const float least = mapped_minimum(race, place() + i / 8 * (kGroupsOf8 * 8) + i % 8);
        if (i / 8 == static_cast<int>(threadIdx.x) % kLanes) {
          bound(i % 8) = kMargin - fast_log(least);
        }
      }
      return;
    }
    const uint32_t quad = quad_of(kMinima + first());
    PhiloxWords words[2];
    noise_words(race.noise, {quad, quad + 1}, words);
#pragma unroll
    for (int j = 0; j < 8; ++j) bound(j) = luck_of(words[j / 4].word[j % 4]);
  }
  // The bounds from it; returns the best of this thread and its block.
  template <class E>
  __device__ Bounded set_bounds(int blocks, const LogitRow& maxima, const E& entrants) {
    float most[8];
    maxima.load8(first(), blocks, most);
    Bounded best{-1, -INFINITY};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float w = entrants.bound(most[j]), score = w + bound(j);
      // Scores are exact, bounds within their margin.
      const float one = w > -INFINITY ? score + 1e-5f * fabsf(score) : -INFINITY;
      bound(j) = one;
      if (one > best.bound) best = {first() + j, one};
    }
    return best;
  }
  // Copies the best of each group to scratch.looks; returns how many groups there are.
  __device__ int share_tops(Bounded best) const {
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best.bound, mask);
      const int its = __shfl_xor_sync(0xffffffffu, best.block, mask);
      if (other > best.bound || (other == best.bound && its < best.block)) best = {its, other};
    }
    if (threadIdx.x % kLanes == 0) scratch.looks[threadIdx.x / kLanes] = best;
    return kGroupsOf8;
  }
  // Moves up to kThreads blocks that reach `least` to scratch.looks; returns how many reach it. All
  // threads call it.
  __device__ int share(float least) {
    const float bar = fmaxf(least, kLowest);
    unsigned may_win = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) may_win |= bound(k) >= bar ? 1u << k : 0;
    int total, at = block_exclusive_sum(__popc(may_win), &total);
#pragma unroll 1
    for (; may_win != 0 && at < kThreads; may_win &= may_win - 1) {
      const int k = lowest_bit(may_win);
      scratch.looks[at++] = {first() + k, bound(k)};
      bound(k) = -INFINITY;
    }
    return total;
  }
  __device__ void put_back(const Bounded& look) const {
    const int place = look.block - window, lane = place / (kGroupsOf8 * 8);
    const int group = place % (kGroupsOf8 * 8) / 8;
    scratch.bounds[place % 8 * kThreads + group * kLanes + lane] = look.bound;
  }
};

// Of a block, which eight lanes share: the id of the largest logit and that of the smallest E.
// Together those of the best bounds come close to the winner.
__device__ inline unsigned mark_favourites(const Race& race, const float (&v)[8], int64_t first) {
  const auto block = static_cast<uint32_t>(first) / kNoiseBlock;
  const auto place = static_cast<int>(noise_word(race.noise, kPlaces + block) % kNoiseBlock);
  float top = -INFINITY;
#pragma unroll
  for (const float one : v) top = fmaxf(top, one);
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
  }
  unsigned largest = 0, luckiest = 0;
#pragma unroll
  for (int j = 7; j >= 0; --j) {
    if (v[j] == top) largest = 1u << j;
    if (static_cast<int>(first) % kNoiseBlock + j == place) luckiest = 1u << j;
  }
  return top > -INFINITY ? largest | luckiest : 0;
}

// v[j] without a place in memory.
__device__ __forceinline__ float chosen(const float (&v)[8], int j) {
  float one = v[0];
#pragma unroll
  for (int k = 1; k < 8; ++k) one = j == k ? v[k] : one;
  return one;
}

// Lists the ids that are marked among eight of each lane, those of a group or, where there is no
// room, none of them. All lanes of a warp call it.
__device__ inline bool list_marked(RaceScratch& scratch, const float (&v)[8], int64_t first,
                                   unsigned marks) {
  const int lane = threadIdx.x % kLanes, own = __popc(marks);
  int upto = own, at = 0;
#pragma unroll
  for (int delta = 1; delta < kLanes; delta *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, upto, delta);
    if (lane >= delta) upto += before;
  }
  if (lane == kLanes - 1 && upto > 0) {
    at = atomicAdd(&scratch.count, upto);
    if (at + upto > kMarked) at = -1;
  }
  at = __shfl_sync(0xffffffffu, at, static_cast<int>(threadIdx.x) % 32 | (kLanes - 1));
  if (at < 0) return false;
  at += upto - own;
#pragma unroll 1
  for (; marks != 0; marks &= marks - 1) {
    const int j = lowest_bit(marks);
    scratch.marked[at++] = {static_cast<int>(first) + j, chosen(v, j)};
  }
  return true;
}

// Lists ids of the blocks in scratch.looks: the favourites, or all that may beat `best`.
template <class Best, class E>
__device__ void look_into(const BlockQueue& queue, int count, const Race& race,
                          const LogitRow& maxima, bool is_first, const Best& best,
                          const E& entrants) {
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  const int of_warp = group / (32 / kLanes) * (32 / kLanes);
#pragma unroll 1
  for (int i = 0; i + of_warp < count; i += kGroupsOf8) {
    const Bounded look = i + group < count ? queue.scratch.looks[i + group] : Bounded{-1, 0.f};
    const int64_t first = look.block * int64_t{kNoiseBlock} + lane * 8;
    float v[8];
    unsigned marks = 0;
#pragma unroll
    for (float& one : v) one = -INFINITY;
    if (look.block >= 0) entrants.load8(first, v);
    if (is_first) {
      marks = mark_favourites(race, v, first);
    } else if (look.block >= 0) {
      const float luck = look.bound - entrants.above(maxima.at(look.block));
      const float bar = fmaxf(best.least() - luck, kLowest);
#pragma unroll
      for (int j = 0; j < 8; ++j) marks |= entrants.above(v[j]) >= bar ? 1u << j : 0;
    }
    const bool is_listed = list_marked(queue.scratch, v, first, marks);
    if (!is_listed && lane == 0) queue.put_back(look);
  }
}

constexpr int kScored = kMarked / kThreads;  // ids that a thread scores

// The winner of a race alone.
struct Winner {
  Key key;
  __device__ float least() const { return key_score(key); }
  __device__ void add(Key one, int /*number*/) { key = larger(key, one); }
  __device__ void merge() { key = block_reduce(key, Larger{}); }
};

// The n best keys in order, 0 where fewer compete; n <= kThreads.
struct Winners {
  int n;
  Key* keys;              // in shared memory
  Key scored[kScored]{};  // by this thread
  __device__ float least() const { return key_score(keys[n - 1]); }
  __device__ void add(Key one, int number) {
#pragma unroll
    for (int k = 0; k < kScored; ++k) scored[k] = k == number ? one : scored[k];
  }
  __device__ void merge() {
    const int mine = static_cast<int>(threadIdx.x);
    const Key kept = mine < n ? keys[mine] : 0;
    Key last = ~Key{0};
    __syncthreads();
    for (int i = 0; i < n; ++i) {  // keys are distinct but for those that were scored again
      Key best = kept < last ? kept : 0;
#pragma unroll
      for (const Key one : scored) best = one < last && one > best ? one : best;
      if (last != 0) last = block_reduce(best, Larger{});
      if (threadIdx.x == 0) keys[i] = last;
    }
    __syncthreads();
  }
};

// Runs the race of a row of `blocks` blocks on from `best`, a Winner or Winners. Favourites come
// first: what their scores leave of a row is mostly one more look. The luck of the queue is set.
template <class Best, class E>
__device__ void run_race(const Race& race, int blocks, const LogitRow& maxima, BlockQueue queue,
                         Best& best, const E& entrants) {
  RaceScratch& scratch = queue.scratch;
  for (; queue.window < blocks; queue.window += kWindow) {
    const bool is_begin = queue.window == 0;
    if (!is_begin) queue.set_luck(race);
    const Bounded top = queue.set_bounds(blocks, maxima, entrants);
    for (bool is_first = is_begin, is_over = false; !is_over; is_first = false) {
      const int found = is_first ? queue.share_tops(top) : queue.share(best.least());
      if (found == 0) break;
      if (threadIdx.x == 0) scratch.count = 0;
      for (int i = threadIdx.x; i < kMarked; i += kThreads) scratch.marked[i].id = -1;
      __syncthreads();
      look_into(queue, found < kThreads ? found : kThreads, race, maxima, is_first, best, entrants);
      __syncthreads();
#pragma unroll 1
      for (int k = 0; k < kScored; ++k) {
        const Marked one = scratch.marked[k * kThreads + threadIdx.x];
        if (one.id < 0) continue;
        const float other = entrants.other(one.id), e = race.exponential_of(one.id);
        const float weight = entrants.weight(one.id, one.logit, other);
        if (weight > -INFINITY) best.add(score_key(weight, e, one.id), k);
      }
      is_over = !is_first && found <= kThreads && scratch.count <= kMarked;
      best.merge();
    }
  }
}

}  // namespace specdec
