// Arguments of allocate_drafts as a plain struct, and the arithmetic that its backends share.
#pragma once
#include "params.h"

namespace specdec {

struct AllocateParams {
  int64_t batch, draft, capacity;  // capacity: most drafts of the batch
  Ids draft_ids;                   // [batch, draft]
  const float* confidence;         // [batch, draft], dense
  Vector<bool> active;             // [batch] or not given
  Vector<float> cost;              // [> capacity] or not given
  bool compare_all;
  void* out_ids;  // results; of the type of draft_ids
  int32_t *cu_draft, *source, *num_draft, *status;
};

// The fault of a draft that begins with this id and confidence; 0: none, it goes on.
SPECDEC_HD int32_t draft_fault(int64_t id, float confidence) {
  if (id < 0) return kBadId;
  return confidence >= 0.0f && confidence <= 1.0f ? 0 : kBadDraft;
}

// Expected tokens are summed as integers, so no order of summation changes a bit.
constexpr float kOneToken = 0x1p32f;
SPECDEC_HD int64_t tokens_of(float product) {
  return static_cast<int64_t>(mul_rn(product, kOneToken));
}

// Tokens a unit of time; least where the cost is not positive.
SPECDEC_HD double yield_of(int64_t tokens, float cost) {
  return cost > 0.0f ? static_cast<double>(tokens) / static_cast<double>(cost)
                     : -static_cast<double>(bits_float(0x7f800000u));
}

}  // namespace specdec
