// count_tokens: tokens into the hash table of their slot. grid = [batch]; a thread a token.
#include "../torch/edit_args.h"
#include "block.cuh"
#include "global.cuh"

namespace specdec {
namespace {

struct CountParams {
  Global<int32_t> ids, counts, status;
  int64_t slots, capacity;
  int bits;  // capacity = 2^bits
  GlobalIds tokens;
  int64_t width;
  GlobalVector<int32_t> slot;
  int amount;
};

// The place of an id in the table at `table`, taken for it where it is free; -1: full of others.
__device__ int64_t take_place(const CountParams& p, int64_t table, int id) {
  const auto mask = static_cast<uint32_t>(p.capacity - 1), first = first_place(id, p.bits);
  for (uint32_t step = 0; step <= mask; ++step) {
    const int64_t place = table + ((first + step) & mask);
    const int before = claim(p.ids, place, -1, id);
    if (before == -1 || before == id) return place;
  }
  return -1;
}

__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ CountParams p) {
  const int64_t b = blockIdx.x;
  after_last_kernel();
  const int64_t slot = p.slot.get(b, static_cast<int>(b));
  const bool is_there = slot >= 0 && slot < p.slots;
  int status = is_there || slot == -1 ? 0 : kBadLayout;
  for (int64_t i = threadIdx.x; is_there && i < p.width; i += kThreads) {
    const int64_t id = p.tokens.load(b * p.width + i);
    if (id < 0 || id > 0x7fffffff) continue;
    const int64_t place = take_place(p, slot * p.capacity, static_cast<int>(id));
    if (place < 0) {
      status = kBadLayout;
    } else if (p.amount == 1) {
      set_bits(p.counts, place, 1);
    } else {
      add_to(p.counts, place, p.amount);
    }
  }
  status = block_reduce(status, Or{});
  if (threadIdx.x == 0) p.status.store(b, status);
}

}  // namespace

void count_tokens_out(const CountTokensParams& c, const Tensor& like) {
  const DeviceGuard guard(like);
  const Stream stream = current_stream(like);
  CountParams p{};
  p.ids = Global<int32_t>(c.ids);
  p.counts = Global<int32_t>(c.counts);
  p.status = Global<int32_t>(c.status);
  p.slots = c.slots;
  p.capacity = c.capacity;
  while (int64_t{1} << p.bits < c.capacity) ++p.bits;
  p.tokens = GlobalIds(c.tokens);
  p.width = c.width;

  p.slot = GlobalVector(c.slot);
  p.amount = c.amount;
  launch_phase(count_kernel, c.batch, kThreads, stream, p);
}

}  // namespace specdec

SPECDEC_REGISTER(count_tokens,
                 (specdec::Boxed<specdec::count_tokens_params, specdec::count_tokens_out>::call))
