// Global<T>: the only way a kernel reaches global memory. On the host it counts every byte, which
// is the traffic meter.
#pragma once
#include <cmath>

#include "../common/hd.h"
#include "../common/params.h"
#include "platform.cuh"

namespace specdec {

SPECDEC_HD bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

#ifdef SPECDEC_HOST
inline int64_t bytes_read = 0, bytes_written = 0;
inline void count_read(int64_t bytes) { bytes_read += bytes; }
inline void count_written(int64_t bytes) { bytes_written += bytes; }
#else
__device__ __forceinline__ void count_read(int64_t) {}
__device__ __forceinline__ void count_written(int64_t) {}
#endif

template <class T>
class Global {
 public:
  Global() = default;
  SPECDEC_HD explicit Global(T* data) : data_(data) {}
  SPECDEC_HD explicit operator bool() const { return data_ != nullptr; }
  SPECDEC_HD Global operator+(int64_t i) const { return Global(data_ + i); }
  template <class U>
  SPECDEC_HD Global<U> as() const {
    return Global<U>(reinterpret_cast<U*>(data_));
  }
  SPECDEC_HD T* data() const { return data_; }
  SPECDEC_HD bool is_aligned() const { return reinterpret_cast<uint64_t>(data_) % 16 == 0; }

  __device__ __forceinline__ T load(int64_t i) const {
    count_read(sizeof(T));
    return data_[i];
  }
  __device__ __forceinline__ void store(int64_t i, T value) const {
    count_written(sizeof(T));
    data_[i] = value;
  }

 private:
  T* data_ = nullptr;
};

// Words that many threads change: each change is whole, and orders nothing but itself.
__device__ __forceinline__ void set_bits(Global<int32_t> words, int64_t i, int bits) {
  count_written(4);
  atomicOr(words.data() + i, bits);
}
__device__ __forceinline__ void add_to(Global<int32_t> words, int64_t i, int amount) {
  count_written(4);
  atomicAdd(words.data() + i, amount);
}
__device__ __forceinline__ void store_whole(Global<float> values, int64_t i, float value) {
  count_written(4);
  atomicExch(values.data() + i, value);
}
// What stood there; `value` now does if that was `free`.
__device__ __forceinline__ int claim(Global<int32_t> words, int64_t i, int free, int value) {
  count_written(4);
  return atomicCAS(words.data() + i, free, value);
}

template <class T>
struct GlobalVector : Global<const T> {  // [n], dense; absent: `get` gives the other value
  GlobalVector() = default;
  SPECDEC_HD explicit GlobalVector(const Vector<T>& v) : Global<const T>(v.data) {}
  __device__ __forceinline__ T get(int64_t i, T otherwise) const {
    return *this ? this->load(i) : otherwise;
  }
};

struct GlobalKnob {
  float all = 0.f;
  GlobalVector<float> each;
  GlobalKnob() = default;
  explicit GlobalKnob(const Knob& k) : all(k.all), each(k.each) {}
  __device__ __forceinline__ float load(int64_t b) const { return each.get(b, all); }
};

struct alignas(16) Words {
  uint32_t w[4];
};

__device__ __forceinline__ float widen(LogitType type, uint16_t bits) {
  return type == LogitType::kBFloat16 ? bits_float(static_cast<uint32_t>(bits) << 16)
                                      : half_value(bits);
}

// One row of logits in its own dtype; values come out as float32.
class LogitRow {
 public:
  LogitRow() = default;
  // Value 0 is value `offset` of the table.
  SPECDEC_HD LogitRow(const void* table, int64_t offset, LogitType type) : type_(type) {
    const int64_t bytes = offset * (type == LogitType::kFloat32 ? 4 : 2);
    data_ = reinterpret_cast<uint64_t>(table) + static_cast<uint64_t>(bytes);
  }

  __device__ __forceinline__ float at(int64_t i) const {
    if (type_ == LogitType::kFloat32) {
      count_read(4);
      return reinterpret_cast<const float*>(data_)[i];
    }
    return widen(type_, half_at(i));
  }
  __device__ LogitType type() const { return type_; }
  __device__ bool is_aligned() const { return data_ % 16 == 0; }

  // The row from value i on.
  __device__ LogitRow from(int64_t i, int bytes) const {
    LogitRow rest = *this;
    rest.data_ += i * bytes;
    return rest;
  }
  // The 16 bytes from value i on; of an aligned row.
  template <int kBytes>
  __device__ __forceinline__ Words words_at(int64_t i) const {
    return words(data_ + i * kBytes);
  }
  // Value i as it lies in memory: of two bytes, or of four.
  __device__ __forceinline__ uint16_t half_at(int64_t i) const {
    count_read(2);
    return reinterpret_cast<const uint16_t*>(data_)[i];
  }
  __device__ __forceinline__ uint32_t word_at(int64_t i) const {
    count_read(4);
    return reinterpret_cast<const uint32_t*>(data_)[i];
  }

