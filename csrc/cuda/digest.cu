// The digest of every row that a request has: all that is read of most of it. Of each tile
//   maximum, mass = sum exp((l - maximum) / T), entropy = sum e^s s with s = (l - maximum) / T,
// and the same two numbers of the unmasked logits at temperature 1; of each block of 64 ids its
// largest logit, in the dtype of the row. NaN stays.
//   grid = [batch * rows * shares / a few]; a share is 32 KB of a row, or a tile where rows are
//   few. A thread block finds its shares first, a warp each, and loads all of one before it uses
//   any; a warp owns 512 consecutive ids of each tile
#include "chunk.cuh"
#include "kernels.h"
#include "rows.cuh"

namespace specdec {
namespace {

// Largest value of a warp's share of a tile; kStore: also of each of its eight blocks.
template <LogitType kType, bool kStore>
__device__ __forceinline__ float warp_maximum(const Words* v, Global<uint8_t> maxima, bool stores) {
  const int lane = threadIdx.x % 32;
  constexpr auto larger = max_words<kType>;
  uint32_t top[Chunk<kType>::kOfTile];
#pragma unroll
  for (int i = 0; i < Chunk<kType>::kOfTile; ++i) {
    top[i] = larger(larger(v[i].w[0], v[i].w[1]), larger(v[i].w[2], v[i].w[3]));
  }
  if constexpr (kType == LogitType::kFloat32) {
    // A load spans two blocks of 16 lanes. Lanes share the four loads: each keeps one of them.
    const bool odd = (lane & 1) != 0, second = (lane & 2) != 0;
    uint32_t a = odd ? top[2] : top[0], b = odd ? top[3] : top[1];
    a = larger(a, __shfl_xor_sync(0xffffffffu, odd ? top[0] : top[2], 1));
    b = larger(b, __shfl_xor_sync(0xffffffffu, odd ? top[1] : top[3], 1));
    uint32_t m = larger(second ? b : a, __shfl_xor_sync(0xffffffffu, second ? a : b, 2));
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 4));
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 8));
    const int load = (odd ? 2 : 0) + (second ? 1 : 0);
    if (kStore && stores && (lane & 12) == 0) {
      maxima.as<uint32_t>().store(2 * load + lane / 16, m);
    }
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 2));
    return bits_float(larger(m, __shfl_xor_sync(0xffffffffu, m, 16)));
  } else {
    // A load spans four blocks of 8 lanes. One word holds both loads' maxima.
    uint32_t m = larger(__byte_perm(top[0], top[1], 0x5410), __byte_perm(top[0], top[1], 0x7632));
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) m = larger(m, __shfl_xor_sync(0xffffffffu, m, mask));
    if (kStore && stores && lane % 8 == 0) {
      const Global<uint16_t> out = maxima.as<uint16_t>();
      out.store(lane / 8, static_cast<uint16_t>(m));
      out.store(4 + lane / 8, static_cast<uint16_t>(m >> 16));
    }
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 8));
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 16));
    m = larger(m, __byte_perm(m, m, 0x1032));
    return value_of<kType>(Words{{m}}, 0);
  }
}

constexpr int kResident = 4;  // thread blocks that a multiprocessor holds at once

struct Sums {
  float mass, entropy;
};

// exp((l - m) / T) = 2^(l scale - shift) / 2^lost with shift = m scale, rounded: one fused
// multiplication an id, and m itself weighs exactly 1.
struct Shift {
  float scale, shift, lost;
};
__device__ __forceinline__ Shift shift_of(float maximum, float scale) {
  const float m = maximum > -INFINITY ? maximum : 0.f;
  // Beyond 2^30 all but the maximum weigh less than 2^-60, whatever the temperature: the scale is
  // halved until the shift lies below 2^32.
  const auto exponent = [](float x) { return static_cast<int>(float_bits(x) >> 23 & 255u) - 127; };
  const int excess = exponent(m) + exponent(scale) - 30;
  scale = bits_float(float_bits(scale) - (static_cast<uint32_t>(excess > 0 ? excess : 0) << 23));
  const float shift = mul_rn(m, scale);
  return {scale, shift, fmaf(m, scale, -shift)};
}

