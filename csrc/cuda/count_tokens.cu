// count_tokens: tokens into the hash table of their slot. grid = [batch]; a thread a token.
#include "../torch/edit_args.h"
#include "block.cuh"
#include "global.cuh"

namespace specdec {
namespace {

// The place of an id in the table at `table`, taken for it where it is free; -1: full of others.
__device__ int64_t take_place(const CountTokensParams& p, int64_t table, int id) {
  const auto mask = static_cast<uint32_t>(p.capacity - 1);
  const uint32_t first = first_place(id, __popc(mask));
  for (uint32_t step = 0; step <= mask; ++step) {
    const int64_t place = table + ((first + step) & mask);
    const int before = claim(Global(p.ids), place, -1, id);
    if (before == -1 || before == id) return place;
  }
  return -1;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ CountTokensParams p) {
  const int64_t b = blockIdx.x;
  after_last_kernel();
  const int64_t slot = GlobalVector(p.slot).get(b, static_cast<int>(b));
  const bool is_there = slot >= 0 && slot < p.slots;
  int status = is_there || slot == -1 ? 0 : kBadLayout;
  for (int64_t i = threadIdx.x; is_there && i < p.width; i += kThreads) {
    const int64_t id = GlobalIds(p.tokens).load(b * p.width + i);
    if (id < 0 || id > 0x7fffffff) continue;
    const int64_t place = take_place(p, slot * p.capacity, static_cast<int>(id));
    if (place < 0) {
      status = kBadLayout;
    } else if (p.amount == 1) {
      set_bits(Global(p.counts), place, 1);
    } else {
      add_to(Global(p.counts), place, p.amount);
    }
  }
  status = block_reduce(status, Or{});
  if (threadIdx.x == 0) Global(p.status).store(b, status);
}

}  // namespace

void count_tokens_out(const CountTokensParams& p, const Tensor& like) {
  const OnDevice on(like);
  launch_phase(count_kernel, p.batch, on, p);
}

}  // namespace specdec

SPECDEC_REGISTER(count_tokens,
                 (specdec::Boxed<specdec::count_tokens_params, specdec::count_tokens_out>::call))
