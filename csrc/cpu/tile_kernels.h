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

#include "tile_race.h"

TileMax tile_max(const float* tile, int n) {
  F best[4];
  for (F& b : best) b = splat(-kInf);
  Mask nan = no_lane();
  for (int i = 0; i < n; i += 4 * kWidth) {
    F v[4];
    for (int k = 0; k < 4; ++k) v[k] = load<F>(tile + i + k * kWidth);
    for (int k = 0; k < 4; ++k) best[k] = max(v[k], best[k]);
    nan = nan | either_nan(v[0], v[1]) | either_nan(v[2], v[3]);
  }
  return {lane_max(max(max(best[0], best[1]), max(best[2], best[3]))), any(nan)};
}

// Lanes whose bit of `bits` is 0 become -inf.
SPECDEC_INLINE F keep_bits(F v, uint32_t bits) {
  U lane{};
  for (int j = 0; j < kWidth; ++j) lane[j] = 1u << j;
  const I off = (I)((splat_bits(bits) & lane) == U{});
  return off ? splat(-kInf) : v;
}

template <LogitType kType>
TileMax tile_load(const void* logits, int n, const int32_t* allowed, float* tile) {
  F best[2] = {splat(-kInf), splat(-kInf)};
  Mask nan = no_lane();
  constexpr int kStep = 2 * kWidth;
  const auto take = [&](const void* from, int offset, int i) SPECDEC_ALWAYS_INLINE {
    F v[2];
    for (int k = 0; k < 2; ++k) {
      const int at = i + k * kWidth;
      v[k] = load_logits<kType>(from, offset + k * kWidth);
      if (allowed) v[k] = keep_bits(v[k], static_cast<uint32_t>(allowed[at >> 5]) >> (at & 31));
      best[k] = max(v[k], best[k]);
      store(tile + at, v[k]);
    }
    nan = nan | either_nan(v[0], v[1]);
  };
  int i = 0;
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
  return {lane_max(max(best[0], best[1])), any(nan)};
}

template <LogitType kType>
SumMax tile_exp_sum(const void* logits, int n, const ExpShift& shift, Ahead ahead) {
  const Exp2 weigh(shift);
  Sum sum;
  F best = splat(-kInf);
  for (int i = 0; i < n; i += kLanes) {
    ahead.fetch(i, kLanes);
    for (int k = 0; k < kParts; ++k) {
      const F l = load_logits<kType>(logits, i + k * kWidth);
      best = max(l, best);
      sum.part[k] = weigh.add(l, sum.part[k]);
    }
  }
  return {sum.total(), lane_max(best)};
}

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
    // The minimum keeps a wrong logsumexp of the caller from overflowing the exponent bits.
    const F x = min(splat(88.f), exponent(l));
    return select(ge(l, threshold), exp(x) * scale, F{});
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

// mass[j] = sum of weights of l >= pivots[j], count[j] = how many; nothing below the threshold.
PivotSums tile_pivot_sums(const float* tile, int n, const Weighting& weighting,
                          const float* pivots) {
  const Weigh w(weighting);
  Sum mass[kPivots];
  int count[kPivots] = {};
  float lowest = pivots[0];
  for (int j = 1; j < kPivots; ++j) lowest = pivots[j] < lowest ? pivots[j] : lowest;
  for (int i = 0; i < n; i += kLanes) {
    for (int k = 0; k < kParts; ++k) {
      const F l = load<F>(tile + i + k * kWidth);
      if (!any(ge(l, splat(lowest)))) continue;
      const F e = w(l);
      for (int j = 0; j < kPivots; ++j) {
        const Mask in = ge(l, splat(pivots[j]));
        mass[j].add(k, select(in, e, F{}));
        count[j] += __builtin_popcount(lane_bits(in));
      }
    }
  }
  PivotSums out;
  for (int j = 0; j < kPivots; ++j) {
    out.mass[j] = mass[j].total();
    out.count[j] = count[j];
  }
  return out;
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

template <LogitType kType>
TileMax tile_cell_max(const void* logits, int n, float* cells, Ahead ahead) {
  F best = splat(-kInf);
  Mask nan = no_lane();
  for (int block = 0; block < n; block += kCellBlock, cells += kCells) {
    F cell[kParts];
    for (F& c : cell) c = splat(-kInf);
    const int end = block + kCellBlock < n ? block + kCellBlock : n;
    for (int i = block; i < end; i += 2 * kLanes) {
      ahead.fetch(i, 2 * kLanes);
      for (int k = 0; k < kParts; ++k) {
        const F a = load_logits<kType>(logits, i + k * kWidth);
        const F b = load_logits<kType>(logits, i + kLanes + k * kWidth);
        nan = nan | either_nan(a, b);
        cell[k] = max(max(a, b), cell[k]);
      }
    }
    for (int k = 0; k < kParts; ++k) {
      best = max(cell[k], best);
      store(cells + k * kWidth, cell[k]);
    }
  }
  return {lane_max(best), any(nan)};
}

void tile_residual(const float* p, const float* q, int n, const Weighting& pw, const Weighting& qw,
                   float a, float b, float* out) {
  const Weigh wp(pw), wq(qw);
  const F va = splat(a), vb = splat(b), zero{};
  for (int i = 0; i < n; i += kWidth) {
    const F ap = p ? va * wp(load<F>(p + i)) : zero;
    const F bq = q ? vb * wq(load<F>(q + i)) : zero;
    store(out + i, max(ap - bq, zero));
  }
}

void tile_overlap(const float* p, const float* q, int n, const Weighting& pw, const Weighting& qw,
                  float* out) {
  const Weigh wp(pw), wq(qw);
  for (int i = 0; i < n; i += kWidth) {
    const F vp = p ? wp(load<F>(p + i)) : F{};
    const F vq = q ? wq(load<F>(q + i)) : F{};
    store(out + i, min(vp, vq));
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
#include "linear_kernels.h"
#ifdef SPECDEC_AMX
#include "attention_amx.h"
#else
constexpr Attention kAttendBFloat16 = {keep_queries, attend_block<LogitType::kBFloat16>};
#endif

constexpr TileTable kTable = {
    .max = tile_max,
    .load = {tile_load<LogitType::kFloat32>, tile_load<LogitType::kBFloat16>,
             tile_load<LogitType::kFloat16>},
    .exp_sums = tile_exp_sums,
    .exp_sum = {tile_exp_sum<LogitType::kFloat32>, tile_exp_sum<LogitType::kBFloat16>,
                tile_exp_sum<LogitType::kFloat16>},
    .pivot_sums = tile_pivot_sums,
    .count = tile_count,
    .find = tile_find,
    .gather = tile_gather,
    .cell_max = {tile_cell_max<LogitType::kFloat32>, tile_cell_max<LogitType::kBFloat16>,
                 tile_cell_max<LogitType::kFloat16>},
    .residual = tile_residual,
    .overlap = tile_overlap,
    .sum_max = tile_sum_max,
    .race_logits = {tile_race_logits<LogitType::kFloat32>, tile_race_logits<LogitType::kBFloat16>,
                    tile_race_logits<LogitType::kFloat16>},
    .race_weights = tile_race_weights,
    .attention = {{keep_queries, attend_block<LogitType::kFloat32>},
                  kAttendBFloat16,
                  {keep_queries, attend_block<LogitType::kFloat16>}},
    .linear = {linear<LogitType::kFloat32>, linear<LogitType::kBFloat16>,
               linear<LogitType::kFloat16>},
};

}  // namespace specdec::cpu::SPECDEC_ISA
