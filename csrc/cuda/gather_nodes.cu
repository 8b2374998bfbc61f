// gather_nodes: out[b, 0] = values[b, 0], out[b, d] = values[b, path[b, d - 1]] up to the path's
// end, then zeros. Grid: batch * columns; a block owns one row of the result.
#include "cache.cuh"

namespace specdec {
namespace {

struct GatherParams {
  uint64_t values, out;
  int64_t batch_stride, node_stride, bytes, nodes;
  GlobalIds path;  // [batch, columns]; the last column is not read
  int64_t columns;
  Global<int32_t> status;
};

struct Found {
  int64_t node;
  int is_stranger;
};

template <class U>
__device__ void copy_row(uint64_t from, uint64_t to, int64_t bytes) {
  const Global<const U> source(reinterpret_cast<const U*>(from));
  const Global<U> target(reinterpret_cast<U*>(to));
  for (int64_t e = threadIdx.x; e < bytes / static_cast<int64_t>(sizeof(U)); e += kThreads) {
    target.store(e, from ? source.load(e) : U{});
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    gather_nodes_kernel(const __grid_constant__ GatherParams p) {
  SPECDEC_SHARED(Found, found);
  const auto columns = static_cast<unsigned>(p.columns);
  const int64_t b = blockIdx.x / columns, i = blockIdx.x % columns;
  const int64_t last = p.columns - 1, looks_at = i == 0 ? last : i;  // row 0 also judges the path
  int64_t end = last;
  for (int64_t d = threadIdx.x; d < looks_at; d += kThreads) {
    const int64_t node = p.path.load(b * p.columns + d);
    if ((node < 0 || node >= p.nodes) && d < end) end = d;
  }
  end = -block_reduce(-end, Larger());
  if (threadIdx.x == 0) {
    found.node = i == 0 ? 0 : i <= end ? p.path.load(b * p.columns + i - 1) : -1;
    if (i == 0)
      p.status.store(b, end < last && p.path.load(b * p.columns + end) != -1 ? kBadLayout : 0);
  }
  __syncthreads();
  const uint64_t to = p.out + static_cast<uint64_t>(static_cast<int64_t>(blockIdx.x) * p.bytes);
  const uint64_t row =
      p.values + static_cast<uint64_t>(b * p.batch_stride + found.node * p.node_stride);
  const uint64_t from = found.node < 0 ? 0 : row;
  const auto strides = static_cast<uint64_t>(p.batch_stride | p.node_stride | p.bytes);
  const uint64_t bits = p.values | p.out | strides;
  if (bits % 16 == 0) return copy_row<Words>(from, to, p.bytes);
  if (bits % 4 == 0) return copy_row<uint32_t>(from, to, p.bytes);
  copy_row<uint8_t>(from, to, p.bytes);
}

void gather_nodes(SPECDEC_GATHER_NODES_ARGS) {
  const OnDevice on(values);
  GatherParams p{};
  p.values = reinterpret_cast<uint64_t>(values.const_data_ptr());
  p.out = reinterpret_cast<uint64_t>(output<void>(out_values));
  const auto item = static_cast<int64_t>(values.element_size());
  p.batch_stride = values.stride(0) * item;
  p.node_stride = values.stride(1) * item;
  p.nodes = values.size(1);
  p.bytes = values.size(2) * item;
  p.path = GlobalIds(ids_of(path));
  p.columns = path.size(1);
  p.status = Global<int32_t>(output<int32_t>(out_status));
  launch(gather_nodes_kernel, path.size(0) * p.columns, on, p);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(gather_nodes, specdec::gather_nodes)
