// The tile functions for AVX512 with AMX, which attention over bfloat16 uses.
#if defined(__x86_64__)
#include <immintrin.h>

#include <atomic>
#include <cfloat>
#include <cstring>

#include "tile.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define SPECDEC_ISA amx
#define SPECDEC_WIDTH 16
#define SPECDEC_AMX
#include "tile_kernels.h"

namespace specdec::cpu {
const TileTable& amx_tiles() { return amx::kTable; }
}  // namespace specdec::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
