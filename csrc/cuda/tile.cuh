// One tile of a row in registers: loads, masks, statistics.
#pragma once
#include "race.cuh"

namespace specdec {

constexpr Key kNotANumber = ~Key{0};

// Values of the tile at `base`; -inf past the end.
__device__ __forceinline__ void load_tile(const LogitRow& row, int64_t base, int64_t size,
                                          float (&v)[kPerThread]) {
  row.load8(id_of(base, 0), size, &v[0]);
  row.load8(id_of(base, 8), size, &v[8]);
}

// -inf where the packed bits are 0. Four threads share a word: one loads it.
__device__ __forceinline__ void mask_tile(Global<const int32_t> allowed, int64_t base, int64_t size,
                                          float (&v)[kPerThread]) {
  if (!allowed) return;
#pragma unroll
  for (int run = 0; run < 2; ++run) {
    const int64_t id = id_of(base, run * 8);
    int word = 0;
    if (threadIdx.x % 4 == 0 && id < size) word = allowed.load(id >> 5);
    word = __shfl_sync(0xffffffffu, word, static_cast<int>(threadIdx.x % 32 & ~3u));
    const uint32_t bits = static_cast<uint32_t>(word) >> (id & 31);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if ((bits >> j & 1u) == 0) v[run * 8 + j] = -INFINITY;
    }
  }
}

// (maximum, lowest id of it) of the tile as one key, kNotANumber if there is a NaN. For all
// threads.
__device__ __forceinline__ Key tile_maximum(const float (&v)[kPerThread], int64_t base) {
  Key best = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const Key key = v[j] == v[j] ? make_key(false, v[j], id_of(base, j)) : kNotANumber;
    best = key > best ? key : best;
  }
  return block_reduce(best, Larger{});
}

__device__ __forceinline__ float key_value(Key key) {
  return from_ordered_bits(static_cast<uint32_t>(key >> 31));
}

// Statistics of rows and tiles merge in index order.
struct RowSum {
  float maximum = -INFINITY, mass = 0.f,
        entropy = 0.f;  // entropy: sum e^s s, s = (l - maximum) / T
  float raw_maximum = -INFINITY, raw_mass = 0.f;
  int argmax = 0x7fffffff, rank = 0, bad = 0;
  Key key = 0;
};

__device__ inline void merge_mass(float maximum, float inv_t, float other, float* mass,
                                  float* entropy) {
  if (other == maximum || *mass == 0.f) return;
  const float shift = (other - maximum) * inv_t, factor = expf(shift);
  *entropy = factor * (*entropy + shift * *mass);
  *mass *= factor;
}

__device__ inline RowSum merge(RowSum a, RowSum b, float inv_t) {
  RowSum all;
  all.maximum = fmaxf(a.maximum, b.maximum);
  merge_mass(all.maximum, inv_t, a.maximum, &a.mass, &a.entropy);
  merge_mass(all.maximum, inv_t, b.maximum, &b.mass, &b.entropy);
  all.mass = a.mass + b.mass;
  all.entropy = a.entropy + b.entropy;
  all.raw_maximum = fmaxf(a.raw_maximum, b.raw_maximum);
  float unused = 0.f;
  merge_mass(all.raw_maximum, 1.f, a.raw_maximum, &a.raw_mass, &unused);
  merge_mass(all.raw_maximum, 1.f, b.raw_maximum, &b.raw_mass, &unused);
  all.raw_mass = a.raw_mass + b.raw_mass;
  const bool first = a.maximum > b.maximum || (a.maximum == b.maximum && a.argmax < b.argmax);
  all.argmax = first ? a.argmax : b.argmax;
  all.rank = a.rank + b.rank;
  all.bad = a.bad | b.bad;
  all.key = a.key > b.key ? a.key : b.key;
  return all;
}

__device__ inline RowSum shuffle_xor(const RowSum& r, int mask) {
  RowSum o;
  o.maximum = __shfl_xor_sync(0xffffffffu, r.maximum, mask);
  o.mass = __shfl_xor_sync(0xffffffffu, r.mass, mask);
  o.entropy = __shfl_xor_sync(0xffffffffu, r.entropy, mask);
  o.raw_maximum = __shfl_xor_sync(0xffffffffu, r.raw_maximum, mask);
  o.raw_mass = __shfl_xor_sync(0xffffffffu, r.raw_mass, mask);
  o.argmax = __shfl_xor_sync(0xffffffffu, r.argmax, mask);
  o.rank = __shfl_xor_sync(0xffffffffu, r.rank, mask);
  o.bad = __shfl_xor_sync(0xffffffffu, r.bad, mask);
  o.key = __shfl_xor_sync(0xffffffffu, r.key, mask);
  return o;
}

// A warp merges the tiles of one row: lane l the tiles l, l + 32, ...; all lanes get the result,
// the same for any batch.
__device__ inline RowSum merge_row(const Problem& p, int64_t slot, int tiles, float inv_t,
                                   bool has_keys) {
  RowSum all;
  for (int tile = threadIdx.x % 32; tile < tiles; tile += 32) {
    const Partial part = p.work.partials.load(slot * p.tiles + tile);
    RowSum one;
    one.maximum = part.maximum;
    one.mass = part.mass;
    one.entropy = part.entropy;
    one.raw_maximum = part.raw_maximum;
    one.raw_mass = part.raw_mass;
    one.argmax = part.argmax;
    one.rank = part.rank;
    one.bad = part.bad;
    if (has_keys) one.key = p.work.keys.load((slot * p.tiles + tile) * p.num_samples);
    all = merge(all, one, inv_t);
  }
  for (int mask = 1; mask < 32; mask *= 2) {
    const RowSum other = shuffle_xor(all, mask);
    // The lower lane's part comes first on both sides, so that both compute the same bits.
    all = (threadIdx.x & mask) == 0 ? merge(all, other, inv_t) : merge(other, all, inv_t);
  }
  return all;
}

}  // namespace specdec
