// The recurrence of replay.h for one instruction set. Included by tile_kernels.h.

constexpr int kStateVectors = 4;  // of a row in a block: sums of a column stay in registers
constexpr int kBlockColumns = kStateVectors * kWidth;
static_assert(kBlockColumns <= kStateColumns);

struct StateRow {  // columns of a block in one row of the state
  F v[kStateVectors];
};

// Rounds to nearest even; NaN stays NaN.
SPECDEC_INLINE H to_bfloat16(F v) {
  const U bits = (U)v;
  const U is_nan = (U)((I)(bits & 0x7fffffffu) > (I)splat_bits(0x7f800000u));
  const U kept = (nearest_bfloat16(v) & ~is_nan) | ((bits | 0x400000u) & is_nan);
  return __builtin_convertvector(kept >> 16, H);
}

template <LogitType kType>
SPECDEC_INLINE StateRow load_state(const char* from, int64_t columns) {
  constexpr int64_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
  char padded[kBlockColumns * kSize];
  if (columns < kBlockColumns) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, from, columns * kSize);
    from = padded;
  }
  StateRow row;
#pragma GCC unroll 4
  for (int i = 0; i < kStateVectors; ++i) row.v[i] = load_logits<kType>(from, i * kWidth);
  return row;
}

template <LogitType kType>
SPECDEC_INLINE void store_state(char* to, int64_t columns, const StateRow& row) {
  constexpr int64_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
  char padded[kBlockColumns * kSize];
  char* at = columns < kBlockColumns ? padded : to;
#pragma GCC unroll 4
  for (int i = 0; i < kStateVectors; ++i) {
    if constexpr (kType == LogitType::kFloat32) {
      std::memcpy(at + i * kWidth * kSize, &row.v[i], sizeof row.v[i]);
    } else {
      const H narrow = to_bfloat16(row.v[i]);
      std::memcpy(at + i * kWidth * kSize, &narrow, sizeof narrow);
    }
  }
  if (columns < kBlockColumns) std::memcpy(to, padded, columns * kSize);
}

SPECDEC_INLINE StateRow load_row(const float* from) {
  StateRow row;
#pragma GCC unroll 4
  for (int i = 0; i < kStateVectors; ++i) row.v[i] = load<F>(from + i * kWidth);
  return row;
}

// row = decay row + key value.
SPECDEC_INLINE void step_row(StateRow* row, float decay, float key, const StateRow& value) {
#pragma GCC unroll 4
  for (int i = 0; i < kStateVectors; ++i) {
    row->v[i] = fma(splat(key), value.v[i], splat(decay) * row->v[i]);
  }
}

// Without the delta rule rows do not meet: each takes all its tokens in registers.
template <LogitType kType>
SPECDEC_INLINE void replay_rows(const ReplayHead& h, int64_t column, int64_t columns) {
  constexpr int64_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
  for (int64_t k = 0; k < h.d_k; ++k) {
    char* at = static_cast<char*>(h.state) + (k * h.d_v + column) * kSize;
    StateRow row = load_state<kType>(at, columns);
    for (int64_t t = 0; t < h.tokens; ++t) {
      step_row(&row, h.decay[t * h.d_k + k], h.keys[t * h.d_k + k],
               load_row(h.values + t * h.pitch + column));
    }
    store_state<kType>(at, columns, row);
  }
}

// With it, a token needs S^T k of the whole block first. Each pass over the rows applies a token
// and sums for the next one: the first pass reads the state, the last one writes it.
template <LogitType kType>
SPECDEC_INLINE void replay_delta(const ReplayHead& h, int64_t column, int64_t columns) {
  constexpr int64_t kSize = kType == LogitType::kFloat32 ? 4 : 2;
  StateRow update{};
  for (int64_t t = 0; t <= h.tokens; ++t) {
    const bool is_first = t == 0, is_last = t == h.tokens;
    const float *key = h.keys + t * h.d_k, *decay = h.decay + t * h.d_k;  // of the next token
    StateRow sum{};
    for (int64_t k = 0; k < h.d_k; ++k) {
      char* at = static_cast<char*>(h.state) + (k * h.d_v + column) * kSize;
      float* kept = h.block + k * kBlockColumns;
      StateRow row = is_first ? load_state<kType>(at, columns) : load_row(kept);
      if (!is_first) step_row(&row, decay[k - h.d_k], key[k - h.d_k], update);
      if (is_last) {
        store_state<kType>(at, columns, row);
        continue;
      }
      const F weight = splat(key[k] * decay[k]);
#pragma GCC unroll 4
      for (int i = 0; i < kStateVectors; ++i) {
        store(kept + i * kWidth, row.v[i]);
        sum.v[i] = fma(weight, row.v[i], sum.v[i]);
      }
    }
    if (is_last) return;
    const StateRow value = load_row(h.values + t * h.pitch + column);
    for (int i = 0; i < kStateVectors; ++i) {
      update.v[i] = splat(h.beta[t]) * (value.v[i] - sum.v[i]);
    }
  }
}

template <LogitType kType>
void replay(const ReplayHead& h) {
  for (int64_t column = 0; column < h.d_v; column += kBlockColumns) {
    const int64_t columns = std::min<int64_t>(kBlockColumns, h.d_v - column);
    if (h.beta) {
      replay_delta<kType>(h, column, columns);
    } else {
      replay_rows<kType>(h, column, columns);
    }
  }
}
