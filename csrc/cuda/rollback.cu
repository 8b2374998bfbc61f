// rollback: new_length = length + 1 + num_accepted; pages that begin at or after it leave the
// table. zero_tail_kernel, if asked for, before the table is trimmed. Grid: batch * groups * splits
// (cache.cuh). trim_kernel: one block; a thread owns a request, a scan over the block says where
// its pages go in the list.
#include "cache.cuh"

namespace specdec {
namespace {

struct RollbackParams {
  Views views;
  BlockTable blocks;
  GlobalIds lengths;
  Global<const int32_t> num_accepted;
  int64_t batch, max_tail;
  GlobalIds new_lengths, freed;
  int64_t width;  // of the list
  Global<int32_t> num_freed, status;
};

struct Tail {
  int64_t new_length;
  int64_t first, end;  // entries of the table that hold a part of the tail
  int acts, bad;       // a request that does not act is left alone
};

__device__ Tail tail_of(const RollbackParams& p, int64_t b) {
  const int64_t length = p.lengths.load(b), count = p.num_accepted.load(b);
  const int64_t capacity = p.blocks.blocks * p.blocks.page_size;
  if (count < 0) return {length, 0, 0, 0, count < -1};
  const Tail left_alone{length, 0, 0, 0, 1};
  if (length < 0 || length > capacity || length + 1 + count > capacity) return left_alone;
  const int64_t fresh = length + 1 + count, first = fresh / p.blocks.page_size;
  Tail tail{fresh, first, first, 1, 0};
  while (tail.end < p.blocks.blocks && tail.end * p.blocks.page_size < fresh + p.max_tail) {
    const int64_t page = page_of(p.blocks, b, static_cast<uint64_t>(tail.end));
    if (page < 0) break;
    if (page >= p.blocks.num_pages) return left_alone;
    ++tail.end;
  }
  return tail;
}

__global__ void __launch_bounds__(kThreads)
    zero_tail_kernel(const __grid_constant__ RollbackParams p) {
  SPECDEC_SHARED(GroupTable, table);
  SPECDEC_SHARED(Moves, moves);
  SPECDEC_SHARED(Tail, tail);
  const Item item = item_of(p.views);
  if (threadIdx.x == 0) tail = tail_of(p, item.request);
  load_group(p.views, item, &table);
  __syncthreads();
  if (!tail.acts) return;
  const int64_t tail_end = tail.new_length + p.max_tail, pages_end = tail.end * p.blocks.page_size;
  const int64_t last = tail_end < pages_end ? tail_end : pages_end;
  for (int64_t first = tail.new_length; first < last; first += kMoves) {
    const int64_t left = last - first;
    const int count = static_cast<int>(left < kMoves ? left : kMoves);
    if (static_cast<int>(threadIdx.x) < count) {
      locate(p.blocks, item.request, static_cast<uint64_t>(first + threadIdx.x),
             &moves.to[threadIdx.x]);
    }
    __syncthreads();
    move_rows<true>(p.views, item, table, moves, count);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    trim_kernel(const __grid_constant__ RollbackParams p) {
  const GlobalIds entries(p.blocks.entries);
  int64_t num_freed = 0;
  for (int64_t first = 0; first < p.batch; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    Tail tail{};
    if (b < p.batch) {
      tail = tail_of(p, b);
      p.new_lengths.store(b, tail.new_length);
      p.status.store(b, tail.bad ? kBadLayout : 0);
    }
    if (!p.blocks.entries.data) continue;
    // The page that the last token shares with the tail stays.
    const int64_t dropped = tail.first + (tail.new_length % p.blocks.page_size != 0);
    const int count = tail.acts && dropped < tail.end ? static_cast<int>(tail.end - dropped) : 0;
    int total = 0;
    const int64_t at = num_freed + block_exclusive_sum(count, &total);
    for (int i = 0; i < count; ++i) {
      const int64_t entry = b * p.blocks.entries.batch_stride + dropped + i;
      p.freed.store(at + i, entries.load(entry));
      entries.store(entry, -1);
    }
    num_freed += total;
  }
  for (int64_t i = num_freed + threadIdx.x; i < p.width; i += kThreads) p.freed.store(i, -1);
  if (threadIdx.x == 0) p.num_freed.store(0, static_cast<int32_t>(num_freed));
}

void rollback(SPECDEC_ROLLBACK_ARGS) {
  const OnDevice on(lengths);
  RollbackParams p{};
  p.blocks = block_table_of(block_table, page_size, num_pages);
  p.lengths = GlobalIds(ids_of(lengths));
  p.num_accepted = Global<const int32_t>(input<int32_t>(num_accepted));
  p.batch = lengths.size(0);
  p.max_tail = max_tail;
  p.new_lengths = GlobalIds(output<void>(out_lengths), is_wide(lengths));
  p.freed = GlobalIds(output<void>(out_freed_pages), block_table && is_wide(*block_table));
  p.width = out_freed_pages.size(0);
  p.num_freed = Global<int32_t>(output<int32_t>(out_num_freed));
  p.status = Global<int32_t>(output<int32_t>(out_status));
  for_tensors(tensors, table, p.batch, [&](const Views& views, int64_t blocks, bool) {
    p.views = views;
    launch(zero_tail_kernel, blocks, on, p);
  });
  launch(trim_kernel, 1, on, p);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(rollback, specdec::rollback)
