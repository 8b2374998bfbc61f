// Arguments of the ops on caches. A cache is a list of byte views [page, slot, head, byte], one a
// tensor, and a table that names the page of each block of a request's tokens.
#pragma once
#include <vector>

#include "args.h"

namespace specdec {

#define SPECDEC_CACHE_ARGS                                                           \
  std::vector<Tensor> tensors, [[maybe_unused]] Tensor table, OptTensor block_table, \
      int64_t page_size, int64_t num_pages

#define SPECDEC_COMPACT_CACHE_ARGS \
  SPECDEC_CACHE_ARGS, Tensor path, Tensor num_accepted, Tensor lengths, Tensor out_status

#define SPECDEC_SELECT_STATE_ARGS SPECDEC_CACHE_ARGS, Tensor num_accepted, Tensor out_status

#define SPECDEC_ROLLBACK_ARGS                                                                    \
  SPECDEC_CACHE_ARGS, Tensor lengths, Tensor num_accepted, int64_t max_tail, Tensor out_lengths, \
      Tensor out_freed_pages, Tensor out_num_freed, Tensor out_status

#define SPECDEC_GATHER_NODES_ARGS Tensor values, Tensor path, Tensor out_values, Tensor out_status

struct BlockTable {
  Ids entries;        // [batch, blocks]; data == nullptr: request b has the one page b
  int64_t blocks;     // entries of a request
  int64_t page_size;  // slots
  int64_t num_pages;
};

inline BlockTable block_table_of(const OptTensor& table, int64_t page_size, int64_t num_pages) {
  if (!table) return {{nullptr, 0, 0, false}, 1, page_size, num_pages};
  return {ids_of(*table), table->size(1), page_size, num_pages};
}

inline bool is_wide(const Tensor& t) { return t.scalar_type() == ScalarType::Long; }

}  // namespace specdec
