// The SIMD half of the race: a bound that discards all but the few blocks of 64 ids that may win.
// Included by tile_kernels.h, after simd.h.
//
// A score is z - log E, and no E of a block is below its minimum m = -log1p(-x) / 64 >= x / 64. So
// a winner's x is at most 64 exp(z - best score), or for weights 64 w / exp(best score), with the
// block's largest z or w. Mitchell's log2(2^e (1 + f)) ~ e + f, a float's bits read as a number,
// never exceeds log2: its inverse, a number's bits read as a float, gives a limit that is never too
// small. The word of x is compared with it as an integer, by its upper 24 bits. Only survivors pay
// for exact logarithms, in Race.

// The words of the minima of a tile's blocks: word k of counter first + j is that of block 4 j + k.
SPECDEC_INLINE void minima_words(const NoiseStream& s, uint32_t first, uint32_t* words) {
  // 64-bit lanes whose low words are the state: the widening product needs no shuffles, and what
  // stands in the high words is never read.
  constexpr int kCounters = kWidth / 2;
  const L m0 = L{} + uint64_t{kPhiloxMul0}, m1 = L{} + uint64_t{kPhiloxMul1};
  for (int j = 0; j < kTileBlocks / 4; j += kCounters) {
    L c[4] = {L{} + uint64_t{first + j}, L{} + uint64_t{s.position}, L{} + uint64_t{s.step},
              L{} + uint64_t{s.lane}};
    for (int i = 0; i < kCounters; ++i) c[0][i] += i;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const L product0 = mul_low_words(m0, c[0]), product1 = mul_low_words(m1, c[2]);
      c[0] = high_words(product1) ^ c[1] ^ uint64_t { s.key0 + round* kPhiloxWeyl0 };
      c[2] = high_words(product0) ^ c[3] ^ uint64_t { s.key1 + round* kPhiloxWeyl1 };
      c[1] = product1;
      c[3] = product0;
    }
    for (int i = 0; i < 4 * kCounters; ++i) {
      words[4 * j + i] = static_cast<uint32_t>(c[i % 4][i / 4]);
    }
  }
}

// The upper 24 bits of a minimum's word, at most, for a block of log-weights up to z that may win.
struct LogitLimit {
  F cut;
  explicit LogitLimit(float cut) : cut(splat(cut > -FLT_MAX ? cut - 4.1588831f : -FLT_MAX)) {}
  SPECDEC_ALWAYS_INLINE I operator()(F z) const {
    constexpr float kStep = 0x1p23f / 0.693147181f, kOffset = (127 + 24) * 0x1p23f;
    const F bits = fma(z - cut, splat(kStep), splat(kOffset));
    return to_int((F)to_int(max(min(bits, splat(kOffset)), F{})));
  }
};

// The same for weights; exp(cut) may be 0.
struct WeightLimit {
  F inverse;
  explicit WeightLimit(float linear_cut) : inverse(splat(0x1p30f / linear_cut)) {}
  SPECDEC_ALWAYS_INLINE I operator()(F w) const {
    return to_int(min(w * inverse, splat(0x1p24f)));  // NaN, of 0 / 0, to the bound
  }
};

// The blocks of a tile whose key may win, as bits. `hopeless`: keys below it cannot win, whatever
// the word.
template <class Key, class Limit>
SPECDEC_INLINE uint32_t race_blocks(const float* blocks, int64_t first_id, const Race& race,
                                    uint32_t* words, float hopeless, const Key& key,
                                    const Limit& limit) {
  uint32_t found = 0;
  for (int j = 0; j < kTileBlocks; j += kWidth) {
    found |= lane_bits(ge(key(load<F>(blocks + j)), splat(hopeless))) << j;
  }
  if (found == 0) return 0;
  minima_words(race.stream, static_cast<uint32_t>((kMinima + first_id / kNoiseBlock) >> 2), words);
  uint32_t wins = 0;
  for (int j = 0; j < kTileBlocks; j += kWidth) {
    const I word = (I)(load<U>(words + j) >> 8);
    wins |= lane_bits(at_most(word, limit(key(load<F>(blocks + j))))) << j;
  }
  return found & wins;
}

uint32_t tile_race_logits(const float* blocks, int64_t first_id, const Race& race,
                          uint32_t* words) {
  const F inv_t = splat(race.inv_t), top = splat(race.max);
  const F threshold = splat(race.threshold > -FLT_MAX ? race.threshold : -FLT_MAX);
  const auto key = [&](F l) SPECDEC_ALWAYS_INLINE {
    return select(ge(l, threshold), (l - top) * inv_t, splat(-kInf));
  };
  // Never -inf: a block without a kept logit has that key, and there may be no row behind it.
  const float hopeless = race.cut() > -FLT_MAX ? race.cut() - kMaxRaceNoise : -FLT_MAX;
  return race_blocks(blocks, first_id, race, words, hopeless, key, LogitLimit(race.cut()));
}

uint32_t tile_race_weights(const float* blocks, int64_t first_id, const Race& race,
                           uint32_t* words) {
  constexpr float kMaxInverse = 5.6e11f;  // above 1 / E for every word: exp(27.05)
  const auto key = [](F w) SPECDEC_ALWAYS_INLINE { return w; };
  return race_blocks(blocks, first_id, race, words, race.linear_cut() * (1.f / kMaxInverse), key,
                     WeightLimit(race.linear_cut()));
}
