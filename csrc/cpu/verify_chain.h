// One request of verify_chain while it is walked; shared by the rules.
#pragma once
#include <optional>

#include "chain.h"

namespace specdec::cpu {

enum class How { kNothing, kPlain, kResidual };

class ChainWalk {
 public:
  ChainWalk(const VerifyChainParams& p, const Listing& listing, const WantedEdits& wanted,
            const ChainLayout& layout, const std::vector<int32_t>& inverse, int64_t slot,
            const Team& team);

  void run();

 private:
  // The rules that stop at the first rejection, and block verification (verify_block.cpp).
  void walk();
  void walk_block();
  bool examine_position(int64_t i, bool has_draft);  // false: the walk ends here
  bool passes(int64_t i, int64_t x);
  bool passes_ratio(int64_t i, int64_t x);
  bool passes_by_rank(int64_t i, int64_t x);

  // Draft row i as a law over target ids; `law` is the examined row, unused with draft_stats.
  DraftRow draft_row(int64_t i, int64_t x, const RowLaw& law) const;
  bool read_stat(int64_t i, int64_t x) const;
  bool read_draft_late(int64_t i);  // with draft_stats: false if the rejected row is bad
  bool has_draft_row() const {
    return layout_.draft && !target_params_.greedy && !draft_params_.greedy;
  }
  bool has_stats() const { return static_cast<bool>(p_.draft_logsumexp); }
  NoiseStream stream(int64_t i) const;
  float coin_at(int64_t i) const;

  void emit();
  int64_t emit_plain();
  bool scores_twins() const { return scores_.of_twin(target_params_, processed_); }
  RowLaw* twin_of(int64_t i, RowLaw& law) const;  // null where no twin is scored
  void score(int64_t i, int64_t id, const RowLaw& row, const RowLaw& twin) const;
  void write(int64_t token);

  const VerifyChainParams& p_;
  const Scores scores_;
  const ChainLayout& layout_;
  const std::vector<int32_t>& inverse_;
  const Team& team_;
  Chain chain_;
  std::optional<RequestEdits> edits_;  // made as rows are read
  RowParams target_params_, draft_params_, processed_;
  int64_t slot_;

  int32_t status_ = 0;
  int64_t accepted_ = 0;
  How how_ = How::kNothing;
  float scale_ = 1.f;   // of p in the residual
  RowLaw row_, twin_;   // target row `accepted_`
  RowLaw drafted_;      // draft row `accepted_`, where it was examined
  int64_t drawn_ = -1;  // the plain draw of row_, once made
};

}  // namespace specdec::cpu
