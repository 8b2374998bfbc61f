// The digest of every row that a request has: all that is read of most of it. Of each tile
//   maximum, mass = sum exp((l - maximum) / T), entropy = sum e^s s with s = (l - maximum) / T,
// and the same two numbers of the unmasked logits at temperature 1; of each block of 64 ids its
// largest logit, in the dtype of the row, in float32 where the row has edits. NaN stays.
//   grid = [batch * rows * shares / a few]; a share is 32 KB of a row, or a tile where rows are
//   few. A thread block finds its shares first, a warp each, and loads all of one before it uses
//   any; a warp owns 512 consecutive ids of each tile
#include "edited_tiles.cuh"

namespace specdec {
namespace {

// Largest value of a warp's share of a tile; also `put(block, its bits)` of each of its eight
// blocks.
template <LogitType kType, class F>
__device__ __forceinline__ float warp_maximum(const Words* v, const F& put) {
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
    if ((lane & 12) == 0) put(2 * load + lane / 16, m);
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 2));
    return bits_float(larger(m, __shfl_xor_sync(0xffffffffu, m, 16)));
  } else {
    // A load spans four blocks of 8 lanes. One word holds both loads' maxima.
    uint32_t m = larger(__byte_perm(top[0], top[1], 0x5410), __byte_perm(top[0], top[1], 0x7632));
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) m = larger(m, __shfl_xor_sync(0xffffffffu, m, mask));
    if (lane % 8 == 0) {
      put(lane / 8, m & 0xffffu);
      put(4 + lane / 8, m >> 16);
    }
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 8));
    m = larger(m, __shfl_xor_sync(0xffffffffu, m, 16));
    m = larger(m, __byte_perm(m, m, 0x1032));
    return value_of<kType>(Words{{m}}, 0);
  }
}

// Sums of a lane's share of a tile.
template <LogitType kType, bool kEntropy>
__device__ __forceinline__ Sums words_sums(const Words* v, float maximum, float scale) {
  constexpr int kPer = Chunk<kType>::kPer;
  return lane_sums<kEntropy>(maximum, scale,
                             [&](int j) { return value_of<kType>(v[j / kPer], j % kPer); });
}

template <LogitType kType, unsigned kFlags, int kTiles>
__device__ __forceinline__ void digest(const Problem& p, const Share& t,
                                       Digested<kType, kFlags, kTiles>& parts) {
  using D = Digested<kType, kFlags, kTiles>;
  using C = Chunk<kType>;
  Words v[kTiles * C::kOfTile];
  load_tiles<kType>(t.values.logits, t.base, t.size, v);
  const int first = static_cast<int>(threadIdx.x) / 32 * (kTileBlocks / kWarps), tiles = t.tiles;
  const auto maxima = (t.maxima + first * static_cast<int>(sizeof(typename D::Bits)))
                          .template as<typename D::Bits>();
  [[maybe_unused]] const ShownBits<kType, D::kEdited> shown(t.values, t.base, t.size);
  [[maybe_unused]] int bound = 0;
  if constexpr (D::kEdited) {
    bound = listed_bound<kTiles>(t);
    no_edits_yet(parts);
  }
  float most[kTiles], raw_most[kTiles] = {};
  Sums sums[kTiles] = {}, raw_sums[kTiles] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    Words* of_tile = v + tile * C::kOfTile;
    if constexpr (D::kRaw) {
      if (t.is_target) {
        raw_most[tile] = warp_maximum<kType>(of_tile, [](int, uint32_t) {});
        raw_sums[tile] = words_sums<kType, false>(of_tile, raw_most[tile], kLog2E);
      }
    }
    if constexpr ((kFlags & (kIsMasked | kIsEdited)) != 0) {
      if (shown) {
        const unsigned bits = shown.of_tile(tile);
#pragma unroll
        for (int i = 0; i < C::kOfTile; ++i) mask_words<kType>(bits >> i * C::kPer, of_tile + i);
      }
    }
    most[tile] = warp_maximum<kType>(of_tile, [&](int block, uint32_t bits) {
      const auto own = static_cast<typename D::Bits>(bits);
      const int at = tile * kTileBlocks + block;
      if constexpr (D::kEdited) {
        parts.blocks[first + at] = own;
      } else if (tile < tiles) {
        maxima.store(at, own);
      }
    });
    if constexpr (D::kMass) {
      sums[tile] = words_sums<kType, D::kEntropy>(of_tile, most[tile], t.scale);
    }
  }
  parts.own.store(most, sums, t.scale);
  if constexpr (D::kRaw) parts.raw.store(raw_most, raw_sums, kLog2E);
  if constexpr (D::kEdited) {
    if (t.values.edits) take_listed<kTiles>(t, bound, parts);
  }
  finish_share<D, kTiles>(p, t, parts);
  if constexpr (D::kEdited) store_blocks<kType, kTiles>(t, parts);
}

template <LogitType kType, unsigned kFlags, int kTiles>
__device__ __forceinline__ void digest_shares(const Problem& p) {
  using D = Digested<kType, kFlags, kTiles>;
  const unsigned count = static_cast<unsigned>(shares_of<kTiles>(p));
  for (unsigned first = blockIdx.x; first < count; first += kWarps * gridDim.x) {
    take_shares<D, kTiles>(p, kType, first, count, [&](const Share& t, D& parts) {
      digest<kType, kFlags, kTiles>(p, t, parts);
    });
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

// Thread blocks that leave some of an A100's 108 multiprocessors idle: a quarter of a chunk each is
// done in half of the time.
constexpr int64_t kFewBlocks = 108;

template <LogitType kType>
void launch_typed(const Problem& p, const OnDevice& on) {
  const int64_t chunks = shares_of<Chunk<kType>::kTiles>(p), most = kResident * multiprocessors();
  const auto go = [&](auto flags) {
    if (chunks < kFewBlocks) {
      const int64_t tiles = shares_of<1>(p);
      return launch_phase(tile_kernel<kType, flags.value>, tiles < most ? tiles : most, on, p);
    }
    launch_phase(digest_kernel<kType, flags.value>, blocks_for(chunks), on, p);
  };
  for_flags(p, [&](auto flags) {
    if (p.edits || p.draft_edits) {
      return go(std::integral_constant<unsigned, flags.value | kIsEdited>{});
    }
    if (p.allowed) return go(std::integral_constant<unsigned, flags.value | kIsMasked>{});
    go(flags);
  });
}

}  // namespace

void launch_digest(const Problem& p, const OnDevice& on) {
  for_types(p, [&](auto type) { launch_typed<type.value>(p, on); });
}

}  // namespace specdec
