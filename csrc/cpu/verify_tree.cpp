// verify_tree: walk from the root to an accepted node, then draw one token.
//   match: the seeded draw from p is looked for among the children
// Only rows on the walked path are read, each once; the row that is drawn from is read again.
#include "verify_tree.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "../torch/tree_args.h"

namespace specdec::cpu {

TreeWalk::TreeWalk(const VerifyTreeParams& p, const Listing& listing, const WantedEdits& wanted,
                   const std::vector<int32_t>& inverse, int64_t slot, const Team& team)
    : p_(p),
      scores_{p.logprobs_mode, p.logprobs, listing},
      wanted_(wanted),
      inverse_(inverse),
      team_(team),
      slot_(slot),
      tree_(p.parents, slot, p.nodes, p.max_depth),
      target_params_(row_params(p.sampling, slot)),
      draft_params_(row_params(p.draft_sampling, slot)),
      is_active_(p.sampling.active.get(slot, true)),
      laws_(p.nodes),
      twins_(p.nodes) {
  if (!is_active_) return;
  if (!p.replacement && has_twins()) tree_.keep_root_only();
  status_ = tree_.status();
  rank_ = tree_.ranks();
  if (wanted.is_given) {
    Drafts drafts{{}, tree_.parent};
    for (int64_t n = 0; n < p.nodes; ++n) drafts.ids.push_back(id(n));
    edits_.emplace(wanted.lists, slot, std::move(drafts));
  }
  if (p.rule == TreeRule::kGreedy) {  // argmax decoding reads no sampling parameter
    target_params_ = RowParams{};
    target_params_.greedy = true;
    return;
  }
  processed_ = target_params_;
  const bool reads_draft =
      p.draft && has_usable_child(0) &&
      (p.rule == TreeRule::kRecursive || p.rule == TreeRule::kGreedyMultiDraft ||
       p.rule == TreeRule::kTraversal);
  const bool bad_draft = draft_params_.bad && !target_params_.greedy && reads_draft;
  if (target_params_.bad || bad_draft) status_ |= kBadSampling;
}

void TreeWalk::run() { write(is_active_ ? walk() : -1); }

int64_t TreeWalk::walk() {
  switch (p_.rule) {
    case TreeRule::kTypical:
      return typical();
    case TreeRule::kRecursive:
      return recursive();
    case TreeRule::kGreedyMultiDraft:
      return greedy_multi_draft();
    case TreeRule::kTargetOnly:
      return target_only();
    case TreeRule::kTraversal:
      return traversal();
    default:
      return match();
  }
}

bool TreeWalk::has_usable_child(int64_t n) const {
  for (const int64_t child : tree_.children(n)) {
    if (is_usable(child)) return true;
  }
  return false;
}

int64_t TreeWalk::child_with(int64_t token) const {
  for (const int64_t child : tree_.children(stand_)) {
    if (id(child) == token) return child;
  }
  return -1;
}

bool TreeWalk::has_twins() const {
  std::vector<std::pair<int32_t, int64_t>> candidates;
  for (int64_t n = 1; n < tree_.nodes; ++n) {
    if (tree_.has(n) && is_usable(n)) candidates.emplace_back(tree_.parent[n], id(n));
  }
  std::sort(candidates.begin(), candidates.end());
  return std::adjacent_find(candidates.begin(), candidates.end()) != candidates.end();
}

void TreeWalk::flag_outside(int64_t n) {
  if (is_outside(n)) status_ |= kBadId;
}

void TreeWalk::flag_outside_children(int64_t n) {
  for (const int64_t child : tree_.children(n)) flag_outside(child);
}

RowEdits TreeWalk::edits(int64_t n) {
  if (edits_) return edits_->row(n);
  return p_.edits.row(slot_ * p_.nodes + n);
}

RowEdits TreeWalk::draft_edits(int64_t n) {
  if (edits_ && wanted_.of_drafts) return edits_->row(n);
  return p_.draft_edits.row(slot_ * p_.nodes + n);
}

bool TreeWalk::examine_row(int64_t n, Purpose purpose, bool with_draft) {
  RowLaw& row = laws_[n];
  const int64_t number = slot_ * p_.nodes + n;
  row.source = row_source(p_.target, slot_, n, p_.allowed.row(number), edits(n));
  row.params = target_params_;
  const bool filtered = target_params_.filtered(p_.target.vocab);
  const bool is_only_drawn = purpose == Purpose::kDrawn && !filtered;
  Examine asks[2];
  asks[0] = {&row, !is_only_drawn || p_.logprobs_mode == LogprobsMode::kProcessed,
             purpose == Purpose::kTestedByEntropy};
  if (scores_twins()) {
    twins_[n].source = scores_.raw() ? row_source(p_.target, slot_, n) : row.source;
    twins_[n].params = scores_.raw() ? RowParams{} : processed_;
    asks[0].twin = &twins_[n];
  }
  if (with_draft) {
    drafted_ = RowLaw{};
    drafted_.source = row_source(p_.draft, slot_, n, nullptr, draft_edits(n));
    drafted_.params = draft_params_;
    asks[1] = {&drafted_, true};
  }
  examine(team_, asks, with_draft ? 2 : 1);
  if (with_draft) read_kept(p_.kept, number, p_.target.vocab, drafted_);
  if (row.bad) {
    status_ |= kBadTarget;
    return false;
  }
  return true;
}

DraftRow TreeWalk::draft_row() const {
  DraftRow row;
  row.point = !has_draft_row();
  if (row.point) return row;
  row.source = drafted_.source;
  row.inverse = inverse_.empty() ? nullptr : inverse_.data();
  if (p_.kept) row.kept = drafted_.kept;
  row.weight = drafted_.weighting(1 / drafted_.mass);
  return row;
}

NoiseStream TreeWalk::stream(int64_t n) const {
  const bool match = p_.rule == TreeRule::kMatch;
  return noise_stream(p_.noise.seed[slot_], p_.noise.position[slot_] + tree_.depth[n],
                      match ? 0 : p_.noise.step.get(slot_, 0),
                      match ? kPurposeTarget : kPurposeResidual);
}

float TreeWalk::coin_of(int64_t n, int64_t position) const {
  return coin(p_.noise.seed[slot_], p_.noise.position[slot_] + position,
              p_.noise.step.get(slot_, 0), rank_[n]);
}

int64_t TreeWalk::draw_plain_token() {
  Race race(stream(stand_));
  race_plain(laws_[stand_], race);
  return race.winner();
}

int64_t TreeWalk::draw_without(const std::vector<int64_t>& ids) {
  Race race(stream(stand_));
  for (const int64_t x : ids) race.exclude(x);
  race_plain(laws_[stand_], race);
  return draw_left(race.winner());
}

int64_t TreeWalk::draw_left(int64_t residual) {
  if (residual >= 0) return residual;
  status_ |= kEmptyResidual;
  return draw_plain_token();
}

int64_t TreeWalk::match() {
  for (;;) {
    flag_outside_children(stand_);
    if (!examine_row(stand_, Purpose::kDrawn)) return -1;
    const int64_t token = draw_plain_token();
    const int64_t next = child_with(token);
    if (next < 0) return token;
    stand_ = next;
  }
}

// One coin a node: the first child x_j with coin < p(x_1) + .. + p(x_j), else p without children.
int64_t TreeWalk::target_only() {
  for (;;) {
    flag_outside_children(stand_);
    const bool has_candidates = has_usable_child(stand_);
    if (!examine_row(stand_, has_candidates ? Purpose::kTested : Purpose::kDrawn)) return -1;
    if (!has_candidates) return draw_plain_token();
    const float u = coin_of(stand_, tree_.depth[stand_]);
    double sum = 0;
    int64_t next = -1;
    std::vector<int64_t> tried;
    for (const int64_t child : tree_.children(stand_)) {
      if (next >= 0 || !is_usable(child)) continue;
      const double p = laws_[stand_].prob(id(child));
      sum += p;
      tried.push_back(id(child));
      if (static_cast<float>(p) > 0 && u < static_cast<float>(sum)) next = child;
    }
    if (next < 0) return draw_without(tried);
    stand_ = next;
  }
}

// Accepts x iff p(x) > min(epsilon, delta exp(-H)): the deepest, then the likeliest, then the
// first.
int64_t TreeWalk::typical() {
  std::vector<double> score(tree_.nodes, -kInf);  // sum of log p of an accepted node
  score[0] = 0;
  for (int64_t n = 0; n < tree_.nodes; ++n) {
    if (score[n] == -kInf) continue;
    const int32_t depth = tree_.depth[n], best = tree_.depth[stand_];
    if (depth > best || (depth == best && score[n] > score[stand_])) stand_ = n;
    if (tree_.first_child[n] < 0) continue;
    flag_outside_children(n);
    const bool has_candidates = has_usable_child(n);
    if (!examine_row(n, has_candidates ? Purpose::kTestedByEntropy : Purpose::kTested)) continue;
    if (!has_candidates) continue;
    const double typical_p = p_.typical_delta.of(slot_) * std::exp(-laws_[n].entropy());
    for (const int64_t child : tree_.children(n)) {
      if (!is_usable(child)) continue;
      const double p = laws_[n].prob(id(child));
      if (p > 0 && p > std::min<double>(p_.typical_epsilon.of(slot_), typical_p)) {
        score[child] = score[n] + std::log(std::max(p, 1e-300));
      }
    }
  }
  if (tree_.first_child[stand_] < 0) examine_row(stand_, Purpose::kDrawn);
  return laws_[stand_].bad ? -1 : draw_plain_token();
}

void TreeWalk::write(int64_t token) {
  const int64_t width = p_.max_depth + 1, accepted = tree_.depth[stand_], first = slot_ * width;
  std::vector<int64_t> path(accepted + 1);
  for (int64_t n = stand_; n >= 0; n = tree_.parent[n]) path[tree_.depth[n]] = n;
  for (int64_t i = 0; i < width; ++i) {
    const int64_t next = i < accepted ? path[i + 1] : -1;
    const int64_t emitted = i < accepted ? id(next) : i == accepted ? token : -1;
    p_.path[first + i] = static_cast<int32_t>(next);
    store_id(p_.token_ids, p_.ids.wide, first + i, emitted);
    if (!scores_) continue;
    if (emitted >= 0) {
      scores_.write(team_, first + i, (scores_twins() ? twins_ : laws_)[path[i]], emitted);
    } else {
      scores_.clear(first + i);
    }
  }
  p_.num_accepted[slot_] = static_cast<int32_t>(accepted);
  p_.status[slot_] = status_;
}

namespace {

void verify(const VerifyTreeParams& p, const Listing& listing, const WantedEdits& wanted) {
  const std::vector<int32_t> inverse = invert(p.token_map, p.draft, p.target.vocab);
  for_requests(p.batch, [&](int64_t slot, const Team& team) {
    TreeWalk(p, listing, wanted, inverse, slot, team).run();
  });
}

void verify_listed(const VerifyTreeParams& p, const Listing& listing) { verify(p, listing, {}); }

void verify_tree(const VerifyTreeParams& p, const Tensor& /*like*/) { verify(p, {}, {}); }

}  // namespace

SPECDEC_CPU_KERNEL(verify_tree_out, Boxed<verify_tree_params, verify_tree>::call)
SPECDEC_CPU_KERNEL(verify_tree_listed_out, BoxedListed<verify_tree_params, verify_listed>::call)
SPECDEC_CPU_KERNEL(verify_tree_edited_out, BoxedEdited<verify_tree_params, verify>::call)
}  // namespace specdec::cpu
