// The one handshake between blocks: each takes a ticket after its stores; the last one sees them
// all.
//
// Order: every thread's stores -> barrier -> fence + ticket of thread 0 (release) ... ticket of the
// last block + fence (acquire) -> barrier -> loads. The counter is left at zero, so no launch has
// to clear it.
#pragma once
#include "block.cuh"
#include "global.cuh"

namespace specdec {

// True in all threads of the block that is the last of `expected` to arrive at `counter`.
__device__ inline bool is_last_block(Global<unsigned> counter, unsigned expected) {
  SPECDEC_SHARED(int, is_last);
  __threadfence();
  __syncthreads();
  if (expected == 1) return true;
  if (threadIdx.x == 0) {
    const unsigned ticket = counter.add(0, 1u);
    is_last = ticket == expected - 1;
    if (is_last) counter.store(0, 0u);
    __threadfence();
  }
  __syncthreads();
  return is_last != 0;
}

}  // namespace specdec
