// Vectors of SPECDEC_WIDTH lanes for one instruction set: GCC/Clang vector extensions, and the few
// operations that they lack. Included by tile_kernels.h inside namespace specdec::cpu::SPECDEC_ISA,
// after the file's target pragma, so nothing here is shared between instruction sets.

constexpr int kWidth = SPECDEC_WIDTH;
constexpr int kLanes = 16;               // logical lanes of every accumulator, whatever the width
constexpr int kParts = kLanes / kWidth;  // vectors that make them up

typedef float F __attribute__((vector_size(4 * SPECDEC_WIDTH)));
typedef int32_t I __attribute__((vector_size(4 * SPECDEC_WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * SPECDEC_WIDTH)));
typedef uint64_t L __attribute__((vector_size(4 * SPECDEC_WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * SPECDEC_WIDTH)));
typedef uint16_t W __attribute__((vector_size(4 * SPECDEC_WIDTH)));
typedef int16_t S __attribute__((vector_size(4 * SPECDEC_WIDTH)));
typedef uint8_t B __attribute__((vector_size(SPECDEC_WIDTH)));

#define SPECDEC_INLINE static inline __attribute__((always_inline))

// Lanes of two vectors by their numbers; GCC 11 has no __builtin_shufflevector, Clang nothing else.
#if defined(__clang__)
#define SPECDEC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SPECDEC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

SPECDEC_INLINE F splat(float x) { return x - F{}; }
SPECDEC_INLINE U splat_bits(uint32_t x) { return x - U{}; }

template <class V, class T>
SPECDEC_INLINE V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

SPECDEC_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }

#if SPECDEC_WIDTH == 16

