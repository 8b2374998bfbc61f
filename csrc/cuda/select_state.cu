// select_state: state[b, 0] = state[b, num_accepted[b]].
// Grid: batch * groups * splits; see cache.cuh for what a block owns.
#include "cache.cuh"

namespace specdec {
namespace {

struct SelectParams {
  Views views;
  BlockTable blocks;
  Global<const int32_t> num_accepted;
  Global<int32_t> status;
};

__global__ void __launch_bounds__(kThreads)
    select_state_kernel(const __grid_constant__ SelectParams p) {
  SPECDEC_SHARED(GroupTable, table);
  SPECDEC_SHARED(Moves, moves);
  SPECDEC_SHARED(int, moving);
  const Item item = item_of(p.views);
  const int64_t b = item.request;
  if (threadIdx.x == 0) {
    const int32_t count = p.num_accepted.load(b);
    bool bad = count < -1;
    if (count > 0) {
      bad = !locate(p.blocks, b, static_cast<uint64_t>(count), &moves.from[0]) ||
            !locate(p.blocks, b, 0, &moves.to[0]);
    }
    moving = count > 0 && !bad;
    if (item.group == 0 && item.split == 0 && p.status) p.status.store(b, bad ? kBadLayout : 0);
  }
  __syncthreads();
  if (!moving) return;
  load_group(p.views, item, &table);
  __syncthreads();
  move_rows<false>(p.views, item, table, moves, 1);
}

void select_state(SPECDEC_SELECT_STATE_ARGS) {
  const OnDevice on(num_accepted);
  for_tensors(tensors, table, num_accepted.size(0),
              [&](const Views& views, int64_t blocks, bool is_first) {
                SelectParams p{};
                p.views = views;
                p.blocks = block_table_of(block_table, page_size, num_pages);
                p.num_accepted = Global<const int32_t>(input<int32_t>(num_accepted));
                if (is_first) p.status = Global<int32_t>(output<int32_t>(out_status));
                launch(select_state_kernel, blocks, on, p);
              });
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(select_state, specdec::select_state)