// Sums of a lane's values as 2^(l scale - shift), in units of log 2.
template <LogitType kType, bool kEntropy>
__device__ __forceinline__ Sums lane_sums(const Words* v, float maximum, float scale) {
  const Shift t = shift_of(maximum, scale);
  constexpr int kPer = Chunk<kType>::kPer;
  float mass[4] = {}, entropy = 0.f;
#pragma unroll
  for (int i = 0; i < Chunk<kType>::kOfTile; ++i) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const float s = fmaf(value_of<kType>(v[i], j), t.scale, -t.shift), e = fast_exp2(s);
      mass[j % 4] += e;
      if (kEntropy) entropy += e * fmaxf(s, -1000.f);
    }
  }
  return {(mass[0] + mass[1]) + (mass[2] + mass[3]), entropy};
}

// The sum over a warp of one number a tile. The lanes share the tiles: each keeps that of its own.
template <int kTiles>
__device__ __forceinline__ int tile_of_lane() {
  return static_cast<int>(threadIdx.x) % 32 / (32 / kTiles);
}

template <int kTiles>
__device__ __forceinline__ float warp_sum(float (&v)[kTiles]) {
  int mask = 16;
#pragma unroll
  for (int left = kTiles; left > 1; left /= 2, mask /= 2) {
    const bool is_high = (threadIdx.x & mask) != 0;
#pragma unroll
    for (int i = 0; i < left / 2; ++i) {
      const float keep = is_high ? v[left / 2 + i] : v[i], give = is_high ? v[i] : v[left / 2 + i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, mask);
    }
  }
#pragma unroll
  for (; mask > 0; mask /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], mask);
  return v[0];
}

// Maximum and sums of eight consecutive lanes, each of one warp's share.
template <bool kMass, bool kEntropy>
__device__ __forceinline__ void merge_warps(float scale, float* maximum, Sums* sums) {
  const float own = *maximum;
#pragma unroll
  for (int mask = 1; mask < kWarps; mask *= 2) {
    *maximum = max_nan(*maximum, __shfl_xor_sync(0xffffffffu, *maximum, mask));
  }
  if (!kMass) return;
  if (own < *maximum) {
    const float shift = fmaxf((own - *maximum) * scale, -1000.f), factor = fast_exp2(shift);
    sums->entropy = factor * (sums->entropy + shift * sums->mass);
    sums->mass *= factor;
  }
#pragma unroll
  for (int mask = 1; mask < kWarps; mask *= 2) {
    sums->mass += __shfl_xor_sync(0xffffffffu, sums->mass, mask);
    if (kEntropy) sums->entropy += __shfl_xor_sync(0xffffffffu, sums->entropy, mask);
  }
}

constexpr float kLn2 = 0.693147181f;

// Maximum and sums of the eight warps' shares of each tile.
template <int kTiles, bool kMass, bool kEntropy>
struct WarpParts {
  float maximum[kTiles * kWarps], mass[kMass ? kTiles * kWarps : 1];
  float entropy[kEntropy ? kTiles * kWarps : 1];

  // What a warp has of each tile. Its lanes share the tiles.
  __device__ __forceinline__ void store(const float (&most)[kTiles], const Sums (&sums)[kTiles],
                                        float scale) {
    const int tile = tile_of_lane<kTiles>(), at = tile * kWarps + threadIdx.x / 32;
    const bool stores = threadIdx.x % (32 / kTiles) == 0;
    float mine = most[0], each[kTiles];
#pragma unroll
    for (int i = 1; i < kTiles; ++i) mine = tile == i ? most[i] : mine;
    if (stores) maximum[at] = mine;
    if constexpr (kMass) {
      const float lost = shift_of(mine, scale).lost, factor = fast_exp2(lost);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) each[i] = sums[i].mass;
      const float sum = warp_sum(each);
      if (stores) mass[at] = sum / factor;
      if constexpr (kEntropy) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) each[i] = sums[i].entropy;
        const float weighted = warp_sum(each) - lost * sum;
        if (stores) entropy[at] = weighted / factor;
      }
    }
  }
  // Those of a tile, to its eight lanes.
  __device__ __forceinline__ Sums merged(int at, float scale, float* most) const {
    *most = maximum[at];
    Sums sums{kMass ? mass[at] : 0.f, kEntropy ? entropy[at] : 0.f};
    merge_warps<kMass, kEntropy>(scale, most, &sums);
    return sums;
  }
};

struct Share {  // of a thread block
  bool active, is_target;
  MaskedRow values;
  int64_t slot, base, size;
  Global<uint8_t> maxima;
  float scale;
  int first_tile, tiles;  // tiles: that the row has from there on
};

