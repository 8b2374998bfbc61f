// 32 KB of a row in the registers of a thread block, in the dtype of the row: eight loads of 16
// bytes a thread, all under way before the first is used; or one tile of it.
#pragma once
#include "problem.cuh"

namespace specdec {

constexpr int kLoads = 8;  // of 16 bytes, a thread

template <LogitType kType>
struct Chunk {
  static constexpr int kPer = kType == LogitType::kFloat32 ? 4 : 8;  // values of a load
  static constexpr int kIds = kLoads * kThreads * kPer, kTiles = kIds / kTile;
  static constexpr int kOfTile = kLoads / kTiles;  // loads
  // First id of load i, behind the chunk's first, and behind that of load 0.
  static __device__ __forceinline__ int offset(int i) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return step(i) + warp * (kTile / kWarps) + lane * kPer;
  }
  static __device__ __forceinline__ int step(int i) {
    return i / kOfTile * kTile + i % kOfTile * 32 * kPer;
  }
};

template <LogitType kType>
__device__ __forceinline__ uint32_t max_words(uint32_t a, uint32_t b) {  // NaN stays
  if constexpr (kType == LogitType::kFloat32) {
    return float_bits(max_nan(bits_float(a), bits_float(b)));
  } else {
    return max_halves<kType == LogitType::kBFloat16>(a, b);
  }
}

template <LogitType kType>
constexpr uint32_t kNothing32 = kType == LogitType::kFloat32    ? 0xff800000u
                                : kType == LogitType::kBFloat16 ? 0xff80ff80u
                                                                : 0xfc00fc00u;  // -inf

// Value j of 16 bytes.
template <LogitType kType>
__device__ __forceinline__ float value_of(const Words& words, int j) {
  if constexpr (kType == LogitType::kFloat32) return bits_float(words.w[j]);
  const uint32_t word = words.w[j / 2];
  if constexpr (kType == LogitType::kBFloat16) {
    return bits_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
  return half_value(static_cast<uint16_t>(j % 2 == 0 ? word : word >> 16));
}

// What is left of the 16 bytes from value i on, one value at a time.
template <LogitType kType>
__device__ __forceinline__ Words ragged_words(const LogitRow& row, int64_t i, int64_t size) {
  Words out;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (kType == LogitType::kFloat32) {
      out.w[j] = i + j < size ? row.word_at(i + j) : kNothing32<kType>;
    } else {
      const int64_t at = i + 2 * j;
      const uint32_t low = at < size ? row.half_at(at) : kNothing32<kType> & 0xffffu;
      const uint32_t high = at + 1 < size ? row.half_at(at + 1) : kNothing32<kType> & 0xffffu;
      out.w[j] = low | high << 16;
    }
  }
  return out;
}

// A chunk that the row does not fill, or of a row that is not aligned.
template <LogitType kType, int kCount>
__device__ __forceinline__ void load_ragged(const LogitRow& row, int64_t base, int64_t size,
                                            Words (&v)[kCount]) {
  using C = Chunk<kType>;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t first = base + C::offset(i);
    if (row.is_aligned() && first + C::kPer <= size) {
      v[i] = row.template words_at<16 / C::kPer>(first);
    } else {
      v[i] = ragged_words<kType>(row, first, size);
    }
  }
}

// The same where its end lies between two loads.
template <LogitType kType, int kCount>
__device__ __forceinline__ void load_last(const LogitRow& own, int64_t left, Words (&v)[kCount]) {
  using C = Chunk<kType>;
  constexpr uint32_t kNone = kNothing32<kType>;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = {{kNone, kNone, kNone, kNone}};
    if (C::step(i) < left) v[i] = own.template words_at<16 / C::kPer>(C::step(i));
  }
}

// Some tiles of a row, -inf past its end.
template <LogitType kType, int kCount>
__device__ __forceinline__ void load_tiles(const LogitRow& row, int64_t base, int64_t size,
                                           Words (&v)[kCount]) {
  using C = Chunk<kType>;
  constexpr int kBytes = 16 / C::kPer;
  const bool is_whole = base + kCount / C::kOfTile * kTile <= size;
  if (!row.is_aligned() || !(is_whole || size % C::kPer == 0)) {
    return load_ragged<kType>(row, base, size, v);
  }
  const LogitRow own = row.from(base + C::offset(0), kBytes);
  if (!is_whole) return load_last<kType>(own, size - base - C::offset(0), v);
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = own.template words_at<kBytes>(C::step(i));
}

// Which of a lane's values are allowed, and where edits are given have none: from packed bits.
template <LogitType kType, bool kEdited>
class ShownBits {
  using C = Chunk<kType>;

 public:
  __device__ __forceinline__ ShownBits(const MaskedRow& row, int64_t base, int64_t size) {
    const int64_t first = (base + C::offset(0)) & ~int64_t{7};
    left_ = size - first;
    if (row.allowed) allowed_ = row.allowed.as<const uint8_t>() + (first >> 3);
    if (kEdited && row.edits) listed_ = row.edits.bits.as<const uint8_t>() + (first >> 3);
  }
  __device__ __forceinline__ explicit operator bool() const {
    return allowed_ || (kEdited && listed_);
  }
  // Of its loads of a tile, one behind the other. Two lanes of float32 share each byte: either
  // loads those of two.
  __device__ __forceinline__ unsigned of_tile(int tile) const {
    const int load = tile * C::kOfTile;
    if constexpr (C::kPer == 8) {
      return byte(C::step(load)) | byte(C::step(load + 1)) << 8;
    } else {
      const bool is_odd = threadIdx.x % 2 != 0;
      const int mine = C::step(load) + (is_odd ? C::step(2) : 0);
      const unsigned own = byte(mine) | byte(mine + C::step(1)) << 8;
      const unsigned other = __shfl_xor_sync(0xffffffffu, own, 1);
      unsigned all = is_odd ? (other | own << 16) >> 4 : own | other << 16;
      all &= 0x0f0f0f0fu;
      all = (all | all >> 4) & 0x00ff00ffu;
      return (all | all >> 8) & 0xffffu;
    }
  }

 private:
  __device__ __forceinline__ unsigned byte(int step) const {
    if (step >= left_) return 0;
    const unsigned kept = allowed_ ? allowed_.load(step >> 3) : 0xffu;
    return kEdited && listed_ ? kept & ~listed_.load(step >> 3) : kept;
  }

  Global<const uint8_t> allowed_, listed_;  // from the byte of the lane's first value on
  int64_t left_;
};

// -inf where the packed bits are 0.
template <LogitType kType>
__device__ __forceinline__ void mask_words(unsigned bits, Words* v) {
  // Of 16-bit values: bits 2 j and 2 j + 1, where the signs of two bytes are.
  [[maybe_unused]] const uint32_t signs = (bits & 0xffu) | (bits & 0xffu) << 7;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (kType == LogitType::kFloat32) {
      v->w[j] = (bits >> j & 1u) != 0 ? v->w[j] : kNothing32<kType>;
    } else {
      const uint32_t keep = spread_signs(signs << (7 - 2 * j));
      v->w[j] = (v->w[j] & keep) | (kNothing32<kType> & ~keep);
    }
  }
}

}  // namespace specdec
