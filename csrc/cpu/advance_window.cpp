// advance_window: the last inputs of a convolution, those of the root and the accepted nodes behind
// them; threads take a layer of a request.
#include "accepted.h"
#include "team.h"

namespace specdec::cpu {
namespace {

// The window as it is and the inputs of the nodes are one row, of which its end stays. Number j
// comes from behind j, so numbers are written in order.
template <class T>
void advance_layer(const AdvanceWindowParams& p, int64_t layer, int64_t b, const Steps& steps) {
  const auto tokens = static_cast<int64_t>(steps.nodes.size());
  const auto &to = p.window_strides, &from = p.input_strides;
  T* window = static_cast<T*>(p.window) + layer * to[0] + steps.slot * to[1];
  const T* inputs = static_cast<const T*>(p.inputs) + layer * from[0] + b * from[1];
  for (int64_t j = 0; j < p.width; ++j) {
    const int64_t source = tokens + j, step = source - p.width;
    const T* x = step < 0 ? window + source * to[3] : inputs + steps.nodes[step] * from[2];
    const int64_t stride = step < 0 ? to[2] : from[3];
    for (int64_t c = 0; c < p.channels; ++c) window[j * to[3] + c * to[2]] = x[c * stride];
  }
}

void advance_window(const AdvanceWindowParams& p, const Tensor& /*like*/) {
  const std::vector<Steps> plan = plan_steps(p.accepted);
  const int64_t batch = p.accepted.batch;
  hand_out(p.layers * batch, [&](const auto& take) {
    for (int64_t i = take(); i >= 0; i = take()) {
      const int64_t layer = i / batch, b = i % batch;
      if (plan[b].nodes.empty()) continue;
      if (p.size == 2) {
        advance_layer<uint16_t>(p, layer, b, plan[b]);
      } else {
        advance_layer<uint32_t>(p, layer, b, plan[b]);
      }
    }
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(advance_window_out, Boxed<advance_window_params, advance_window>::call)
}  // namespace specdec::cpu
