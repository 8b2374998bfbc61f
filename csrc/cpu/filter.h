// Thresholds of filters without sorting a row.
//   min-p: max + T log(min_p);  top-k: the k-th largest logit;  tau12: the larger of the two
//   top-p: the largest logit t with mass{l >= t} >= top_p * mass{l >= tau12}
#pragma once
#include "row.h"

namespace specdec::cpu {

// A bound of the k-th largest logit from below: the k-th largest of k and more block maxima.
float bound_of(const RowLaw& law, int64_t k);

// The blocks that hold a logit of at least `low`, which is finite; they are on their way to the
// cache.
std::vector<int> blocks_from(const RowLaw& law, float low);

// Sets threshold and mass (and mass_log, if `entropy`) of a filtered row whose digest is known;
// without top-k and min-p, law.mass is that of the whole row.
void finish_filters(const Team& team, RowLaw& law, bool entropy);

}  // namespace specdec::cpu
