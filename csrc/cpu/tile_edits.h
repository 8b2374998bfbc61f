// Edits of tiles, and the list of what a request edits. Included by tile_kernels.h.

// Entries of a table of counts that are ids of the row, as columns. Which they are is chance, so
// that no branch asks for it.
int take_counted(const CountTables& tables, int64_t slot, int64_t first, int64_t vocab,
                 int32_t* columns, int32_t* counts) {
  const int32_t* ids = tables.ids + slot * tables.capacity;
  const int32_t* of = tables.counts + slot * tables.capacity;
  if (first > INT32_MAX) return 0;
  int n = 0;
  int64_t i = 0;
#if SPECDEC_WIDTH == 16
  const I least = I{} + static_cast<int32_t>(first);
  const I most = I{} + static_cast<int32_t>(std::min<int64_t>(first + vocab, INT32_MAX) - 1);
  for (; i + kWidth <= tables.capacity; i += kWidth) {
    const I id = load<I>(ids + i);
    const Mask here = at_most(least, id) & at_most(id, most);
    compress(id - least, here, columns + n);
    n += compress(load<I>(of + i), here, counts + n);
  }
#endif
  for (; i < tables.capacity; ++i) {
    const int64_t v = ids[i] - first;
    columns[n] = static_cast<int32_t>(v);
    counts[n] = of[i];
    n += ids[i] >= 0 && v >= 0 && v < vocab;
  }
  return n;
}

void number_marked(const int64_t* bits, int n, int32_t* start) {
  int32_t size = 0;
  for (int k = 0; k < n; ++k) {
    start[k] = size;
    size += __builtin_popcountll(static_cast<uint64_t>(bits[k]));
  }
  start[n] = size;
}

void place_counted(const int64_t* bits, const int32_t* start, const int32_t* columns,
                   const int32_t* counts, int n, int32_t* out, float* ids) {
  for (int i = 0; i < n; ++i) {
    const uint32_t v = columns[i], k = v / kEditBlock;
    const uint64_t below = (uint64_t{1} << (v % kEditBlock)) - 1;
    const int at = start[k] + __builtin_popcountll(static_cast<uint64_t>(bits[k]) & below);
    out[at] = counts[i];
    ids[at] = static_cast<float>(v);
  }
}

// edited_logit, lane by lane.
SPECDEC_INLINE F edited(F logit, F bias, F repetition, F minus) {
  const F v = logit + bias;
  const F changed = select(lt(F{}, v), v / repetition, v * repetition) - minus;
  return select(eq(bias, splat(-kInf)), bias, changed);
}

// Logits of a tile, and the largest of their blocks, at kWidth offsets.
template <LogitType kType>
SPECDEC_INLINE void gather_logits(const void* logits, const float* blocks, U at, F* logit,
                                  F* largest) {
#if SPECDEC_WIDTH == 16
  *largest = (F)_mm512_permutex2var_ps(load<F>(blocks), (__m512i)(at / kNoiseBlock),
                                       load<F>(blocks + kWidth));
  if constexpr (kType == LogitType::kFloat32) {
    *logit = _mm512_i32gather_ps((__m512i)at, logits, 4);
  } else {
    const I pairs = (I)_mm512_i32gather_epi32((__m512i)(at >> 1), logits, 4);
    const U raw = ((U)pairs >> ((at & 1) << 4)) & 0xffffu;
    *logit = kType == LogitType::kBFloat16 ? (F)(raw << 16)
                                           : from_half((H)_mm512_cvtepi32_epi16((__m512i)raw));
  }
#else
  using Raw = std::conditional_t<kType == LogitType::kFloat32, float, uint16_t>;
  Raw raw[kWidth];
  float most[kWidth];
  for (int j = 0; j < kWidth; ++j) {
    raw[j] = static_cast<const Raw*>(logits)[at[j]];
    most[j] = blocks[at[j] / kNoiseBlock];
  }
  *logit = load_logits<kType>(raw, 0);
  *largest = load<F>(most);
#endif
}

// Of a block, what is not listed.
template <LogitType kType>
SPECDEC_INLINE float largest_of_others(const void* logits, int block, int64_t bits) {
  F most = splat(-kInf);
  const uint64_t others = ~static_cast<uint64_t>(bits);
  for (int j = 0; j < kEditBlock; j += kWidth) {
    const F v = load_logits<kType>(logits, block * kEditBlock + j);
    most = max(keep_bits(v, static_cast<uint32_t>(others >> j)), most);
  }
  return lane_max(most);
}

template <LogitType kType>
EditedTile tile_edit(const void* logits, const TileEdits& edits, float* before, float* after,
                     float* blocks) {
  const int n = edits.start[kTileBlocks] - edits.start[0];
  F lane{};
  for (int j = 0; j < kWidth; ++j) lane[j] = static_cast<float>(j);
  Mask nan = no_lane();
  uint32_t changed = 0;  // blocks whose largest logit is another one
  for (int i = 0; i < n; i += kWidth) {
    const Mask real = lt(lane, splat(static_cast<float>(n - i)));
    const U at = (U)to_int(load_where(real, edits.ids + i)) & splat_bits(kTile - 1);
    F was, largest;
    gather_logits<kType>(logits, blocks, at, &was, &largest);
    const F now = edited(was, load_where(real, edits.bias + i),
                         load_where(real, edits.repetition + i), load_where(real, edits.minus + i));
    store(before + i, select(real, was, splat(-kInf)));
    store(after + i, select(real, now, splat(-kInf)));
    nan = nan | (real & either_nan(now, now));
    const Mask lost = eq(was, largest) & lt(now, was);
    for (uint32_t left = lane_bits(real & (lost | lt(largest, now))); left != 0; left &= left - 1) {
      changed |= 1u << at[__builtin_ctz(left)] / kNoiseBlock;
    }
  }
  const int end = (n + kWidth - 1) / kWidth * kWidth;
  for (int i = end; i % kPad != 0; i += kWidth) {
    store(before + i, splat(-kInf));
    store(after + i, splat(-kInf));
  }
  for (; changed != 0; changed &= changed - 1) {
    const int k = __builtin_ctz(changed);
    float most = largest_of_others<kType>(logits, k, edits.bits[k]);
    for (int i = edits.start[k]; i < edits.start[k + 1]; ++i) {
      const float now = after[i - edits.start[0]];
      most = now > most ? now : most;
    }
    blocks[k] = most;
  }
  F largest = load<F>(blocks);
  for (int k = kWidth; k < kTileBlocks; k += kWidth) largest = max(load<F>(blocks + k), largest);
  return {n, any(nan), lane_max(largest)};
}
