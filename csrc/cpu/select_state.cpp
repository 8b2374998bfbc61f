// select_state: state num_accepted of each request to slot 0.
#include "cache.h"

namespace specdec::cpu {
namespace {

void select_state(SPECDEC_SELECT_STATE_ARGS) {
  const BlockTable blocks = block_table_of(block_table, page_size, num_pages);
  const auto count = vector_of<int32_t>(num_accepted);
  auto* status = output<int32_t>(out_status);
  Plan plan;
  for (int64_t b = 0; b < num_accepted.size(0); ++b) {
    bool good = count[b] >= -1;
    if (count[b] > 0) {
      Move move;
      good = locate(blocks, b, static_cast<uint64_t>(count[b]), &move.from) &&
             locate(blocks, b, 0, &move.to);
      if (good) plan.moves.push_back(move);
    }
    plan.end_request();
    status[b] = good ? 0 : kBadLayout;
  }
  move_rows(rows_of(tensors), plan);
}

}  // namespace

SPECDEC_CPU_KERNEL(select_state_out, select_state)
}  // namespace specdec::cpu
