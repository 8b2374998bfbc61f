// The digest of a row: which part of which row a thread block takes, and how its warps put together
// what each has of a tile.
#pragma once
#include "chunk.cuh"
#include "kernels.h"
#include "rows.cuh"

namespace specdec {

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

constexpr int kOfLane = kTile / kThreads;  // values of a tile that a lane has

// Sums of a lane's values as 2^(l scale - shift), in units of log 2.
template <bool kEntropy, class F>
__device__ __forceinline__ Sums lane_sums(float maximum, float scale, const F& value) {
  const Shift t = shift_of(maximum, scale);
  float mass[4] = {}, entropy = 0.f;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    const float s = fmaf(value(j), t.scale, -t.shift), e = fast_exp2(s);
    mass[j % 4] += e;
    if (kEntropy) entropy += e * fmaxf(s, -1000.f);
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

// Maximum and sums of so many consecutive lanes.
template <int kLanes, bool kMass, bool kEntropy>
__device__ __forceinline__ void merge_lanes(float scale, float* maximum, Sums* sums) {
  const float own = *maximum;
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    *maximum = max_nan(*maximum, __shfl_xor_sync(0xffffffffu, *maximum, mask));
  }
  if (!kMass) return;
  if (own < *maximum) {
    const float shift = fmaxf((own - *maximum) * scale, -1000.f), factor = fast_exp2(shift);
    sums->entropy = factor * (sums->entropy + shift * sums->mass);
    sums->mass *= factor;
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    sums->mass += __shfl_xor_sync(0xffffffffu, sums->mass, mask);
    if (kEntropy) sums->entropy += __shfl_xor_sync(0xffffffffu, sums->entropy, mask);
  }
}

constexpr float kLn2 = 0.693147181f;

// Maximum of some values, and their sums relative to it, in units of log 2.
struct Weighed {
  float maximum;
  Sums sums;
};

template <bool kEntropy>
__device__ __forceinline__ Weighed together(const Weighed& a, const Weighed& b, float scale) {
  Weighed all{max_nan(a.maximum, b.maximum), {}};
  const auto add = [&](const Weighed& part) {
    const float below = (part.maximum - all.maximum) * scale;
    const float shift = part.maximum < all.maximum ? fmaxf(below, -1000.f) : 0.f;
    const float factor = fast_exp2(shift);
    all.sums.mass += factor * part.sums.mass;
    if (kEntropy) all.sums.entropy += factor * (part.sums.entropy + shift * part.sums.mass);
  };
  add(a);
  add(b);
  return all;
}

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
  // More values of a warp, by one lane.
  __device__ __forceinline__ void add(int at, const Weighed& more, float scale) {
    const Weighed own{maximum[at], {kMass ? mass[at] : 0.f, kEntropy ? entropy[at] : 0.f}};
    const Weighed all = together<kEntropy>(own, more, scale);
    maximum[at] = all.maximum;
    if constexpr (kMass) mass[at] = all.sums.mass;
    if constexpr (kEntropy) entropy[at] = all.sums.entropy;
  }
  // Those of a tile, to its eight lanes.
  __device__ __forceinline__ Sums merged(int at, float scale, float* most) const {
    *most = maximum[at];
    Sums sums{kMass ? mass[at] : 0.f, kEntropy ? entropy[at] : 0.f};
    merge_lanes<kWarps, kMass, kEntropy>(scale, most, &sums);
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

template <int kTiles, bool kEdited>  // by a warp
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
  if (kEdited && (row.is_target ? p.edits : p.draft_edits)) type = LogitType::kFloat32;
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
  if constexpr (kEdited) {  // behind the others: there are few registers
    const int64_t number = row_number(p, row.chain, row.b, row.index);
    shared->values.edits = (row.is_target ? p.edits : p.draft_edits).row(number);
  }
}

template <LogitType kType, unsigned kFlags, int kTiles>
struct Digested {  // of a share, in shared memory
  static constexpr bool kMass = (kFlags & kWantsMass) != 0;
  static constexpr bool kEntropy = (kFlags & kWantsEntropy) != 0;
  static constexpr bool kRaw = (kFlags & kWantsRaw) != 0;
  static constexpr bool kEdited = (kFlags & kIsEdited) != 0;
  WarpParts<kTiles, kMass, kEntropy> own;
  WarpParts<kTiles, kRaw, false> raw;
  // In a call with edits, of each block: the largest logit that has none, as it is in memory, and
  // that of those that have one (`max_bits`).
  using Bits = std::conditional_t<kType == LogitType::kFloat32, uint32_t, uint16_t>;
  static constexpr int kBlocks = kEdited ? kTiles * kTileBlocks : 1;
  Bits blocks[kBlocks];
  uint32_t edited[kBlocks];
};

// Every warp has stored its parts: those of the tiles are put together and stored.
template <class D, int kTiles>
__device__ __forceinline__ void finish_share(const Problem& p, const Share& t, const D& parts) {
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

// Shares of this thread block from `first` on, at most one for each warp, by `run(share, parts)`.
template <class D, int kTiles, class F>
__device__ __forceinline__ void take_shares(const Problem& p, LogitType type, unsigned first,
                                            unsigned count, const F& run) {
  using Shares = Share[kWarps];
  using Parts = D[2];  // a warp merges one while others fill one
  SPECDEC_SHARED(Shares, shares);
  SPECDEC_SHARED(Parts, parts);
  const unsigned step = gridDim.x, mine = first + threadIdx.x / 32 * step;
  if (mine < count) find_share<kTiles, D::kEdited>(p, type, mine, &shares[threadIdx.x / 32]);
  __syncthreads();
  int turn = 0;
#pragma unroll 1
  for (int k = 0; k < kWarps && first + k * step < count; ++k) {
    if (!shares[k].active) continue;
    run(shares[k], parts[turn]);
    turn ^= 1;
  }
}

// Shares of a thread block, where there are many. Multiprocessors are not equally fast: an H200
// takes 80 us for a call of 5632 shares if each has as many of them, and 78 so; 190 and 180 for
// 17920. One share a block costs more again, 83 and 205; so does asking L2 for the next share while
// one is summed, 3 us of 75.
constexpr int64_t kInTurn = 4;
static_assert(kInTurn <= kWarps);

template <LogitType kType>
using Type = std::integral_constant<LogitType, kType>;

// f(type), as a constant, of the target's rows, and of the draft's if theirs is another.
template <class F>
void for_types(const Problem& p, const F& f) {
  const auto call = [&](LogitType type) {
    if (type == LogitType::kFloat32) return f(Type<LogitType::kFloat32>{});
    if (type == LogitType::kBFloat16) return f(Type<LogitType::kBFloat16>{});
    f(Type<LogitType::kFloat16>{});
  };
  call(p.target.type());
  if (p.draft_rows > 0 && p.draft.type() != p.target.type()) call(p.draft.type());
}

// f(flags) of what is wanted of each row.
template <class F>
void for_flags(const Problem& p, const F& f) {
  switch (p.flags) {
    case 0:
      return f(std::integral_constant<unsigned, 0>{});
    case kWantsMass:
      return f(std::integral_constant<unsigned, kWantsMass>{});
    case kWantsMass | kWantsEntropy:
      return f(std::integral_constant<unsigned, kWantsMass | kWantsEntropy>{});
    case kWantsMass | kWantsRaw:
      return f(std::integral_constant<unsigned, kWantsMass | kWantsRaw>{});
    default:
      f(std::integral_constant<unsigned, kWantsMass | kWantsEntropy | kWantsRaw>{});
  }
}

// Thread blocks of a grid for so many shares: none has more of them than warps.
inline int64_t blocks_for(int64_t shares) {
  STD_TORCH_CHECK(shares <= 0x7fffffff, shares, " parts of rows: split the batch");
  const int64_t few = 2 * kResident * multiprocessors();
  const int64_t blocks = few > shares / kInTurn ? few : shares / kInTurn;
  return blocks < shares ? blocks : shares;
}

}  // namespace specdec
