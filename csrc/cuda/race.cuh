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
__device__ __forceinline__ Key score_key(float log_weight, float e, int64_t id) {
  const float score = race_score(log_weight, e);
  if (!is_finite(score)) return 0;
  return static_cast<Key>(ordered_bits(score)) << 31 | static_cast<Key>(0x7fffffff - id);
}

struct Race {
  NoiseStream noise;
  GlobalVector<int32_t> token_map;  // noise is indexed by target id
  int64_t size;                     // ids

  __device__ float exponential_of(int64_t id) const {
    return noise_of(noise, token_map ? token_map.load(id) : id);
  }
};

// -log1p(-x) of a word within 1e-3, from the hardware logarithm.
__device__ __forceinline__ float rough_exponential(uint32_t word) {
  const float x = unit_interval(word);
  return x < 0.05f ? x + x * x * (0.5f + 0.34f * x) : -fast_log(1.f - x);
}

// E of eight ids from `first` on, within 1e-3; those of a token_map are exact.
__device__ inline void rough_noise(const Race& race, int64_t first, float (&e)[kLanes]) {
  if (race.token_map) {
#pragma unroll
    for (int j = 0; j < 8; ++j) e[j] = first + j < race.size ? race.exponential_of(first + j) : 1.f;
    return;
  }
  const auto id = static_cast<uint32_t>(first);
  const BlockNoise block = block_noise(race.noise, id / kNoiseBlock);
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

// Best key of eight ids from `first` on, each of log-weight w[j] or -inf. Rough scores tell which
// of the group's 64 ids can win; only those are scored exactly. All lanes of a warp call it.
__device__ inline Key best_of_eight(const Race& race, const float (&w)[8], int64_t first,
                                    float least) {
  float e[8], top = -INFINITY;
  rough_noise(race, first, e);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    e[j] = w[j] - fast_log(e[j]);
    top = fmaxf(top, e[j]);
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
  }
  top = fmaxf(top, least);
  const float bar = top - (0.01f + 1e-5f * fabsf(top));
  unsigned may_win = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) may_win |= e[j] >= bar && e[j] > -INFINITY ? 1u << j : 0;
  Key best = 0;
#pragma unroll 1
  for (int j = 0; may_win != 0; ++j, may_win >>= 1) {
    if ((may_win & 1) == 0) continue;
    float weight = w[0];
#pragma unroll
    for (int k = 1; k < 8; ++k) weight = j == k ? w[k] : weight;
    best = larger(best, score_key(weight, race.exponential_of(first + j), first + j));
  }
  return best;
}

// Minima of the noise of blocks 4 quad .. 4 quad + 3. With a token_map: of the columns of each,
// which the eight threads of a group share; all lanes of a warp call it.
__device__ inline void block_minima(const Race& race, int64_t quad, float (&minimum)[4]) {
  const PhiloxWords w =
      noise_words(race.noise, static_cast<uint32_t>(kMinima >> 2) + static_cast<uint32_t>(quad));
#pragma unroll
  for (int j = 0; j < 4; ++j) minimum[j] = block_minimum(w.word[j]);
}

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

// What the blocks of a row may score: block 4 q + j is that of group q % 32, of whose eight threads
// each keeps 8.
constexpr int kQuads = 2, kWindow = kThreads * kQuads * 4;  // blocks

struct BlockQueue {
  float bound[kQuads * 4];
  int64_t first_quad;  // of this thread; others every kThreads

