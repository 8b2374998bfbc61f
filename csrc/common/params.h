// The arguments of the ops as plain structs: what a kernel sees, on the host and on a device.
#pragma once
#include "codes.h"
#include "hd.h"

namespace specdec {

enum class LogitType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

template <class T>
struct Vector {  // [n] with any stride; data == nullptr means: not given
  const T* data;
  int64_t stride;
  SPECDEC_HD T operator[](int64_t i) const { return data[i * stride]; }
  SPECDEC_HD T get(int64_t i, T otherwise) const { return data ? data[i * stride] : otherwise; }
  SPECDEC_HD explicit operator bool() const { return data != nullptr; }
};

// Rows of logits. Dense [batch, rows, vocab]: row (b, i) is at b * batch_stride + i * row_stride.
// Flat [rows, vocab]: batch_stride is 0 and i counts all rows. The last stride is 1.
struct Logits {
  const void* data;
  int64_t batch_stride, row_stride;  // in elements
  int64_t vocab;
  LogitType type;
  SPECDEC_HD int64_t offset(int64_t b, int64_t i) const {
    return b * batch_stride + i * row_stride;
  }
  SPECDEC_HD explicit operator bool() const { return data != nullptr; }
};

struct Sampling {  // each [batch] or not given (off)
  Vector<float> temperature;
  Vector<int32_t> top_k;
  Vector<float> top_p, min_p;
  Vector<bool> active;  // not given: every request takes part
};

struct Noise {
  Vector<int64_t> seed, position;  // [batch]
  Vector<int64_t> step;            // [batch] or not given (0)
};

struct Allowed {        // bit v % 32 of word v / 32 of a target row; not given: all are allowed
  const int32_t* data;  // [target rows, ceil(vocab / 32)]
  int64_t row_stride;
  SPECDEC_HD const int32_t* row(int64_t i) const { return data ? data + i * row_stride : nullptr; }
};

constexpr int kEditBlock = 64;  // ids of a word

// A logit with its edit. A bias of -inf bans.
SPECDEC_HD float edited_logit(float logit, float bias, float repetition, float minus) {
  const float v = add_rn(logit, bias);
  const float divided = div_rn(v, repetition), multiplied = mul_rn(v, repetition);
  const float changed = sub_rn(v > 0 ? divided : multiplied, minus);
  return bias == bits_float(0xff800000u) ? bias : changed;
}

// How the logits of rows change, by id (edit_rows); not given: not at all.
struct RowEdits {
  const int64_t* bits;   // [rows, blocks]: bit v % 64 of word v / 64: id v is listed
  const int32_t* start;  // [rows, blocks + 1]: how many are listed before those of each word
  const float* values;   // [4, rows, room]: bias, repetition, minus and id of what is listed
  int64_t blocks, room, plane;
  SPECDEC_HD RowEdits row(int64_t i) const {
    if (!bits) return *this;
    return {bits + i * blocks, start + i * (blocks + 1), values + i * room, blocks, room, plane};
  }
  // The logit of entry i of a row.
  SPECDEC_HD float apply(float logit, int64_t i) const {
    return edited_logit(logit, values[i], values[plane + i], values[2 * plane + i]);
  }
};

// Token ids in, int32 or int64.
struct Ids {
  const void* data;
  int64_t batch_stride, stride;  // dense [batch, max_draft]; flat [total]: batch_stride 0
  bool wide;                     // int64
  SPECDEC_HD int64_t at(int64_t b, int64_t i) const {
    const int64_t offset = b * batch_stride + i * stride;
    return wide ? static_cast<const int64_t*>(data)[offset]
                : static_cast<int64_t>(static_cast<const int32_t*>(data)[offset]);
  }
};

// The candidates of draft rows, laid out like their logits; not given: a column's id is its number,
// or what a token map says.
struct Kept {
  const void* ids;         // [draft rows, k]: target id of each column
  bool wide;               // int64
  const float* logsumexp;  // [draft rows]
  SPECDEC_HD int64_t id(int64_t at) const {
    return wide ? static_cast<const int64_t*>(ids)[at] : static_cast<const int32_t*>(ids)[at];
  }
  SPECDEC_HD explicit operator bool() const { return ids != nullptr; }
};

// How far the log-sum of a row's candidates may lie from the one that is given with them.
SPECDEC_HD double kept_tolerance(double logsumexp) {
  return 0x1p-10 + 0x1p-22 * (logsumexp < 0 ? -logsumexp : logsumexp);
}

// A number that a rule reads: of all requests, or of each.
struct Knob {
  float all;
  Vector<float> each;  // [batch] or not given
  SPECDEC_HD float of(int64_t b) const { return each.get(b, all); }
};

// Of an op on target and draft rows.
struct PairParams {
  int64_t batch;
  Logits target, draft;  // draft.data == nullptr: deterministic drafts
  Sampling sampling, draft_sampling;
  Vector<int32_t> token_map;  // [draft vocab]
  Allowed allowed;
  RowEdits edits, draft_edits;
  int32_t* status;  // [batch]
};

// Of an op that verifies drafts.
struct VerifyParams : PairParams {
  Noise noise;
  Kept kept;
  Knob typical_epsilon, typical_delta;
  LogprobsMode logprobs_mode;
  void* token_ids;        // [batch, longest path + 1], of the type of the drafts
  int32_t* num_accepted;  // [batch]
  float* logprobs;        // as token_ids, unused when mode is none
};

struct VerifyChainParams : VerifyParams {
  int64_t max_draft, total;  // total: rows of flat ids; 0 when dense
  Ids draft_ids;
  const float *draft_logsumexp, *draft_threshold;  // one a draft row, or null
  Vector<int32_t> cu_draft;                        // [batch + 1] when flat
  Rule rule;
  Knob over_acceptance;
  bool rejected_from_target;
  int64_t top_m, max_distance, min_block;
};

struct SampleParams {
  int64_t batch;
  Logits logits;  // [batch, vocab]: row (0, b)
  Sampling sampling;
  Noise noise;
  int64_t purpose, num_samples;
  Vector<int64_t> lane;        // [batch] or not given (0)
  const int64_t* exclude_ids;  // [batch, num_exclude] or null; -1 excludes nothing
  int64_t num_exclude;
  Vector<int32_t> token_map;  // [vocab]
  Allowed allowed;
  RowEdits edits;
  LogprobsMode logprobs_mode;
  int64_t* token_ids;  // [batch, num_samples]
  float* logprobs;     // [batch, num_samples]
  float* logsumexp;    // [batch]
  float* threshold;    // [batch]
  int32_t* status;     // [batch]
};

struct TokenLogprobsParams {
  int64_t rows, top;
  Logits logits;
  Ids token_ids;  // [rows], -1: none
  Sampling sampling;
  Allowed allowed;
  RowEdits edits;
  float* logprobs;      // [rows]
  int32_t* ranks;       // [rows]
  void* top_ids;        // [rows, top], the type of token_ids
  float* top_logprobs;  // [rows, top]
  int32_t* status;      // [rows]
};

struct AcceptanceRatiosParams : PairParams {
  int64_t max_draft, total;
  Ids draft_ids;
  Vector<int32_t> cu_draft;
  float* ratio;    // [batch, max_draft]
  float* overlap;  // [batch, max_draft]
};

struct ResidualParams : PairParams {  // rows: [batch, vocab], row (0, b)
  Vector<float> a, b;                 // [batch]
  Vector<int64_t> draft_ids;          // [batch] or not given
  Noise noise;                        // residual_sample only
  int64_t purpose;                    // residual_sample only
  float* probs;                       // [batch, vocab], residual_probs only
  int64_t* token_ids;                 // [batch], residual_sample only
  float* mass;                        // [batch]
};

}  // namespace specdec
