// The tile functions of tile.h, written once and compiled once per instruction set: no include
// guard. The including file sets SPECDEC_ISA (a namespace), SPECDEC_WIDTH (float lanes) and the
// target pragma, after all standard headers.

#pragma GCC diagnostic ignored "-Wpsabi"  // vector arguments never cross a call: all is inlined
#if !defined(__clang__)                   // GCC 12 warns of its own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define SPECDEC_ALWAYS_INLINE __attribute__((always_inline))

namespace specdec::cpu::SPECDEC_ISA {

#include "simd.h"

// f(a count known to the compiler) of n, which is 1 to kMost.
template <int kMost, class Function>
SPECDEC_INLINE void with_count(int64_t n, const Function& f) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, f);
  }
  f(std::integral_constant<int, kMost>{});
}

template <LogitType kType>
SPECDEC_INLINE F load_logits(const void* logits, int i) {
  if constexpr (kType == LogitType::kFloat32) {
    return load<F>(static_cast<const float*>(logits) + i);
  } else if constexpr (kType == LogitType::kBFloat16) {
    return from_bfloat16(load<H>(static_cast<const uint16_t*>(logits) + i));
  } else {
    return from_half(load<H>(static_cast<const uint16_t*>(logits) + i));
  }
}

// 2 kLanes logits from `i` as two rounds of kLanes: which id lies in which lane does not depend on
// the width. Pairs of bfloat16 logits are parted by a shift and a mask, which is half the work of
// widening them.
template <LogitType kType>
SPECDEC_INLINE void load_rounds(const void* logits, int i, F v[2][kParts]) {
  for (int k = 0; k < kParts; ++k) {
    if constexpr (kType == LogitType::kBFloat16) {
      const U pairs = load<U>(static_cast<const uint16_t*>(logits) + i + 2 * k * kWidth);
      v[0][k] = (F)(pairs << 16);
      v[1][k] = (F)(pairs & 0xffff0000u);
    } else {
      v[0][k] = load_logits<kType>(logits, i + k * kWidth);
      v[1][k] = load_logits<kType>(logits, i + kLanes + k * kWidth);
    }
  }
}

#include "tile_digest.h"
#include "tile_race.h"

// Lanes whose bit of `bits` is 0 become -inf.
SPECDEC_INLINE F keep_bits(F v, uint32_t bits) {
  U lane{};
  for (int j = 0; j < kWidth; ++j) lane[j] = 1u << j;
  const I off = (I)((splat_bits(bits) & lane) == U{});
  return off ? splat(-kInf) : v;
}

template <LogitType kType>
void tile_load(const void* logits, int n, const int32_t* allowed, float* tile) {
  constexpr int kStep = 2 * kWidth;
  const auto take = [&](const void* from, int offset, int i) SPECDEC_ALWAYS_INLINE {
    for (int k = 0; k < 2; ++k) {
      const int at = i + k * kWidth;
      F v = load_logits<kType>(from, offset + k * kWidth);
      if (allowed) v = keep_bits(v, static_cast<uint32_t>(allowed[at >> 5]) >> (at & 31));
      store(tile + at, v);
    }
  };
  int i = 0;
  for (; i + kNoiseBlock <= n; i += kNoiseBlock) {
    if (n == kTile) prefetch_block<kType>(logits, i + kAhead);
    for (int j = i; j < i + kNoiseBlock; j += kStep) take(logits, j, j);
  }
  for (; i + kStep <= n; i += kStep) take(logits, i, i);
  if (i < n) {  // the row ends inside a step: widen it with -inf
    constexpr size_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
    constexpr uint32_t kMinusInf = kType == LogitType::kFloat32    ? 0xff800000u
                                   : kType == LogitType::kBFloat16 ? 0xff80u
                                                                   : 0xfc00u;
    char rest[kStep * kSize];
    for (int j = 0; j < kStep; ++j) std::memcpy(rest + j * kSize, &kMinusInf, kSize);
    std::memcpy(rest, static_cast<const char*>(logits) + i * kSize, (n - i) * kSize);
    take(rest, 0, i);
  }
  const int padded = (n + kPad - 1) / kPad * kPad;
  for (int j = n; j < padded; ++j) tile[j] = -kInf;
}