  __device__ int64_t block_of(int k) const { return 4 * (first_quad + k / 4 * kThreads) + k % 4; }
  // log_weight(block): the largest of its ids, -inf if none competes.
  template <class F>
  __device__ void fill(const Race& race, int64_t window, int64_t blocks, const F& log_weight) {
    const int group = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
    first_quad = window / 4 + group + kGroupsOf8 * lane;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float minimum[4];
      if (race.token_map) {
        for (int owner = 0; owner < kLanes; ++owner) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int64_t quad = window / 4 + group + kGroupsOf8 * owner + q * kThreads;
            const float m = mapped_minimum(race, 4 * quad + j);
            if (owner == lane) minimum[j] = m;
          }
        }
      } else {
        block_minima(race, first_quad + q * kThreads, minimum);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t block = block_of(4 * q + j);
        const float w = block < blocks ? log_weight(block) : -INFINITY;
        // Scores are exact, bounds within their margin.
        const float score = w - fast_log(minimum[j]);
        bound[4 * q + j] = w > -INFINITY ? score + (1e-3f + 1e-5f * fabsf(score)) : -INFINITY;
      }
    }
  }
  // The group's best bound and its block, which leaves the queue if the bound reaches `least`.
  __device__ int64_t pop(float least) {
    float top = bound[0];
    int64_t block = block_of(0);
#pragma unroll
    for (int k = 1; k < kQuads * 4; ++k) {
      block = bound[k] > top ? block_of(k) : block;
      top = fmaxf(bound[k], top);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, top, mask);
      const int64_t its = __shfl_xor_sync(0xffffffffu, block, mask);
      block = other > top || (other == top && its < block) ? its : block;
      top = fmaxf(other, top);
    }
    if (top == -INFINITY || top < least) return -1;
#pragma unroll
    for (int k = 0; k < kQuads * 4; ++k) bound[k] = block_of(k) == block ? -INFINITY : bound[k];
    return block;
  }
};

// Whether a group of the warp looks into a block.
__device__ __forceinline__ bool warp_looks(int64_t block) {
  int looks = block >= 0 ? 1 : 0;
  looks |= __shfl_xor_sync(0xffffffffu, looks, 8);
  looks |= __shfl_xor_sync(0xffffffffu, looks, 16);
  return looks != 0;
}

// Best key of a row of `blocks` blocks and `best`, to all threads. weights(first, w): log-weights
// of eight ids.
template <class F, class G>
__device__ Key race_blocks(const Race& race, int64_t blocks, Key best, const F& log_weight,
                           const G& weights) {
  for (int64_t window = 0; window < blocks; window += kWindow) {
    BlockQueue queue;
    queue.fill(race, window, blocks, log_weight);
    for (;;) {
      const float least = key_score(best);
      const int64_t block = queue.pop(least);
      Key key = 0;
      if (warp_looks(block)) {
        float w[8];
        const int64_t first = block * kNoiseBlock + threadIdx.x % kLanes * 8;
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] = -INFINITY;
        if (block >= 0) weights(first, w);
        key = best_of_eight(race, w, block >= 0 ? first : 0, least);
        if (block >= 0) key = larger(key, kNobody);
      }
      key = block_reduce(key, Larger{});
      best = larger(best, key);
      if (key == 0) break;
    }
  }
  return best > kNobody ? best : 0;
}

template <int kCount>
struct RegisterKeys {
  Key key[kCount];
};

// out[0..n) = the n largest keys of the block in order. Keys are distinct but for 0.
template <int kCount>
__device__ void block_top_keys(const RegisterKeys<kCount>& mine, int n, Key* out) {
  Key last = ~Key{0};
  for (int i = 0; i < n; ++i) {
    Key best = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (mine.key[j] < last && mine.key[j] > best) best = mine.key[j];
    }
    if (last != 0) last = block_reduce(best, Larger{});
    if (threadIdx.x == 0) out[i] = last;
  }
  __syncthreads();
}

// best[0..n): the n best keys of a row, in order; 0 where fewer compete. n <= kThreads.
template <class F, class G>
__device__ void race_for_best(const Race& race, int64_t blocks, int n, Key* best,
                              const F& log_weight, const G& weights) {
  for (int i = threadIdx.x; i < n; i += kThreads) best[i] = 0;
  __syncthreads();
  for (int64_t window = 0; window < blocks; window += kWindow) {
    BlockQueue queue;
    queue.fill(race, window, blocks, log_weight);
    for (;;) {
      const int64_t block = queue.pop(key_score(best[n - 1]));
      RegisterKeys<9> keys{};
      if (block >= 0) {
        float w[8];
        const int64_t first = block * kNoiseBlock + threadIdx.x % kLanes * 8;
        weights(first, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (w[j] > -INFINITY)
            keys.key[j] = score_key(w[j], race.exponential_of(first + j), first + j);
        }
      }
      if (block_reduce(block >= 0 ? 1 : 0, Or{}) == 0) break;
      const int mine = static_cast<int>(threadIdx.x);
      keys.key[8] = mine < n ? best[mine] : 0;
      __syncthreads();
      block_top_keys(keys, n, best);
    }
  }
}

}  // namespace specdec
