// Arguments of edit_rows and count_tokens.
#pragma once
#include "../common/edit_params.h"
#include "args.h"

namespace specdec {

// Lists of each request: see Edits in specdec_kernels/_edits.py.
#define SPECDEC_REQUEST_EDITS_ARGS                                                  \
  OptTensor bias_ids, OptTensor bias, OptTensor repetition, OptTensor frequency,    \
      OptTensor presence, OptTensor counted_ids, OptTensor counts, OptTensor slots, \
      OptTensor stop_ids, OptTensor min_tokens, OptTensor bad_words, OptTensor tail

#define SPECDEC_REQUEST_EDITS_NAMES                                                      \
  bias_ids, bias, repetition, frequency, presence, counted_ids, counts, slots, stop_ids, \
      min_tokens, bad_words, tail

#define SPECDEC_EDIT_ROWS_ARGS                                                              \
  int64_t batch, int64_t vocab, OptTensor draft_ids, OptTensor parents, OptTensor cu_draft, \
      int64_t max_draft, bool only_last, SPECDEC_REQUEST_EDITS_ARGS, OptTensor active,      \
      int64_t first_id, Tensor out_edit_bits, Tensor out_edit_start, Tensor out_edit_values

#define SPECDEC_COUNT_TOKENS_ARGS                                                       \
  Tensor counted_ids, Tensor counts, Tensor token_ids, OptTensor slots, int64_t amount, \
      Tensor out_status

template <class T>
Lists<T> lists_of(const OptTensor& t) {
  if (!t) return {nullptr, 0};
  return {input<T>(t), t->size(0) ? t->numel() / t->size(0) : 0};
}

inline EditRowsParams edits_params(int64_t vocab, SPECDEC_REQUEST_EDITS_ARGS) {
  EditRowsParams p{};
  p.vocab = vocab;
  p.bias_ids = lists_of<int32_t>(bias_ids);
  p.bias = lists_of<float>(bias);
  p.repetition = vector_of<float>(repetition);
  p.frequency = vector_of<float>(frequency);
  p.presence = vector_of<float>(presence);
  if (counted_ids && counts) {
    p.counts = {input<int32_t>(counted_ids), input<int32_t>(counts), counted_ids->size(0),
                counted_ids->size(1)};
  }
  p.slots = vector_of<int32_t>(slots);
  p.stop_ids = lists_of<int32_t>(stop_ids);
  p.min_tokens = vector_of<int32_t>(min_tokens);
  p.bad_words = lists_of<int32_t>(bad_words);
  p.length = bad_words ? bad_words->size(2) : 0;
  p.tail = lists_of<int32_t>(tail);
  return p;
}

inline EditRowsParams edit_rows_params(SPECDEC_EDIT_ROWS_ARGS) {
  EditRowsParams p = edits_params(vocab, SPECDEC_REQUEST_EDITS_NAMES);
  p.batch = batch;
  p.width = max_draft;
  p.total = cu_draft ? draft_ids->size(0) : 0;
  p.only_last = only_last;
  if (draft_ids) p.draft_ids = ids_of(*draft_ids);
  if (parents) p.parents = ids_of(*parents);
  p.cu_draft = vector_of<int32_t>(cu_draft);
  p.active = vector_of<bool>(active);
  p.first_id = first_id;
  p.bits = output<int64_t>(out_edit_bits);
  p.start = output<int32_t>(out_edit_start);
  p.values = output<float>(out_edit_values);
  p.blocks = out_edit_bits.size(1);
  p.room = out_edit_values.size(2);
  p.plane = out_edit_values.size(1) * p.room;
  return p;
}

inline CountTokensParams count_tokens_params(SPECDEC_COUNT_TOKENS_ARGS) {
  return {static_cast<int32_t*>(counted_ids.mutable_data_ptr()),
          static_cast<int32_t*>(counts.mutable_data_ptr()),
          counted_ids.size(0),
          counted_ids.size(1),
          ids_of(token_ids),
          token_ids.size(0),
          token_ids.size(1),
          vector_of<int32_t>(slots),
          static_cast<int32_t>(amount),
          output<int32_t>(out_status)};
}

}  // namespace specdec
