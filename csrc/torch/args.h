// Tensors of the flat schemas as the plain structs of common/params.h, for every native backend.
// Signatures of the operators are written once, here: SPECDEC_<OP>_ARGS is the schema's order.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <tuple>

#include "../common/params.h"
#include "namespace.h"

namespace specdec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

template <class T>
Vector<T> vector_of(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.dim() > 0 ? t.stride(0) : 0};
}

template <class T>
Vector<T> vector_of(const OptTensor& t) {
  return t ? vector_of<T>(*t) : Vector<T>{nullptr, 0};
}

template <class T>
const T* input(const OptTensor& t) {  // what is dense, or null
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

inline Knob knob_of(double all, const OptTensor& each) {
  return {static_cast<float>(all), vector_of<float>(each)};
}

inline LogitType logit_type(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return LogitType::kFloat32;
    case ScalarType::BFloat16:
      return LogitType::kBFloat16;
    default:
      STD_TORCH_CHECK(t.scalar_type() == ScalarType::Half, "logits: float32, bfloat16 or float16");
      return LogitType::kFloat16;
  }
}

inline Logits logits_of(const Tensor& t) {  // [batch, rows, vocab] or [rows, vocab]
  const int64_t dim = t.dim();
  STD_TORCH_CHECK(dim == 2 || dim == 3, "logits: 2 or 3 dimensions, got ", dim);
  STD_TORCH_CHECK(t.size(dim - 1) <= 1 || t.stride(dim - 1) == 1, "logits: dense last dimension");
  return {t.const_data_ptr(), dim == 3 ? t.stride(0) : 0, t.stride(dim - 2), t.size(dim - 1),
          logit_type(t)};
}

// Absent drafts and drafts of no rows are the same: deterministic.
inline Logits logits_of(const OptTensor& t, const Logits& like) {
  if (!t || t->numel() == 0) return {nullptr, 0, 0, 0, like.type};
  return logits_of(*t);
}

inline Sampling sampling_of(const OptTensor& temperature, const OptTensor& top_k,
                            const OptTensor& top_p, const OptTensor& min_p,
                            const OptTensor& active) {
  return {vector_of<float>(temperature), vector_of<int32_t>(top_k), vector_of<float>(top_p),
          vector_of<float>(min_p), vector_of<bool>(active)};
}

inline Noise noise_of(const Tensor& seed, const Tensor& position, const OptTensor& step) {
  return {vector_of<int64_t>(seed), vector_of<int64_t>(position), vector_of<int64_t>(step)};
}

inline Allowed allowed_of(const OptTensor& t) {
  if (!t) return {nullptr, 0};
  return {input<int32_t>(t), t->stride(0)};
}

inline RowEdits edits_of(const OptTensor& bits, const OptTensor& start, const OptTensor& values) {
  if (!bits || !start || !values) return {};
  return {input<int64_t>(bits), input<int32_t>(start), input<float>(values),
          bits->size(1),        values->size(2),       values->size(1) * values->size(2)};
}

inline Kept kept_of(const OptTensor& ids, const OptTensor& logsumexp) {
  if (!ids || !logsumexp || ids->numel() == 0) return {};
  return {input<void>(ids), ids->scalar_type() == ScalarType::Long, input<float>(logsumexp)};
}

inline Ids ids_of(const Tensor& t) {
  return {t.const_data_ptr(), t.dim() == 2 ? t.stride(0) : 0, t.stride(t.dim() - 1),
          t.scalar_type() == ScalarType::Long};
}

template <class T>
T* output(const Tensor& t) {
  STD_TORCH_CHECK(t.is_contiguous(), "results: contiguous");
  return static_cast<T*>(t.mutable_data_ptr());
}

// An operator whose arguments become one struct: `call` has the signature of kParams, the schema's,
// and hands the struct to kRun, with a result, which lives on the device of the call.
template <auto kParams, auto kRun>
struct Boxed;

template <class Params, class... Args, Params (*kParams)(Args...), auto kRun>
struct Boxed<kParams, kRun> {
  static void call(Args... args) {
    kRun(kParams(args...), std::get<sizeof...(Args) - 1>(std::tie(args...)));
  }
};

