// Rows of a cache on the host: where they lie, and moving them with all threads.
#pragma once
#include <cstdint>
#include <vector>

#include "../torch/cache_args.h"

namespace specdec::cpu {

struct Rows {     // one tensor of a cache
  uint8_t* data;  // [page, slot, head, byte]
  int64_t page_stride, slot_stride, head_stride;
  int64_t heads, bytes;
};

struct Place {
  int64_t page, slot;
};

struct Move {
  Place from, to;
};

// What happens to each request, in order.
struct Plan {
  std::vector<Move> moves;
  std::vector<int64_t> first{0};  // moves of request b: first[b] to first[b + 1]

  void end_request(bool good = true) {  // else without the moves planned for it
    if (!good) moves.resize(first.back());
    first.push_back(static_cast<int64_t>(moves.size()));
  }
};

std::vector<Rows> rows_of(const std::vector<Tensor>& tensors);

// Entry i of request b, -1 past the end.
int64_t page_of(const BlockTable& table, int64_t b, uint64_t i);

// Where a position lies; false if it has no page.
bool locate(const BlockTable& table, int64_t b, uint64_t position, Place* place);

// Carries a plan out on every tensor. A request's rows are moved in order, each column of a row by
// one thread, so a row is never written before it was read.
void move_rows(const std::vector<Rows>& cache, const Plan& plan);

// Zeros in `to` of every move.
void zero_rows(const std::vector<Rows>& cache, const Plan& plan);

}  // namespace specdec::cpu
