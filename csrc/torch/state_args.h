// Arguments of advance_state as plain structs, for every native backend.
#pragma once
#include "args.h"

namespace specdec {

#define SPECDEC_ADVANCE_STATE_ARGS                                               \
  Tensor state, Tensor keys, Tensor values, OptTensor log_decay, OptTensor beta, \
      Tensor num_accepted, OptTensor path, OptTensor slots, Tensor out_status

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
  int64_t layers, batch, nodes, heads, d_k, d_v;
  int64_t slots;    // of the state
  int64_t columns;  // of the path; of a chain: its drafts
  void* state;      // [layers, slots, heads, d_k, d_v]
  int64_t layer_stride, slot_stride;
  LogitType type;
  TokenInputs keys, values, log_decay, beta;
  Vector<int32_t> num_accepted, slot;
  Ids path;  // data == nullptr: a chain
  int32_t* status;
};

inline TokenInputs token_inputs(const OptTensor& t) {
  if (!t) return {};
  return {
      t->const_data_ptr(), t->stride(0), t->stride(1), t->size(3), t->dim() == 5 ? t->size(4) : 1,
      logit_type(*t)};
}

inline AdvanceStateParams advance_state_params(SPECDEC_ADVANCE_STATE_ARGS) {
  AdvanceStateParams p{};
  p.layers = state.size(0);
  p.slots = state.size(1);
  p.heads = state.size(2);
  p.d_k = state.size(3);
  p.d_v = state.size(4);
  p.batch = keys.size(1);
  p.nodes = keys.size(2);
  p.state = state.mutable_data_ptr();
  p.layer_stride = state.stride(0);
  p.slot_stride = state.stride(1);
  p.type = logit_type(state);
  p.keys = token_inputs(keys);
  p.values = token_inputs(values);
  p.log_decay = token_inputs(log_decay);
  p.beta = token_inputs(beta);
  p.num_accepted = vector_of<int32_t>(num_accepted);
  p.slot = vector_of<int32_t>(slots);
  p.columns = path ? path->size(1) : p.nodes - 1;
  if (path) p.path = ids_of(*path);
  p.status = output<int32_t>(out_status);
  return p;
}

}  // namespace specdec
