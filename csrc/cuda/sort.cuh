// Bitonic sort of one tile, largest first, values only: rank 16 t + j is value j of thread t.
#pragma once
#include "block.cuh"
#include "problem.cuh"

namespace specdec {

__device__ __forceinline__ void order_pair(float* a, float* b, bool down) {
  const float high = fmaxf(*a, *b), low = fminf(*a, *b);
  *a = down ? high : low;
  *b = down ? low : high;
}

// The last four steps of a merge: distances 8, 4, 2, 1 lie inside a thread.
__device__ __forceinline__ void merge_in_thread(float (&v)[kPerThread], bool down) {
#pragma unroll
  for (int stride = 8; stride > 0; stride /= 2) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if ((j & stride) == 0) order_pair(&v[j], &v[j | stride], down);
    }
  }
}

__device__ __forceinline__ void sort_in_thread(float (&v)[kPerThread], bool down) {
#pragma unroll
  for (int size = 2; size < kPerThread; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        if ((j & stride) == 0) order_pair(&v[j], &v[j | stride], (j & size) == 0);
      }
    }
  }
  merge_in_thread(v, down);
}

// Keep the larger or the smaller of each own value and that of the thread at distance `mask`.
__device__ __forceinline__ void exchange_step(float (&v)[kPerThread], int mask, bool keep_larger,
                                              float* buffer) {
  const int t = static_cast<int>(threadIdx.x);
  float other[kPerThread];
  if (mask < 32) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) other[j] = v[j];
    exchange_lanes(other, mask);
  } else {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) buffer[j * kThreads + t] = v[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) other[j] = buffer[j * kThreads + (t ^ mask)];
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    v[j] = keep_larger ? fmaxf(v[j], other[j]) : fminf(v[j], other[j]);
  }
}

// buffer: [kTile] shared.
__device__ inline void sort_tile(float (&v)[kPerThread], float* buffer) {
  const int t = static_cast<int>(threadIdx.x);
  sort_in_thread(v, (t & 1) == 0);
  for (int size = 2; size <= kThreads; size *= 2) {  // in threads
    const bool down = (t & size) == 0;
    for (int mask = size / 2; mask > 0; mask /= 2) {
      exchange_step(v, mask, ((t & mask) == 0) == down, buffer);
    }
    merge_in_thread(v, down);
  }
}

}  // namespace specdec
