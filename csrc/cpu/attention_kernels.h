// Attention over a block of keys for one instruction set. Included by tile_kernels.h.

// sum[i][v] += sum over k of a[i * item + k * step] * row k, in the order of k; read(k, row) reads
// its vectors.
template <int kItems, int kVectors, class Read>
SPECDEC_INLINE void add_products(const float* a, int64_t item, int64_t step, int count,
                                 const Read& read, F (&sum)[kItems][kVectors]) {
  for (int k = 0; k < count; ++k) {
    F row[kVectors];
    read(k, row);
#pragma GCC unroll 8
    for (int i = 0; i < kItems; ++i) {
      const F x = splat(a[i * item + k * step]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(x, row[v], sum[i][v]);
    }
  }
}

// c[i, row] = sum over k of a[i * item + k * step] * b[k, row], plus c[i, row] * rescale[row] where
// rescale is given: a long sum is made of short ones, which round less. For n rows' vectors and
// kItems items; every element is summed in the order of k, whatever the panel's width.
template <int kVectors, int kItems>
SPECDEC_INLINE void multiply_items(const float* a, int64_t item, int64_t step, const float* b,
                                   int count, int width, const float* rescale, float* c) {
  F sum[kItems][kVectors] = {};
  const auto read = [&](int k, F* row) SPECDEC_ALWAYS_INLINE {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = load<F>(b + k * width + v * kWidth);
  };
  add_products(a, item, step, count, read, sum);
#pragma GCC unroll 8
  for (int i = 0; i < kItems; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + i * width + v * kWidth;
      const F before = rescale ? load<F>(to) * load<F>(rescale + v * kWidth) : F{};
      store(to, before + sum[i][v]);
    }
  }
}

// The same for any number of items, a multiple of 8; kVectors * kItems sums stay in registers.
template <int kVectors>
void multiply(const float* a, int items, int64_t item, int64_t step, const float* b, int count,
              int width, const float* rescale, float* c) {
  constexpr int kItems = kVectors > 2 || kWidth < 16 ? 4 : 8;
  for (int i = 0; i < items; i += kItems) {
    for (int r = 0; r < width; r += kVectors * kWidth) {
      multiply_items<kVectors, kItems>(a + i * item, item, step, b + r, count, width,
                                       rescale ? rescale + r : nullptr, c + i * width + r);
    }
  }
}

SPECDEC_INLINE void multiply(const float* a, int items, int64_t item, int64_t step, const float* b,
                             int count, int width, const float* rescale, float* c) {
  if constexpr (kWidth < 16) {
    return multiply<2>(a, items, item, step, b, count, width, rescale, c);
  }
  with_count<4>(width / kRowUnit, [&](auto vectors) SPECDEC_ALWAYS_INLINE {
    multiply<vectors.value>(a, items, item, step, b, count, width, rescale, c);
  });
}

// Elements i, i + 1, .. of a row. An 8-bit float's exponent is the lower part of a half's: an e5m2
// is the upper byte of its half, and an e4m3 is one 2^8 smaller, but for its NaN, which would be
// 480.
template <KeyType kType>
SPECDEC_INLINE F load_keys(const void* row, int i) {
  if constexpr (kType < KeyType::kFloat8E4M3) {
    return load_logits<static_cast<LogitType>(kType)>(row, i);
  } else {
    const H byte = __builtin_convertvector(load<B>(static_cast<const uint8_t*>(row) + i), H);
    if constexpr (kType == KeyType::kFloat8E5M2) return from_half(byte << 8);
    const H size = byte & 0x7f;
    const H half = (H)(((byte & 0x80) << 8) | (size << 7) | ((H)(size == 0x7f) & 0x7c00));
    return from_half(half) * splat(256.f);
  }
}

template <KeyType kType>
constexpr int64_t kKeyBytes = kType == KeyType::kFloat32     ? 4
                              : kType < KeyType::kFloat8E4M3 ? 2
                                                             : 1;

