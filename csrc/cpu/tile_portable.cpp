// The tile functions for the baseline of the architecture: SSE2, NEON, or whatever the compiler
// has.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cfloat>
#include <cstring>

#include "tile.h"

#define SPECDEC_ISA portable
#define SPECDEC_WIDTH 4
#include "tile_kernels.h"

namespace specdec::cpu {
const TileTable& portable_tiles() { return portable::kTable; }
}  // namespace specdec::cpu
