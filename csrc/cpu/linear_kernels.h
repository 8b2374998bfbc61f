// The products of linear.h for one instruction set. Included by tile_kernels.h.

constexpr int kMostRows = kWidth == 16 ? 6 : 3;  // sums, rows and a weight fill the registers

// From so many rows on, and for so few inputs, transposing the weights pays: 2 threads, [768, 256]
// in float32, 16 / 40 / 64 rows: 141 / 181 / 193 GFLOP/s in place of 100 / 109 / 111; MKL 103 / 142
// / 145.
constexpr int64_t kManyRows = 16, kMostInputs = 512;

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

// What every path ends with: the first `count` sums of a row.
SPECDEC_INLINE void store_sums(const LinearRows& l, int64_t row, int64_t output, const float* sums,
                               int64_t count) {
  float* y = l.y + row * l.outputs + output;
  for (int64_t o = 0; o < count; ++o) y[o] = l.bias ? sums[o] + l.bias[output + o] : sums[o];
}

// A block of outputs for kRows rows. `kFetches`: ask for the weights of the next block meanwhile.
template <LogitType kType, int kRows, bool kFetches>
SPECDEC_INLINE void multiply_block(const LinearRows& l, int64_t output, int64_t row) {
  constexpr int64_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
  const char* weight[kOutputBlock];
  for (int o = 0; o < kOutputBlock; ++o) {  // behind the last output: the last once more
    const int64_t at = std::min(output + o, l.outputs - 1);
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
  const int64_t count = std::min<int64_t>(l.outputs - output, kOutputBlock);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float sums[kOutputBlock];
    lane_sums(sum[r], sums);
    store_sums(l, row + r, output, sums, count);
  }
}

// --- many rows: outputs are lanes, so that no sum goes across lanes; the weights are transposed
// once for all rows

constexpr int kPanel = 4 * kWidth;  // outputs worked on at once

// Lanes of two vectors in turn, from lane kFrom on.
template <int kFrom, int... kLane>
SPECDEC_INLINE F in_turn(F a, F b, std::integer_sequence<int, kLane...>) {
  return SPECDEC_SHUFFLE(a, b, (kFrom + kLane / 2 + kLane % 2 * kWidth)...);
}
template <int kFrom>
SPECDEC_INLINE F interleave(F a, F b) {
  return in_turn<kFrom>(a, b, std::make_integer_sequence<int, kWidth>());
}

// panel[i, lane] = weight[output + lane, i]; behind the last output the last once more.
template <LogitType kType>
SPECDEC_INLINE void transpose_panel(const LinearRows& l, int64_t output, float* panel) {
  constexpr int64_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
  for (int lane = 0; lane < kPanel; lane += kWidth) {
    const char* from[kWidth];
    for (int o = 0; o < kWidth; ++o) {
      const int64_t at = std::min(output + lane + o, l.outputs - 1);
      from[o] = static_cast<const char*>(l.weight) + at * l.inputs * kSize;
    }
    for (int64_t i = 0; i < l.inputs; i += kWidth) {
      F row[2][kWidth];
#pragma GCC unroll 16
      for (int o = 0; o < kWidth; ++o) row[0][o] = load_logits<kType>(from[o] + i * kSize, 0);
      int now = 0;
#pragma GCC unroll 4
      for (int step = 1; step < kWidth; step *= 2, now = 1 - now) {
#pragma GCC unroll 8
        for (int o = 0; o < kWidth / 2; ++o) {
          row[1 - now][2 * o] = interleave<0>(row[now][o], row[now][o + kWidth / 2]);
          row[1 - now][2 * o + 1] = interleave<kWidth / 2>(row[now][o], row[now][o + kWidth / 2]);
        }
      }
#pragma GCC unroll 16
      for (int o = 0; o < kWidth; ++o) store(panel + (i + o) * kPanel + lane, row[now][o]);
    }
  }
}

// The first `width` outputs of a panel for kRows rows; meanwhile `lines` cache lines from `next` on
// are fetched.
template <int kRows>
SPECDEC_INLINE void multiply_panel(const LinearRows& l, const float* panel, int64_t output,
                                   int64_t row, int width, const char* next, int64_t lines) {
  constexpr int kVectors = kPanel / kWidth;
  F sum[kRows][kVectors] = {};
  const float* x = l.x + row * l.inputs;
  for (int64_t i = 0; i < l.inputs; ++i) {
    if (i < lines) __builtin_prefetch(next + 64 * i, 0, 2);
    F w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = load<F>(panel + i * kPanel + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F value = splat(x[r * l.inputs + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(value, w[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float sums[kPanel];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + v * kWidth, sum[r][v]);
    store_sums(l, row + r, output, sums, width);
  }
}

// Each group of rows fetches its share of the next panel's weights.
template <LogitType kType>
void multiply_many(const LinearRows& l, int64_t begin, int64_t end, int64_t groups) {
  const int64_t bytes = kPanel * l.inputs * (kType == LogitType::kFloat32 ? 4 : 2);
  std::vector<float> room(kPanel * l.inputs + kLanes);
  float* panel = room.data();
  while (reinterpret_cast<uintptr_t>(panel) % 64 != 0) ++panel;
  for (int64_t output = begin; output < end; output += kPanel) {
    transpose_panel<kType>(l, output, panel);
    const int width = static_cast<int>(std::min<int64_t>(end - output, kPanel));
    const char* next = static_cast<const char*>(l.weight) + output * (bytes / kPanel) + bytes;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = l.rows * g / groups, count = l.rows * (g + 1) / groups - row;
      const int64_t lines = (bytes + 64 * groups - 1) / (64 * groups);
      with_count<kMostRows>(count, [&](auto rows) SPECDEC_ALWAYS_INLINE {
        multiply_panel<rows.value>(l, panel, output, row, width, next + 64 * lines * g, lines);
      });
    }
  }
}

// --- both; rows go in groups of about the same size

template <LogitType kType>
void linear(const LinearRows& l, int64_t first, int64_t end) {
  const int64_t groups = (l.rows + kMostRows - 1) / kMostRows;
  if (groups == 0) return;
  if (l.rows >= kManyRows && l.inputs <= kMostInputs) {
    const int64_t stop = std::min(end * kOutputBlock, l.outputs);
    return multiply_many<kType>(l, first * kOutputBlock, stop, groups);
  }
  for (int64_t block = first; block < end; ++block) {
    const int64_t output = block * kOutputBlock;
    with_count<kMostRows>(l.rows / groups, [&](auto rows) SPECDEC_ALWAYS_INLINE {
      multiply_block<kType, rows.value, true>(l, output, 0);  // which fetches the next block
    });
    for (int64_t g = 1; g < groups; ++g) {
      const int64_t row = l.rows * g / groups;
      const int64_t count = l.rows * (g + 1) / groups - row;
      with_count<kMostRows>(count, [&](auto rows) SPECDEC_ALWAYS_INLINE {
        multiply_block<kType, rows.value, false>(l, output, row);
      });
    }
  }
}
