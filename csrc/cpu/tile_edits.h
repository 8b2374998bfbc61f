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
#if SPECDEC_WIDTH >= 8
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

// Logits at kWidth places.
template <LogitType kType>
SPECDEC_INLINE F gather_logits(const void* logits, U at) {
#if SPECDEC_WIDTH == 16
  if constexpr (kType == LogitType::kFloat32) {
    return _mm512_i32gather_ps((__m512i)at, logits, 4);
  } else {
    const I pairs = (I)_mm512_i32gather_epi32((__m512i)(at >> 1), logits, 4);
    const U raw = ((U)pairs >> ((at & 1) << 4)) & 0xffffu;
    return kType == LogitType::kBFloat16 ? (F)(raw << 16)
                                         : from_half((H)_mm512_cvtepi32_epi16((__m512i)raw));
  }
#else
  using Raw = std::conditional_t<kType == LogitType::kFloat32, float, uint16_t>;
  Raw raw[kWidth];
  for (int j = 0; j < kWidth; ++j) raw[j] = static_cast<const Raw*>(logits)[at[j]];
  return load_logits<kType>(raw, 0);
#endif
}

// The maxima of kEditTiles tiles' blocks, to be picked by number.
struct BlockMaxima {
#if SPECDEC_WIDTH == 16
  F part[4];
  BlockMaxima(const float* blocks, int count) {
    for (int i = 0; i < 4; ++i)
      part[i] = load<F>(blocks + (i * kWidth) % count);  // of one tile twice
  }
  SPECDEC_ALWAYS_INLINE F operator[](U block) const {
    const F low = (F)_mm512_permutex2var_ps(part[0], (__m512i)block, part[1]);
    const F high = (F)_mm512_permutex2var_ps(part[2], (__m512i)block, part[3]);
    return select(_mm512_test_epi32_mask((__m512i)block, _mm512_set1_epi32(32)), high, low);
  }
#else
  const float* blocks;
  BlockMaxima(const float* blocks, int) : blocks(blocks) {}
  SPECDEC_ALWAYS_INLINE F operator[](U block) const {
    F v;
    for (int j = 0; j < kWidth; ++j) v[j] = blocks[block[j]];
    return v;
  }
#endif
};

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
bool edit_tiles(const void* logits, const ListedTiles& edits, float* before, float* after,
                float* blocks, float* maxima) {
  const int n = edits.count;
  const F first = splat(static_cast<float>(edits.first));
  F lane{};
  for (int j = 0; j < kWidth; ++j) lane[j] = static_cast<float>(j);
  Mask nan = no_lane();
  const BlockMaxima maxima_of(blocks, edits.tiles * kTileBlocks);
  float changed[kEditTiles * kTile + kWidth];  // what takes or loses its block's maximum
  int changes = 0;
  for (int i = 0; i < n; i += kWidth) {
    const Mask real = lt(lane, splat(static_cast<float>(n - i)));
    const F place = select(real, load_where(real, edits.ids + i) - first, F{});
    const U at = (U)to_int(place);
    const F was = gather_logits<kType>(logits, at), largest = maxima_of[at / kNoiseBlock];
    const F now = edited(was, load_where(real, edits.bias + i),
                         load_where(real, edits.repetition + i), load_where(real, edits.minus + i));
    store(before + i, select(real, was, splat(-kInf)));
    store(after + i, select(real, now, splat(-kInf)));
    nan = nan | (real & either_nan(now, now));
    const Mask lost = eq(was, largest) & lt(now, was);
    changes += compress(place, real & (lost | lt(largest, now)), changed + changes);
  }
  const int end = (n + kWidth - 1) / kWidth * kWidth;
  for (int i = end; i % kPad != 0; i += kWidth) {
    store(before + i, splat(-kInf));
    store(after + i, splat(-kInf));
  }
  for (int i = 0, done = -1; i < changes; ++i) {
    const int k = static_cast<int>(changed[i]) / kNoiseBlock;
    if (k == done) continue;
    done = k;
    float most = largest_of_others<kType>(logits, k, edits.bits[k]);
    for (int j = edits.start[k]; j < edits.start[k + 1]; ++j) {
      const float now = after[j - edits.start[0]];
      most = now > most ? now : most;
    }
    blocks[k] = most;
    const float* tile = blocks + k / kTileBlocks * kTileBlocks;
    F largest = load<F>(tile);
    for (int j = kWidth; j < kTileBlocks; j += kWidth) largest = max(load<F>(tile + j), largest);
    maxima[k / kTileBlocks] = lane_max(largest);
  }
  return !any(nan);
}
