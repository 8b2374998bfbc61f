// The tile functions for AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cfloat>
#include <cstring>

#include "tile.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define SPECDEC_ISA avx2
#define SPECDEC_WIDTH 8
#include "tile_kernels.h"

namespace specdec::cpu {
const TileTable& avx2_tiles() { return avx2::kTable; }
}  // namespace specdec::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