  // out[j] = row[first + j] for first + j < size, else -inf. `first` is a multiple of 8; 16-byte
  // loads where the row is aligned, else values in turn, kAtOnce of them: eight where a row is
  // streamed; elsewhere this code is only in the way of the others.
  template <int kAtOnce = 1>
  __device__ __forceinline__ void load8(int64_t first, int64_t size, float* out) const {
    if (first + 8 > size || data_ % 16 != 0) {
      const LogitRow rest = from(first, type_ == LogitType::kFloat32 ? 4 : 2);
      const int left = size - first < 8 ? static_cast<int>(size - first) : 8;
#pragma unroll
      for (int j = 0; j < 8; ++j) out[j] = -INFINITY;
#pragma unroll kAtOnce
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 7; ++j) out[j] = out[j + 1];
        out[7] = i < left ? rest.at(i) : -INFINITY;
      }
    } else if (type_ == LogitType::kFloat32) {
      const Words low = words(data_ + first * 4), high = words(data_ + first * 4 + 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out[j] = bits_float(low.w[j]);
        out[4 + j] = bits_float(high.w[j]);
      }
    } else {
      const Words all = words(data_ + first * 2);
      const bool is_bfloat16 = type_ == LogitType::kBFloat16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t low = all.w[j] << 16, high = all.w[j] & 0xffff0000u;
        out[2 * j] = is_bfloat16 ? bits_float(low) : half_value(all.w[j] & 0xffffu);
        out[2 * j + 1] = is_bfloat16 ? bits_float(high) : half_value(all.w[j] >> 16);
      }
    }
  }

 private:
  __device__ __forceinline__ static Words words(uint64_t address) {
    count_read(16);
#if defined(__CUDA_ARCH__)
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(address));
    return {{v.x, v.y, v.z, v.w}};
#else
    return *reinterpret_cast<const Words*>(address);
#endif
  }

  uint64_t data_ = 0;
  LogitType type_ = LogitType::kFloat32;
};

// Stores a value of a row of this type.
__device__ inline void store_as(LogitType type, Global<uint8_t> table, int64_t i, float value) {
  const uint32_t bits = float_bits(value);
  if (type == LogitType::kFloat32) return table.as<uint32_t>().store(i, bits);
  const bool is_bfloat16 = type == LogitType::kBFloat16;
  table.as<uint16_t>().store(i, is_bfloat16 ? static_cast<uint16_t>(bits >> 16) : half_bits(value));
}

class LogitTable {  // [batch, rows, vocab]
 public:
  SPECDEC_HD LogitType type() const { return type_; }
  LogitTable() = default;
  LogitTable(const Logits& l, int64_t batch_stride, int64_t row_stride)
      : data_(l.data), batch_stride_(batch_stride), row_stride_(row_stride), type_(l.type) {}
  explicit LogitTable(const Logits& l) : LogitTable(l, l.batch_stride, l.row_stride) {}
  SPECDEC_HD explicit operator bool() const { return data_ != nullptr; }
  __device__ LogitRow row(int64_t b, int64_t i) const {
    return LogitRow(data_, b * batch_stride_ + i * row_stride_, type_);
  }

 private:
  const void* data_ = nullptr;
  int64_t batch_stride_ = 0, row_stride_ = 0;
  LogitType type_ = LogitType::kFloat32;
};

// Token ids in or out, int32 or int64.
class GlobalIds {
 public:
  GlobalIds() = default;
  SPECDEC_HD GlobalIds(void* data, bool wide) : data_(data), wide_(wide) {}
  SPECDEC_HD explicit GlobalIds(const Ids& ids)
      : GlobalIds(const_cast<void*>(ids.data), ids.wide) {}  // dense
  __device__ int64_t load(int64_t i) const {
    if (wide_) return Global<const int64_t>(static_cast<const int64_t*>(data_)).load(i);
    return Global<const int32_t>(static_cast<const int32_t*>(data_)).load(i);
  }
  __device__ void store(int64_t i, int64_t id) const {
    if (wide_) {
      Global<int64_t>(static_cast<int64_t*>(data_)).store(i, id);
    } else {
      Global<int32_t>(static_cast<int32_t*>(data_)).store(i, static_cast<int32_t>(id));
    }
  }

 private:
  void* data_ = nullptr;
  bool wide_ = true;
};

}  // namespace specdec
