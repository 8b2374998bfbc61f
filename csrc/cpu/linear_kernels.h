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
  // The next block in the order of its bytes, as memory likes it: in the order of their use, a line
  // of each row in turn, one row takes 200 us in place of 120 (one thread, [1536, 256] in float32).
  constexpr int kStep = kOutputBlock * kWidth * kSize;
  const char* next = weight[0] + kOutputBlock * l.inputs * kSize;
  F sum[kRows][kOutputBlock] = {};
  for (int64_t i = 0; i < l.inputs; i += kWidth) {
    if (kFetches) {
      for (int j = 0; j < kStep; j += 64) __builtin_prefetch(next + i * kOutputBlock * kSize + j);
    }
    F x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] = load<F>(l.x + (row + r) * l.inputs + i);
#pragma GCC unroll 4
    for (int o = 0; o < kOutputBlock; ++o) {
      const F w = load_logits<kType>(weight[o] + i * kSize, 0);
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
SPECDEC_INLINE void multiply_rows(const LinearRows& l, int64_t output, int64_t row, int64_t count) {
  switch (count) {
    case 1:
      return multiply_block<kType, 1, kFetches>(l, output, row);
    case 2:
      return multiply_block<kType, 2, kFetches>(l, output, row);
    case 3:
      return multiply_block<kType, 3, kFetches>(l, output, row);
#if SPECDEC_WIDTH == 16
    case 4:
      return multiply_block<kType, 4, kFetches>(l, output, row);
    case 5:
      return multiply_block<kType, 5, kFetches>(l, output, row);
    case 6:
      return multiply_block<kType, 6, kFetches>(l, output, row);
#endif
  }
}

// Rows go in groups of about the same size, the first of which fetches.
template <LogitType kType>
void linear(const LinearRows& l, int64_t first, int64_t end) {
  const int64_t groups = (l.rows + kMostRows - 1) / kMostRows;
  if (groups == 0) return;
  for (int64_t block = first; block < end; ++block) {
    const int64_t output = block * kOutputBlock;
    multiply_rows<kType, true>(l, output, 0, l.rows / groups);
    for (int64_t g = 1; g < groups; ++g) {
      const int64_t row = l.rows * g / groups;
      multiply_rows<kType, false>(l, output, row, l.rows * (g + 1) / groups - row);
    }
  }
}
