// The digest of rows of a call with edits (digest.cu says what it holds). The maxima of edited rows
// are float32.
//   grid = [batch * rows * shares / a few], a share half as large as there. A lane has 16 values of
//   each tile; what it needs to edit them is under way with them
#include "digest.cuh"

namespace specdec {
namespace {

template <LogitType kType>
struct Edited {  // what a lane has of a share
  using C = Chunk<kType>;
  static constexpr int kTiles = C::kTiles / 2, kCount = kTiles * C::kOfTile;
  static constexpr unsigned kBits = (1u << C::kPer) - 1;
  using Places = int[kCount][kThreads];
  Words words[kCount];
  unsigned listed, kept;  // bit j: value j has an edit, is allowed
  // Edits of the row before those of each load, less those of its tile: in shared memory, where a
  // thread has its own. Registers are few: sm_120 would spill.
  Places& places;

  // The byte of the eight ids where load i begins, in a table of one bit an id; 0 behind the row.
  template <class F>
  static __device__ __forceinline__ unsigned byte_of(const Share& t, int i, const F& byte) {
    const int first = (static_cast<int>(t.base) + C::offset(i)) & ~7;
    return first < static_cast<int>(t.size) ? byte(first >> 3) : 0u;
  }

  // Bits of all loads. Two lanes of float32 share each byte: either reads those of two loads.
  template <class F>
  static __device__ __forceinline__ unsigned gather(const Share& t, const F& byte) {
    unsigned bits = 0;
    if constexpr (C::kPer == 8) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits |= byte_of(t, i, byte) << i * 8;
    } else {
      const bool is_odd = threadIdx.x % 2 != 0;
      unsigned own = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) own |= byte_of(t, is_odd ? 2 + i : i, byte) << i * 8;
      const unsigned other = __shfl_xor_sync(0xffffffffu, own, 1);
      const unsigned bytes = is_odd ? other | own << 16 : own | other << 16;
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits |= (bytes >> (i * 8 + is_odd * 4) & kBits) << i * 4;
    }
    return bits;
  }

  __device__ __forceinline__ void load(const Share& t) {
    const EditedRow& edits = t.values.edits;
    load_tiles<kType>(t.values.logits, t.base, t.size, words);
    const Global<const uint8_t> named = edits.bits.template as<const uint8_t>();
    const Global<const uint8_t> allowed = t.values.allowed.template as<const uint8_t>();
    kept = allowed ? gather(t, [&](int64_t i) { return allowed.load(i); }) : ~0u;
    listed = named ? gather(t, [&](int64_t i) { return named.load(i); }) : 0u;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const unsigned before = (1u << i * C::kPer) - (1u << i / C::kOfTile * kOfLane);
      const bool is_listed = (listed >> i * C::kPer & kBits) != 0;
      places[i][threadIdx.x] =
          is_listed ? edits.place(static_cast<int>(t.base) + C::offset(i)) - __popc(listed & before)
                    : 0;
    }
  }

  // The values of a tile as they are in memory.
  __device__ __forceinline__ void widen(int tile, float (&x)[kOfLane]) const {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      x[j] = value_of<kType>(words[tile * C::kOfTile + j / C::kPer], j % C::kPer);
    }
  }

  // Their edits, one after the other: most lanes have few. Then the packed bits of what is allowed.
  __device__ __forceinline__ void apply(const MaskedRow& row, int tile, float (&x)[kOfLane]) const {
    const unsigned own = listed >> tile * kOfLane & 0xffffu, allowed = kept >> tile * kOfLane;
#pragma unroll 1
    for (unsigned left = own; left != 0; left &= left - 1) {
      const unsigned mine = left & (0u - left);
      float logit = x[0];
#pragma unroll
      for (int j = 1; j < kOfLane; ++j) logit = mine == 1u << j ? x[j] : logit;
      const int load = tile * C::kOfTile + __popc(mine - 1) / C::kPer;
      const int edit = places[load][threadIdx.x] + __popc(own & (mine - 1));
      logit = row.edits.apply(logit, edit);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) x[j] = mine == 1u << j ? logit : x[j];
    }
    if (!row.allowed) return;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) x[j] = (allowed >> j & 1u) != 0 ? x[j] : -INFINITY;
  }
};

