// Reductions and scans of a warp and of a block; the order of every sum is fixed.
#pragma once
#include "platform.cuh"

namespace specdec {

constexpr int kWarps = kThreads / 32;

template <class T, class F>
__device__ __forceinline__ T warp_reduce(T value, F f) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    value = f(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  return value;
}

// All threads get the result.
template <class T, class F>
__device__ __forceinline__ T block_reduce(T value, F f) {
  using PerWarp = T[kWarps];
  SPECDEC_SHARED(PerWarp, per_warp);
  value = warp_reduce(value, f);
  if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = value;
  __syncthreads();
  T all = per_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all = f(all, per_warp[w]);
  __syncthreads();
  return all;
}

struct Plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Smaller {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Or {
  __device__ int operator()(int a, int b) const { return a | b; }
};

// Sum over the threads before this one; `total` is the sum over all.
template <class T>
__device__ T block_exclusive_sum(T value, T* total) {
  using PerWarp = T[kWarps];
  SPECDEC_SHARED(PerWarp, per_warp);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T inclusive = value;
#pragma unroll
  for (int delta = 1; delta < 32; delta *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, inclusive, delta);
    if (lane >= delta) inclusive += other;
  }
  if (lane == 31) per_warp[warp] = inclusive;
  __syncthreads();
  T before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += per_warp[w];
    all += per_warp[w];
  }
  __syncthreads();
  *total = all;
  return before + inclusive - value;
}

}  // namespace specdec
