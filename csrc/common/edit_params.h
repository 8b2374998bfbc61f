// Arguments of edit_rows as a plain struct: what each request changes of its logits, and its text.
#pragma once
#include "params.h"

namespace specdec {

template <class T>
struct Lists {  // [batch, size], dense; data == nullptr: not given, size is 0
  const T* data;
  int64_t size;
  SPECDEC_HD const T* row(int64_t b) const { return data + b * size; }
};

// Hash tables of the tokens so far, one a slot (count_tokens).
struct CountTables {
  const int32_t *ids, *counts;  // [slots, capacity]: -1 is free; 2 * generated + in_prompt
  int64_t slots, capacity;      // capacity: a power of two; 0 where no counts are given
};

// The place where the search for an id begins in a table of 2^bits places.
SPECDEC_HD uint32_t first_place(int32_t id, int bits) {
  return bits == 0 ? 0u : (static_cast<uint32_t>(id) * 2654435761u) >> (32 - bits);
}

struct EditRowsParams {
  int64_t batch, vocab;
  int64_t width, total;      // width: most drafts before a row; total: of flat ids
  bool only_last;            // one row a request, behind all of its drafts
  Ids draft_ids;             // data == nullptr: none
  Ids parents;               // [batch, width + 1] of trees, whose ids have a root too; or null
  Vector<int32_t> cu_draft;  // [batch + 1] when flat
  Lists<int32_t> bias_ids;
  Lists<float> bias;
  Vector<float> repetition, frequency, presence;  // [batch] or not given (1, 0, 0)
  CountTables counts;
  Vector<int32_t> slots;  // [batch] or not given: the request's number
  Lists<int32_t> stop_ids;
  Vector<int32_t> min_tokens;  // given with stop_ids
  Lists<int32_t> bad_words;    // [batch, words * length]
  int64_t length;              // of a bad word
  Lists<int32_t> tail;         // [batch, tokens]
  Vector<bool> active;
  int64_t first_id;
  int64_t* bits;  // results: see RowEdits
  int32_t* start;
  float* values;
  int64_t blocks, room, plane;
};

struct CountTokensParams {
  int32_t *ids, *counts;  // [slots, capacity], written
  int64_t slots, capacity;
  Ids tokens;  // [batch, width]
  int64_t batch, width;
  Vector<int32_t> slot;  // [batch] or not given: the request's number
  int32_t amount;        // added to a count; 1: the prompt's bit is set
  int32_t* status;       // [batch]
};

}  // namespace specdec