#include "tile_edits.h"

// Weighting, spread over lanes.
struct Weigh {
  F max, inv_t, minus_shift, scale, threshold;
  explicit Weigh(const Weighting& w)
      : max(splat(w.max)),
        inv_t(splat(w.inv_t)),
        minus_shift(splat(-w.shift)),
        scale(splat(w.scale)),
        threshold(splat(w.threshold)) {}
  SPECDEC_ALWAYS_INLINE F exponent(F l) const { return fma(l - max, inv_t, minus_shift); }
  SPECDEC_ALWAYS_INLINE F operator()(F l) const {
    // The minimum keeps a wrong logsumexp of the caller from overflowing the exponent bits. What
    // exp does not reach is 0: a residual of nothing else must be empty.
    const F x = min(splat(88.f), exponent(l));
    return select(ge(l, threshold) & ge(x, splat(kLeastExp)), exp(x) * scale, F{});
  }
};

ExpSums tile_exp_sums(const float* tile, int n, const Weighting& weighting) {
  const Weigh w(weighting);
  Sum sum, sum_log;
  for (int i = 0; i < n; i += kLanes) {
    for (int k = 0; k < kParts; ++k) {
      const F l = load<F>(tile + i + k * kWidth);
      const Mask kept = ge(l, w.threshold);
      const F x = select(kept, w.exponent(l), F{});
      const F e = select(kept, exp(x), F{});
      sum.add(k, e);
      sum_log.add(k, e * x);
    }
  }
  return {sum.total(), sum_log.total()};
}

Counts tile_count(const float* tile, int n, float logit) {
  const F x = splat(logit);
  Counts c{0, 0};
  for (int i = 0; i < n; i += kWidth) {
    const F l = load<F>(tile + i);
    c.greater += __builtin_popcount(lane_bits(lt(x, l)));
    c.equal += __builtin_popcount(lane_bits(eq(x, l)));
  }
  return c;
}

int tile_find(const float* tile, int n, float value) {
  for (int i = 0; i < n; i += kWidth) {
    const uint32_t bits = lane_bits(eq(load<F>(tile + i), splat(value)));
    if (bits != 0) return i + __builtin_ctz(bits);
  }
  return n;
}

int tile_gather(const float* tile, int n, float low, float high, float* out) {
  const F from = splat(low), to = splat(high);
  int count = 0;
  for (int i = 0; i < n; i += 4 * kWidth) {
    F v[4];
    Mask in[4];
    for (int k = 0; k < 4; ++k) {
      v[k] = load<F>(tile + i + k * kWidth);
      in[k] = ge(v[k], from) & lt(v[k], to);
    }
    if (!any(in[0] | in[1] | in[2] | in[3])) continue;
    for (int k = 0; k < 4; ++k) count += compress(v[k], in[k], out + count);
  }
  return count;
}