// Largest value of a warp's share of a tile, whose loads lie as in Chunk; stored: also of each of
// its eight blocks, of so many lanes.
template <int kPer>
__device__ __forceinline__ float warp_maximum(const float (&x)[kOfLane], LogitType type,
                                              Global<uint8_t> maxima, bool stores) {
  constexpr int kLanes = kBlock / kPer;
  const int lane = threadIdx.x % 32;
  float all = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOfLane / kPer; ++i) {
    float most = x[i * kPer];
#pragma unroll
    for (int j = 1; j < kPer; ++j) most = max_nan(most, x[i * kPer + j]);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, mask));
    }
    if (stores && lane % kLanes == 0)
      store_as(type, maxima, i * (32 / kLanes) + lane / kLanes, most);
    all = max_nan(all, most);
  }
#pragma unroll
  for (int mask = kLanes; mask < 32; mask *= 2) {
    all = max_nan(all, __shfl_xor_sync(0xffffffffu, all, mask));
  }
  return all;
}

// The same numbers of the logits as they are in memory, at temperature 1.
template <LogitType kType, int kTiles>
__device__ __forceinline__ void measure_raw(const Edited<kType>& own, float (&most)[kTiles],
                                            Sums (&sums)[kTiles]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float x[kOfLane];
    own.widen(tile, x);
    most[tile] = warp_maximum<Chunk<kType>::kPer>(x, kType, {}, false);
    sums[tile] = lane_sums<false>(most[tile], kLog2E, [&](int j) { return x[j]; });
  }
}

template <LogitType kType, unsigned kFlags, int kTiles>
__device__ __forceinline__ void digest_edited(const Problem& p, const Share& t,
                                              typename Edited<kType>::Places& places,
                                              Digested<kType, kFlags, kTiles>& parts) {
  using D = Digested<kType, kFlags, kTiles>;
  constexpr int kPer = Chunk<kType>::kPer, kOfWarp = kTileBlocks / kWarps;
  const LogitType type = t.values.type();
  const int bytes = type == LogitType::kFloat32 ? 4 : 2, warp = threadIdx.x / 32;
  Edited<kType> own{{}, 0, 0, places};
  own.load(t);
  float x[kOfLane], most[kTiles] = {};
  Sums sums[kTiles] = {};
  if constexpr (D::kRaw) {
    if (t.is_target) measure_raw(own, most, sums);
    parts.raw.store(most, sums, kLog2E);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    own.widen(tile, x);
    own.apply(t.values, tile, x);
    const Global<uint8_t> maxima = t.maxima + (tile * kTileBlocks + warp * kOfWarp) * bytes;
    most[tile] = warp_maximum<kPer>(x, type, maxima, tile < t.tiles);
    if constexpr (D::kMass) {
      sums[tile] = lane_sums<D::kEntropy>(most[tile], t.scale, [&](int j) { return x[j]; });
    }
  }
  parts.own.store(most, sums, t.scale);
  finish_share<D, kTiles>(p, t, parts);
}

// Thread blocks of a multiprocessor. On sm_120 four of them would spill registers, and three have
// enough under way for its memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kEditedResident = 3;
#else
constexpr int kEditedResident = kResident;
#endif

template <LogitType kType, unsigned kFlags>
__global__ void __launch_bounds__(kThreads, kEditedResident)
    edited_digest_kernel(const __grid_constant__ Problem p) {
  constexpr int kTiles = Edited<kType>::kTiles;
  using D = Digested<kType, kFlags, kTiles>;
  using Places = typename Edited<kType>::Places;
  SPECDEC_SHARED(Places, places);
  after_last_kernel();
  const unsigned count = static_cast<unsigned>(shares_of<kTiles>(p));
  take_shares<D, kTiles, true>(p, kType, blockIdx.x, count, [&](const Share& t, D& parts) {
    digest_edited<kType, kFlags, kTiles>(p, t, places, parts);
  });
}

template <LogitType kType>
void launch_typed(const Problem& p, Stream stream) {
  const int64_t blocks = blocks_for(shares_of<Edited<kType>::kTiles>(p));
  for_flags(p, [&](auto flags) {
    launch_phase(edited_digest_kernel<kType, flags.value>, blocks, kThreads, stream, p);
  });
}

}  // namespace

void launch_edited_digest(const Problem& p, Stream stream) {
  for_types(p, [&](auto type) { launch_typed<type.value>(p, stream); });
}

}  // namespace specdec
