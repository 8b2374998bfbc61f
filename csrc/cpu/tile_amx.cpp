// The tile functions for AVX512 with AMX, which attention over bfloat16 uses.
#define SPECDEC_ISA amx
#define SPECDEC_WIDTH 16
#define SPECDEC_TARGET "amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define SPECDEC_AMX
#include "tile_unit.h"
