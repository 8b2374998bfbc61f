// Attention over a block of bfloat16 keys with AMX tile registers: products of bfloat16 pairs, sums
// in float32. Included by tile_kernels.h. Tiles are 16 rows of 64 bytes: A is [item, 32 to sum
// over], B [16 pairs to sum over, row], C [item, row].

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTiles;

// kItems (1 or 4) tiles of c[i, row] = [c[i, row]] + sum over k < count of a[i, k] * b[k, row].
template <int kItems, bool kAdd>
SPECDEC_INLINE void multiply_tiles(const uint16_t* a, int stride, const float* b, int count,
                                   int width, float* c) {
  const int row = width * 4;  // bytes
  float* c1 = c + 16 * width;
  float *c2 = c1 + 16 * width, *c3 = c2 + 16 * width;
  if constexpr (kAdd) {
    _tile_loadd(0, c, row);
    if constexpr (kItems == 4) {
      _tile_loadd(1, c1, row);
      _tile_loadd(2, c2, row);
      _tile_loadd(3, c3, row);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < count; k += kSumUnit) {
    const uint16_t* from = a + k;
    _tile_loadd(7, b + k / 2 * width, row);
    _tile_loadd(4, from, stride * 2);
    _tile_dpbf16ps(0, 4, 7);
    if constexpr (kItems == 4) {
      _tile_loadd(5, from + 16 * stride, stride * 2);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(6, from + 32 * stride, stride * 2);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(4, from + 48 * stride, stride * 2);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c, row);
  if constexpr (kItems == 4) {
    _tile_stored(1, c1, row);
    _tile_stored(2, c2, row);
    _tile_stored(3, c3, row);
  }
}

// The same for any multiple of 16 items and rows.
template <bool kAdd>
void multiply_pairs(const uint16_t* a, int items, int stride, const float* b, int count, int width,
                    float* c) {
  std::atomic_signal_fence(std::memory_order_seq_cst);  // tile loads name no memory to the compiler
  for (int r = 0; r < width; r += kRowUnit) {
    int i = 0;
    for (; i + 64 <= items; i += 64) {
      multiply_tiles<4, kAdd>(a + i * stride, stride, b + r, count, width, c + i * width + r);
    }
    for (; i < items; i += 16) {
      multiply_tiles<1, kAdd>(a + i * stride, stride, b + r, count, width, c + i * width + r);
    }
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Floats [count, width] become bfloat16 pairs [count / 2, width], in place.
SPECDEC_INLINE void pack_pairs(float* x, int count, int width) {
  for (int k = 0; k < count; k += 2) {
    for (int r = 0; r < width; r += kWidth) {
      const U low = nearest_bfloat16(load<F>(x + k * width + r));
      const U high = nearest_bfloat16(load<F>(x + (k + 1) * width + r));
      store(x + k / 2 * width + r, (F)(high | (low >> 16)));
    }
  }
}

void pack_queries(const AttentionRows& rows) {
  const auto dim = static_cast<int>(padded(rows.dim, kSumUnit));
  for_panels(rows,
             [&](int64_t first, int width) { pack_pairs(rows.query + first * dim, dim, width); });
}

// A row of a cache, zeros behind it up to `size` elements.
SPECDEC_INLINE void copy_row(const void* row, int dim, int size, uint16_t* out) {
  std::memset(out + (row ? dim : 0), 0, (row ? size - dim : size) * sizeof *out);
  if (row) std::memcpy(out, row, dim * sizeof *out);
}

// Values [key, dim] to [dim, key]: first pairs of keys [pair, dim], then their transpose, so that
// what is gathered are whole pairs.
SPECDEC_INLINE void transpose_values(const AttentionKeys& keys, const AttentionRows& rows,
                                     int items, int value_dim) {
  constexpr int kPairs = kKeyBlock / 2;
  auto* transposed = reinterpret_cast<int32_t*>(rows.values);  // [dim, pair]
  float* pairs = rows.values + kPairs * value_dim;
  alignas(64) uint16_t row[2][kMaxValueDim];
  for (int i = 0; i < items; i += 2) {
    for (int j = 0; j < 2; ++j) {
      copy_row(i + j < keys.count ? keys.value[i + j] : nullptr, rows.value_dim, value_dim, row[j]);
    }
    for (int d = 0; d < value_dim; d += kWidth) {
      const U low = (U)from_bfloat16(load<H>(row[0] + d)),
              high = (U)from_bfloat16(load<H>(row[1] + d));
      store(pairs + i / 2 * value_dim + d, (F)(high | (low >> 16)));
    }
  }
  const __m512i place =
      _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                         _mm512_set1_epi32(value_dim));
  for (int k = 0; k < items / 2; k += 16) {
    for (int d = 0; d < value_dim; ++d) {
      const __m512i column = _mm512_i32gather_epi32(place, pairs + k * value_dim + d, 4);
      _mm512_storeu_si512(transposed + d * kPairs + k, column);
    }
  }
}

void attend_bfloat16(const AttentionKeys& keys, const AttentionRows& rows) {
  const auto dim = static_cast<int>(padded(rows.dim, kSumUnit));
  const auto value_dim = static_cast<int>(padded(rows.value_dim, kDimUnit));
  const auto items = static_cast<int>(padded(keys.count, kSumUnit));
  auto* key = reinterpret_cast<uint16_t*>(rows.keys);  // [key, dim]
  for (int i = 0; i < items; ++i) {
    copy_row(i < keys.count ? keys.key[i] : nullptr, rows.dim, dim, key + i * dim);
  }
  transpose_values(keys, rows, items, value_dim);
  _tile_loadconfig(&kTiles);
  for_panels(rows, [&](int64_t first, int width) {
    float* output = rows.output + first * value_dim;
    multiply_pairs<false>(key, items, dim, rows.query + first * dim, dim, width, rows.scores);
    for (int r = 0; r < width; r += kWidth) {
      const F rescale = weigh(keys, rows, first + r, width, rows.scores + r);
      if (!any(lt(rescale, splat(1.f)))) continue;
      for (int d = 0; d < value_dim; ++d) {
        store(output + d * width + r, load<F>(output + d * width + r) * rescale);
      }
    }
    std::memset(rows.scores + keys.count * width, 0, (items - keys.count) * width * sizeof(float));
    pack_pairs(rows.scores, items, width);
    multiply_pairs<true>(reinterpret_cast<const uint16_t*>(rows.values), value_dim, kKeyBlock,
                         rows.scores, items, width, output);
  });
  _tile_release();
}

// A block of 64 keys and values of 128 dims costs 256 gathers and 128 copies of rows here, as much
// as the products of 8 rows cost without tile registers: counted, not measured.
template <>
constexpr Attention kAttend<KeyType::kBFloat16> = {pack_queries, attend_bfloat16,
                                                   attend_few<KeyType::kBFloat16>, 8};
