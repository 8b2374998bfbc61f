// compact_cache: row of the d-th accepted node to slot length + d, in order of d.
#include "cache.h"

namespace specdec::cpu {
namespace {

// Plans the moves of request b; false if its path or its table is bad.
bool plan_request(const BlockTable& table, const Ids& path, int64_t columns, int64_t b,
                  int64_t count, int64_t length, Plan* plan) {
  if (count < -1 || count > columns || (count >= 0 && length < 0)) return false;
  const auto root = static_cast<uint64_t>(length);
  for (int64_t d = 1, before = 0; d <= count; ++d) {
    const int64_t node = path.at(b, d - 1);
    if (node <= before) return false;
    before = node;
    if (node == d) continue;  // in place
    Move move;
    if (!locate(table, b, root + static_cast<uint64_t>(node), &move.from)) return false;
    if (!locate(table, b, root + static_cast<uint64_t>(d), &move.to)) return false;
    plan->moves.push_back(move);
  }
  return true;
}

void compact_cache(SPECDEC_COMPACT_CACHE_ARGS) {
  const BlockTable blocks = block_table_of(block_table, page_size, num_pages);
  const Ids nodes = ids_of(path), start = ids_of(lengths);
  const auto count = vector_of<int32_t>(num_accepted);
  auto* status = output<int32_t>(out_status);
  Plan plan;
  for (int64_t b = 0; b < num_accepted.size(0); ++b) {
    const bool good = plan_request(blocks, nodes, path.size(1), b, count[b], start.at(0, b), &plan);
    plan.end_request(good);
    status[b] = good ? 0 : kBadLayout;
  }
  move_rows(rows_of(tensors), plan);
}

}  // namespace

SPECDEC_CPU_KERNEL(compact_cache_out, compact_cache)
}  // namespace specdec::cpu
