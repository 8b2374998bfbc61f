// Where the ids and rows of each request of a chain lie, dense or flat.
#pragma once
#include "draw.h"

namespace specdec::cpu {

struct ChainLayout {
  int64_t batch, max_draft, total;
  Ids ids;
  Logits target, draft;
  Vector<int32_t> cu_draft;
  Allowed allowed;
  RowEdits edits, draft_edits;
  Vector<bool> active;
};

// One request of a chain: row i of it, wherever it lies.
struct Chain {
  const ChainLayout* layout;
  int64_t slot, first;  // flat: cu_draft[slot]
  int64_t length;       // ids that may be read; the draft may end earlier
  bool bad, lost;       // bad offsets; no row is read: the first one is unknown, or not active

  int64_t id(int64_t i) const {
    return layout->cu_draft ? layout->ids.at(0, first + i) : layout->ids.at(slot, i);
  }
  bool has_drafts() const { return length > 0 && id(0) >= 0 && id(0) < layout->target.vocab; }
  int64_t row(int64_t i) const {  // number of target row i among all
    return layout->cu_draft ? first + slot + i : slot * (layout->max_draft + 1) + i;
  }
  RowSource target(int64_t i, bool masked = true) const {  // masked: and edited
    const int32_t* bits = masked ? layout->allowed.row(row(i)) : nullptr;
    const RowEdits edits = masked ? layout->edits.row(row(i)) : RowEdits{};
    return layout->cu_draft ? row_source(layout->target, 0, row(i), bits, edits)
                            : row_source(layout->target, slot, i, bits, edits);
  }
  int64_t draft_number(int64_t i) const {  // of draft row i among all
    return layout->cu_draft ? first + i : slot * layout->max_draft + i;
  }
  RowSource draft(int64_t i) const {
    const RowEdits edits = layout->draft_edits.row(row(i));
    return layout->cu_draft ? row_source(layout->draft, 0, first + i, nullptr, edits)
                            : row_source(layout->draft, slot, i, nullptr, edits);
  }
  float stat(const Matrix<float>& m, int64_t i) const {
    return layout->cu_draft ? m.at(0, first + i) : m.at(slot, i);
  }
};

inline Chain chain_of(const ChainLayout& layout, int64_t slot) {
  Chain c{&layout, slot, 0, layout.max_draft, false, false};
  if (!layout.active.get(slot, true)) {
    c.length = 0;
    c.lost = true;
    return c;
  }
  if (!layout.cu_draft) return c;
  c.first = layout.cu_draft[slot];
  const int64_t last = layout.cu_draft[slot + 1];
  c.lost = c.first < 0 || c.first > layout.total;
  c.bad = c.lost || last < c.first || last > layout.total || last - c.first > layout.max_draft ||
          (slot == 0 && c.first != 0);
  c.length = c.bad ? 0 : last - c.first;
  return c;
}

}  // namespace specdec::cpu
