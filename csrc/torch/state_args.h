// Arguments of advance_state and advance_window as plain structs, for every native backend.
#pragma once
#include "args.h"

namespace specdec {

#define SPECDEC_ADVANCE_STATE_ARGS                                               \
  Tensor state, Tensor keys, Tensor values, OptTensor log_decay, OptTensor beta, \
      Tensor num_accepted, OptTensor path, OptTensor slots, Tensor out_status

#define SPECDEC_ADVANCE_WINDOW_ARGS                                                   \
  Tensor window, Tensor inputs, Tensor num_accepted, OptTensor path, OptTensor slots, \
      Tensor out_status

struct AcceptedNodes {  // of a step: what enters the state of each request
  int64_t batch, nodes;
  int64_t slots;    // of the state
  int64_t columns;  // of the path; of a chain: its drafts
  Vector<int32_t> num_accepted, slot;
  Ids path;  // data == nullptr: a chain
  int32_t* status;
};

struct TokenInputs {  // [layers, batch, nodes, heads, dim], absent or of dim 1
  const void* data;
  int64_t layer_stride, request_stride;
  int64_t heads, dim;
  LogitType type;
  SPECDEC_HD int64_t at(int64_t layer, int64_t b, int64_t node, int64_t head) const {
    return layer * layer_stride + b * request_stride + (node * heads + head) * dim;
  }
};

struct AdvanceStateParams {
  AcceptedNodes accepted;
  int64_t layers, heads, d_k, d_v;
  void* state;  // [layers, slots, heads, d_k, d_v]
  int64_t layer_stride, slot_stride;
  LogitType type;
  TokenInputs keys, values, log_decay, beta;
};

struct AdvanceWindowParams {
  AcceptedNodes accepted;
  int64_t layers, channels, width;
  void* window;        // [layers, slots, channels, width]
  const void* inputs;  // [layers, batch, nodes, channels]
  int64_t window_strides[4], input_strides[4];
  int64_t size;  // bytes of a number, 2 or 4
};

inline AcceptedNodes accepted_nodes(const Tensor& state, const Tensor& inputs,
                                    const Tensor& num_accepted, const OptTensor& path,
                                    const OptTensor& slots, const Tensor& out_status) {
  AcceptedNodes a{};
  a.batch = inputs.size(1);
  a.nodes = inputs.size(2);
  a.slots = state.size(1);
  a.columns = path ? path->size(1) : a.nodes - 1;
  a.num_accepted = vector_of<int32_t>(num_accepted);
  a.slot = vector_of<int32_t>(slots);
  if (path) a.path = ids_of(*path);
  a.status = output<int32_t>(out_status);
  return a;
}

inline TokenInputs token_inputs(const OptTensor& t) {
  if (!t) return {};
  return {
      t->const_data_ptr(), t->stride(0), t->stride(1), t->size(3), t->dim() == 5 ? t->size(4) : 1,
      logit_type(*t)};
}

inline AdvanceStateParams advance_state_params(SPECDEC_ADVANCE_STATE_ARGS) {
  AdvanceStateParams p{};
  p.accepted = accepted_nodes(state, keys, num_accepted, path, slots, out_status);
  p.layers = state.size(0);
  p.heads = state.size(2);
  p.d_k = state.size(3);
  p.d_v = state.size(4);
  p.state = state.mutable_data_ptr();
  p.layer_stride = state.stride(0);
  p.slot_stride = state.stride(1);
  p.type = logit_type(state);
  p.keys = token_inputs(keys);
  p.values = token_inputs(values);
  p.log_decay = token_inputs(log_decay);
  p.beta = token_inputs(beta);
  return p;
}

inline AdvanceWindowParams advance_window_params(SPECDEC_ADVANCE_WINDOW_ARGS) {
  AdvanceWindowParams p{};
  p.accepted = accepted_nodes(window, inputs, num_accepted, path, slots, out_status);
  p.layers = window.size(0);
  p.channels = window.size(2);
  p.width = window.size(3);
  p.window = window.mutable_data_ptr();
  p.inputs = inputs.const_data_ptr();
  for (int i = 0; i < 4; ++i) {
    p.window_strides[i] = window.stride(i);
    p.input_strides[i] = inputs.stride(i);
  }
  p.size = static_cast<int64_t>(window.element_size());
  return p;
}

}  // namespace specdec
