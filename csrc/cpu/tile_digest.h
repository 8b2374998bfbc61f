// The pass over all logits of a row: the largest of each block, and the sum of all weights.
// Included by tile_kernels.h.

template <LogitType kType>
SPECDEC_INLINE void prefetch_block(const void* logits, int i) {
  constexpr int kSize = kType == LogitType::kFloat32 ? 4 : 2;
  prefetch_lines(static_cast<const char*>(logits) + i * kSize, kNoiseBlock * kSize);
}

// The largest values of blocks whose ids lie over the lanes of one vector each.
SPECDEC_INLINE void block_maxima(F* lanes, int count, float* out) {
  for (int i = count; i % kWidth != 0; ++i) lanes[i] = splat(-kInf);
  for (int i = 0; i < count; i += kWidth) {
    const F v = lane_maxima(lanes + i);
    if (count - i >= kWidth) {
      store(out + i, v);
    } else {
      std::memcpy(out + i, &v, (count - i) * sizeof(float));
    }
  }
}

// Largest logits of 16 bits, taken by their bits: those that are not negative are in the order of
// signed integers, negative ones in the reverse of unsigned integers, and NaN lies beyond infinity.
// A block takes 10 instructions where widening its logits first takes 16; the baseline of x86 lacks
// the unsigned ones, which float16 still gains from there.
template <LogitType kType>
constexpr bool kByWords =
    kType == LogitType::kFloat16 || (kType == LogitType::kBFloat16 && kWidth > 4);

struct Words {
  W most, least;
  SPECDEC_ALWAYS_INLINE explicit Words(W v) : most(v), least(v) {}
  SPECDEC_ALWAYS_INLINE void take(W v) {
    most = max_signed(most, v);
    least = min_unsigned(least, v);
  }
  SPECDEC_ALWAYS_INLINE W largest() const { return (S)most < 0 ? least : most; }
};

// The larger of each lane's two logits.
template <LogitType kType>
SPECDEC_INLINE F widened(W v) {
  if constexpr (kType == LogitType::kBFloat16) {
    return max((F)((U)v << 16), (F)((U)v & 0xffff0000u));
  } else {
    H half[2];
    std::memcpy(half, &v, sizeof v);
    return max(from_half(half[0]), from_half(half[1]));
  }
}

template <LogitType kType>
TileMax tile_digest_of_words(const RawTile& tile, int n, float* blocks) {
  constexpr uint16_t kInfinity = kType == LogitType::kBFloat16 ? 0x7f80 : 0x7c00;
  constexpr uint16_t kMinusInfinity = kInfinity | 0x8000;
  constexpr int kWords = 2 * kWidth;
  const auto* logits = static_cast<const uint16_t*>(tile.logits);
  const void* ahead = tile.ahead;
  F lanes[kTileBlocks], best = splat(-kInf);
  W top_signed = W{} + kInfinity, top_unsigned{};
  for (int i = 0; i < n; i += kNoiseBlock) {
    prefetch_block<kType>(ahead, i);
    Words words(load<W>(logits + i));
    top_unsigned = max_unsigned(top_unsigned, words.most);
    for (int j = i + kWords; j < i + kNoiseBlock; j += kWords) {
      const W v = load<W>(logits + j);
      words.take(v);
      top_unsigned = max_unsigned(top_unsigned, v);
    }
    top_signed = max_signed(top_signed, words.most);
    best = max(lanes[i / kNoiseBlock] = widened<kType>(words.largest()), best);
  }
  if (blocks) block_maxima(lanes, n / kNoiseBlock, blocks);
  const W nan = (W)(top_signed != kInfinity) | (W)(top_unsigned > kMinusInfinity);
  return {lane_max(best), any_bit((U)nan)};
}

template <LogitType kType>
TileMax tile_digest(const RawTile& tile, int n, float* blocks) {
  if constexpr (kByWords<kType>) return tile_digest_of_words<kType>(tile, n, blocks);
  const auto [logits, ahead, type] = tile;
  F lanes[kTileBlocks], best = splat(-kInf);
  Mask nan = no_lane();
  for (int i = 0; i < n; i += kNoiseBlock) {
    prefetch_block<kType>(ahead, i);
    F most[2] = {splat(-kInf), splat(-kInf)};
    for (int j = i; j < i + kNoiseBlock; j += 2 * kLanes) {
      F v[2][kParts];
      load_rounds<kType>(logits, j, v);
      for (int k = 0; k < kParts; ++k) {
        most[0] = max(v[0][k], most[0]);
        most[1] = max(v[1][k], most[1]);
        nan = nan | either_nan(v[0][k], v[1][k]);
      }
    }
    best = max(lanes[i / kNoiseBlock] = max(most[0], most[1]), best);
  }
  if (blocks) block_maxima(lanes, n / kNoiseBlock, blocks);
  return {lane_max(best), any(nan)};
}

template <LogitType kType>
SumMax tile_exp_sum(const RawTile& tile, int n, const ExpShift& shift, float* blocks) {
  const auto [logits, ahead, type] = tile;
  const Exp2 weigh(shift);
  Sum sum;
  F lanes[kTileBlocks], best = splat(-kInf);
  for (int i = 0; i < n; i += kNoiseBlock) {
    prefetch_block<kType>(ahead, i);
    F most = splat(-kInf);
    for (int j = i; j < i + kNoiseBlock; j += 2 * kLanes) {
      F v[2][kParts];
      load_rounds<kType>(logits, j, v);
      for (const F(&round)[kParts] : v) {
        for (int k = 0; k < kParts; ++k) {
          most = max(round[k], most);
          sum.part[k] = weigh.add(round[k], sum.part[k]);
        }
      }
    }
    best = max(lanes[i / kNoiseBlock] = most, best);
  }
  block_maxima(lanes, n / kNoiseBlock, blocks);
  return {sum.total(), lane_max(best)};
}
