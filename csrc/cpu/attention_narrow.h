// Attention of a few rows over a block of keys: each row and key makes one sum over dims, whose
// lanes are folded for many at once; then keys are lanes of scores, and dims of values. Rows are
// read as they are in memory where they can. Included by tile_kernels.h.

// Types that are read anew for every few rows; others are widened once.
template <KeyType kType>
constexpr bool kWidensFast =
    kType < KeyType::kFloat8E4M3 && (kType != KeyType::kFloat16 || kWidth > 4);

// Up to so many rows this is faster than rows as lanes. One core of an EPYC (family 26), 4096
// tokens, as lanes / as few. AVX-512, bfloat16, 8 requests: 4 rows 22 / 7.5 ms, 8 22 / 10.7, 12 25
// / 14, 16 24 / 18, 24 31 / 24, 32 30 / 30; e4m3, one request: 4 2.3 / 1.3, 8 2.1 / 1.7, 12 2.1
// / 2.1, 16 2.2 / 2.4. AVX2, one request, bfloat16: 4 4.0 / 1.1, 8 3.3 / 2.2, 16 3.7 / 3.6; e4m3:
// 4 3.7 / 2.4, 8 3.8 / 3.2, 12 3.8 / 4.1.
template <KeyType kType>
constexpr int kMostFew = kWidensFast<kType> ? (kWidth == 16 ? 28 : 12) : (kWidth == 16 ? 12 : 8);

// lanes[r * apart + i]: what adds up to q[r] . key[i], of kRows rows and kKeys keys.
template <KeyType kType, int kRows, int kKeys>
SPECDEC_INLINE void dots(const float* q, int stride, const void* const* key, int dim, int apart,
                         F* lanes) {
  F sum[kRows][kKeys][kParts] = {};
  for (int d = 0; d < dim; d += kLanes) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const int at = d + part * kWidth;
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) {
        const F k = load_keys<kType>(key[i], at);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sum[r][i][part] = fma(load<F>(q + r * stride + at), k, sum[r][i][part]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const F* part = sum[r][i];
      F all = part[0];
      if constexpr (kParts == 2) all = part[0] + part[1];
      if constexpr (kParts == 4) all = (part[0] + part[2]) + (part[1] + part[3]);
      lanes[r * apart + i] = all;
    }
  }
}

// The memory of rows is asked for so many bytes before their turn, across blocks. One core of an
// EPYC (family 26), one node behind 4096 tokens, 8 requests, 4 heads to a key head of 128, without
// / 4 / 8 / 16 KB ahead: bfloat16 13.2 / 7.7 / 7.0 / 9.0 ms (a sum of the same memory takes 4.4),
// float32 15.9 / 14.0 / 14.0 / 15.1 (7.9).
constexpr int64_t kAheadBytes = 8192;

class Ahead {
 public:
  Ahead(const void* const* row, const void* const* next, int64_t bytes)
      : row_(row), next_(next), bytes_(bytes) {
    const int64_t rows = kAheadBytes / bytes;
    distance_ = rows < kKeyBlock ? static_cast<int>(rows) : kKeyBlock;
  }
  SPECDEC_ALWAYS_INLINE void ask(int i) const {
    const int at = i + distance_;
    const void* row = at < kKeyBlock ? row_[at] : next_ ? next_[at - kKeyBlock] : nullptr;
    if (row) prefetch_lines(row, bytes_);
  }

 private:
  const void *const *row_, *const *next_;
  int64_t bytes_;
  int distance_;
};

// scores[row, key], kKeyBlock apart. What lies behind the keys of a block means nothing.
template <KeyType kType>
void score_few(const AttentionRows& rows, const void* const* key, int count, const Ahead& ahead) {
  constexpr int kRows = kWidth == 16 ? 4 : 2, kKeys = kWidth / kRows;
  constexpr int kOnce = kWidth == 16 ? kKeys : kKeys / 2;  // sums that stay in registers
  const auto stride = static_cast<int>(padded(rows.dim, kSumUnit));
  const auto dim = static_cast<int>(padded(rows.dim, kDimUnit));
  for (int64_t r = 0; r < rows.rows; r += kRows) {
    for (int i = 0; i < count; i += kKeys) {
      for (int j = 0; j < kKeys && r == 0; ++j) ahead.ask(i + j);
      F lanes[kWidth];
      for (int j = 0; j < kKeys; j += kOnce) {
        dots<kType, kRows, kOnce>(rows.query + r * stride, stride, key + i + j, dim, kKeys,
                                  lanes + j);
      }
      const F sums = lane_sums(lanes);
      for (int j = 0; j < kRows; ++j) {
        std::memcpy(rows.scores + (r + j) * kKeyBlock + i,
                    reinterpret_cast<const float*>(&sums) + j * kKeys, kKeys * sizeof(float));
      }
    }
  }
}

// output[row, d] of kFewUnit rows and kVectors vectors from d on, rescaled, and the weights' sum of
// values.
template <KeyType kType, int kVectors>
SPECDEC_INLINE void add_values(const float* weights, const void* const* value, int count, int d,
                               int value_dim, const float* rescale, float* output,
                               const Ahead* ahead) {
  F sum[kFewUnit][kVectors] = {};
  const auto read = [&](int k, F* row) SPECDEC_ALWAYS_INLINE {
    if (ahead) ahead->ask(k);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = load_keys<kType>(value[k], d + v * kWidth);
  };
  add_products(weights, kKeyBlock, 1, count, read, sum);
#pragma GCC unroll 4
  for (int r = 0; r < kFewUnit; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = output + r * value_dim + d + v * kWidth;
      store(to, load<F>(to) * splat(rescale[r]) + sum[r][v]);
    }
  }
}

