// The largest number whose measure reaches a goal: a count, or a mass, of the values from it on.
#pragma once
#include "race.cuh"

namespace specdec {

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
    T all[kTried];
#pragma unroll
    for (int k = 0; k < kTried; ++k) {
      all[k] = measured.part[turn][0][k];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) all[k] += measured.part[turn][w][k];
    }
    bool is_near = false;
    U low = from, high = to;
#pragma unroll
    for (int k = 0; k < kTried; ++k) {
      if (!(all[k] >= goal)) continue;
      low = place[k];
      is_near = all[k] <= goal + slack;
    }
#pragma unroll
    for (int k = kTried - 1; k >= 0; --k) {
      if (!(all[k] >= goal)) high = static_cast<U>(place[k] - 1);
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

}  // namespace specdec
