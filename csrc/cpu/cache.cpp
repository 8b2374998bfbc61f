// Moving rows of a cache.
#include "cache.h"

#include <cstring>

#include "team.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kItemsPerThread = 8;  // so that unequal requests still spread evenly

// f(rows, move, head offset, first byte, number of bytes) for every row of the plan. Work is split
// by request and tensor, and by columns of the rows where that gives too few items.
template <class F>
void for_rows(const std::vector<Rows>& cache, const Plan& plan, const F& f) {
  const auto batch = static_cast<int64_t>(plan.first.size()) - 1;
  const auto tensors = static_cast<int64_t>(cache.size());
  int64_t token_bytes = 0;
  for (const Rows& rows : cache) token_bytes += rows.heads * rows.bytes;
  const int64_t total = token_bytes * static_cast<int64_t>(plan.moves.size());
  if (total == 0) return;
  const auto threads = total < kOneThreadBytes ? 1 : int64_t{torch::stable::get_num_threads()};
  const int64_t items = batch * tensors;
  const int64_t parts = threads == 1 ? 1 : (threads * kItemsPerThread + items - 1) / items;
  Team(static_cast<int>(threads)).run(items * parts, [&](int, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t part = item % parts, b = item / parts / tensors;
      const Rows& rows = cache[item / parts % tensors];
      const int64_t low = rows.bytes * part / parts, high = rows.bytes * (part + 1) / parts;
      if (low == high) continue;
      for (int64_t head = 0; head < rows.heads; ++head) {
        for (int64_t m = plan.first[b]; m < plan.first[b + 1]; ++m) {
          f(rows, plan.moves[m], head * rows.head_stride + low, high - low);
        }
      }
    }
  });
}

uint8_t* at(const Rows& rows, const Place& place, int64_t offset) {
  return rows.data + place.page * rows.page_stride + place.slot * rows.slot_stride + offset;
}

}  // namespace

std::vector<Rows> rows_of(const std::vector<Tensor>& tensors) {
  std::vector<Rows> cache;
  cache.reserve(tensors.size());
  for (const Tensor& t : tensors) {
    cache.push_back({static_cast<uint8_t*>(t.mutable_data_ptr()), t.stride(0), t.stride(1),
                     t.stride(2), t.size(2), t.size(3)});
  }
  return cache;
}

int64_t page_of(const BlockTable& table, int64_t b, uint64_t i) {
  if (i >= static_cast<uint64_t>(table.blocks)) return -1;
  return table.entries.data ? table.entries.at(b, static_cast<int64_t>(i)) : b;
}

bool locate(const BlockTable& table, int64_t b, uint64_t position, Place* place) {
  const auto size = static_cast<uint64_t>(table.page_size);
  *place = {page_of(table, b, position / size), static_cast<int64_t>(position % size)};
  return place->page >= 0 && place->page < table.num_pages;
}

void move_rows(const std::vector<Rows>& cache, const Plan& plan) {
  for_rows(cache, plan, [](const Rows& rows, const Move& move, int64_t offset, int64_t bytes) {
    uint8_t* to = at(rows, move.to, offset);
    const uint8_t* from = at(rows, move.from, offset);
    if (to != from) std::memcpy(to, from, bytes);  // equal only where a table names a page twice
  });
}

void zero_rows(const std::vector<Rows>& cache, const Plan& plan) {
  for_rows(cache, plan, [](const Rows& rows, const Move& move, int64_t offset, int64_t bytes) {
    std::memset(at(rows, move.to, offset), 0, bytes);
  });
}

}  // namespace specdec::cpu