template <KeyType kType>
void sum_few(const AttentionRows& rows, const void* const* value, int count, const float* rescale,
             const Ahead& ahead) {
  const auto value_dim = static_cast<int>(padded(rows.value_dim, kDimUnit));
  for (int64_t r = 0; r < rows.rows; r += kFewUnit) {
    const float* weights = rows.scores + r * kKeyBlock;
    float* output = rows.output + r * value_dim;
    constexpr int kMost = kWidth == 16 ? 4 : 2;
    const auto add = [&](auto vectors, int d) SPECDEC_ALWAYS_INLINE {
      add_values<kType, vectors>(weights, value, count, d, value_dim, rescale + r, output,
                                 r == 0 && d == 0 ? &ahead : nullptr);
    };
    int d = 0;
    for (; d + kMost * kWidth <= value_dim; d += kMost * kWidth) {
      add(std::integral_constant<int, kMost>{}, d);
    }
    for (; d < value_dim; d += kWidth) add(std::integral_constant<int, 1>{}, d);
  }
}

// Bits of the keys of a block that a row attends.
SPECDEC_INLINE uint64_t attended_bits(const AttentionKeys& keys, const AttentionRows& rows,
                                      int64_t row) {
  const uint64_t all = ~uint64_t{0} >> (kKeyBlock - keys.count);
  if (keys.first_node < 0) {
    const int64_t hidden = rows.window ? rows.depth[row] - keys.reach : 0;
    return hidden <= 0 ? all : hidden >= kKeyBlock ? 0 : all & (~uint64_t{0} << hidden);
  }
  uint64_t bits = 0;
  for (int i = 0; i < keys.count; ++i) {
    const int node = keys.first_node + i;
    const auto word = static_cast<uint32_t>(rows.words[(node >> 5) * rows.rows + row]);
    const bool near = !rows.window || rows.depth[row] - rows.node_depth[node] < rows.window;
    const bool seen = keys.key[i] && near && ((word >> (node & 31)) & 1) != 0;
    bits |= static_cast<uint64_t>(seen) << i;
  }
  return bits;
}

// `weigh` of one row, whose keys are lanes.
SPECDEC_INLINE float weigh_few(const AttentionKeys& keys, const AttentionRows& rows, int64_t row) {
  const uint64_t bits = attended_bits(keys, rows, row);
  const F scale = splat(rows.scale), none = splat(-kInf);
  float* scores = rows.scores + row * kKeyBlock;
  const float before = rows.max[row];
  F most = none;
  for (int i = 0; i < kKeyBlock; i += kWidth) {
    const F score = keep_bits(load<F>(scores + i) * scale, static_cast<uint32_t>(bits >> i));
    store(scores + i, score);
    most = max(score, most);
  }
  float best = lane_max(most);
  if (!(before + kSlack < best)) best = before;
  Sum sum;
  for (int i = 0; i < kKeyBlock; i += kLanes) {
    for (int k = 0; k < kParts; ++k) {
      float* at = scores + i + k * kWidth;
      const F score = load<F>(at);
      const F weight = select(eq(score, none), F{}, exp(score - splat(best)));
      store(at, weight);
      sum.add(k, weight);
    }
  }
  const float rescale = exp(splat(before - best))[0];
  rows.sum[row] = rows.sum[row] * rescale + sum.total();
  rows.max[row] = best;
  return rescale;
}

// f(type, rows) with the rows of a block, as they are in memory or as floats in `scratch`: types
// that do not widen fast, dims that do not fill a vector, and where a row is null. Behind the block
// is its first row again.
template <KeyType kType, class Function>
SPECDEC_INLINE void with_rows(const void* const* from, int count, int dim, float* scratch,
                              const Function& f) {
  const auto wide = static_cast<int>(padded(dim, kDimUnit));
  bool is_whole = kWidensFast<kType> && dim == wide;
  for (int i = 0; i < count; ++i) is_whole &= from[i] != nullptr;
  const void* rows[kKeyBlock];
  for (int i = 0; i < kKeyBlock; ++i) {
    const int k = i < count ? i : 0;
    rows[i] = is_whole ? from[k] : scratch + k * wide;
  }
  if constexpr (kWidensFast<kType>) {
    if (is_whole) return f(std::integral_constant<KeyType, kType>{}, rows);
  }
  for (int i = 0; i < count; ++i) widen_row<kType>(from[i], dim, scratch + i * wide);
  f(std::integral_constant<KeyType, KeyType::kFloat32>{}, rows);
}

template <KeyType kType>
void attend_few(const AttentionKeys& keys, const AttentionRows& rows) {
  static_assert(kMostFew<kType> % kFewUnit == 0 && kMostFew<kType> <= kPanel);
  const int count = keys.count;
  const AttentionKeys* next = keys.next;
  const Ahead next_keys(keys.key, next ? next->key : nullptr, rows.dim * kKeyBytes<kType>);
  const Ahead next_values(keys.value, next ? next->value : nullptr,
                          rows.value_dim * kKeyBytes<kType>);
  with_rows<kType>(keys.key, count, rows.dim, rows.keys, [&](auto type, const void* const* key) {
    score_few<type>(rows, key, count, next_keys);
  });
  float rescale[kMostFew<kType>];
  for (int64_t r = 0; r < rows.rows; ++r) rescale[r] = weigh_few(keys, rows, r);
  with_rows<kType>(keys.value, count, rows.value_dim, rows.values,
                   [&](auto type, const void* const* value) {
                     sum_few<type>(rows, value, count, rescale, next_values);
                   });
}

// Of a type of keys.
template <KeyType kType>
constexpr Attention kAttend = {keep_queries, attend_block<kType>, attend_few<kType>,
                               kMostFew<kType>};
