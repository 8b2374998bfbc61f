// Where the ids and rows of each request of a chain lie, dense or flat.
#pragma once
#include "draw.h"
#include "request_edits.h"

namespace specdec::cpu {

struct ChainLayout : PairParams {
  int64_t max_draft, total;
  Ids ids;
  Vector<int32_t> cu_draft;
};

// One request of a chain: row i of it, wherever it lies.
struct Chain {
  const ChainLayout* layout;
  int64_t slot, first;  // flat: cu_draft[slot]
  int64_t length;       // ids that may be read; the draft may end earlier
  bool bad, lost;       // bad offsets; no row is read: the first one is unknown, or not active
  RequestEdits* wanted = nullptr;  // edits that are made as rows are read; or null
  bool wanted_of_drafts = false;   // of draft rows too

  int64_t id(int64_t i) const {
    return layout->cu_draft ? layout->ids.at(0, first + i) : layout->ids.at(slot, i);
  }
  bool has_drafts() const { return length > 0 && id(0) >= 0 && id(0) < layout->target.vocab; }
  int64_t row(int64_t i) const {  // number of target row i among all
    return layout->cu_draft ? first + slot + i : slot * (layout->max_draft + 1) + i;
  }
  RowSource target(int64_t i, bool masked = true) const {  // masked: and edited
    const int32_t* bits = masked ? layout->allowed.row(row(i)) : nullptr;
    const RowEdits edits = masked ? this->edits(i) : RowEdits{};
    return layout->cu_draft ? row_source(layout->target, 0, row(i), bits, edits)
                            : row_source(layout->target, slot, i, bits, edits);
  }
  int64_t draft_number(int64_t i) const {  // of draft row i among all
    return layout->cu_draft ? first + i : slot * layout->max_draft + i;
  }
  RowEdits edits(int64_t i) const {
    if (wanted) return wanted->row(i);
    return layout->edits.row(row(i));
  }
  RowSource draft(int64_t i) const {
    RowEdits edits = layout->draft_edits.row(row(i));
    if (wanted_of_drafts) edits = wanted->row(i);
    return layout->cu_draft ? row_source(layout->draft, 0, first + i, nullptr, edits)
                            : row_source(layout->draft, slot, i, nullptr, edits);
  }
  float stat(const float* of_rows, int64_t i) const { return of_rows[draft_number(i)]; }
};

// The drafts that may be read.
inline Drafts drafts_of(const Chain& chain) {
  Drafts drafts{{-1}, {-1}};
  drafts.ids.reserve(chain.length + 1);
  drafts.parent.reserve(chain.length + 1);
  for (int64_t i = 0; i < chain.length; ++i) {
    drafts.ids.push_back(chain.id(i));
    drafts.parent.push_back(static_cast<int32_t>(i));
  }
  return drafts;
}

inline Chain chain_of(const ChainLayout& layout, int64_t slot) {
  Chain c{&layout, slot, 0, layout.max_draft, false, false};
  if (!layout.sampling.active.get(slot, true)) {
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
