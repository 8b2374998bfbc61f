// The tile functions for one instruction set of x86, a file each: no include guard. That file sets
// SPECDEC_ISA, SPECDEC_WIDTH (see tile_kernels.h) and SPECDEC_TARGET, what the compiler may use.
#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cfloat>
#include <cstring>

#include "tile.h"

#define SPECDEC_DO_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define SPECDEC_PRAGMA(...) SPECDEC_DO_PRAGMA(__VA_ARGS__)
#if defined(__clang__)
SPECDEC_PRAGMA(clang attribute push(__attribute__((target(SPECDEC_TARGET))), apply_to = function))
#else
SPECDEC_PRAGMA(GCC target(SPECDEC_TARGET))
#endif
#include "tile_kernels.h"

#define SPECDEC_DO_JOIN(a, b) a##b
#define SPECDEC_JOIN(a, b) SPECDEC_DO_JOIN(a, b)
namespace specdec::cpu {
const TileTable& SPECDEC_JOIN(SPECDEC_ISA, _tiles)() { return SPECDEC_ISA::kTable; }
}  // namespace specdec::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
