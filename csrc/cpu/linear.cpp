// linear: x times a weight's transpose, for a few rows.
//   linear.cpu(Tensor x, Tensor weight, Tensor? bias) -> Tensor
// x [..., inputs], weight [outputs, inputs] and bias [outputs] are dense and of one type, float32,
// bfloat16 or float16; sums are float32. Not part of the public interface: specdec_loop calls it.
#include "linear.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "../torch/args.h"
#include "../torch/dispatch.h"
#include "team.h"
#include "tile.h"

namespace specdec::cpu {
namespace {

// Products of a thread that is woken: 32 thousand take about 5 us.
constexpr int64_t kThreadWork = 32 << 10;

// A tensor's numbers as floats; those of a float32 tensor where they are.
const float* widened(const Tensor& t, LogitType type, std::vector<float>& room) {
  const void* from = t.const_data_ptr();
  if (type == LogitType::kFloat32) return static_cast<const float*>(from);
  room.resize(t.numel());
  dispatch_logits(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (size_t i = 0; i < room.size(); ++i) room[i] = static_cast<const T*>(from)[i];
  });
  return room.data();
}

Tensor linear(Tensor x, Tensor weight, OptTensor bias) {
  const bool fits = weight.dim() == 2 && x.dim() > 0 && x.size(x.dim() - 1) == weight.size(1);
  STD_TORCH_CHECK(fits, "linear: x [..., inputs] and weight [outputs, inputs]");
  const LogitType type = logit_type(weight);
  const auto same = [&](const Tensor& t) {
    return t.is_contiguous() && t.scalar_type() == weight.scalar_type();
  };
  STD_TORCH_CHECK(same(x) && same(weight) && (!bias || same(*bias)), "linear: dense, of one type");
  LinearRows l{};
  l.outputs = weight.size(0);
  l.inputs = weight.size(1);
  STD_TORCH_CHECK(!bias || bias->numel() == l.outputs, "linear: bias [outputs]");
  STD_TORCH_CHECK(l.inputs > 0 && l.inputs % kInputUnit == 0, "linear: inputs a multiple of 16");
  l.rows = x.numel() / l.inputs;
  std::vector<int64_t> sizes(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) sizes[d] = d + 1 < x.dim() ? x.size(d) : l.outputs;
  Tensor y = torch::stable::new_empty(x, {sizes.data(), sizes.size()});
  std::vector<float> x_room, bias_room, y_room;
  l.x = widened(x, type, x_room);
  l.weight = weight.const_data_ptr();
  l.bias = bias ? widened(*bias, type, bias_room) : nullptr;
  if (type != LogitType::kFloat32) y_room.resize(y.numel());
  l.y = type == LogitType::kFloat32 ? output<float>(y) : y_room.data();
  const int64_t blocks = (l.outputs + kOutputBlock - 1) / kOutputBlock;
  const int64_t work = l.rows * l.inputs * l.outputs / kThreadWork;
  const int64_t threads = torch::stable::get_num_threads();
  const Team team(static_cast<int>(std::clamp<int64_t>(work, 1, threads)));
  const Linear multiply = tiles().linear[static_cast<int>(type)];
  team.run(blocks, [&](int, int64_t first, int64_t end) { multiply(l, first, end); });
  if (type != LogitType::kFloat32) {
    dispatch_logits(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      T* to = output<T>(y);
      for (size_t i = 0; i < y_room.size(); ++i) to[i] = y_room[i];
    });
  }
  return y;
}

}  // namespace
}  // namespace specdec::cpu

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_NAMESPACE, m) {
  m.def("linear.cpu(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}

SPECDEC_CPU_KERNEL(linear, specdec::cpu::linear)
