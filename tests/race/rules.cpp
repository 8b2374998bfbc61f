// Kernels with and without a race, one for each rule of what creates order: `rules NAME` says which
// it is.
#include <cuda_on_host.h>

#include <cstdio>
#include <map>
#include <string>

#define SHARED(type, name) type& name = cuda_on_host::shared_memory<type>([] {})

namespace {

constexpr unsigned kThreads = 64;
using Word = unsigned;

struct Memory {  // global
  Word words[256];
  unsigned ticket;
};

bool is(unsigned block, unsigned thread) { return blockIdx.x == block && threadIdx.x == thread; }

// The last of two blocks reads what the first one stored.
template <class Before, class After>
void meet(Memory& m, Before before, After after) {
  SHARED(int, is_last);
  before();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&m.ticket, 1u) == 1;
    after();
  }
  __syncthreads();
  if (is_last != 0) m.words[128 + threadIdx.x] = m.words[kThreads - 1 - threadIdx.x];
}

// One thread stores a word of shared memory, all load it, after what lies between.
template <class Between>
void share(Memory& m, Between between) {
  SHARED(Word, x);
  if (threadIdx.x == 0) x = 1;
  between();
  m.words[blockIdx.x * kThreads + threadIdx.x] = x;
}

// Three threads in turn store a word of shared memory that all load; `end` ends a turn.
template <class End>
void share_in_turn(Memory& m, End end) {
  SHARED(Word, x);
  for (unsigned i = 0; i < 3; ++i) {
    if (threadIdx.x == i) x = 1;
    __syncthreads();
    m.words[blockIdx.x * kThreads + threadIdx.x] = x;
    end();
  }
}

// One thread stores a word, another one of its block loads it, after what lies between.
template <class Between>
void pass_on(Memory& m, unsigned reader, Between between) {
  if (is(0, 0)) m.words[0] = 1;
  between();
  if (is(0, reader)) m.words[1] = m.words[0];
}

void store_own(Memory& m) {
  if (blockIdx.x == 0) m.words[threadIdx.x] = 1;
}

struct Large {
  Word words[40];
};

[[gnu::noinline]] Large made(Word x) {
  Large all{};
  all.words[x] = x;
  return all;
}
[[gnu::noinline]] Word taken(Large all, Word x) { return all.words[x]; }

