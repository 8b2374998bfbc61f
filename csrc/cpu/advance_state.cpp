// advance_state: S = exp(g) S + k u^T for the root and the accepted nodes; threads take heads.
#include <cmath>
#include <vector>

#include "../torch/dispatch.h"
#include "accepted.h"
#include "team.h"
#include "tile.h"

namespace specdec::cpu {
namespace {

// out[i] = x[offset + i] as float32.
void widen(const TokenInputs& x, int64_t offset, int64_t n, float* out) {
  dispatch_logits(x.type, [&](auto tag) {
    const auto* from = static_cast<const typename decltype(tag)::type*>(x.data) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(from[i]);
  });
}

struct Scratch {
  std::vector<float> keys, decay, values, beta, block;
};

void advance_head(const AdvanceStateParams& p, int64_t layer, int64_t b, int64_t head,
                  const Steps& steps, Scratch* s) {
  const auto tokens = static_cast<int64_t>(steps.nodes.size());
  const int64_t pitch = (p.d_v + kStateColumns - 1) / kStateColumns * kStateColumns;
  s->keys.resize(tokens * p.d_k);
  s->decay.assign(tokens * p.d_k, 1.f);
  s->values.assign(tokens * pitch, 0.f);
  s->beta.resize(tokens);
  s->block.resize(p.d_k * kStateColumns);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t node = steps.nodes[t];
    const auto at = [&](const TokenInputs& x) {
      return x.at(layer, b, node, head / (p.heads / x.heads));
    };
    widen(p.keys, at(p.keys), p.d_k, &s->keys[t * p.d_k]);
    widen(p.values, at(p.values), p.d_v, &s->values[t * pitch]);
    if (p.beta.data) widen(p.beta, at(p.beta), 1, &s->beta[t]);
    if (p.log_decay.data) {
      const auto* g = static_cast<const float*>(p.log_decay.data) + at(p.log_decay);
      float* factor = &s->decay[t * p.d_k];
      if (p.log_decay.dim == 1) {
        std::fill_n(factor, p.d_k, std::exp(*g));
      } else {
        for (int64_t k = 0; k < p.d_k; ++k) factor[k] = std::exp(g[k]);
      }
    }
  }
  const int64_t size = p.type == LogitType::kFloat32 ? 4 : 2;
  const int64_t start = layer * p.layer_stride + steps.slot * p.slot_stride + head * p.d_k * p.d_v;
  tiles().replay[static_cast<int>(p.type)](
      {static_cast<char*>(p.state) + start * size, p.d_k, p.d_v, tokens, s->keys.data(),
       s->decay.data(), s->values.data(), p.beta.data ? s->beta.data() : nullptr, pitch,
       s->block.data()});
}

void advance_state(const AdvanceStateParams& p, const Tensor& /*like*/) {
  const std::vector<Steps> plan = plan_steps(p.accepted);
  const int64_t batch = p.accepted.batch;
  hand_out(p.layers * batch * p.heads, [&](const auto& take) {  // requests differ in tokens
    Scratch scratch;
    for (int64_t i = take(); i >= 0; i = take()) {
      const int64_t b = i / p.heads % batch;
      if (plan[b].nodes.empty()) continue;
      advance_head(p, i / p.heads / batch, b, i % p.heads, plan[b], &scratch);
    }
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(advance_state_out, Boxed<advance_state_params, advance_state>::call)
}  // namespace specdec::cpu
