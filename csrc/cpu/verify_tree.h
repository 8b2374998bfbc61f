// One request of verify_tree while it is walked; shared by the rules.
#pragma once
#include <optional>

#include "../common/tree_params.h"
#include "draw.h"
#include "request_edits.h"
#include "tree.h"

namespace specdec::cpu {

class TreeWalk {
 public:
  TreeWalk(const VerifyTreeParams& p, const Listing& listing, const WantedEdits& wanted,
           const std::vector<int32_t>& inverse, int64_t slot, const Team& team);

  void run();

 private:
  // The rules: each leaves stand_ where its walk ends and returns the token after it, -1 if that
  // row is bad.
  int64_t walk();
  int64_t match();
  int64_t target_only();
  int64_t typical();
  int64_t recursive();  // verify_recursive.cpp
  int64_t greedy_multi_draft();
  int64_t traversal();  // verify_traversal.cpp

  // Candidates.
  int64_t id(int64_t n) const { return p_.ids.at(slot_, n); }
  bool is_outside(int64_t n) const { return id(n) < -1 || id(n) >= p_.target.vocab; }
  bool is_usable(int64_t n) const { return id(n) >= 0 && id(n) < p_.target.vocab; }
  bool has_usable_child(int64_t n) const;
  int64_t child_with(int64_t token) const;  // of stand_; -1: none
  bool has_twins() const;                   // two usable siblings with the same id
  void flag_outside(int64_t n);
  void flag_outside_children(int64_t n);

  // Rows. A row is examined once; one that is only `drawn` from needs no mass.
  enum class Purpose { kDrawn, kTested, kTestedByEntropy };
  bool examine_row(int64_t n, Purpose purpose, bool with_draft = false);  // false: bad
  bool has_draft_row() const { return p_.draft && !target_params_.greedy && !draft_params_.greedy; }
  // The examined drafted_ over target ids; a point mass, whose id is still to be set, without.
  DraftRow draft_row() const;
  RowEdits edits(int64_t n);
  RowEdits draft_edits(int64_t n);

  // Draws of the token after node n.
  NoiseStream stream(int64_t n) const;
  float coin_of(int64_t n, int64_t position) const;
  float coin_of(int64_t n) const { return coin_of(n, tree_.depth[n] - 1); }
  int64_t draw_plain_token();
  int64_t draw_without(const std::vector<int64_t>& ids);  // from p without them
  int64_t draw_left(int64_t residual);                    // the residual's draw, or if empty from p

  bool scores_twins() const { return scores_.of_twin(target_params_, processed_); }
  void write(int64_t token);

  const VerifyTreeParams& p_;
  const Scores scores_;
  const WantedEdits& wanted_;
  const std::vector<int32_t>& inverse_;
  const Team& team_;
  int64_t slot_;
  Tree tree_;
  RowParams target_params_, draft_params_, processed_;
  bool is_active_;
  std::optional<RequestEdits> edits_;  // made as rows are read

  int32_t status_ = 0;
  int64_t stand_ = 0;
  std::vector<int32_t> rank_;         // of each node in its depth
  std::vector<RowLaw> laws_, twins_;  // of the nodes whose target row was examined
  RowLaw drafted_;                    // draft row that was examined last
};

}  // namespace specdec::cpu
