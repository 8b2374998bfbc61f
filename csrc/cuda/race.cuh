// Races: the id with the largest log-weight - log E(id) wins, ties to the lowest id. One 64-bit key
// orders them all: 62..31: score, order preserving; 30..0: 2^31 - 1 - id. Key 0: nobody competes.
//
// No id of a block of 64 can beat (its largest log-weight) - log(its smallest E). A thread block
// looks into the blocks of a row by descending bound, kGroupsOf8 at once, until none can win.
#pragma once
#include "../common/noise.h"
#include "rows.cuh"

namespace specdec {

using Key = unsigned long long;
constexpr Key kNobody = 1;  // below every key of an id
constexpr float kTiny = 0x1p-126f;
constexpr int kLanes = 8, kGroupsOf8 = kThreads / kLanes;  // eight threads look into a block

// Both zeros have the same order.
SPECDEC_HD uint32_t ordered_bits(float x) {
  const uint32_t bits = float_bits(add_rn(x, 0.f));
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

SPECDEC_HD float from_ordered_bits(uint32_t ordered) {
  return bits_float(ordered ^ ((ordered >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

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

  // block: that of the id, where there is no token_map.
  __device__ float exponential_of(int64_t id, const BlockNoise& block) const {
    if (token_map) return noise_of(noise, token_map.load(id));
    return noise_in(block, id, noise_word(noise, id));
  }
};

// -log1p(-x) of a word within 1e-3, from the hardware logarithm.
__device__ __forceinline__ float rough_exponential(uint32_t word) {
  const float x = unit_interval(word);
  return x < 0.05f ? x + x * x * (0.5f + 0.34f * x) : -fast_log(1.f - x);
}

// Noise of the block of 64 ids from which eight lanes have eight ids each: even lanes make the word
// of the minimum, odd ones that of the place. All lanes of a warp call it; nothing with a
// token_map.
__device__ __forceinline__ BlockNoise group_noise(const Race& race, int64_t first) {
  if (race.token_map) return {};
  const auto block = static_cast<uint32_t>(first) / kNoiseBlock;
  const bool is_odd = threadIdx.x % 2 != 0;
  const uint32_t own = noise_word(race.noise, (is_odd ? kPlaces : kMinima) + block);
  const uint32_t other = __shfl_xor_sync(0xffffffffu, own, 1);
  return {block_minimum(is_odd ? other : own), static_cast<int>((is_odd ? own : other) % 64)};
}

// E of eight ids from `first` on, within 1e-3; those of a token_map are exact.
__device__ inline void rough_noise(const Race& race, const BlockNoise& block, int64_t first,
                                   float (&e)[kLanes]) {
  if (race.token_map) {
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
      const float one = first + j < race.size ? race.exponential_of(first + j, block) : 1.f;
#pragma unroll
      for (int k = 0; k < 8; ++k) e[k] = j == k ? one : e[k];
    }
    return;
  }
  const auto id = static_cast<uint32_t>(first);
  const int least = block.place - static_cast<int>(id % kNoiseBlock);
#pragma unroll
  for (int quad = 0; quad < 8; quad += 4) {
    const PhiloxWords w = noise_words(race.noise, (id + quad) >> 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      e[quad + j] = block.minimum + (quad + j == least ? 0.f : rough_exponential(w.word[j]));
    }
  }
}

// How the log-weight of a weight w > -inf is had; a rough one is within 1e-3.
struct IsLogWeight {
  __device__ float operator()(float w, bool /*is_exact*/) const { return w; }
};

__device__ __forceinline__ int lowest_bit(unsigned bits) { return __popc((bits & -bits) - 1); }

// v[j] without a place in memory.
__device__ __forceinline__ float chosen(const float (&v)[8], int j) {
  float one = v[0];
#pragma unroll
  for (int k = 1; k < 8; ++k) one = j == k ? v[k] : one;
  return one;
}

// Key of the j-th of eight ids from `first` on, which lie in `block`; 0 if its weight is -inf.
template <class L>
__device__ Key exact_key(const Race& race, const BlockNoise& block, const float (&w)[8],
                         int64_t first, int j, const L& log_of) {
  const float weight = chosen(w, j);
  if (weight == -INFINITY) return 0;
  const int64_t id = first + j;
  return score_key(log_of(weight, true), race.exponential_of(id, block), id);
}

// Best key of eight ids from `first` on, each of weight w[j] or -inf. Rough scores tell which of
// the group's 64 ids can win; only those are scored exactly, one of a lane at once. All lanes of a
// warp call it.
template <class L>
__device__ Key best_of_eight(const Race& race, const float (&w)[8], int64_t first, float least,
                             const L& log_of) {
  float score[8], top = -INFINITY;
  const BlockNoise block = group_noise(race, first);
  rough_noise(race, block, first, score);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    score[j] = w[j] > -INFINITY ? log_of(w[j], false) - fast_log(score[j]) : -INFINITY;
    top = fmaxf(top, score[j]);
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
  }
  top = fmaxf(top, least);
  const float bar = top - (0.01f + 1e-5f * fabsf(top));
  unsigned may_win = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) may_win |= score[j] >= bar && score[j] > -INFINITY ? 1u << j : 0;
  Key best = 0;
#pragma unroll 1
  for (; may_win != 0; may_win &= may_win - 1) {
    const int j = lowest_bit(may_win);
    best = larger(best, exact_key(race, block, w, first, j, log_of));
  }
  return best;
}

// Minima of the noise of eight blocks from `first` on, within 1e-3.
__device__ inline void rough_minima(const Race& race, int first, float (&minimum)[8]) {
  const uint32_t index = static_cast<uint32_t>(kMinima) + static_cast<uint32_t>(first);
#pragma unroll
  for (int quad = 0; quad < 8; quad += 4) {
    const PhiloxWords w = noise_words(race.noise, (index + quad) >> 2);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      minimum[quad + j] = rough_exponential(w.word[j]) * (1.f / kNoiseBlock);
    }
  }
}

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
using Bounds = float[kWindow];

struct BlockQueue {
  float* bounds;  // kWindow of them, in shared memory: a look needs the registers
  int first;

