// Rows of a cache on a device. A block owns one request in a group of tensors, a warp one tensor of
// the group: every column of a row stays with one thread, which takes the rows in order, so none is
// written before it was read.
#pragma once
#include <algorithm>
#include <vector>

#include "../torch/cache_args.h"
#include "block.cuh"
#include "global.cuh"

namespace specdec {

constexpr int kMaxTensors = 384;  // of a launch: their addresses travel as a kernel's arguments
constexpr int kFields = 5;      // of the table: strides of page, slot, head; heads; bytes of a row
constexpr int kGroup = kWarps;  // tensors of a block
constexpr int kMoves = 32;      // rows of a request that a block looks up at once
constexpr int kInFlight = 4;    // loads of a thread before its stores
constexpr int64_t kSplitBytes =
    8192;  // bytes of a token's row, over all heads, that are worth a block of their own

struct Views {
  Global<const int64_t> table;  // [tensors, kFields]
  unsigned groups, splits;
  int tensors;
  uint64_t address[kMaxTensors];
};

struct Place {
  int64_t page, slot;
};

struct Moves {
  Place from[kMoves], to[kMoves];
};

struct GroupTable {
  int64_t field[kGroup][kFields];
};

struct Item {  // what this block works on
  int64_t request, group, split;
};

__device__ inline Item item_of(const Views& views) {
  const unsigned rest = blockIdx.x / views.splits;
  return {rest / views.groups, rest % views.groups, blockIdx.x % views.splits};
}

__device__ inline int64_t page_of(const BlockTable& blocks, int64_t b, uint64_t i) {
  if (i >= static_cast<uint64_t>(blocks.blocks)) return -1;
  if (!blocks.entries.data) return b;
  const int64_t row = b * blocks.entries.batch_stride;
  return GlobalIds(blocks.entries).load(row + static_cast<int64_t>(i));
}

__device__ inline bool locate(const BlockTable& blocks, int64_t b, uint64_t position,
                              Place* place) {
  const auto size = static_cast<uint64_t>(blocks.page_size);
  *place = {page_of(blocks, b, position / size), static_cast<int64_t>(position % size)};
  return place->page >= 0 && place->page < blocks.num_pages;
}

// Reads the table of this block's tensors; to be followed by a barrier.
__device__ inline void load_group(const Views& views, const Item& item, GroupTable* table) {
  const int64_t first = item.group * kGroup * kFields, end = int64_t{views.tensors} * kFields;
  for (int i = threadIdx.x; i < kGroup * kFields; i += kThreads) {
    if (first + i < end) table->field[i / kFields][i % kFields] = views.table.load(first + i);
  }
}

struct RowsOfTensor {
  uint64_t base;
  const int64_t* field;
  __device__ uint64_t at(const Place& place) const {
    return base + static_cast<uint64_t>(place.page * field[0] + place.slot * field[1]);
  }
};

// Columns of U bytes: from -> to for `count` rows in order, or zeros where kZero.
template <class U, bool kZero>
__device__ void move_columns(const RowsOfTensor& rows, const Moves& moves, int count,
                             const Item& item, int64_t splits) {
  const int64_t row = rows.field[4] / static_cast<int64_t>(sizeof(U)), width = row * rows.field[3];
  for (int64_t e = item.split * 32 + threadIdx.x % 32; e < width; e += splits * 32) {
    const auto column = static_cast<uint64_t>(e / row * rows.field[2] + e % row * sizeof(U));
    for (int first = 0; first < count; first += kInFlight) {
      U units[kInFlight] = {};
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (kZero || first + j >= count) continue;
        const uint64_t from = rows.at(moves.from[first + j]) + column;
        units[j] = Global<const U>(reinterpret_cast<const U*>(from)).load(0);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (first + j >= count) continue;
        const uint64_t to = rows.at(moves.to[first + j]) + column;
        Global<U>(reinterpret_cast<U*>(to)).store(0, units[j]);
      }
    }
  }
}

// Moves (or zeros) `count` rows in every tensor of this block.
template <bool kZero>
__device__ void move_rows(const Views& views, const Item& item, const GroupTable& table,
                          const Moves& moves, int count) {
  const int warp = threadIdx.x / 32;
  const int64_t tensor = item.group * kGroup + warp;
  if (tensor >= views.tensors) return;
  const RowsOfTensor rows{views.address[tensor], table.field[warp]};
  uint64_t bits = rows.base;
  for (const int f : {0, 1, 2, 4}) bits |= static_cast<uint64_t>(rows.field[f]);
  if (bits % 16 == 0) return move_columns<Words, kZero>(rows, moves, count, item, views.splits);
  if (bits % 8 == 0) return move_columns<uint64_t, kZero>(rows, moves, count, item, views.splits);
  if (bits % 4 == 0) return move_columns<uint32_t, kZero>(rows, moves, count, item, views.splits);
  if (bits % 2 == 0) return move_columns<uint16_t, kZero>(rows, moves, count, item, views.splits);
  move_columns<uint8_t, kZero>(rows, moves, count, item, views.splits);
}

// f(views, blocks of the grid, whether these are the first tensors), once for each kMaxTensors
// tensors.
template <class F>
void for_tensors(const std::vector<Tensor>& tensors, const Tensor& table, int64_t batch,
                 const F& f) {
  const auto total = static_cast<int64_t>(tensors.size());
  for (int64_t first = 0; first < total; first += kMaxTensors) {
    Views views{};
    views.tensors = static_cast<int>(std::min<int64_t>(total - first, kMaxTensors));
    views.table = Global<const int64_t>(input<int64_t>(table) + first * kFields);
    int64_t widest = 0;
    for (int i = 0; i < views.tensors; ++i) {
      const Tensor& t = tensors[first + i];
      views.address[i] = reinterpret_cast<uint64_t>(t.mutable_data_ptr());
      widest = std::max(widest, t.size(2) * t.size(3));
    }
    views.groups = static_cast<unsigned>((views.tensors + kGroup - 1) / kGroup);
    views.splits = static_cast<unsigned>(std::clamp<int64_t>(widest / kSplitBytes, 1, 64));
    f(views, batch * views.groups * views.splits, first == 0);
  }
}

}  // namespace specdec
