// The tile functions for AVX512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cfloat>
#include <cstring>

#include "tile.h"

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define SPECDEC_ISA avx512
#define SPECDEC_WIDTH 16
#include "tile_kernels.h"

namespace specdec::cpu {
const TileTable& avx512_tiles() { return avx512::kTable; }
}  // namespace specdec::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
