// The SIMD half of the race: Philox for four blocks of lanes at a time, and a bound that discards
// all but the few ids that may win. Included by tile_kernels.h, after simd.h.
//
// A score is z - log E, and E = -log1p(-x) >= x. So a winner's x is at most exp(z - best score), or
// for weights w / exp(best score). Mitchell's log2(2^e (1 + f)) ~ e + f, a float's bits read as a
// number, never exceeds log2: its inverse, a number's bits read as a float, gives a limit that is
// never too small. Words are compared with it as integers, by their upper 24 bits, and a block
// first by the smallest word and the largest logit of its four vectors: most blocks end there. Only
// survivors pay for the two exact logarithms, one id at a time, in Race.

constexpr int kBlock = 4 * kWidth;  // ids of a block: a counter a lane, four words a counter

// Lane l of the counters holds quad offset 4-lane group g, place j: kWidth / 4 * j + g, so that the
// 4 x 4 transposes inside 128-bit groups leave the words in id order.
SPECDEC_INLINE constexpr int quad_of_lane(int lane) { return kWidth / 4 * (lane % 4) + lane / 4; }

SPECDEC_INLINE F unpack_low(F a, F b) {
#if SPECDEC_WIDTH == 16
  return _mm512_unpacklo_ps(a, b);
#elif SPECDEC_WIDTH == 8
  return _mm256_unpacklo_ps(a, b);
#else
  return __builtin_shuffle(a, b, I{0, 4, 1, 5});
#endif
}

SPECDEC_INLINE F unpack_high(F a, F b) {
#if SPECDEC_WIDTH == 16
  return _mm512_unpackhi_ps(a, b);
#elif SPECDEC_WIDTH == 8
  return _mm256_unpackhi_ps(a, b);
#else
  return __builtin_shuffle(a, b, I{2, 6, 3, 7});
#endif
}

// A stream, ready for its blocks: what the first two rounds make of the counter words that all ids
// share, and the keys of the others. Whole vectors: broadcasts in the loop would take the port of
// the shuffles.
struct Philox {
  L k0[kPhiloxRounds], k1[kPhiloxRounds];
  L first2, second0, second2, second3;  // word 2 of round 1; words 0, 2, 3 of round 2
  L quad[2];                            // offsets of even and odd lanes

  explicit Philox(const NoiseStream& s) {
    for (int r = 2; r < kPhiloxRounds; ++r) {
      k0[r] = L{} + uint64_t{s.key0 + r * kPhiloxWeyl0};
      k1[r] = L{} + uint64_t{s.key1 + r * kPhiloxWeyl1};
    }
    // Round 1 multiplies word 2, the step; round 2 the word 0 which that makes.
    const uint64_t product1 = uint64_t{kPhiloxMul1} * s.step;
    const auto word0 = static_cast<uint32_t>((product1 >> 32) ^ s.position ^ s.key0);
    const uint64_t product0 = uint64_t{kPhiloxMul0} * word0;
    first2 = L{} + uint64_t{s.lane ^ s.key1};
    second0 = L{} + (product1 ^ (s.key0 + kPhiloxWeyl0));
    second2 = L{} + ((product0 >> 32) ^ (s.key1 + kPhiloxWeyl1));
    second3 = L{} + product0;
    for (int h = 0; h < 2; ++h) {
      for (int j = 0; j < kWidth / 2; ++j) quad[h][j] = quad_of_lane(2 * j + h);
    }
  }
};

// words[k] = the words of ids 4 * quad + k * kWidth ... in id order.
SPECDEC_INLINE void philox_block(const Philox& s, uint32_t quad, U words[4]) {
  // 64-bit lanes whose low words are the state: the widening product needs no shuffles, and what
  // stands in the high words is never read. c[h]: even (h = 0) and odd lanes.
  L c0[2], c1[2], c2[2], c3[2];
  const L m0 = L{} + uint64_t{kPhiloxMul0}, m1 = L{} + uint64_t{kPhiloxMul1};
  for (int h = 0; h < 2; ++h) {
    const L product0 = mul_low_words(m0, s.quad[h] + uint64_t{quad});
    const L product1 = mul_low_words(m1, high_words(product0) ^ s.first2);
    c0[h] = high_words(product1) ^ s.second0;
    c1[h] = product1;
    c2[h] = product0 ^ s.second2;
    c3[h] = s.second3;
  }
  for (int round = 2; round < kPhiloxRounds; ++round) {
    for (int h = 0; h < 2; ++h) {
      const L product0 = mul_low_words(m0, c0[h]), product1 = mul_low_words(m1, c2[h]);
      c0[h] = high_words(product1) ^ c1[h] ^ s.k0[round];
      c2[h] = high_words(product0) ^ c3[h] ^ s.k1[round];
      c1[h] = product1;
      c3[h] = product0;
    }
  }
  // 4 x 4 transposes: from word k of four counters to the four words of one counter.
  const F a = (F)join_words(c0[0], c0[1]), b = (F)join_words(c1[0], c1[1]);
  const F c = (F)join_words(c2[0], c2[1]), d = (F)join_words(c3[0], c3[1]);
  const F ac0 = unpack_low(a, c), bd0 = unpack_low(b, d);
  const F ac1 = unpack_high(a, c), bd1 = unpack_high(b, d);
  words[0] = (U)unpack_low(ac0, bd0);
  words[1] = (U)unpack_high(ac0, bd0);
  words[2] = (U)unpack_low(ac1, bd1);
  words[3] = (U)unpack_high(ac1, bd1);
}