// Registers a function, which TORCH_BOX can box, as the operator `op` of this backend.
#define SPECDEC_CPU_KERNEL(op, ...)                      \
  STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { \
    m.impl(#op ".cpu", TORCH_BOX((&__VA_ARGS__)));       \
  }

#define SPECDEC_SAMPLING_NAMES(prefix) \
  prefix##temperature, prefix##top_k, prefix##top_p, prefix##min_p, prefix##active

#define SPECDEC_SAMPLING_ARGS(prefix)                                              \
  OptTensor prefix##temperature, OptTensor prefix##top_k, OptTensor prefix##top_p, \
      OptTensor prefix##min_p, OptTensor prefix##active

#define SPECDEC_EDITS_NAMES(prefix) prefix##edit_bits, prefix##edit_start, prefix##edit_values

#define SPECDEC_EDITS_ARGS(prefix) \
  OptTensor prefix##edit_bits, OptTensor prefix##edit_start, OptTensor prefix##edit_values

#define SPECDEC_TYPICAL_ARGS \
  double typical_epsilon, double typical_delta, OptTensor typical_epsilons, OptTensor typical_deltas

#define SPECDEC_VERIFY_CHAIN_ARGS                                                                \
  Tensor draft_ids, Tensor target_logits, OptTensor draft_logits, OptTensor draft_logsumexp,     \
      OptTensor draft_threshold, OptTensor cu_draft, int64_t max_draft, SPECDEC_SAMPLING_ARGS(), \
      SPECDEC_SAMPLING_ARGS(draft_), Tensor seed, Tensor position, OptTensor step, int64_t rule, \
      double over_acceptance, OptTensor over_acceptances, bool rejected_from_target,             \
      OptTensor token_map, OptTensor draft_kept_ids, OptTensor draft_kept_logsumexp,             \
      OptTensor allowed, SPECDEC_EDITS_ARGS(), SPECDEC_EDITS_ARGS(draft_), SPECDEC_TYPICAL_ARGS, \
      int64_t top_m, int64_t max_distance, int64_t min_block, int64_t logprobs_mode,             \
      Tensor out_token_ids, Tensor out_num_accepted, Tensor out_status, Tensor out_logprobs

#define SPECDEC_SAMPLE_ARGS                                                                  \
  Tensor logits, SPECDEC_SAMPLING_ARGS(), Tensor seed, Tensor position, OptTensor step,      \
      int64_t purpose, int64_t num_samples, OptTensor lane, OptTensor exclude_ids,           \
      OptTensor token_map, OptTensor allowed, SPECDEC_EDITS_ARGS(), int64_t logprobs_mode,   \
      Tensor out_token_ids, Tensor out_logprobs, Tensor out_logsumexp, Tensor out_threshold, \
      Tensor out_status

#define SPECDEC_TOKEN_LOGPROBS_ARGS                                                         \
  Tensor logits, Tensor token_ids, int64_t top, SPECDEC_SAMPLING_ARGS(), OptTensor allowed, \
      SPECDEC_EDITS_ARGS(), Tensor out_logprobs, Tensor out_ranks, Tensor out_top_ids,      \
      Tensor out_top_logprobs, Tensor out_status

#define SPECDEC_ACCEPTANCE_RATIOS_ARGS                                                          \
  Tensor draft_ids, Tensor target_logits, OptTensor draft_logits, OptTensor cu_draft,           \
      int64_t max_draft, SPECDEC_SAMPLING_ARGS(), SPECDEC_SAMPLING_ARGS(draft_),                \
      OptTensor token_map, OptTensor allowed, SPECDEC_EDITS_ARGS(), SPECDEC_EDITS_ARGS(draft_), \
      Tensor out_ratio, Tensor out_overlap, Tensor out_status

#define SPECDEC_RESIDUAL_ARGS                                                                      \
  Tensor target_logits, OptTensor draft_logits, Tensor a, Tensor b, SPECDEC_SAMPLING_ARGS(),       \
      SPECDEC_SAMPLING_ARGS(draft_), OptTensor token_map, OptTensor allowed, SPECDEC_EDITS_ARGS(), \
      SPECDEC_EDITS_ARGS(draft_), OptTensor draft_ids

#define SPECDEC_RESIDUAL_NAMES                                                                 \
  target_logits, draft_logits, a, b, SPECDEC_SAMPLING_NAMES(), SPECDEC_SAMPLING_NAMES(draft_), \
      token_map, allowed, SPECDEC_EDITS_NAMES(), SPECDEC_EDITS_NAMES(draft_), draft_ids

#define SPECDEC_RESIDUAL_PROBS_ARGS \
  SPECDEC_RESIDUAL_ARGS, Tensor out_probs, Tensor out_mass, Tensor out_status

#define SPECDEC_RESIDUAL_SAMPLE_ARGS                                                    \
  SPECDEC_RESIDUAL_ARGS, Tensor seed, Tensor position, OptTensor step, int64_t purpose, \
      Tensor out_token_ids, Tensor out_mass, Tensor out_status

#define SPECDEC_PAIR_NAMES                                                               \
  target_logits, draft_logits, SPECDEC_SAMPLING_NAMES(), SPECDEC_SAMPLING_NAMES(draft_), \
      token_map, allowed, SPECDEC_EDITS_NAMES(), SPECDEC_EDITS_NAMES(draft_), out_status

inline void fill_pair(PairParams* p, const Tensor& target_logits, const OptTensor& draft_logits,
                      SPECDEC_SAMPLING_ARGS(), SPECDEC_SAMPLING_ARGS(draft_),
                      const OptTensor& token_map, const OptTensor& allowed, SPECDEC_EDITS_ARGS(),
                      SPECDEC_EDITS_ARGS(draft_), const Tensor& out_status) {
  p->batch = out_status.size(0);
  p->target = logits_of(target_logits);
  p->draft = logits_of(draft_logits, p->target);
  p->sampling = sampling_of(SPECDEC_SAMPLING_NAMES());
  p->draft_sampling = sampling_of(SPECDEC_SAMPLING_NAMES(draft_));
  p->token_map = vector_of<int32_t>(token_map);
  p->allowed = allowed_of(allowed);
  p->edits = edits_of(SPECDEC_EDITS_NAMES());
  p->draft_edits = edits_of(SPECDEC_EDITS_NAMES(draft_));
  p->status = output<int32_t>(out_status);
}

#define SPECDEC_VERIFY_NAMES                                                                  \
  seed, position, step, draft_kept_ids, draft_kept_logsumexp, typical_epsilon, typical_delta, \
      typical_epsilons, typical_deltas, logprobs_mode, out_token_ids, out_num_accepted,       \
      out_logprobs

// `ids`: the drafts.
inline void fill_verify(VerifyParams* p, const Tensor& ids, const Tensor& seed,
                        const Tensor& position, const OptTensor& step,
                        const OptTensor& draft_kept_ids, const OptTensor& draft_kept_logsumexp,
                        SPECDEC_TYPICAL_ARGS, int64_t logprobs_mode, const Tensor& out_token_ids,
                        const Tensor& out_num_accepted, const Tensor& out_logprobs) {
  p->noise = noise_of(seed, position, step);
  p->kept = kept_of(draft_kept_ids, draft_kept_logsumexp);
  p->typical_epsilon = knob_of(typical_epsilon, typical_epsilons);
  p->typical_delta = knob_of(typical_delta, typical_deltas);
  p->logprobs_mode = static_cast<LogprobsMode>(logprobs_mode);
  STD_TORCH_CHECK(out_token_ids.scalar_type() == ids.scalar_type(),
                  "results must have the type of the drafts");
  p->token_ids = output<void>(out_token_ids);
  p->num_accepted = output<int32_t>(out_num_accepted);
  p->logprobs = output<float>(out_logprobs);
}

inline VerifyChainParams verify_chain_params(SPECDEC_VERIFY_CHAIN_ARGS) {
  VerifyChainParams p{};
  fill_pair(&p, SPECDEC_PAIR_NAMES);
  fill_verify(&p, draft_ids, SPECDEC_VERIFY_NAMES);
  p.max_draft = max_draft;
  p.total = cu_draft ? draft_ids.size(0) : 0;
  p.draft_ids = ids_of(draft_ids);
  if (draft_logsumexp && draft_threshold) {
    p.draft_logsumexp = input<float>(draft_logsumexp);
    p.draft_threshold = input<float>(draft_threshold);
  }
  p.cu_draft = vector_of<int32_t>(cu_draft);
  p.rule = static_cast<Rule>(rule);
  p.over_acceptance = knob_of(over_acceptance, over_acceptances);
  p.rejected_from_target = rejected_from_target;
  p.top_m = top_m;
  p.max_distance = max_distance;
  p.min_block = min_block;
  return p;
}

inline SampleParams sample_params(SPECDEC_SAMPLE_ARGS) {
  SampleParams p{};
  p.batch = logits.size(0);
  p.logits = logits_of(logits);
  p.sampling = sampling_of(SPECDEC_SAMPLING_NAMES());
  p.noise = noise_of(seed, position, step);
  p.purpose = purpose;
  p.num_samples = num_samples;
  p.lane = vector_of<int64_t>(lane);
  p.exclude_ids = input<int64_t>(exclude_ids);
  p.num_exclude = exclude_ids ? exclude_ids->size(1) : 0;
  p.token_map = vector_of<int32_t>(token_map);
  p.allowed = allowed_of(allowed);
  p.edits = edits_of(SPECDEC_EDITS_NAMES());
  p.logprobs_mode = static_cast<LogprobsMode>(logprobs_mode);
  p.token_ids = output<int64_t>(out_token_ids);
  p.logprobs = output<float>(out_logprobs);
  p.logsumexp = output<float>(out_logsumexp);
  p.threshold = output<float>(out_threshold);
  p.status = output<int32_t>(out_status);
  return p;
}

inline TokenLogprobsParams token_logprobs_params(SPECDEC_TOKEN_LOGPROBS_ARGS) {
  TokenLogprobsParams p{};
  p.rows = logits.size(0);
  p.top = top;
  p.logits = logits_of(logits);
  p.token_ids = ids_of(token_ids);
  p.sampling = sampling_of(SPECDEC_SAMPLING_NAMES());
  p.allowed = allowed_of(allowed);
  p.edits = edits_of(SPECDEC_EDITS_NAMES());
  p.logprobs = output<float>(out_logprobs);
  p.ranks = output<int32_t>(out_ranks);
  STD_TORCH_CHECK(out_top_ids.scalar_type() == token_ids.scalar_type(),
                  "token_logprobs: top_ids must have the type of token_ids");
  p.top_ids = output<void>(out_top_ids);
  p.top_logprobs = output<float>(out_top_logprobs);
  p.status = output<int32_t>(out_status);
  return p;
}

inline AcceptanceRatiosParams acceptance_ratios_params(SPECDEC_ACCEPTANCE_RATIOS_ARGS) {
  AcceptanceRatiosParams p{};
  fill_pair(&p, SPECDEC_PAIR_NAMES);
  p.max_draft = max_draft;
  p.total = cu_draft ? draft_ids.size(0) : 0;
  p.draft_ids = ids_of(draft_ids);
  p.cu_draft = vector_of<int32_t>(cu_draft);
  p.ratio = output<float>(out_ratio);
  p.overlap = output<float>(out_overlap);
  return p;
}

inline ResidualParams residual_params(SPECDEC_RESIDUAL_ARGS, const Tensor& out_mass,
                                      const Tensor& out_status) {
  ResidualParams p{};
  fill_pair(&p, SPECDEC_PAIR_NAMES);
  p.a = vector_of<float>(a);
  p.b = vector_of<float>(b);
  p.draft_ids = vector_of<int64_t>(draft_ids);
  p.mass = output<float>(out_mass);
  return p;
}

inline ResidualParams residual_probs_params(SPECDEC_RESIDUAL_PROBS_ARGS) {
  ResidualParams p = residual_params(SPECDEC_RESIDUAL_NAMES, out_mass, out_status);
  p.probs = output<float>(out_probs);
  return p;
}

inline ResidualParams residual_sample_params(SPECDEC_RESIDUAL_SAMPLE_ARGS) {
  ResidualParams p = residual_params(SPECDEC_RESIDUAL_NAMES, out_mass, out_status);
  p.noise = noise_of(seed, position, step);
  p.purpose = purpose;
  p.token_ids = output<int64_t>(out_token_ids);
  return p;
}

}  // namespace specdec
