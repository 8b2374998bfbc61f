// advance_window: the last inputs of a convolution, those of the root and the accepted nodes behind
// them. Grid: layers * batch * blocks; a thread owns a channel.
#include "accepted.cuh"

namespace specdec {
namespace {

constexpr int kInFlight = 4;  // loads of a thread before its stores: windows have 2 to 4 numbers

struct WindowParams {
  AdvanceWindowParams given;
  Accepted accepted;
  unsigned blocks;  // of a layer of a request
};

// The window as it is and the inputs of the nodes are one row, of which its end stays. Number j
// comes from behind j, so a thread writes none before it was read.
template <class T>
__global__ void __launch_bounds__(kThreads)
    advance_window_kernel(const __grid_constant__ WindowParams p) {
  const AdvanceWindowParams& a = p.given;
  const unsigned block = blockIdx.x % p.blocks, rest = blockIdx.x / p.blocks;
  const int64_t b = rest % a.accepted.batch, layer = rest / a.accepted.batch;
  const Steps steps = p.accepted.steps(b, layer == 0 && block == 0);
  const int64_t channel = int64_t{block} * kThreads + threadIdx.x;
  if (steps.count < 0 || channel >= a.channels) return;

  const auto &to = a.window_strides, &from = a.input_strides;
  const Global<T> window =
      Global<T>(static_cast<T*>(a.window)) + (layer * to[0] + steps.slot * to[1] + channel * to[2]);
  const Global<const T> inputs = Global<const T>(static_cast<const T*>(a.inputs)) +
                                 (layer * from[0] + b * from[1] + channel * from[3]);
  for (int64_t first = 0; first < a.width; first += kInFlight) {
    T x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t source = steps.count + 1 + first + i, step = source - a.width;
      if (first + i >= a.width) continue;
      x[i] =
          step < 0 ? window.load(source * to[3]) : inputs.load(p.accepted.node(b, step) * from[2]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i < a.width) window.store((first + i) * to[3], x[i]);
    }
  }
}

void advance_window(const AdvanceWindowParams& p, const Tensor& like) {
  const OnDevice on(like);
  WindowParams q{p, Accepted(p.accepted), 0};
  q.blocks = static_cast<unsigned>((p.channels + kThreads - 1) / kThreads);
  const int64_t blocks = p.layers * p.accepted.batch * q.blocks;
  if (p.size == 2) return launch(advance_window_kernel<uint16_t>, blocks, on, q);
  launch(advance_window_kernel<uint32_t>, blocks, on, q);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(advance_window,
                 (specdec::Boxed<specdec::advance_window_params, specdec::advance_window>::call))