// The upper 24 bits of a word that may win, at most, for log-weights z.
struct LogitLimit {
  F cut;
  explicit LogitLimit(float cut) : cut(splat(cut > -FLT_MAX ? cut : -FLT_MAX)) {}
  SPECDEC_ALWAYS_INLINE I operator()(F z) const {
    constexpr float kStep = 0x1p23f / 0.693147181f, kOffset = (127 + 24) * 0x1p23f;
    const F bits = fma(z - cut, splat(kStep), splat(kOffset));
    return to_int((F)to_int(max(min(bits, splat(kOffset)), F{})));
  }
};

// The same for weights; exp(cut) may be 0.
struct WeightLimit {
  F inverse;
  explicit WeightLimit(float linear_cut) : inverse(splat(0x1p24f / linear_cut)) {}
  SPECDEC_ALWAYS_INLINE I operator()(F w) const {
    return to_int(min(w * inverse, splat(0x1p24f)));  // NaN, of 0 / 0, to the bound
  }
};

// Offers the ids of a tile that may win, and finds its maximum on the way. Of the largest value of
// a block `key` makes what is compared with `hopeless` and with the words by `limit`; both depend
// on the race.
template <LogitType kType, class Key, class Rules>
SPECDEC_INLINE TileMax race_blocks(const void* values, int n, int64_t first_id, const Race& race,
                                   Ahead ahead, const Key& key, const Rules& rules) {
  const Philox philox(race.stream);
  F top = splat(-kInf);
  Mask nan = no_lane();
  for (int i = 0; i < n; i += kBlock) {
    ahead.fetch(i, kBlock);
    F v[4];
    for (int k = 0; k < 4; ++k) v[k] = load_logits<kType>(values, i + k * kWidth);
    const F largest = max(max(v[0], v[1]), max(v[2], v[3]));
    top = max(largest, top);
    nan = nan | either_nan(v[0], v[1]) | either_nan(v[2], v[3]);
    const F best = key(largest);
    if (!any(ge(best, splat(rules.hopeless())))) continue;
    U words[4];
    philox_block(philox, static_cast<uint32_t>((first_id + i) >> 2), words);
    const auto limit = rules.limit();
    const U least = min(min(words[0], words[1]), min(words[2], words[3]));
    if (!any(at_most((I)(least >> 8), limit(best)))) continue;
    uint64_t bits = 0;
    for (int k = 0; k < 4; ++k) {
      const Mask may_win = at_most((I)(words[k] >> 8), limit(key(v[k])));
      bits |= uint64_t{lane_bits(may_win)} << (k * kWidth);
    }
    float value[kBlock];
    uint32_t word[kBlock];
    std::memcpy(value, v, sizeof value);
    std::memcpy(word, words, sizeof word);
    for (; bits != 0; bits &= bits - 1) {
      const int j = __builtin_ctzll(bits);
      rules.offer(first_id + i + j, value[j], word[j]);
    }
  }
  return {lane_max(top), any(nan)};
}

struct LogitRules {
  Race& race;
  float hopeless() const { return race.cut() - kMaxRaceNoise; }
  LogitLimit limit() const { return LogitLimit(race.cut()); }
  void offer(int64_t id, float logit, uint32_t word) const { race.offer_logit(id, logit, word); }
};

struct WeightRules {
  Race& race;
  float hopeless() const {
    constexpr float kMaxInverse = 8.8e9f;  // above 1 / E for every word: exp(22.89)
    return race.linear_cut() * (1.f / kMaxInverse);
  }
  WeightLimit limit() const { return WeightLimit(race.linear_cut()); }
  void offer(int64_t id, float weight, uint32_t word) const { race.offer_weight(id, weight, word); }
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
