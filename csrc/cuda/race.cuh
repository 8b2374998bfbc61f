// Races: the id with the largest log-weight - log E(id) wins, ties to the lowest id. One 64-bit key
// orders them all:
//   bit 63: the score is finite; 62..31: score, order preserving; 30..0: 2^31 - 1 - id. Key 0:
//   nobody competes.
// Where every score overflowed, keys without bit 63 order by the logit itself.
#pragma once
#include "../common/noise.h"
#include "block.cuh"
#include "problem.cuh"

namespace specdec {

using Key = unsigned long long;
constexpr float kTiny = 0x1p-126f;

// Both zeros have the same order.
SPECDEC_HD uint32_t ordered_bits(float x) {
  const uint32_t bits = float_bits(add_rn(x, 0.f));
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

SPECDEC_HD float from_ordered_bits(uint32_t ordered) {
  return bits_float(ordered ^ ((ordered >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ Key make_key(bool is_score, float value, int64_t id) {
  return (static_cast<Key>(is_score) << 63) | (static_cast<Key>(ordered_bits(value)) << 31) |
         static_cast<Key>(0x7fffffff - id);
}

__device__ __forceinline__ int64_t key_id(Key key) {
  return 0x7fffffff - static_cast<int64_t>(key & 0x7fffffffu);
}

// Key of an exact score, or of the logit if the score is not finite.
__device__ __forceinline__ Key score_key(float log_weight, float logit, float e, int64_t id) {
  const float score = race_score(log_weight, e);
  return is_finite(score) ? make_key(true, score, id) : make_key(false, logit, id);
}

// Id of value j of this thread in the tile that starts at `base`: two runs of 8 consecutive ids.
__device__ __forceinline__ int64_t id_of(int64_t base, int j) {
  return base + (j >> 3) * (kTile / 2) + threadIdx.x * 8 + (j & 7);
}

struct Race {  // over a plain row
  NoiseStream noise;
  float inv_t, threshold;
  Global<const int64_t> excluded;  // [count], every `stride`
  int64_t count = 0, stride = 0;
  GlobalVector<int32_t> token_map;  // noise is indexed by target id

  __device__ bool is_excluded(int64_t id) const {
    if (count == 0) return false;
    const int64_t target = token_map ? token_map.load(id) : id;
    for (int64_t i = 0; i < count; ++i) {
      if (excluded.load(i * stride) == target) return true;
    }
    return false;
  }
  template <bool kNamed = true>
  __device__ bool competes(float logit, int64_t id) const {
    return logit >= threshold && logit > -INFINITY && logit < INFINITY &&
           !(kNamed && is_excluded(id));
  }
  __device__ float exponential_of(int64_t id) const {
    return noise_of(noise, token_map ? token_map.load(id) : id);
  }
};

// -log1p(-x) of a word within 1e-3, from the hardware logarithm.
__device__ __forceinline__ float rough_exponential(uint32_t word) {
  const float x = unit_interval(word);
  return x < 0.05f ? x + x * x * (0.5f + 0.34f * x) : -fast_log(1.f - x);
}

// f(j, E) for this thread's 16 ids, two runs of 8, each inside a block of the noise; rough numbers
// are within 1e-3. Ids of a token_map have their exact ones.
template <bool kRough, bool kNamed, class F>
__device__ __forceinline__ void tile_noise(const Race& race, int64_t base, int64_t size,
                                           const F& f) {
#pragma unroll
  for (int run = 0; run < kPerThread; run += 8) {
    const int64_t first = id_of(base, run);
    if (kNamed && race.token_map) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        f(run + j, first + j < size ? race.exponential_of(first + j) : 1.f);
      }
      continue;
    }
    const auto id = static_cast<uint32_t>(first);
    const BlockNoise block = block_noise(race.noise, id / kNoiseBlock);
    const int least = block.place - static_cast<int>(id % kNoiseBlock);
#pragma unroll
    for (int quad = 0; quad < 8; quad += 4) {
      const PhiloxWords w = noise_words(race.noise, (id + quad) >> 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float own = kRough ? rough_exponential(w.word[j]) : exponential(w.word[j]);
        f(run + quad + j, quad + j == least ? block.minimum : add_rn(block.minimum, own));
      }
    }
  }
}

// Best key of this thread's values. Rough scores tell who can win in the warp; only those are
// scored exactly: mostly none or one, else all, as no register keeps the others' scores. kNamed:
// there may be a token_map, or excluded ids.
template <bool kNamed>
__device__ inline Key race_best(const Race& race, const float (&v)[kPerThread], int64_t base,
                                int64_t size) {
  float best = -INFINITY, second = -INFINITY;
  int at = 0;
  Key key = 0;
  tile_noise<true, kNamed>(race, base, size, [&](int j, float e) {
    if (!race.competes<kNamed>(v[j], id_of(base, j))) return;
    const float score = v[j] * race.inv_t - fast_log(e);
    if (!is_finite(score)) {
      const Key fallback = make_key(false, v[j], id_of(base, j));
      key = fallback > key ? fallback : key;
    } else if (score > best) {
      second = best;
      best = score;
      at = j;
    } else {
      second = fmaxf(second, score);
    }
  });
  const float most = warp_reduce(best, Larger{});
  const float bar = most - (0.01f + 1e-5f * fabsf(most));
  if (best == -INFINITY || best < bar) return key;
  const bool alone = second < bar;
#pragma unroll 1
  for (int j = alone ? at : 0; j < (alone ? at + 1 : kPerThread); ++j) {
    float logit = v[0];
#pragma unroll
    for (int k = 1; k < kPerThread; ++k) logit = j == k ? v[k] : logit;
    const int64_t id = id_of(base, j);
    if (!race.competes<kNamed>(logit, id)) continue;
    const float e = kNamed ? race.exponential_of(id) : noise_of(race.noise, id);
    const Key exact = score_key(mul_rn(logit, race.inv_t), logit, e, id);
    key = exact > key ? exact : key;
  }
  return key;
}

template <int kCount>
struct RegisterKeys {
  Key key[kCount];
};

// All keys of this thread's values.
__device__ inline void race_all(const Race& race, const float (&v)[kPerThread], int64_t base,
                                int64_t size, RegisterKeys<kPerThread>* keys) {
  tile_noise<false, true>(race, base, size, [&](int j, float e) {
    const int64_t id = id_of(base, j);
    keys->key[j] = race.competes(v[j], id) ? score_key(mul_rn(v[j], race.inv_t), v[j], e, id) : 0;
  });
}

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

}  // namespace specdec
