// The tile functions for AVX2.
#define SPECDEC_ISA avx2
#define SPECDEC_WIDTH 8
#define SPECDEC_TARGET "avx2,fma,f16c"
#include "tile_unit.h"