// What is kept is listed first: its weights take half of the time that they take in place, where a
// tenth of the tile is kept.
Bracketed tile_bracket(const float* tile, int n, const Weighting& w, float low, float high,
                       float* out) {
  const float k = w.inv_t < 2e38f ? w.inv_t * 1.44269504f : 2e38f;
  const float lowest = static_cast<float>(-kExpRoom) / k;
  const Exp2 weigh({0, w.inv_t, k, 0, lowest > -FLT_MAX ? lowest : -FLT_MAX, 0});
  const F max = splat(w.max), from = splat(low), to = splat(high);
  F above[kParts] = {}, inside[kParts] = {};
  float kept[kTile + kLanes];
  const int size = tile_gather(tile, n, low, kInf, kept);
  for (int i = 0; i < kLanes; i += kWidth) store(kept + size + i, splat(-kInf));
  int count = 0;
  for (int i = 0; i < size; i += kLanes) {
    for (int k = 0; k < kParts; ++k) {
      const F l = load<F>(kept + i + k * kWidth);
      const Mask is_above = ge(l, to), is_inside = ge(l, from) & lt(l, to);
      const F e = weigh(l - max);
      above[k] = select(is_above, above[k] + e, above[k]);
      inside[k] = select(is_inside, inside[k] + e, inside[k]);
      count += compress(l, is_inside, out + count);
    }
  }
  Sum sums[2];
  std::memcpy(sums[0].part, above, sizeof above);
  std::memcpy(sums[1].part, inside, sizeof inside);
  return {sums[0].total(), sums[1].total(), count};
}

// kLeast: min(p, q) in place of (a p - b q)+.
template <bool kLeast>
void tile_residual(const float* p, const float* q, int n, const Weighting& pw, const Weighting& qw,
                   float a, float b, float* out) {
  const Weigh wp(pw), wq(qw);
  const F va = splat(a), vb = splat(b), zero{};
  for (int i = 0; i < n; i += kWidth) {
    F ap = p ? wp(load<F>(p + i)) : zero, bq = q ? wq(load<F>(q + i)) : zero;
    if (!kLeast && p) ap = va * ap;
    if (!kLeast && q) bq = vb * bq;
    store(out + i, kLeast ? min(ap, bq) : max(ap - bq, zero));
  }
}

SumMax tile_sum_max(const float* tile, int n) {
  Sum sum;
  F best = splat(-kInf);
  for (int i = 0; i < n; i += kLanes) {
    for (int k = 0; k < kParts; ++k) {
      const F v = load<F>(tile + i + k * kWidth);
      sum.add(k, v);
      best = max(v, best);
    }
  }
  return {sum.total(), lane_max(best)};
}

#include "attention_kernels.h"
#include "attention_narrow.h"
#include "linear_kernels.h"
#include "replay_kernels.h"
#ifdef SPECDEC_AMX
#include "attention_amx.h"
#endif

constexpr TileTable kTable = {
    .load = {tile_load<LogitType::kFloat32>, tile_load<LogitType::kBFloat16>,
             tile_load<LogitType::kFloat16>},
    .digest = {tile_digest<LogitType::kFloat32>, tile_digest<LogitType::kBFloat16>,
               tile_digest<LogitType::kFloat16>},
    .exp_sums = tile_exp_sums,
    .exp_sum = {tile_exp_sum<LogitType::kFloat32>, tile_exp_sum<LogitType::kBFloat16>,
                tile_exp_sum<LogitType::kFloat16>},
    .edit = {edit_tiles<LogitType::kFloat32>, edit_tiles<LogitType::kBFloat16>,
             edit_tiles<LogitType::kFloat16>},
    .edit_list = {take_counted, number_marked, place_counted},
    .bracket = tile_bracket,
    .count = tile_count,
    .find = tile_find,
    .gather = tile_gather,
    .residual = tile_residual<false>,
    .overlap = tile_residual<true>,
    .sum_max = tile_sum_max,
    .race_logits = tile_race_logits,
    .race_weights = tile_race_weights,
    .attention = {kAttend<KeyType::kFloat32>, kAttend<KeyType::kBFloat16>,
                  kAttend<KeyType::kFloat16>, kAttend<KeyType::kFloat8E4M3>,
                  kAttend<KeyType::kFloat8E5M2>},
    .linear = {linear<LogitType::kFloat32>, linear<LogitType::kBFloat16>,
               linear<LogitType::kFloat16>},
    .replay = {replay<LogitType::kFloat32>, replay<LogitType::kBFloat16>},
};

}  // namespace specdec::cpu::SPECDEC_ISA
