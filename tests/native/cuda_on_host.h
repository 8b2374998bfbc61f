// Runs CUDA kernel source on the CPU: one fiber per thread, one block at a time. Tests only.
//
// Seen here: wrong indices (with sanitizers), threads that wait at different barriers, reads of
// shared memory that this block did not write (it is poisoned between blocks), dependence on the
// order of blocks (SPECDEC_HOST_ORDER=<seed> shuffles it). Built with the detector of tests/race,
// the same run also sees data races and missing fences.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "../race/order.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_host {

constexpr size_t kStackBytes = 32 << 10, kMaxThreads = 1024, kSlotBytes = 64;

// Not shown to the race detector: a switch belongs to neither of the two.
#define SPECDEC_UNSEEN __attribute__((no_sanitize("thread")))

// A suspended thread of execution with its own stack.
#if defined(__x86_64__)
struct Context {
  void* stack_pointer = nullptr;
};

// Saves the callee-saved registers on the current stack and continues on the other.
__attribute__((naked, noinline)) SPECDEC_UNSEEN inline void switch_stack(void** /*save*/,
                                                                         void* /*load*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

SPECDEC_UNSEEN inline void switch_to(Context& from, Context& to) {
  switch_stack(&from.stack_pointer, to.stack_pointer);
}

inline void prepare(Context& context, char* stack, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15};
  auto* words = reinterpret_cast<void**>(top) - 8;  // 6 registers, return address, alignment
  std::fill(words, words + 8, nullptr);
  words[6] = reinterpret_cast<void*>(entry);
  context.stack_pointer = words;
}
#else
struct Context {
  ucontext_t state;
};
SPECDEC_UNSEEN inline void switch_to(Context& from, Context& to) {
  swapcontext(&from.state, &to.state);
}
inline void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = kStackBytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}
#endif

enum class State { kRunnable, kAtBlockBarrier, kAtWarpBarrier, kAtShuffle, kDone };

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  State state = State::kDone;
};

// What the host run itself keeps is static or on its stack: there the detector does not look.
inline std::array<Fiber, kMaxThreads> fibers;
inline Context scheduler;
inline unsigned current;
inline const std::function<void()>* body;
inline unsigned char lane_slot[kMaxThreads][kSlotBytes];

inline bool has_raced;

struct SharedBlock {  // of one declaration, poisoned between blocks
  void* data;
  size_t size;
  SharedBlock* next;
  static inline SharedBlock* all = nullptr;

  explicit SharedBlock(size_t bytes)
      : data(std::aligned_alloc(16, (bytes + 15) / 16 * 16)), size(bytes), next(all) {
    all = this;
    order::add_shared(data, size);
    poison();
  }
  void poison() { std::memset(data, 0xFF, size); }
};

// The block's one object of type T for this declaration (each lambda is a type of its own).
template <class T, class Tag>
T& shared_memory(Tag) {
  static SharedBlock block(sizeof(T));
  return *static_cast<T*>(block.data);
}

// Leaves the fiber in this state, until the scheduler goes on with it.
inline void suspend(State state) {
  const unsigned me = current;
  fibers[me].state = state;
  order::pause();
  switch_to(fibers[me].context, scheduler);
}

inline void entry() {
  (*body)();
  suspend(State::kDone);
}

inline void give_up() {
  has_raced = true;
  suspend(State::kDone);
}

// Wakes [first, last) if every live fiber in it waits at `state`.
inline bool release(unsigned first, unsigned last, State state) {
  bool any = false;
  for (unsigned i = first; i < last; ++i) {
    if (fibers[i].state == State::kDone) continue;
    if (fibers[i].state != state) return false;
    any = true;
  }
  if (!any) return false;
  // A shuffle is no barrier: it orders no access to memory.
  if (state != State::kAtShuffle) {
    order::meet(first, last, [](unsigned i) { return fibers[i].state == State::kDone; });
  }
  for (unsigned i = first; i < last; ++i) {
    if (fibers[i].state == state) fibers[i].state = State::kRunnable;
  }
  return true;
}

inline void run_block(unsigned threads) {
  for (SharedBlock* block = SharedBlock::all; block != nullptr; block = block->next)
    block->poison();
  for (unsigned i = 0; i < threads; ++i) {
    if (!fibers[i].stack) fibers[i].stack.reset(new char[kStackBytes]);
    prepare(fibers[i].context, fibers[i].stack.get(), entry);
    fibers[i].state = State::kRunnable;
  }
  for (;;) {
    bool ran = false, live = false;
    for (unsigned i = 0; i < threads; ++i) {
      live |= fibers[i].state != State::kDone;
      if (fibers[i].state != State::kRunnable) continue;
      current = i;
      threadIdx = dim3(i);
      ran = true;
      order::resume(i, fibers[i].stack.get(), kStackBytes);
      switch_to(scheduler, fibers[i].context);
      if (has_raced) return;
    }
    if (!live) return;
    for (unsigned w = 0; w < threads; w += 32) {
      ran |= release(w, std::min(w + 32, threads), State::kAtWarpBarrier);
      ran |= release(w, std::min(w + 32, threads), State::kAtShuffle);
    }
    ran |= release(0, threads, State::kAtBlockBarrier);
    if (!ran) {
      std::fprintf(stderr, "cuda_on_host: threads of block %u wait at different barriers\n",
                   blockIdx.x);
      std::abort();
    }
  }
}

inline void run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1 || block.x > kMaxThreads) {
    std::fprintf(stderr, "cuda_on_host: grids and blocks have one dimension here\n");
    std::abort();
  }
  std::vector<unsigned> turns(grid.x);
  std::iota(turns.begin(), turns.end(), 0u);
  if (const char* seed = std::getenv("SPECDEC_HOST_ORDER")) {
    std::shuffle(turns.begin(), turns.end(), std::mt19937(std::strtoul(seed, nullptr, 10)));
  }
  body = &kernel;
  blockDim = block;
  gridDim = grid;
  has_raced = false;
  order::begin_launch(grid.x, block.x, give_up);
  for (const unsigned b : turns) {
    blockIdx = dim3(b);
    order::begin_block(b);
    run_block(block.x);
    if (has_raced) break;
  }
  order::end_launch();
}

// Every lane of the warp publishes `value` and gets that of lane `source(lane)`.
template <class T, class F>
T exchange(unsigned mask, const T& value, F source) {
  static_assert(sizeof(T) <= kSlotBytes);
  if (mask != ~0u) {
    std::fprintf(stderr, "cuda_on_host: all lanes of a warp take part here\n");
    std::abort();
  }
  const unsigned me = current;
  std::memcpy(lane_slot[me], &value, sizeof value);
  suspend(State::kAtShuffle);
  T got;
  std::memcpy(&got, lane_slot[(me & ~31u) | (source(me & 31u) & 31u)], sizeof got);
  suspend(State::kAtShuffle);
  return got;
}

// One thread runs at a time, so that nothing comes between.
template <class T, class F>
SPECDEC_UNSEEN T replace(T* address, F f) {
  const T old = *address;
  *address = f(old);
  return old;
}

}  // namespace cuda_on_host

inline void __syncthreads() { cuda_on_host::suspend(cuda_on_host::State::kAtBlockBarrier); }
inline void __syncwarp() { cuda_on_host::suspend(cuda_on_host::State::kAtWarpBarrier); }
inline void __threadfence() { order::fence(); }

template <class T>
T __shfl_xor_sync(unsigned all, T value, int mask) {
  return cuda_on_host::exchange(all, value, [&](unsigned lane) { return lane ^ unsigned(mask); });
}
template <class T>
T __shfl_up_sync(unsigned all, T value, unsigned delta) {
  return cuda_on_host::exchange(all, value,
                                [&](unsigned lane) { return lane < delta ? lane : lane - delta; });
}
template <class T>
T __shfl_sync(unsigned all, T value, int lane) {
  return cuda_on_host::exchange(all, value, [&](unsigned) { return unsigned(lane); });
}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  order::atomic(address, sizeof *address);
  return cuda_on_host::replace(address, [&](unsigned old) { return old + value; });
}
inline int atomicOr(int* address, int value) {
  order::atomic(address, sizeof *address);
  return cuda_on_host::replace(address, [&](int old) { return old | value; });
}
inline int atomicAdd(int* address, int value) {
  order::atomic(address, sizeof *address);
  return cuda_on_host::replace(address, [&](int old) { return old + value; });
}
inline unsigned atomicMax(unsigned* address, unsigned value) {
  order::atomic(address, sizeof *address);
  return cuda_on_host::replace(address, [&](unsigned old) { return old > value ? old : value; });
}
inline int atomicCAS(int* address, int wanted, int value) {
  order::atomic(address, sizeof *address);
  return cuda_on_host::replace(address, [&](int old) { return old == wanted ? value : old; });
}
inline float atomicExch(float* address, float value) {
  order::atomic(address, sizeof *address);
  return cuda_on_host::replace(address, [&](float) { return value; });
}