template <int kTiles>  // by a warp
__device__ inline void find_share(const Problem& p, LogitType type, unsigned number,
                                  Share* shared) {
  const unsigned shares = static_cast<unsigned>(p.tiles + kTiles - 1) / kTiles;
  const unsigned slot = number / shares, share = number - slot * shares;
  const Row row = make_row(p, slot);
  if (threadIdx.x % 32 != 0) return;
  Share t;
  t.base = share * kTiles * int64_t{kTile};
  t.active = row.active && t.base < row.size && row.values.logits.type() == type;
  t.is_target = row.is_target;
  t.values = row.values;
  t.slot = slot;
  t.size = row.size;
  t.first_tile = static_cast<int>(share) * kTiles;
  t.tiles = row.tiles() - t.first_tile;
  t.maxima = p.work.maxima + slot * p.maxima_bytes +
             t.base / kBlock * (type == LogitType::kFloat32 ? 4 : 2);
  // Neither 0 (T infinite) nor infinite.
  t.scale = fmaxf(fminf(row.parameters.inv_t * kLog2E, 3e38f), 1e-45f);
  *shared = t;
}

template <LogitType kType, unsigned kFlags, int kTiles>
struct Digested {  // of a share, in shared memory
  static constexpr bool kMass = (kFlags & kWantsMass) != 0;
  static constexpr bool kEntropy = (kFlags & kWantsEntropy) != 0;
  static constexpr bool kRaw = (kFlags & kWantsRaw) != 0;
  WarpParts<kTiles, kMass, kEntropy> own;
  WarpParts<kTiles, kRaw, false> raw;
};

template <LogitType kType, unsigned kFlags, int kTiles>
__device__ __forceinline__ void digest(const Problem& p, const Share& t,
                                       Digested<kType, kFlags, kTiles>& parts) {
  using D = Digested<kType, kFlags, kTiles>;
  using C = Chunk<kType>;
  Words v[kTiles * C::kOfTile];
  load_tiles<kType>(t.values.logits, t.base, t.size, v);
  const int warp = threadIdx.x / 32;
  const Global<uint8_t> maxima = t.maxima + warp * (kTileBlocks / kWarps * (16 / C::kPer));
  float most[kTiles], raw_most[kTiles] = {};
  Sums sums[kTiles] = {}, raw_sums[kTiles] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    Words* of_tile = v + tile * C::kOfTile;
    if constexpr (D::kRaw) {
      if (t.is_target) {
        raw_most[tile] = warp_maximum<kType, false>(of_tile, {}, false);
        raw_sums[tile] = lane_sums<kType, false>(of_tile, raw_most[tile], kLog2E);
      }
    }
    if constexpr ((kFlags & kIsMasked) != 0) {
      if (t.values.allowed) {
#pragma unroll
        for (int i = 0; i < C::kOfTile; ++i) {
          const int64_t id = t.base + C::offset(tile * C::kOfTile + i);
          const unsigned bits = id < t.size ? t.values.bits(id & ~7) : 0u;
          mask_words<kType>(bits >> (id & 7), of_tile + i);
        }
      }
    }
    most[tile] = warp_maximum<kType, true>(of_tile, maxima + tile * kTileBlocks * (16 / C::kPer),
                                           tile < t.tiles);
    if constexpr (D::kMass) {
      sums[tile] = lane_sums<kType, D::kEntropy>(of_tile, most[tile], t.scale);
    }
  }
  parts.own.store(most, sums, t.scale);
  if constexpr (D::kRaw) parts.raw.store(raw_most, raw_sums, kLog2E);
  __syncthreads();
  if (threadIdx.x >= 32) return;  // the others go on
  const int mine = static_cast<int>(threadIdx.x) % (kTiles * kWarps), tile = mine / kWarps;
  Partial out{};
  const Sums all = parts.own.merged(mine, t.scale, &out.maximum);
  out.mass = all.mass;
  out.entropy = all.entropy * kLn2;
  if constexpr (D::kRaw) out.raw_mass = parts.raw.merged(mine, kLog2E, &out.raw_maximum).mass;
  if (static_cast<int>(threadIdx.x) != tile * kWarps || tile >= t.tiles) return;
  p.work.partials.store(t.slot * p.tiles + t.first_tile + tile, out);
}

// Shares of all rows.
template <int kTiles>
SPECDEC_HD int64_t shares_of(const Problem& p) {
  return p.batch * p.rows() * ((p.tiles + kTiles - 1) / kTiles);
}

