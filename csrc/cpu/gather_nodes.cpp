// gather_nodes: out[b, 0] = values[b, 0], out[b, d] = values[b, path[b, d - 1]], then zeros.
#include <cstring>

#include "../torch/cache_args.h"
#include "team.h"

namespace specdec::cpu {
namespace {

void gather_nodes(SPECDEC_GATHER_NODES_ARGS) {
  const int64_t batch = path.size(0), columns = path.size(1);
  const int64_t item = values.element_size(), nodes = values.size(1);
  const int64_t bytes = values.size(2) * item;
  const int64_t batch_stride = values.stride(0) * item, node_stride = values.stride(1) * item;
  const auto* from = static_cast<const uint8_t*>(values.const_data_ptr());
  auto* to = output<uint8_t>(out_values);
  auto* status = output<int32_t>(out_status);
  const Ids entries = ids_of(path);
  const bool is_small = batch * columns * bytes < kOneThreadBytes;
  const Team team(is_small ? 1 : static_cast<int>(torch::stable::get_num_threads()));
  std::vector<int64_t> node(batch * columns, -1);  // -1: zeros
  for (int64_t b = 0; b < batch; ++b) {
    status[b] = 0;
    for (int64_t d = 0; d < columns; ++d) {
      const int64_t n = d > 0 ? entries.at(b, d - 1) : 0;
      if (n < 0 || n >= nodes) {
        if (n != -1) status[b] = kBadLayout;
        break;
      }
      node[b * columns + d] = n;
    }
  }
  team.run(batch * columns, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (node[i] < 0) {
        std::memset(to + i * bytes, 0, bytes);
      } else {
        const int64_t b = i / columns;
        std::memcpy(to + i * bytes, from + b * batch_stride + node[i] * node_stride, bytes);
      }
    }
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(gather_nodes_out, gather_nodes)
}  // namespace specdec::cpu
