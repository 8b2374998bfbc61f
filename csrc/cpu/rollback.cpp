// rollback: new_length = length + 1 + num_accepted; pages that begin at or after it leave the
// table.
#include <algorithm>

#include "cache.h"

namespace specdec::cpu {
namespace {

struct Tail {  // what request b holds after its new length
  int64_t new_length;
  int64_t first, end;  // entries of its table that hold a part of the tail
  bool acts;           // false: the request is left alone
  bool bad;
};

Tail tail_of(const BlockTable& table, int64_t b, int64_t length, int64_t count, int64_t max_tail) {
  Tail tail{length, 0, 0, count >= 0, count < -1};
  if (!tail.acts) return tail;
  const int64_t capacity = table.blocks * table.page_size;
  if (length < 0 || length > capacity || length + 1 + count > capacity) {
    return {length, 0, 0, false, true};
  }
  tail.new_length = length + 1 + count;
  tail.first = tail.end = tail.new_length / table.page_size;
  const int64_t last = tail.new_length + max_tail;
  for (; tail.end < table.blocks && tail.end * table.page_size < last; ++tail.end) {
    const int64_t page = page_of(table, b, static_cast<uint64_t>(tail.end));
    if (page < 0) break;
    if (page >= table.num_pages) return {length, 0, 0, false, true};
  }
  return tail;
}

void plan_zeros(const BlockTable& table, int64_t b, const Tail& tail, int64_t max_tail,
                Plan* plan) {
  const int64_t last = std::min(tail.new_length + max_tail, tail.end * table.page_size);
  for (int64_t position = tail.new_length; position < last; ++position) {
    Move move{};
    if (locate(table, b, static_cast<uint64_t>(position), &move.to)) plan->moves.push_back(move);
  }
}

void store(void* data, bool wide, int64_t i, int64_t value) {
  if (wide) {
    static_cast<int64_t*>(data)[i] = value;
  } else {
    static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
  }
}

void rollback(SPECDEC_ROLLBACK_ARGS) {
  const BlockTable blocks = block_table_of(block_table, page_size, num_pages);
  const Ids start = ids_of(lengths);
  const auto count = vector_of<int32_t>(num_accepted);
  const int64_t batch = lengths.size(0);
  std::vector<Tail> tails;
  Plan zeros;
  for (int64_t b = 0; b < batch; ++b) {
    tails.push_back(tail_of(blocks, b, start.at(0, b), count[b], max_tail));
    if (tails[b].acts && !tensors.empty()) plan_zeros(blocks, b, tails[b], max_tail, &zeros);
    zeros.end_request();
  }
  zero_rows(rows_of(tensors), zeros);

  const bool wide = block_table && is_wide(*block_table);
  void* freed = output<void>(out_freed_pages);
  int64_t num_freed = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const Tail& tail = tails[b];
    store(output<void>(out_lengths), is_wide(lengths), b, tail.new_length);
    output<int32_t>(out_status)[b] = tail.bad ? kBadLayout : 0;
    if (!block_table || !tail.acts) continue;
    const int64_t keeps_first = tail.new_length % page_size != 0;
    for (int64_t i = tail.first + keeps_first; i < tail.end; ++i) {
      store(freed, wide, num_freed++, blocks.entries.at(b, i));
      store(block_table->mutable_data_ptr(), wide,
            b * blocks.entries.batch_stride + i * blocks.entries.stride, -1);
    }
  }
  for (int64_t i = num_freed; i < out_freed_pages.size(0); ++i) store(freed, wide, i, -1);
  *output<int32_t>(out_num_freed) = static_cast<int32_t>(num_freed);
}

}  // namespace

SPECDEC_CPU_KERNEL(rollback_out, rollback)
}  // namespace specdec::cpu
