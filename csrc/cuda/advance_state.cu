// advance_state: S = exp(g) S + k u^T for the root and the accepted nodes.
// Grid: layers * batch * heads * blocks; a block owns kColumns columns of a head's state. A warp
// has every kWarps-th row, a lane two columns of it: the state stays in registers.
#include "accepted.cuh"

namespace specdec {
namespace {

constexpr int kColumns = 64;

struct AdvanceParams {
  AdvanceStateParams given;
  Accepted accepted;
  unsigned blocks;  // of a head
};

struct Token {  // what a block shares of one
  float key[kThreads], decay[kThreads], value[kColumns], rate;
};
using Sums = float[kWarps][kColumns];

__device__ float round_bfloat16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits_float(bits | 0x400000u);
  return bits_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

__device__ float load_input(const TokenInputs& x, int64_t i) {
  return LogitRow(x.data, 0, x.type).at(i);
}

// Where a head's numbers of a node begin.
__device__ int64_t place(const AdvanceStateParams& p, const TokenInputs& x, int64_t layer,
                         int64_t b, int64_t node, int64_t head) {
  return x.at(layer, b, node, head / (p.heads / x.heads));
}

// The token into the rows of this thread.
template <int kRows>
__device__ void step(bool is_delta, const Token& token, Sums& sums, float (&s)[kRows][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float update[2] = {token.value[lane], token.value[lane + 32]}, sum[2] = {0, 0};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int k = warp + r * kWarps;
    for (int j = 0; j < 2; ++j) {
      s[r][j] *= token.decay[k];
      sum[j] += token.key[k] * s[r][j];
    }
  }
  if (is_delta) {
    for (int j = 0; j < 2; ++j) sums[warp][lane + 32 * j] = sum[j];
    __syncthreads();
    for (int j = 0; j < 2; ++j) {
      float all = 0;
      for (int w = 0; w < kWarps; ++w) all += sums[w][lane + 32 * j];
      update[j] = token.rate * (update[j] - all);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 2; ++j) s[r][j] += token.key[warp + r * kWarps] * update[j];
  }
}

// The inputs of a node to shared memory; zeros behind the last channel and column.
__device__ void share_token(const AdvanceStateParams& p, int64_t layer, int64_t b, int64_t head,
                            int64_t node, int64_t first, Token* token) {
  const int64_t k = threadIdx.x;
  float key = 0, decay = 1;
  if (k < p.d_k) {
    key = load_input(p.keys, place(p, p.keys, layer, b, node, head) + k);
    if (p.log_decay.data) {
      const int64_t at = place(p, p.log_decay, layer, b, node, head);
      if (p.log_decay.dim > 1) {
        decay = expf(load_input(p.log_decay, at + k));
      } else if (k % 32 == 0) {
        decay = expf(load_input(p.log_decay, at));
      }
    }
  }
  if (p.log_decay.dim == 1) decay = __shfl_sync(0xffffffffu, decay, 0);  // a load a warp
  token->key[k] = key;
  token->decay[k] = decay;
  if (k < kColumns) {
    const bool is_there = first + k < p.d_v;
    const int64_t at = place(p, p.values, layer, b, node, head) + first + k;
    token->value[k] = is_there ? load_input(p.values, at) : 0.f;
  }
  if (k == 0 && p.beta.data) {
    token->rate = load_input(p.beta, place(p, p.beta, layer, b, node, head));
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    advance_state_kernel(const __grid_constant__ AdvanceParams p) {
  SPECDEC_SHARED(Token, token);
  SPECDEC_SHARED(Sums, sums);
  const AdvanceStateParams& a = p.given;
  const unsigned block = blockIdx.x % p.blocks, rest = blockIdx.x / p.blocks;
  const int64_t head = rest % a.heads, b = rest / a.heads % a.accepted.batch;
  const int64_t layer = rest / a.heads / a.accepted.batch;
  const Steps steps = p.accepted.steps(b, layer == 0 && head == 0 && block == 0);
  if (steps.count < 0) return;

  const int64_t first = int64_t{block} * kColumns, column = first + threadIdx.x % 32;
  const int64_t start = layer * a.layer_stride + steps.slot * a.slot_stride + head * a.d_k * a.d_v;
  const LogitRow state(a.state, start, a.type);
  float s[kRows][2];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t k = threadIdx.x / 32 + r * kWarps;
    for (int j = 0; j < 2; ++j) {
      const bool is_there = k < a.d_k && column + 32 * j < a.d_v;
      s[r][j] = is_there ? state.at(k * a.d_v + column + 32 * j) : 0.f;
    }
  }
  for (int64_t d = 0; d <= steps.count; ++d) {
    share_token(a, layer, b, head, p.accepted.node(b, d), first, &token);
    __syncthreads();
    step<kRows>(a.beta.data != nullptr, token, sums, s);
    __syncthreads();
  }
  const Global<uint8_t> to(static_cast<uint8_t*>(a.state));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t k = threadIdx.x / 32 + r * kWarps;
    for (int j = 0; j < 2; ++j) {
      if (k >= a.d_k || column + 32 * j >= a.d_v) continue;
      const float x = a.type == LogitType::kBFloat16 ? round_bfloat16(s[r][j]) : s[r][j];
      store_as(a.type, to, start + k * a.d_v + column + 32 * j, x);
    }
  }
}

void advance_state(const AdvanceStateParams& p, const Tensor& like) {
  const OnDevice on(like);
  AdvanceParams q{p, Accepted(p.accepted), 0};
  q.blocks = static_cast<unsigned>((p.d_v + kColumns - 1) / kColumns);
  const int64_t blocks = p.layers * p.accepted.batch * p.heads * q.blocks;
  if (p.d_k <= 128) return launch(advance_state_kernel<16>, blocks, on, q);
  launch(advance_state_kernel<32>, blocks, on, q);
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(advance_state,
                 (specdec::Boxed<specdec::advance_state_params, specdec::advance_state>::call))
