// What the host run of CUDA kernels tells the race detector (detector.cpp): whose accesses follow,
// and what orders them.
#pragma once
#include <cstddef>

#ifdef SPECDEC_RACE
extern "C" int race_twin;  // the injected fault that is at work (twins.toml); 0: none
#endif

namespace order {

#ifdef SPECDEC_RACE

// A kernel of `blocks * threads` threads begins; all that was done before is ordered before it.
// `give_up` is called inside a thread that has raced, and does not return. A launch that may
// overlap the one before (programmatic dependent launch) would keep that one's accesses, and
// `griddepcontrol.wait` would order them: this is where both belong.
void begin_launch(unsigned blocks, unsigned threads, void (*give_up)());
// It is over. Throws std::runtime_error if two of its threads raced.
void end_launch();
// Block `block` begins. Its shared memory is new, although the bytes served another block before.
void begin_block(unsigned block);
// Bytes that are shared memory.
void add_shared(const void* data, size_t size);
// What is accessed from here on, thread `thread` of the block accesses; its stack is its own.
void resume(unsigned thread, const void* stack, size_t size);
// What is accessed from here on is no kernel's.
void pause();
// Threads first ... last - 1 have met at a barrier, but for those that `is_absent`.
void meet(unsigned first, unsigned last, bool (*is_absent)(unsigned thread));
// __threadfence: sequentially consistent, of the device.
void fence();
// A relaxed atomic read-modify-write.
void atomic(const void* address, size_t size);

#else

inline void begin_launch(unsigned, unsigned, void (*)()) {}
inline void end_launch() {}
inline void begin_block(unsigned) {}
inline void add_shared(const void*, size_t) {}
inline void resume(unsigned, const void*, size_t) {}
inline void pause() {}
inline void meet(unsigned, unsigned, bool (*)(unsigned)) {}
inline void fence() {}
inline void atomic(const void*, size_t) {}

#endif

}  // namespace order