// A row of a cache as floats, zeros behind it up to kDimUnit.
template <KeyType kType>
SPECDEC_INLINE void widen_row(const void* row, int dim, float* out) {
  constexpr size_t kSize = kKeyBytes<kType>;
  const int full = row ? dim / kLanes * kLanes : 0;
  for (int d = 0; d < full; d += kWidth) store(out + d, load_keys<kType>(row, d));
  for (int d = full; d < dim; d += kLanes) {
    char rest[kLanes * kSize] = {};
    if (row) std::memcpy(rest, static_cast<const char*>(row) + d * kSize, (dim - d) * kSize);
    for (int i = 0; i < kLanes; i += kWidth) store(out + d + i, load_keys<kType>(rest, i));
  }
}

// Scores that lanes do not attend become -inf. Lanes are rows first, first + 1, ...
SPECDEC_INLINE F attended(F score, const AttentionKeys& keys, int i, const AttentionRows& rows,
                          int64_t first) {
  const I depth = load<I>(rows.depth + first);
  I off;
  if (keys.first_node < 0) {
    const int64_t reach = keys.reach + i;
    if (!rows.window || reach >= rows.deepest) return score;
    off = depth > (I)splat_bits(static_cast<uint32_t>(reach));
  } else {
    const int node = keys.first_node + i;
    const U words = load<U>(rows.words + (node >> 5) * rows.rows + first);
    off = (I)(((words >> (node & 31)) & 1u) == 0u);
    if (rows.window) {
      off |= depth - (I)splat_bits(rows.node_depth[node]) >= (I)splat_bits(rows.window);
    }
  }
  return (F)(((U)score & ~(U)off) | ((U)splat(-kInf) & (U)off));
}

// The maximum may lag behind so far: weights up to exp(8) are as exact as those up to 1, and what
// is summed so far is seldom rescaled.
constexpr float kSlack = 8.f;

// One-pass softmax of some rows: scores [key, width] become weights, and the sum and maximum follow
// them. Returns what the weights before this block are to be multiplied with.
SPECDEC_INLINE F weigh(const AttentionKeys& keys, const AttentionRows& rows, int64_t first,
                       int width, float* scores) {
  const F scale = splat(rows.scale), none = splat(-kInf), before = load<F>(rows.max + first);
  F best = before;
  for (int i = 0; i < keys.count; ++i) {
    float* at = scores + i * width;
    const F score = keys.key[i] ? attended(load<F>(at) * scale, keys, i, rows, first) : none;
    store(at, score);
    best = max(score, best);
  }
  best = select(lt(before + splat(kSlack), best), best, before);
  F sum{};
  for (int i = 0; i < keys.count; ++i) {
    float* at = scores + i * width;
    const F score = load<F>(at);
    const F weight = select(eq(score, none), F{}, exp(score - best));
    store(at, weight);
    sum = sum + weight;
  }
  const F rescale = exp(before - best);
  store(rows.sum + first, load<F>(rows.sum + first) * rescale + sum);
  store(rows.max + first, best);
  return rescale;
}

inline void keep_queries(const AttentionRows&) {}

// f(first row, width) for every panel.
template <class Function>
SPECDEC_INLINE void for_panels(const AttentionRows& rows, const Function& f) {
  for (int64_t first = 0; first < rows.rows; first += kPanel) {
    f(first, static_cast<int>(rows.rows - first < kPanel ? rows.rows - first : kPanel));
  }
}

template <KeyType kType>
void attend_block(const AttentionKeys& keys, const AttentionRows& rows) {
  const auto dim = static_cast<int>(padded(rows.dim, kDimUnit));
  const auto value_dim = static_cast<int>(padded(rows.value_dim, kDimUnit));
  for (int i = 0; i < keys.count; ++i) {
    widen_row<kType>(keys.key[i], rows.dim, rows.keys + i * dim);
    widen_row<kType>(keys.value[i], rows.value_dim, rows.values + i * value_dim);
  }
  const auto items = static_cast<int>(padded(keys.count, 8));
  std::memset(rows.keys + keys.count * dim, 0, (items - keys.count) * dim * sizeof(float));
  for_panels(rows, [&](int64_t first, int width) {
    float rescale[kPanel];
    multiply(rows.keys, items, dim, 1, rows.query + first * padded(rows.dim, kSumUnit), rows.dim,
             width, nullptr, rows.scores);
    for (int r = 0; r < width; r += kWidth) {
      store(rescale + r, weigh(keys, rows, first + r, width, rows.scores + r));
    }
    multiply(rows.values, value_dim, 1, value_dim, rows.scores, keys.count, width, rescale,
             rows.output + first * value_dim);
  });
}
