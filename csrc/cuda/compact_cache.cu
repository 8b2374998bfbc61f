// compact_cache: cache[b, lengths[b] + d] = cache[b, lengths[b] + path[b, d - 1]], in order of d.
// Grid: batch * groups * splits; see cache.cuh for what a block owns.
#include "cache.cuh"

namespace specdec {
namespace {

struct CompactParams {
  Views views;
  BlockTable blocks;
  GlobalIds path;  // [batch, columns]
  int64_t columns;
  Global<const int32_t> num_accepted;
  GlobalIds lengths;
  Global<int32_t> status;
};

struct Request {
  int64_t count, length;
};

// Bit 0: something of the path or its places is bad; the other bits count the rows in place.
__device__ int examine(const CompactParams& p, int64_t b, const Request& request) {
  int bad = 0, in_place = 0;
  for (int64_t d = 1 + threadIdx.x; d <= request.count && d <= p.columns; d += kThreads) {
    const int64_t at = b * p.columns + d - 1;
    const int64_t node = p.path.load(at), before = d > 1 ? p.path.load(at - 1) : 0;
    const auto root = static_cast<uint64_t>(request.length);
    Place place;
    if (node <= before) {
      bad = 1;
    } else if (node == d) {
      ++in_place;
    } else if (!locate(p.blocks, b, root + static_cast<uint64_t>(node), &place) ||
               !locate(p.blocks, b, root + static_cast<uint64_t>(d), &place)) {
      bad = 1;
    }
  }
  bad = block_reduce(bad, Or());
  return 2 * block_reduce(in_place, Plus()) + bad;
}

__global__ void __launch_bounds__(kThreads)
    compact_cache_kernel(const __grid_constant__ CompactParams p) {
  SPECDEC_SHARED(Request, request);
  SPECDEC_SHARED(GroupTable, table);
  SPECDEC_SHARED(Moves, moves);
  const Item item = item_of(p.views);
  const int64_t b = item.request;
  if (threadIdx.x == 0) request = {p.num_accepted.load(b), p.lengths.load(b)};
  __syncthreads();
  const int found = examine(p, b, request);
  const bool bad = (found & 1) || request.count < -1 || request.count > p.columns ||
                   (request.count >= 0 && request.length < 0);
  if (threadIdx.x == 0 && item.group == 0 && item.split == 0 && p.status) {
    p.status.store(b, bad ? kBadLayout : 0);
  }
  if (bad || found / 2 >= request.count) return;
  load_group(p.views, item, &table);
  for (int64_t first = found / 2 + 1; first <= request.count; first += kMoves) {
    const int64_t d = first + threadIdx.x;
    if (threadIdx.x < kMoves && d <= request.count) {
      const auto root = static_cast<uint64_t>(request.length);
      const auto node = static_cast<uint64_t>(p.path.load(b * p.columns + d - 1));
      locate(p.blocks, b, root + node, &moves.from[threadIdx.x]);
      locate(p.blocks, b, root + static_cast<uint64_t>(d), &moves.to[threadIdx.x]);
    }
    __syncthreads();
    const int64_t left = request.count - first + 1;
    move_rows<false>(p.views, item, table, moves, static_cast<int>(left < kMoves ? left : kMoves));
    __syncthreads();
  }
}

void compact_cache(SPECDEC_COMPACT_CACHE_ARGS) {
  const OnDevice on(num_accepted);
  const int64_t batch = num_accepted.size(0);
  for_tensors(tensors, table, batch, [&](const Views& views, int64_t blocks, bool is_first) {
    CompactParams p{};
    p.views = views;
    p.blocks = block_table_of(block_table, page_size, num_pages);
    p.path = GlobalIds(ids_of(path));
    p.columns = path.size(1);
    p.num_accepted = Global<const int32_t>(input<int32_t>(num_accepted));
    p.lengths = GlobalIds(ids_of(lengths));
    if (is_first) p.status = Global<int32_t>(output<int32_t>(out_status));
    launch(compact_cache_kernel, blocks, on, p);
  });
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(compact_cache, specdec::compact_cache)