const std::map<std::string, void (*)(Memory&)> kernels = {
    {"two threads store a word", [](Memory& m) { m.words[0] = 1; }},
    {"each thread stores its word",
     [](Memory& m) { m.words[blockIdx.x * kThreads + threadIdx.x] = 1; }},
    {"each thread stores its byte",
     [](Memory& m) { reinterpret_cast<char*>(m.words)[blockIdx.x * kThreads + threadIdx.x] = 1; }},
    {"a byte of a wide load is stored",
     [](Memory& m) {
       struct alignas(16) Wide {
         Word word[4];
       };
       if (is(0, 0)) reinterpret_cast<char*>(m.words)[13] = 1;
       if (is(0, 1)) *reinterpret_cast<Wide*>(m.words + 4) = *reinterpret_cast<Wide*>(m.words);
     }},
    {"a barrier lies between store and load", [](Memory& m) { share(m, [] { __syncthreads(); }); }},
    {"no barrier lies between store and load", [](Memory& m) { share(m, [] {}); }},
    {"shared memory is reused behind a barrier",
     [](Memory& m) { share_in_turn(m, [] { __syncthreads(); }); }},
    {"shared memory is reused without a barrier", [](Memory& m) { share_in_turn(m, [] {}); }},
    {"a shuffle lies between store and load",
     [](Memory& m) { pass_on(m, 1, [] { __shfl_xor_sync(~0u, 0, 1); }); }},
    {"a warp barrier lies between store and load of a warp",
     [](Memory& m) { pass_on(m, 1, [] { __syncwarp(); }); }},
    {"a warp barrier lies between store and load of two warps",
     [](Memory& m) { pass_on(m, 32, [] { __syncwarp(); }); }},
    {"two warps meet at a barrier after their own",
     [](Memory& m) { pass_on(m, 33, [] { __syncwarp(), __syncthreads(); }); }},
    {"a thread that has left stored before a barrier of the others",
     [](Memory& m) {
       if (threadIdx.x == 0) m.words[blockIdx.x] = 1;
       if (threadIdx.x == 0) return;
       __syncthreads();
       if (threadIdx.x == 1) m.words[blockIdx.x] = 2;
     }},
    {"a structure is stored as a function returns it",
     [](Memory& m) {
       SHARED(Large, all);
       if (threadIdx.x == 0) all = made(3);
       m.words[blockIdx.x * kThreads + threadIdx.x] = all.words[5];
     }},
    {"a structure is read as a function takes it",
     [](Memory& m) {
       SHARED(Large, all);
       if (threadIdx.x == 0) all.words[5] = 1;
       m.words[blockIdx.x * kThreads + threadIdx.x] = taken(all, 5);
     }},
    {"a block reads what another stored",
     [](Memory& m) {
       if (is(0, 0)) m.words[0] = 1;
       if (is(1, 0)) m.words[1] = m.words[0];
     }},
    {"blocks add to a word atomically", [](Memory& m) { atomicAdd(m.words, 1u); }},
    {"a block reads what others add to",
     [](Memory& m) {
       atomicAdd(m.words, 1u);
       if (is(1, 0)) m.words[1] = m.words[0];
     }},
    {"ticket: stores, barrier, fence of one thread",
     [](Memory& m) {
       store_own(m);
       __syncthreads();
       meet(m, [] { __threadfence(); }, [] { __threadfence(); });
     }},
    {"ticket: stores, fence of every thread, barrier",
     [](Memory& m) {
       store_own(m);
       meet(m, [] { __threadfence(), __syncthreads(); }, [] { __threadfence(); });
     }},
    {"ticket: stores, fence of one thread, barrier",
     [](Memory& m) {
       store_own(m);
       if (threadIdx.x == 0) __threadfence();
       meet(m, [] { __syncthreads(); }, [] { __threadfence(); });
     }},
    {"ticket: stores, fence, no barrier",
     [](Memory& m) {
       store_own(m);
       meet(m, [] { __threadfence(); }, [] { __threadfence(); });
     }},
    {"ticket: fence, stores, barrier",
     [](Memory& m) {
       __threadfence();
       store_own(m);
       meet(m, [] { __syncthreads(); }, [] { __threadfence(); });
     }},
    {"ticket: no fence before",
     [](Memory& m) {
       store_own(m);
       meet(m, [] { __syncthreads(); }, [] { __threadfence(); });
     }},
    {"ticket: no fence after",
     [](Memory& m) {
       store_own(m);
       __syncthreads();
       meet(m, [] { __threadfence(); }, [] {});
     }},
    {"ticket: every thread's fence after",
     [](Memory& m) {
       SHARED(int, is_last);
       store_own(m);
       __threadfence();
       __syncthreads();
       if (threadIdx.x == 0) is_last = atomicAdd(&m.ticket, 1u) == 1;
       __syncthreads();
       __threadfence();
       if (is_last != 0 && threadIdx.x == 3) m.words[128] = m.words[40];
     }},
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    for (const auto& [name, kernel] : kernels) std::puts(name.c_str());
    return 0;
  }
  auto* const memory = new Memory{};
  const auto kernel = kernels.at(arguments[1]);
  try {
    for (int launch = 0; launch < 2; ++launch) {  // the boundary between them orders all
      memory->ticket = 0;
      cuda_on_host::run(dim3(2), dim3(kThreads), [&] { kernel(*memory); });
    }
  } catch (const std::exception& race) {
    std::puts(race.what());
  }
  return 0;
}