  __device__ __forceinline__ float& bound(int k) const {
    return bounds[k * kThreads + threadIdx.x];
  }

  // log_weight(block, l): the largest of the block's ids, whose largest logit is l; -inf if none
  // competes.
  template <class F>
  __device__ void fill(const Race& race, int window, int blocks, const LogitRow& maxima,
                       const F& log_weight) {
    const int lane = threadIdx.x % kLanes, place = static_cast<int>(threadIdx.x) / kLanes * 8;
    first = window + (place + lane * (kGroupsOf8 * 8));
    float minimum[8] = {}, most[8];
    maxima.load8(first, blocks, most);
    if (race.token_map) {
#pragma unroll 1
      for (int i = 0; i < kLanes * 8; ++i) {
        const int block = first - lane * (kGroupsOf8 * 8) + i / 8 * (kGroupsOf8 * 8) + i % 8;
        const float least = mapped_minimum(race, block);
#pragma unroll
        for (int j = 0; j < 8; ++j) minimum[j] = i == lane * 8 + j ? least : minimum[j];
      }
    } else {
      rough_minima(race, first, minimum);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float w = log_weight(first + j, most[j]);
      // Scores are exact, bounds within their margin.
      const float score = w - fast_log(minimum[j]);
      bound(j) = w > -INFINITY ? score + (3e-3f + 1e-5f * fabsf(score)) : -INFINITY;
    }
  }
  // The group's best bound and its block, which leaves the queue if the bound reaches `least`.
  __device__ int pop(float least) {
    float top = -INFINITY;
    int block = first;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float one = bound(k);
      block = one > top ? first + k : block;
      top = fmaxf(one, top);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, top, mask);
      const int its = __shfl_xor_sync(0xffffffffu, block, mask);
      block = other > top || (other == top && its < block) ? its : block;
      top = fmaxf(other, top);
    }
    if (top == -INFINITY || top < least) return -1;
    const int mine = block - first;
    if (mine >= 0 && mine < 8) bound(mine) = -INFINITY;
    return block;
  }
  // The next kGroupsOf8 blocks that reach `least`, whichever threads keep them, a group one; -1 for
  // a group that gets none. All threads call it.
  __device__ int share(float least) {
    using Shared = int[kGroupsOf8];
    SPECDEC_SHARED(Shared, shared);
    const float bar = fmaxf(least, kLowest);
    unsigned may_win = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) may_win |= bound(k) >= bar ? 1u << k : 0;
    int total, at = block_exclusive_sum(__popc(may_win), &total);
