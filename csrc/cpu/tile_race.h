// The SIMD half of the race: a bound that discards all but the few blocks of 64 ids that may win.
// Included by tile_kernels.h, after simd.h.
//
// A score is z - log E, and no E of a block is below its minimum m = -log1p(-x) / 64 >= x / 64. So
// a winner's x is at most 64 exp(z - best score), or for weights 64 w / exp(best score), with the
// block's largest z or w. Mitchell's log2(2^e (1 + f)) ~ e + f, a float's bits read as a number,
// never exceeds log2: its inverse, a number's bits read as a float, gives a limit that is never too
// small. The word of x is compared with it as an integer, by its upper 24 bits. Only survivors pay
// for exact logarithms, in Race.

constexpr int kTileBlocks = kTile / kNoiseBlock;

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

// Offers the blocks of a tile that may win, and finds its maximum on the way. `key` makes of values
// what is compared with `hopeless` and, by `limit`, with the words; both depend on the race.
template <LogitType kType, class Key, class Rules>
SPECDEC_INLINE TileMax race_blocks(const void* values, int n, int64_t first_id, const Race& race,
                                   Ahead ahead, const Key& key, const Rules& rules) {
  uint32_t words[kTileBlocks];
  minima_words(race.stream, static_cast<uint32_t>((kMinima + first_id / kNoiseBlock) >> 2), words);
  F top = splat(-kInf);
  Mask nan = no_lane();
  for (int i = 0; i < n; i += kNoiseBlock) {
    ahead.fetch(i, kNoiseBlock);
    F largest[2] = {splat(-kInf), splat(-kInf)};
    for (int j = i; j < i + kNoiseBlock; j += 2 * kWidth) {
      const F a = load_logits<kType>(values, j), b = load_logits<kType>(values, j + kWidth);
      largest[0] = max(a, largest[0]);
      largest[1] = max(b, largest[1]);
      nan = nan | either_nan(a, b);
    }
    const F most = max(largest[0], largest[1]), best = key(most);
    top = max(most, top);
    if (!any(ge(best, splat(rules.hopeless())))) continue;
    const uint32_t word = words[i / kNoiseBlock];
    if (!any(at_most((I)splat_bits(word >> 8), rules.limit()(best)))) continue;
    float value[kNoiseBlock];
    for (int j = 0; j < kNoiseBlock; j += kWidth) {
      store(value + j, load_logits<kType>(values, i + j));
    }
    rules.offer(first_id + i, value, word);
  }
  return {lane_max(top), any(nan)};
}

struct LogitRules {
  Race& race;
  float hopeless() const { return race.cut() - kMaxRaceNoise; }
  LogitLimit limit() const { return LogitLimit(race.cut()); }
  void offer(int64_t first, const float* logits, uint32_t word) const {
    race.offer_logits(first, logits, word);
  }
};

struct WeightRules {
  Race& race;
  float hopeless() const {
    constexpr float kMaxInverse = 5.6e11f;  // above 1 / E for every word: exp(27.05)
    return race.linear_cut() * (1.f / kMaxInverse);
  }
  WeightLimit limit() const { return WeightLimit(race.linear_cut()); }
  void offer(int64_t first, const float* weights, uint32_t word) const {
    race.offer_weights(first, weights, word);
  }
};

template <LogitType kType>
TileMax tile_race_logits(const void* logits, int n, int64_t first_id, Race& race, Ahead ahead) {
  const F inv_t = splat(race.inv_t);
  const F threshold = splat(race.threshold > -FLT_MAX ? race.threshold : -FLT_MAX);
  const auto key = [&](F l) SPECDEC_ALWAYS_INLINE {
    return select(ge(l, threshold), l * inv_t, splat(-kInf));
  };
  return race_blocks<kType>(logits, n, first_id, race, ahead, key, LogitRules{race});
}

void tile_race_weights(const float* tile, int n, int64_t first_id, Race& race) {
  const auto key = [](F w) SPECDEC_ALWAYS_INLINE { return w; };
  race_blocks<LogitType::kFloat32>(tile, n, first_id, race, {}, key, WeightRules{race});
}
