// The products of linear.h for one instruction set. Included by tile_kernels.h.

constexpr int kMostRows = kWidth == 16 ? 6 : 3;  // sums, rows and a weight fill the registers

// The sums of four vectors' lanes: neighbours first, then pairs, then quarters.
SPECDEC_INLINE void lane_sums(const F v[4], float* out) {
#if SPECDEC_WIDTH >= 8
#if SPECDEC_WIDTH == 16
  __m256 half[4];
  for (int i = 0; i < 4; ++i) {
    half[i] = _mm512_castps512_ps256((__m512)v[i]) + _mm512_extractf32x8_ps((__m512)v[i], 1);
  }
#else
  const F* half = v;
#endif
  const __m256 pairs = _mm256_hadd_ps((__m256)half[0], (__m256)half[1]);
  const __m256 more = _mm256_hadd_ps((__m256)half[2], (__m256)half[3]);
  const __m256 sums = _mm256_hadd_ps(pairs, more);
  _mm_storeu_ps(out, _mm256_castps256_ps128(sums) + _mm256_extractf128_ps(sums, 1));
#else
  for (int i = 0; i < 4; ++i) out[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}

// A block of outputs for kRows rows. `kFetches`: ask for the weights of the next block meanwhile.
template <LogitType kType, int kRows, bool kFetches>
SPECDEC_INLINE void multiply_block(const LinearRows& l, int64_t output, int64_t row) {
  constexpr int64_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
  const char* weight[kOutputBlock];
  for (int o = 0; o < kOutputBlock; ++o) {  // behind the last output: the last once more
    const int64_t at = output + o < l.outputs ? output + o : l.outputs - 1;
    weight[o] = static_cast<const char*>(l.weight) + at * l.inputs * kSize;
  }
  const int64_t ahead = (32768 + kOutputBlock * l.inputs * kSize - 1) /
                        (kOutputBlock * l.inputs * kSize) * (kOutputBlock * l.inputs * kSize);
  F sum[kRows][kOutputBlock] = {};
  for (int64_t i = 0; i < l.inputs; i += kWidth) {
    F x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] = load<F>(l.x + (row + r) * l.inputs + i);
#pragma GCC unroll 4
    for (int o = 0; o < kOutputBlock; ++o) {
      const char* from = weight[o] + i * kSize;
      if (kFetches) __builtin_prefetch(from + ahead);
      const F w = load_logits<kType>(from, 0);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][o] = fma(x[r], w, sum[r][o]);
    }
  }
  const int count = static_cast<int>(l.outputs - output < kOutputBlock ? l.outputs - output : 4);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float sums[kOutputBlock];
    lane_sums(sum[r], sums);
    float* y = l.y + (row + r) * l.outputs + output;
    for (int o = 0; o < count; ++o) y[o] = l.bias ? sums[o] + l.bias[output + o] : sums[o];
  }
}

template <LogitType kType, bool kFetches>
SPECDEC_INLINE void multiply_rest(const LinearRows& l, int64_t output, int64_t row) {
  switch (l.rows - row) {
    case 0:
      return;
    case 1:
      return multiply_block<kType, 1, kFetches>(l, output, row);
    case 2:
      return multiply_block<kType, 2, kFetches>(l, output, row);
#if SPECDEC_WIDTH == 16
    case 3:
      return multiply_block<kType, 3, kFetches>(l, output, row);
    case 4:
      return multiply_block<kType, 4, kFetches>(l, output, row);
    case 5:
      return multiply_block<kType, 5, kFetches>(l, output, row);
#endif
  }
}

template <LogitType kType>
void linear(const LinearRows& l, int64_t first, int64_t end) {
  for (int64_t output = first * kOutputBlock; output < end * kOutputBlock; output += kOutputBlock) {
    if (l.rows < kMostRows) {
      multiply_rest<kType, true>(l, output, 0);
      continue;
    }
    multiply_block<kType, kMostRows, true>(l, output, 0);
    int64_t row = kMostRows;
    for (; row + kMostRows <= l.rows; row += kMostRows) {
      multiply_block<kType, kMostRows, false>(l, output, row);
    }
    multiply_rest<kType, false>(l, output, row);
  }
}
