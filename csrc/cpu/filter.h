// Thresholds of filters without sorting a row.
//   min-p: max + T log(min_p);  top-k: the k-th largest logit;  tau12: the larger of the two
//   top-p: the largest logit t with mass{l >= t} >= top_p * mass{l >= tau12}
#pragma once
#include <vector>

#include "row.h"

namespace specdec::cpu {

// T log(min_p): how far below the maximum a kept logit may lie.
float min_p_offset(const RowParams& params);

// What top-k and min-p may keep of a row: the pass over it only takes the maxima of cells of a few
// ids. Each is some logit, so the k-th largest of them bounds the k-th largest logit from below,
// and only blocks with a maximum above that bound are read again.
class Candidates {
 public:
  Candidates(const RowParams& params, const RowSource& row);

  // Takes tile t; tiles come in any order, from any thread.
  TileMax add(const RowSource& row, int t, float* buffer);

  // tau12 of a row with this maximum; values are then the logits of at least that, in no order.
  float finish(const Team& team, const RowSource& row, float max);
  std::vector<float> values;

 private:
  float bound() const;  // of the k-th largest logit

  int64_t k_;     // 0: no top-k
  float offset_;  // of min-p; -inf: none
  std::vector<float> cells_;
};

// Sets threshold and mass (and mass_log, if `entropy`) of a filtered row whose maximum is known.
// `candidates` is null where top-p is the only filter; law.mass is then that of the whole row.
void finish_filters(const Team& team, RowLaw& law, Candidates* candidates, bool entropy);

}  // namespace specdec::cpu