#pragma unroll 1
    for (; may_win != 0 && at < kGroupsOf8; may_win &= may_win - 1) {
      const int k = lowest_bit(may_win);
      shared[at++] = first + k;
      bound(k) = -INFINITY;
    }
    __syncthreads();
    const int group = static_cast<int>(threadIdx.x) / kLanes;
    return group < total ? shared[group] : -1;
  }
};

// Whether a group of the warp looks into a block.
__device__ __forceinline__ bool warp_looks(int block) {
  int looks = block >= 0 ? 1 : 0;
  looks |= __shfl_xor_sync(0xffffffffu, looks, 8);
  looks |= __shfl_xor_sync(0xffffffffu, looks, 16);
  return looks != 0;
}

// Best key of a row of `blocks` blocks and `best`, to all threads. weights(first, w): weights of
// eight ids, -inf where one is out. The best block of each group comes first: mostly the winner is
// among them, and what its score leaves of a row (16 blocks) is one more look.
template <class F, class G, class L = IsLogWeight>
__device__ Key race_blocks(const Race& race, int blocks, const LogitRow& maxima, float* bounds,
                           Key best, const F& log_weight, const G& weights, const L& log_of = {}) {
  for (int window = 0; window < blocks; window += kWindow) {
    BlockQueue queue{bounds, 0};
    queue.fill(race, window, blocks, maxima, log_weight);
    for (bool is_first = true;; is_first = false) {
      const float least = key_score(best);
      const int block = is_first ? queue.pop(least) : queue.share(least);
      Key key = 0;
      if (warp_looks(block)) {
        float w[8];
        const int64_t first = block * int64_t{kNoiseBlock} + threadIdx.x % kLanes * 8;
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] = -INFINITY;
        if (block >= 0) weights(first, w);
        key = best_of_eight(race, w, block >= 0 ? first : 0, least, log_of);
        if (block >= 0) key = larger(key, kNobody);
      }
      key = block_reduce(key, Larger{});
      best = larger(best, key);
      if (key == 0) break;
    }
  }
  return best > kNobody ? best : 0;
}

// Keys of eight ids, by their exact scores, and one more.
struct NineKeys {
  float score[8];  // -inf: out
  int first;
  Key other;
};

// out[0..n) = the n largest keys of the block in order. Keys are distinct but for 0.
__device__ inline void block_top_keys(const NineKeys& mine, int n, Key* out) {
  Key last = ~Key{0};
  for (int i = 0; i < n; ++i) {
    Key best = mine.other < last ? mine.other : 0;
#pragma unroll 1  // eight keys at once are more than the registers hold
    for (int j = 0; j < 8; ++j) {
      const Key one = key_of(chosen(mine.score, j), mine.first + j);
      if (one < last && one > best) best = one;
    }
    if (last != 0) last = block_reduce(best, Larger{});
    if (threadIdx.x == 0) out[i] = last;
  }
  __syncthreads();
}

// best[0..n): the n best keys of a row, in order; 0 where fewer compete. n <= kThreads.
template <class F, class G>
__device__ void race_for_best(const Race& race, int blocks, const LogitRow& maxima, float* bounds,
                              int n, Key* best, const F& log_weight, const G& weights) {
  for (int i = threadIdx.x; i < n; i += kThreads) best[i] = 0;
  __syncthreads();
  for (int window = 0; window < blocks; window += kWindow) {
    BlockQueue queue{bounds, 0};
    queue.fill(race, window, blocks, maxima, log_weight);
    for (;;) {
      const int block = queue.pop(key_score(best[n - 1]));
      NineKeys keys;
      const BlockNoise noise = group_noise(race, block >= 0 ? block * int64_t{kNoiseBlock} : 0);
#pragma unroll
      for (float& score : keys.score) score = -INFINITY;
      keys.first = block * kNoiseBlock + static_cast<int>(threadIdx.x) % kLanes * 8;
      if (block >= 0) {
        weights(keys.first, keys.score);
#pragma unroll 1
        for (int j = 0; j < 8; ++j) {
          const float one =
              key_score(exact_key(race, noise, keys.score, keys.first, j, IsLogWeight{}));
#pragma unroll
          for (int k = 0; k < 8; ++k) keys.score[k] = j == k ? one : keys.score[k];
        }
      }
      if (block_reduce(block >= 0 ? 1 : 0, Or{}) == 0) break;
      const int mine = static_cast<int>(threadIdx.x);
      keys.other = mine < n ? best[mine] : 0;
      __syncthreads();
      block_top_keys(keys, n, best);
    }
  }
}

}  // namespace specdec
