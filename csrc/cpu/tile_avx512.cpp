// The tile functions for AVX512.
#define SPECDEC_ISA avx512
#define SPECDEC_WIDTH 16
#define SPECDEC_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#include "tile_unit.h"
