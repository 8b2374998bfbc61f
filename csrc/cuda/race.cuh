// Races: the id with the largest log-weight - log E(id) wins, ties to the lowest id. One 64-bit key
// orders them all:
//   bit 63: the score is finite; 62..31: score, order preserving; 30..0: 2^31 - 1 - id. Key 0:
//   nobody competes.
// Where every score overflowed, keys without bit 63 order by the logit itself.
#pragma once
#include "../common/logmath.h"
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
__device__ __forceinline__ Key score_key(float log_weight, float logit, uint32_t word, int64_t id) {
  const float score = race_score(log_weight, word);
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
  __device__ bool competes(float logit, int64_t id) const {
    return logit >= threshold && logit > -INFINITY && logit < INFINITY && !is_excluded(id);
  }
  __device__ uint32_t word(int64_t id) const {
    return noise_word(noise, token_map ? token_map.load(id) : id);
  }
};

// Words of this thread's 16 ids; a Philox block serves 4 consecutive ids.
__device__ __forceinline__ void tile_words(const Race& race, int64_t base, int64_t size,
                                           uint32_t (&words)[kPerThread]) {
#pragma unroll
  for (int quad = 0; quad < kPerThread / 4; ++quad) {
    const int64_t id = id_of(base, quad * 4);
    if (race.token_map) {
#pragma unroll
      for (int e = 0; e < 4; ++e) words[quad * 4 + e] = id + e < size ? race.word(id + e) : 0u;
    } else {
      const PhiloxWords w = noise_words(race.noise, static_cast<uint32_t>(id >> 2));
#pragma unroll
      for (int e = 0; e < 4; ++e) words[quad * 4 + e] = w.word[e];
    }
  }
}

// -log E within 1e-3, from the hardware logarithm.
__device__ __forceinline__ float rough_noise(uint32_t word) {
  const float x = unit_interval(word);
  const float e = x < 0.05f ? x + x * x * (0.5f + 0.34f * x) : -fast_log(1.f - x);
  return -fast_log(e);
}

// Best key of this thread's values. Rough scores tell who can win in the warp; only those are
// scored exactly.
__device__ inline Key race_best(const Race& race, const float (&v)[kPerThread], int64_t base,
                                int64_t size) {
  uint32_t words[kPerThread];
  float rough[kPerThread];
  tile_words(race, base, size, words);
  float best = -INFINITY;
  Key key = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    rough[j] = -INFINITY;
    if (!race.competes(v[j], id_of(base, j))) continue;
    const float score = v[j] * race.inv_t + rough_noise(words[j]);
    if (is_finite(score)) {
      rough[j] = score;
      best = fmaxf(best, score);
    } else {
      const Key fallback = make_key(false, v[j], id_of(base, j));
      key = fallback > key ? fallback : key;
    }
  }
  best = warp_reduce(best, Larger{});
  const float bar = best - (0.01f + 1e-5f * fabsf(best));
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (rough[j] == -INFINITY || rough[j] < bar) continue;
    const Key exact = score_key(mul_rn(v[j], race.inv_t), v[j], words[j], id_of(base, j));
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
  uint32_t words[kPerThread];
  tile_words(race, base, size, words);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t id = id_of(base, j);
    keys->key[j] =
        race.competes(v[j], id) ? score_key(mul_rn(v[j], race.inv_t), v[j], words[j], id) : 0;
  }
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