// The shares of this thread block.
template <LogitType kType, unsigned kFlags, int kTiles>
__device__ __forceinline__ void digest_shares(const Problem& p) {
  using Shares = Share[kWarps];
  using Parts = Digested<kType, kFlags, kTiles>[2];  // a warp merges one while others fill one
  SPECDEC_SHARED(Shares, shares);
  SPECDEC_SHARED(Parts, parts);
  const unsigned step = gridDim.x, count = static_cast<unsigned>(shares_of<kTiles>(p));
  int turn = 0;
  for (unsigned first = blockIdx.x; first < count; first += kWarps * step) {
    const unsigned mine = first + threadIdx.x / 32 * step;
    if (mine < count) find_share<kTiles>(p, kType, mine, &shares[threadIdx.x / 32]);
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < kWarps && first + k * step < count; ++k) {
      if (!shares[k].active) continue;
      digest<kType, kFlags, kTiles>(p, shares[k], parts[turn]);
      turn ^= 1;
    }
    __syncthreads();
  }
}

template <LogitType kType, unsigned kFlags>
__global__ void __launch_bounds__(kThreads, kResident)
    digest_kernel(const __grid_constant__ Problem p) {
  after_last_kernel();
  digest_shares<kType, kFlags, Chunk<kType>::kTiles>(p);
}

template <LogitType kType, unsigned kFlags>
__global__ void __launch_bounds__(kThreads, kResident)
    tile_kernel(const __grid_constant__ Problem p) {
  after_last_kernel();
  digest_shares<kType, kFlags, 1>(p);
}

// Shares of a thread block, where there are many. Multiprocessors are not equally fast: an H200
// takes 80 us for a call of 5632 shares if each has as many of them, and 78 so; 190 and 180 for
// 17920. One share a block costs more again, 83 and 205; so does asking L2 for the next share while
// one is summed, 3 us of 75.
constexpr int64_t kInTurn = 4;

// Thread blocks that leave some of an A100's 108 multiprocessors idle: a quarter of a chunk each is
// done in half of the time.
constexpr int64_t kFewBlocks = 108;

template <LogitType kType>
void launch_typed(const Problem& p, Stream stream) {
  const int64_t chunks = shares_of<Chunk<kType>::kTiles>(p), most = kResident * multiprocessors();
  int64_t blocks = 2 * most > chunks / kInTurn ? 2 * most : chunks / kInTurn;
  if (blocks > chunks) blocks = chunks;
  STD_TORCH_CHECK(chunks <= 0x7fffffff, chunks, " parts of rows: split the batch");
  const auto go = [&](auto flags) {
    if (chunks < kFewBlocks) {
      const int64_t tiles = shares_of<1>(p);
      return launch_phase(tile_kernel<kType, flags.value>, tiles < most ? tiles : most, kThreads,
                          stream, p);
    }
    launch_phase(digest_kernel<kType, flags.value>, blocks, kThreads, stream, p);
  };
  const auto with_mask = [&](auto flags) {
    if (p.allowed) return go(std::integral_constant<unsigned, flags.value | kIsMasked>{});
    go(flags);
  };
  switch (p.flags) {
    case 0:
      return with_mask(std::integral_constant<unsigned, 0>{});
    case kWantsMass:
      return with_mask(std::integral_constant<unsigned, kWantsMass>{});
    case kWantsMass | kWantsEntropy:
      return with_mask(std::integral_constant<unsigned, kWantsMass | kWantsEntropy>{});
    case kWantsMass | kWantsRaw:
      return with_mask(std::integral_constant<unsigned, kWantsMass | kWantsRaw>{});
    default:
      with_mask(std::integral_constant<unsigned, kWantsMass | kWantsEntropy | kWantsRaw>{});
  }
}

void launch_type(const Problem& p, LogitType type, Stream stream) {
  if (type == LogitType::kFloat32) return launch_typed<LogitType::kFloat32>(p, stream);
  if (type == LogitType::kBFloat16) return launch_typed<LogitType::kBFloat16>(p, stream);
  launch_typed<LogitType::kFloat16>(p, stream);
}

}  // namespace

void launch_digest(const Problem& p, Stream stream) {
  if (p.edits || p.draft_edits) return launch_edited_digest(p, stream);
  launch_type(p, p.target.type(), stream);
  if (p.draft_rows > 0 && p.draft.type() != p.target.type()) {
    launch_type(p, p.draft.type(), stream);
  }
}

}  // namespace specdec
