// A row of logits as its law sees it: edits first (edit_rows), then the packed bits of what is
// allowed.
#pragma once
#include "global.cuh"

namespace specdec {

// How the logits of a row change; absent: not at all.
struct EditedRow {
  Global<const int64_t> bits;   // bit v % 64 of word v / 64: id v is listed
  Global<const int32_t> start;  // how many are listed before those of each word
  Global<const float> values;   // bias, repetition, minus, id of what is listed: a plane each
  int64_t plane;

  SPECDEC_HD explicit operator bool() const { return static_cast<bool>(bits); }
  __device__ __forceinline__ unsigned bits8(int64_t first) const {  // of eight ids
    return bits.as<const uint8_t>().load(first >> 3);
  }
  __device__ bool has(int64_t id) const { return (bits8(id) >> (id & 7) & 1) != 0; }
  // How many are listed before an id.
  __device__ int place(int64_t id) const {
    const int64_t before = bits.load(id >> 6) & ((1ll << (id & 63)) - 1);
    return start.load(id >> 6) + __popcll(before);
  }
  __device__ int64_t id(int64_t i) const { return static_cast<int>(values.load(3 * plane + i)); }
  __device__ float apply(float logit, int64_t i) const {
    const float bias = values.load(i), repetition = values.load(plane + i);
    return edited_logit(logit, bias, repetition, values.load(2 * plane + i));
  }
  // Edits eight values from id `first` on, a multiple of 8. One after the other: most have none,
  // and all at once are more than the registers hold.
  __device__ __forceinline__ void edit8(int64_t first, float* v) const {
    unsigned left = bits8(first);
    if (left == 0) return;
    int edit = place(first);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const unsigned mine = left & (0u - left);
      float logit = v[0];
#pragma unroll
      for (int j = 1; j < 8; ++j) logit = mine == 1u << j ? v[j] : logit;
      logit = apply(logit, edit++);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = mine == 1u << j ? logit : v[j];
    }
  }
};

struct EditTable {  // of all rows of a call
  EditedRow rows{};
  int64_t blocks = 0, room = 0;
  EditTable() = default;
  explicit EditTable(const RowEdits& e)
      : rows{Global<const int64_t>(e.bits), Global<const int32_t>(e.start),
             Global<const float>(e.values), e.plane},
        blocks(e.blocks),
        room(e.room) {}
  SPECDEC_HD explicit operator bool() const { return static_cast<bool>(rows); }
  __device__ EditedRow row(int64_t i) const {
    if (!rows) return rows;
    return {rows.bits + i * blocks, rows.start + i * (blocks + 1), rows.values + i * room,
            rows.plane};
  }
};

struct MaskedRow {
  LogitRow logits;
  Global<const int32_t> allowed;
  EditedRow edits;

  __device__ LogitType type() const { return edits ? LogitType::kFloat32 : logits.type(); }
  // Bits of eight ids from `first` on, a multiple of 8.
  __device__ __forceinline__ unsigned bits(int64_t first) const {
    return allowed.as<const uint8_t>().load(first >> 3);
  }
  __device__ __forceinline__ bool allows(int64_t id) const {
    return !allowed || (allowed.load(id >> 5) >> (id & 31) & 1) != 0;
  }
  // The value of an id that has edit i.
  __device__ float listed_at(int64_t id, int64_t i) const {
    return allows(id) ? edits.apply(logits.at(id), i) : -INFINITY;
  }
  template <bool kEdited = true>
  __device__ float at(int64_t id) const {
    if (!allows(id)) return -INFINITY;
    const float logit = logits.at(id);
    return kEdited && edits && edits.has(id) ? edits.apply(logit, edits.place(id)) : logit;
  }
  // The values from id `first` on, a multiple of 8; -inf past the end and where not allowed.
  template <bool kEdited = true, int kAtOnce = 1>
  __device__ __forceinline__ void load8(int64_t first, int64_t size, float* v) const {
    load_unmasked8<kEdited, kAtOnce>(first, size, v);
    if (!allowed || first >= size) return;
    const unsigned kept = bits(first);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = (kept >> j & 1u) != 0 ? v[j] : -INFINITY;
  }
  // The same of a row without packed bits.
  template <bool kEdited = true, int kAtOnce = 1>
  __device__ __forceinline__ void load_unmasked8(int64_t first, int64_t size, float* v) const {
    logits.load8<kAtOnce>(first, size, v);
    if constexpr (kEdited) {
      if (edits && first < size) edits.edit8(first, v);
    }
  }
};

}  // namespace specdec
