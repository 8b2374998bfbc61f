// The SIMD half of the race: Philox for four blocks of lanes at a time, and a bound that discards
// all but the few ids that may win. Included by tile_kernels.h, after simd.h.
//
// A score is z - log E. As E = -log1p(-x) >= x, and Mitchell's log2(2^e (1 + f)) ~ e + f, which is
// the float's bits read as a number, never exceeds log2, a winner satisfies
//   z - ln 2 * mitchell(x) >= best score,   or for weights   w >= x * exp(best score).
// Only survivors pay for the two exact logarithms, one id at a time, in Race.

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

// Round keys of a stream, one memory operand an instruction.
struct RoundKeys {
  uint64_t k0[kPhiloxRounds], k1[kPhiloxRounds];
  explicit RoundKeys(const NoiseStream& s) {
    for (int r = 0; r < kPhiloxRounds; ++r) {
      k0[r] = s.key0 + r * kPhiloxWeyl0;
      k1[r] = s.key1 + r * kPhiloxWeyl1;
    }
  }
};

// words[k] = the words of ids 4 * quad + k * kWidth ... in id order.
SPECDEC_INLINE void philox_block(const NoiseStream& s, const RoundKeys& keys, uint32_t quad,
                                 U words[4]) {
  // 64-bit lanes whose low words are the state: the widening product needs no shuffles, and what
  // stands in the high words is never read. c[h]: even (h = 0) and odd lanes.
  L c0[2] = {}, c1[2], c2[2], c3[2];
  for (int h = 0; h < 2; ++h) {
    for (int j = 0; j < kWidth / 2; ++j) c0[h][j] = quad + quad_of_lane(2 * j + h);
    c1[h] = L{} + uint64_t{s.position};
    c2[h] = L{} + uint64_t{s.step};
    c3[h] = L{} + uint64_t{s.lane};
  }
  const L m0 = L{} + uint64_t{kPhiloxMul0}, m1 = L{} + uint64_t{kPhiloxMul1};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int h = 0; h < 2; ++h) {
      const L product0 = mul_low_words(m0, c0[h]), product1 = mul_low_words(m1, c2[h]);
      c0[h] = high_words(product1) ^ c1[h] ^ (L{} + keys.k0[round]);
      c2[h] = high_words(product0) ^ c3[h] ^ (L{} + keys.k1[round]);
      c1[h] = product1;
      c3[h] = product0;
    }
  }
  const auto join = [](const L c[2])
                        SPECDEC_ALWAYS_INLINE { return (F)((c[0] & 0xffffffffu) | (c[1] << 32)); };
  // 4 x 4 transposes: from word k of four counters to the four words of one counter.
  const F a = join(c0), b = join(c1), c = join(c2), d = join(c3);
  const F ac0 = unpack_low(a, c), bd0 = unpack_low(b, d);
  const F ac1 = unpack_high(a, c), bd1 = unpack_high(b, d);
  words[0] = (U)unpack_low(ac0, bd0);
  words[1] = (U)unpack_high(ac0, bd0);
  words[2] = (U)unpack_low(ac1, bd1);
  words[3] = (U)unpack_high(ac1, bd1);
}

// Half the word as a float: x * 2^31 within its rounding, never above by more.
SPECDEC_INLINE F half_word(U word) { return __builtin_convertvector((I)(word >> 1), F); }

SPECDEC_INLINE uint64_t block_bits(const Mask may_win[4]) {
  uint64_t bits = 0;
  for (int k = 0; k < 4; ++k) bits |= uint64_t{lane_bits(may_win[k])} << (k * kWidth);
  return bits;
}

// Runs `offer(index, word)` for each id of a block that may win.
template <class Offer>
SPECDEC_INLINE void offer_survivors(uint64_t bits, const U words[4], const Offer& offer) {
  uint32_t word[kBlock];
  std::memcpy(word, words, sizeof word);
  for (; bits != 0; bits &= bits - 1) {
    const int j = __builtin_ctzll(bits);
    offer(j, word[j]);
  }
}

void tile_race_logits(const float* tile, int n, int64_t first_id, Race& race, Ahead ahead) {
  // ln 2 * (bits * 2^-23 - 127 - 31), the last 31 for half_word's scale
  constexpr float kStep = 0.693147181f * 0x1p-23f, kOffset = 0.693147181f * 158.f;
  const NoiseStream stream = race.stream;
  const RoundKeys keys(stream);
  const F inv_t = splat(race.inv_t);
  const F threshold = splat(race.threshold > -FLT_MAX ? race.threshold : -FLT_MAX);
  for (int i = 0; i < n; i += kBlock) {
    ahead.fetch(i, kBlock);
    F z[4];
    Mask may_win[4];
    const F hopeless = splat(race.cut() - kMaxRaceNoise);
    for (int k = 0; k < 4; ++k) {
      const F l = load<F>(tile + i + k * kWidth);
      z[k] = select(ge(l, threshold), l * inv_t, splat(-kInf));
      may_win[k] = ge(z[k], hopeless);
    }
    if (!any(may_win[0] | may_win[1] | may_win[2] | may_win[3])) continue;
    U words[4];
    philox_block(stream, keys, static_cast<uint32_t>((first_id + i) >> 2), words);
    const F cut = splat(race.cut());
    for (int k = 0; k < 4; ++k) {
      const F mitchell = __builtin_convertvector((I)half_word(words[k]), F);
      may_win[k] = ge(fma(mitchell, splat(-kStep), z[k] + splat(kOffset)), cut);
    }
    const uint64_t bits = block_bits(may_win);
    if (bits == 0) continue;
    offer_survivors(bits, words, [&](int j, uint32_t word) {
      race.offer_logit(first_id + i + j, tile[i + j], word);
    });
  }
}

void tile_race_weights(const float* tile, int n, int64_t first_id, Race& race) {
  constexpr float kMaxInverse = 8.8e9f;  // above 1 / E for every word: exp(22.89)
  const NoiseStream stream = race.stream;
  const RoundKeys keys(stream);
  for (int i = 0; i < n; i += kBlock) {
    F w[4];
    Mask may_win[4];
    const F hopeless = splat(race.linear_cut() * (1.f / kMaxInverse));
    for (int k = 0; k < 4; ++k) {
      w[k] = load<F>(tile + i + k * kWidth);
      may_win[k] = ge(w[k], hopeless);
    }
    if (!any(may_win[0] | may_win[1] | may_win[2] | may_win[3])) continue;
    U words[4];
    philox_block(stream, keys, static_cast<uint32_t>((first_id + i) >> 2), words);
    const F cut = splat(race.linear_cut() * 0x1p-31f);
    for (int k = 0; k < 4; ++k) may_win[k] = ge(w[k], half_word(words[k]) * cut);
    const uint64_t bits = block_bits(may_win);
    if (bits == 0) continue;
    offer_survivors(bits, words, [&](int j, uint32_t word) {
      race.offer_weight(first_id + i + j, tile[i + j], word);
    });
  }
}
