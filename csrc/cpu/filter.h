// Thresholds of filters without sorting a row.
//   min-p: max + T log(min_p);  top-k: the k-th largest logit;  tau12: the larger of the two
//   top-p: the largest logit t with mass{l >= t} >= top_p * mass{l >= tau12}
#pragma once
#include <memory>
#include <vector>

#include "row.h"

namespace specdec::cpu {

// T log(min_p): how far below the maximum a kept logit may lie.
float min_p_offset(const RowParams& params);

// The logits of a range of tiles that top-k and min-p may keep, with the running threshold that
// discards the rest: after the first tile hardly any logit passes it, and no exp is needed.
class Candidates {
 public:
  Candidates(const RowParams& params, int64_t vocab);

  void add(const float* tile, int n, float tile_max, Ahead ahead);
  void merge(const Candidates& other);

  // tau12 once everything is merged; only values >= tau12 are left.
  float finish(float max);
  const float* begin() const { return values_.get(); }
  float* begin() { return values_.get(); }
  int64_t size() const { return size_; }

 private:
  void reserve(int64_t size);
  void append(const float* tile, int n, Ahead ahead);
  void trim();  // keeps the k largest and what equals the last of them

  int64_t k_;     // 0: no top-k
  float offset_;  // of min-p; -inf: none
  float best_ = -kInf, cutoff_ = -kInf;
  int64_t size_ = 0, capacity_ = 0, trim_at_;
  std::unique_ptr<float[]> values_;
};

// Sets threshold and mass (and mass_log, if `entropy`) of a filtered row whose maximum is known.
// `candidates` is null where top-p is the only filter; law.mass is then that of the whole row.
void finish_filters(const Team& team, RowLaw& law, Candidates* candidates, bool entropy);

}  // namespace specdec::cpu