typedef __mmask16 Mask;
SPECDEC_INLINE Mask ge(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
SPECDEC_INLINE Mask lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
SPECDEC_INLINE Mask eq(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
SPECDEC_INLINE Mask either_nan(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
SPECDEC_INLINE Mask no_lane() { return 0; }
SPECDEC_INLINE uint32_t lane_bits(Mask m) { return m; }
SPECDEC_INLINE F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
SPECDEC_INLINE F load_where(Mask m, const float* p) { return _mm512_maskz_loadu_ps(m, p); }
SPECDEC_INLINE I ones(Mask m) { return (I)_mm512_maskz_set1_epi32(m, 1); }
SPECDEC_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where one is NaN
SPECDEC_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
SPECDEC_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
SPECDEC_INLINE L mul_low_words(L a, L b) { return (L)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
// By a shuffle: shifts and products share a port, and the race is made of both.
SPECDEC_INLINE L high_words(L a) { return (L)_mm512_shuffle_epi32((__m512i)a, _MM_PERM_DDBB); }
SPECDEC_INLINE F from_half(H h) { return _mm512_cvtph_ps((__m256i)h); }
SPECDEC_INLINE Mask at_most(I a, I b) { return _mm512_cmple_epi32_mask((__m512i)a, (__m512i)b); }
SPECDEC_INLINE I to_int(F v) { return (I)_mm512_cvttps_epi32(v); }
SPECDEC_INLINE F pick(const float table[16], U index) {  // by its low four bits
  return _mm512_permutexvar_ps((__m512i)index, load<F>(table));
}
SPECDEC_INLINE int compress(F v, Mask m, float* out) {
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(m, v));  // out has room for a whole vector
  return __builtin_popcount(m);
}

#else

typedef I Mask;
SPECDEC_INLINE Mask ge(F a, F b) { return a >= b; }
SPECDEC_INLINE Mask lt(F a, F b) { return a < b; }
SPECDEC_INLINE Mask eq(F a, F b) { return a == b; }
SPECDEC_INLINE Mask no_lane() { return I{}; }
SPECDEC_INLINE F select(Mask m, F yes, F no) { return m ? yes : no; }
SPECDEC_INLINE I ones(Mask m) { return -m; }
SPECDEC_INLINE Mask at_most(I a, I b) { return a <= b; }
SPECDEC_INLINE I to_int(F v) { return __builtin_convertvector(v, I); }

#if SPECDEC_WIDTH == 8
SPECDEC_INLINE Mask either_nan(F a, F b) { return (I)_mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
SPECDEC_INLINE uint32_t lane_bits(Mask m) { return _mm256_movemask_ps((__m256)m); }
SPECDEC_INLINE F load_where(Mask m, const float* p) { return _mm256_maskload_ps(p, (__m256i)m); }
SPECDEC_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
SPECDEC_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
SPECDEC_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
SPECDEC_INLINE L mul_low_words(L a, L b) { return (L)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
SPECDEC_INLINE L high_words(L a) { return (L)_mm256_shuffle_epi32((__m256i)a, 0xf5); }
SPECDEC_INLINE F from_half(H h) { return _mm256_cvtph_ps((__m128i)h); }
SPECDEC_INLINE F pick(const float table[8], U index) {  // by its low three bits
  return _mm256_permutevar8x32_ps(load<F>(table), (__m256i)index);
}
#else
#if defined(__SSE2__)
SPECDEC_INLINE Mask either_nan(F a, F b) { return (I)_mm_cmpunord_ps(a, b); }
SPECDEC_INLINE uint32_t lane_bits(Mask m) { return _mm_movemask_ps((__m128)m); }
SPECDEC_INLINE F max(F a, F b) { return _mm_max_ps(a, b); }
SPECDEC_INLINE F min(F a, F b) { return _mm_min_ps(a, b); }
SPECDEC_INLINE L mul_low_words(L a, L b) { return (L)_mm_mul_epu32((__m128i)a, (__m128i)b); }
#else
SPECDEC_INLINE Mask either_nan(F a, F b) { return (a != a) | (b != b); }
SPECDEC_INLINE uint32_t lane_bits(Mask m) {
  return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8);
}
SPECDEC_INLINE F max(F a, F b) { return a > b ? a : b; }
SPECDEC_INLINE F min(F a, F b) { return a < b ? a : b; }
SPECDEC_INLINE L mul_low_words(L a, L b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#endif
SPECDEC_INLINE F load_where(Mask m, const float* p) {
  F v{};
  for (int j = 0; j < kWidth; ++j) {
    if (m[j]) v[j] = p[j];
  }
  return v;
}
SPECDEC_INLINE L high_words(L a) { return a >> 32; }
// The baseline has no fused operation: its row sums differ from the others' in the last bits.
SPECDEC_INLINE F fma(F a, F b, F c) { return a * b + c; }
// Half to float by bits: shift exponent and mantissa into place, then scale by 2^112. Infinity and
// NaN keep a full exponent. Denormal halves become float denormals first, which scale exactly.
SPECDEC_INLINE F from_half(H h) {
  const U wide = __builtin_convertvector(h, U);
  const U magnitude = (wide & 0x7fffu) << 13;
  const F scaled = (F)magnitude * splat(0x1p112f);
  const U special = (U)((I)magnitude >= (I)splat_bits(0x7c00u << 13));
  return (F)((U)scaled | (special & 0x7f800000u) | ((wide & 0x8000u) << 16));
}
#endif

#if SPECDEC_WIDTH == 8
// Of each mask the lanes that are set, in order.
struct SetLanes {
  uint8_t of[256][8] = {};
  constexpr SetLanes() {
    for (int m = 0; m < 256; ++m) {
      for (int lane = 0, n = 0; lane < 8; ++lane) {
        if ((m >> lane & 1) != 0) of[m][n++] = static_cast<uint8_t>(lane);
      }
    }
  }
};
constexpr SetLanes kSetLanes;

SPECDEC_INLINE int compress(F v, Mask m, float* out) {  // out has room for a whole vector
  const uint32_t bits = lane_bits(m);
  const auto* lanes = reinterpret_cast<const __m128i*>(kSetLanes.of[bits]);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(lanes));
  store(out, (F)_mm256_permutevar8x32_ps((__m256)v, order));
  return __builtin_popcount(bits);
}
#else
SPECDEC_INLINE int compress(F v, Mask m, float* out) {  // without a branch: which are set is chance
  int n = 0;
  for (int j = 0; j < kWidth; ++j) {
    out[n] = v[j];
    n -= m[j];
  }
  return n;
}
#endif

#endif  // SPECDEC_WIDTH == 16

#if SPECDEC_WIDTH >= 8  // stores of vectors may alias, those of floats may not
SPECDEC_INLINE int compress(I v, Mask m, int32_t* out) {
  return compress((F)v, m, reinterpret_cast<float*>(out));
}
#endif

SPECDEC_INLINE bool any(Mask m) { return lane_bits(m) != 0; }

#if SPECDEC_WIDTH == 16  // by name: GCC 12 makes a comparison and a blend of the signed one
SPECDEC_INLINE W max_signed(W a, W b) { return (W)_mm512_max_epi16((__m512i)a, (__m512i)b); }
#else
SPECDEC_INLINE W max_signed(W a, W b) { return (W)((S)a > (S)b ? (S)a : (S)b); }
#endif
SPECDEC_INLINE W max_unsigned(W a, W b) { return a > b ? a : b; }
SPECDEC_INLINE W min_unsigned(W a, W b) { return a < b ? a : b; }

SPECDEC_INLINE bool any_bit(U v) {
  uint64_t word[sizeof(U) / 8], all = 0;
  std::memcpy(word, &v, sizeof v);
  for (const uint64_t one : word) all |= one;
  return all != 0;
}

SPECDEC_INLINE F from_bfloat16(H h) {
#if SPECDEC_WIDTH == 16  // by name: GCC 12 widens in two halves what it widens by convertvector
  return (F)((U)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif SPECDEC_WIDTH == 8
  return (F)((U)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
  return (F)(__builtin_convertvector(h, U) << 16);
#endif
}

// bfloat16 of each lane, to nearest even, in the upper half; no NaN.
SPECDEC_INLINE U nearest_bfloat16(F x) {
  const U bits = (U)x;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

constexpr float kLeastExp = -87.3f;

// exp(x) for x <= 88, 1.2e-38 below kLeastExp, NaN to NaN. x = n ln 2 + r; 2^n enters the exponent
// bits. Minimax of degree 6 with constant 1 (2e-9 relative): within 1 ulp on [-87, 0], 2 without
// fma.
SPECDEC_INLINE F exp(F x) {
  x = max(splat(kLeastExp), x);       // the second operand where one is NaN
  const F magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = fma(x, splat(1.44269504f), magic);
  const F n = shifted - magic;
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F y = splat(0.001384364441037178f);
  y = fma(y, r, splat(0.008374162949621677f));
  y = fma(y, r, splat(0.04166800156235695f));
  y = fma(y, r, splat(0.16666431725025177f));
  y = fma(y, r, splat(0.4999999403953552f));
  y = fma(y, r, splat(1.f));
  y = fma(y, r, splat(1.f));
  return (F)((U)y + ((U)shifted << 23));
}

// The weights of one row in one pass: exp((l - center) * inv_t) without the row's maximum.
#if SPECDEC_WIDTH >= 8
// 2^(l k - bias) = 2^n 2^(j / 8) 2^r: adding `magic` rounds to eighths, whose bits are n and j; the
// table's entries lack j's share of the bits. Minimax of degree 3 with constant 1 on |r| <= 1/16
// (2.7e-8 relative). The bias is a multiple of 1/8, so that n + j / 8 is exact. k is inv_t *
// log2(e) rounded: relative to the largest weight, which is scaled to 1, a weight w is wrong by
// |log w| 2^-24 of itself, as in any float product. 12 instructions where `exp` needs the maximum
// first and then 19.
struct Exp2 {
  static constexpr uint32_t kEighths[16] = {0x3f800000u, 0x3f7b95c2u, 0x3f7837f0u, 0x3f75fed7u,
                                            0x3f7504f3u, 0x3f75672au, 0x3f7744fdu, 0x3f7ac0c7u,
                                            0x3f800000u, 0x3f7b95c2u, 0x3f7837f0u, 0x3f75fed7u,
                                            0x3f7504f3u, 0x3f75672au, 0x3f7744fdu, 0x3f7ac0c7u};
  float table[16];
  F k, magic, lowest;
  explicit Exp2(const ExpShift& s)
      : k(splat(s.k)),
        magic(splat(1572864.f - s.bias)),  // 1.5 * 2^20
        lowest(splat(s.lowest)) {
    std::memcpy(table, kEighths, sizeof table);
  }
  SPECDEC_ALWAYS_INLINE F add(F l, F sum) const {
    F scale;
    const F y = parted(l, &scale);
    return fma(scale, y, sum);
  }
  SPECDEC_ALWAYS_INLINE F operator()(F l) const {
    F scale;
    const F y = parted(l, &scale);
    return scale * y;
  }

 private:
  SPECDEC_ALWAYS_INLINE F parted(F l, F* scale) const {
    l = max(lowest, l);  // the second operand where one is NaN
    const F shifted = fma(l, k, magic);
    const F minus_n = magic - shifted;
    const F r = fma(l, k, minus_n);
    F y = splat(0.0554962232708931f);
    y = fma(y, r, splat(0.2402576357126236f));
    y = fma(y, r, splat(0.6931472420692444f));
    y = fma(y, r, splat(1.f));
    *scale = (F)((U)pick(table, (U)shifted) + ((U)shifted << 20));
    return y;
  }
};
#else
struct Exp2 {
  F center, inv_t, lowest;
  explicit Exp2(const ExpShift& s)
      : center(splat(s.center)), inv_t(splat(s.inv_t)), lowest(splat(s.lowest)) {}
  SPECDEC_ALWAYS_INLINE F add(F l, F sum) const { return sum + (*this)(l); }
  SPECDEC_ALWAYS_INLINE F operator()(F l) const { return exp((max(lowest, l) - center) * inv_t); }
};
#endif

// A float accumulator of 16 logical lanes, summed in the same order at every width.
struct Sum {
  F part[kParts] = {};
  SPECDEC_ALWAYS_INLINE void add(int k, F v) { part[k] = part[k] + v; }
  SPECDEC_ALWAYS_INLINE float total() const {
    float lane[kLanes];
    std::memcpy(lane, part, sizeof lane);
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
    }
    return lane[0];
  }
};

SPECDEC_INLINE float lane_max(F v) {
#if SPECDEC_WIDTH == 16
  return _mm512_reduce_max_ps(v);
#elif SPECDEC_WIDTH == 8
  v = max(v, SPECDEC_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, SPECDEC_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return max(v, SPECDEC_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6))[0];
#else
  v = max(v, SPECDEC_SHUFFLE(v, v, 2, 3, 0, 1));
  return max(v, SPECDEC_SHUFFLE(v, v, 1, 0, 3, 2))[0];
#endif
}

// Of each 2 kStep lanes of two vectors the lower kStep, or the upper ones: those of `a`, then
// `b`'s.
template <int kStep, int kFrom, int... kLane>
SPECDEC_INLINE F halves(F a, F b, std::integer_sequence<int, kLane...>) {
  return SPECDEC_SHUFFLE(a, b, (kFrom + kLane + (kLane & kStep ? kWidth - kStep : 0))...);
}
template <int kStep>
SPECDEC_INLINE F lower(F a, F b) {
  return halves<kStep, 0>(a, b, std::make_integer_sequence<int, kWidth>());
}
template <int kStep>
SPECDEC_INLINE F upper(F a, F b) {
  return halves<kStep, kStep>(a, b, std::make_integer_sequence<int, kWidth>());
}

// All lanes of each of kWidth vectors folded into one, in the order of the vectors.
template <int kStep = kWidth / 2, class Of>
SPECDEC_INLINE F fold_lanes(const F* v, const Of& of) {
  if constexpr (kStep == 0) {
    return v[0];
  } else {
    F half[kStep];
    for (int i = 0; i < kStep; ++i) {
      half[i] = of(lower<kStep>(v[i], v[i + kStep]), upper<kStep>(v[i], v[i + kStep]));
    }
    return fold_lanes<kStep / 2>(half, of);
  }
}

SPECDEC_INLINE F lane_maxima(const F* v) {
  return fold_lanes(v, [](F a, F b) SPECDEC_ALWAYS_INLINE { return max(a, b); });
}
SPECDEC_INLINE F lane_sums(const F* v) {
  return fold_lanes(v, [](F a, F b) SPECDEC_ALWAYS_INLINE { return a + b; });
}
