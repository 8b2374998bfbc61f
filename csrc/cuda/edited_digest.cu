// The digest of rows of a call with edits (digest.cu says what it holds): one kernel for every
// dtype and every flag, which reads values as all others do. The maxima of edited rows are float32.
//   grid = [batch * rows * tiles]; a thread has two runs of eight ids
#include "kernels.h"
#include "rows.cuh"

namespace specdec {
namespace {

struct MaxNan {
  __device__ float operator()(float a, float b) const { return max_nan(a, b); }
};

// The largest of two runs of eight values of each thread; stored: also of each block of ids.
__device__ inline float tile_maximum(const float (&v)[16], LogitType type, Global<uint8_t> maxima) {
  float most[2];
#pragma unroll
  for (int run = 0; run < 2; ++run) {
    most[run] = v[8 * run];
#pragma unroll
    for (int j = 1; j < 8; ++j) most[run] = max_nan(most[run], v[8 * run + j]);
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) {
      most[run] = max_nan(most[run], __shfl_xor_sync(0xffffffffu, most[run], mask));
    }
    if (maxima && threadIdx.x % 8 == 0) {
      store_as(type, maxima, run * (kTileBlocks / 2) + threadIdx.x / 8, most[run]);
    }
  }
  return block_reduce(max_nan(most[0], most[1]), MaxNan{});
}

struct Sums {
  float mass, entropy;
};

// sum of e^s and e^s s, with s = (l - maximum) scale in units of log 2.
__device__ inline Sums tile_sums(const float (&v)[16], float maximum, float scale, bool entropy) {
  const float zero = is_finite(maximum) ? maximum : 0.f;
  Sums own{};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float s = (v[j] - zero) * scale, e = fast_exp2(s);
    own.mass += e;
    own.entropy += e * fmaxf(s, -1000.f);
  }
  own.mass = block_reduce(own.mass, Plus{});
  if (entropy) own.entropy = block_reduce(own.entropy, Plus{});
  return own;
}

__global__ void __launch_bounds__(kThreads, 4)
    edited_digest_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Row, row);
  const int64_t slot = blockIdx.x / static_cast<unsigned>(p.tiles);
  const int tile = static_cast<int>(blockIdx.x - slot * p.tiles);
  after_last_kernel();
  if (threadIdx.x < 32) load_row(p, slot, &row);
  __syncthreads();
  if (!row.active || tile >= row.tiles()) return;
  const int64_t base = static_cast<int64_t>(tile) * kTile + threadIdx.x * 8;
  const LogitType type = row.type();
  const Global<uint8_t> maxima = p.work.maxima + slot * p.maxima_bytes +
                                 tile * kTileBlocks * (type == LogitType::kFloat32 ? 4 : 2);
  float v[16];
#pragma unroll
  for (int run = 0; run < 2; ++run) row.load8<true, 8>(base + run * (kTile / 2), v + 8 * run);
  Partial out{};
  out.maximum = tile_maximum(v, type, maxima);
  if ((p.flags & kWantsMass) != 0) {
    const float scale = fmaxf(fminf(row.parameters.inv_t * kLog2E, 3e38f), 1e-45f);
    const Sums sums = tile_sums(v, out.maximum, scale, (p.flags & kWantsEntropy) != 0);
    out.mass = sums.mass;
    out.entropy = sums.entropy * 0.693147181f;
  }
  if ((p.flags & kWantsRaw) != 0 && row.is_target) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      row.values.logits.load8<8>(base + run * (kTile / 2), row.size, v + 8 * run);
    }
    out.raw_maximum = tile_maximum(v, type, {});
    out.raw_mass = tile_sums(v, out.raw_maximum, kLog2E, false).mass;
  }
  if (threadIdx.x == 0) p.work.partials.store(slot * p.tiles + tile, out);
}

}  // namespace

void launch_edited_digest(const Problem& p, Stream stream) {
  launch_phase(edited_digest_kernel, p.batch * p.rows() * p.tiles, kThreads, stream, p);
}

}  // namespace specdec
