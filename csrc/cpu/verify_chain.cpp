// verify_chain: walk the draft until its first rejection, then draw one token.
//   ratio: accept x iff u q(x) < p(x); a rejected position is drawn from norm((p - q)+)
// Rows are read in order, and none after the rejection; the row that is drawn from is read again.
#include "verify_chain.h"

#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "../torch/args.h"

namespace specdec::cpu {

ChainWalk::ChainWalk(const VerifyChainParams& p, const Listing& listing, const WantedEdits& wanted,
                     const ChainLayout& layout, const std::vector<int32_t>& inverse, int64_t slot,
                     const Team& team)
    : p_(p),
      scores_{p.logprobs_mode, p.logprobs, listing},
      layout_(layout),
      inverse_(inverse),
      team_(team),
      chain_(chain_of(layout, slot)),
      target_params_(row_params(p.sampling, slot)),
      draft_params_(row_params(p.draft_sampling, slot)),
      slot_(slot) {
  if (chain_.bad) status_ |= kBadLayout;
  if (wanted.is_given) {
    edits_.emplace(wanted.lists, slot, drafts_of(chain_));
    chain_.wanted = &*edits_;
    chain_.wanted_of_drafts = wanted.of_drafts;
  }
  const bool by_argmax =
      p.rule == Rule::kGreedy || p.rule == Rule::kTopM || p.rule == Rule::kDistance;
  if (by_argmax) {  // argmax decoding reads no sampling parameter
    target_params_ = RowParams{};
    target_params_.greedy = true;
  } else {
    processed_ = target_params_;
    const bool reads_draft =
        layout.draft && chain_.has_drafts() && (p.rule == Rule::kRatio || p.rule == Rule::kBlock);
    const bool bad_draft = draft_params_.bad && !target_params_.greedy && reads_draft;
    if (target_params_.bad || bad_draft) status_ |= kBadSampling;
  }
}

void ChainWalk::run() {
  if (!chain_.lost) {
    // A greedy request is decided row by row even under block: its coins never matter.
    if (p_.rule == Rule::kBlock && !target_params_.greedy) {
      walk_block();
    } else {
      walk();
    }
  }
  emit();
}

NoiseStream ChainWalk::stream(int64_t i) const {
  const bool match = p_.rule == Rule::kMatch;
  return noise_stream(p_.noise.seed[slot_], p_.noise.position[slot_] + i,
                      match ? 0 : p_.noise.step.get(slot_, 0),
                      match ? kPurposeTarget : kPurposeResidual);
}

float ChainWalk::coin_at(int64_t i) const {
  return coin(p_.noise.seed[slot_], p_.noise.position[slot_] + i, p_.noise.step.get(slot_, 0));
}

// Examines target row i, and draft row i where the rule needs it, in one pass over both.
bool ChainWalk::examine_position(int64_t i, bool has_draft) {
  const bool drafted = has_draft && p_.rule == Rule::kRatio && has_draft_row() && !has_stats();
  // A row that is only drawn from needs no mass.
  const bool draws = p_.rule == Rule::kMatch || !has_draft;
  const bool logprobs = p_.logprobs_mode == LogprobsMode::kProcessed;
  const bool filtered = target_params_.filtered(layout_.target.vocab);
  row_ = RowLaw{};
  row_.source = chain_.target(i);
  row_.params = target_params_;
  Examine asks[2];
  asks[0] = {&row_, !draws || filtered || logprobs, p_.rule == Rule::kTypical && has_draft,
             twin_of(i, twin_)};
  int count = 1;
  if (drafted) {
    drafted_ = RowLaw{};
    drafted_.source = chain_.draft(i);
    drafted_.params = draft_params_;
    asks[count++] = {&drafted_, true};
  }
  examine(team_, asks, count);
  if (drafted) read_kept(p_.kept, chain_.draft_number(i), layout_.target.vocab, drafted_);
  if (row_.bad) {
    status_ |= kBadTarget;
    return false;
  }
  drawn_ = -1;
  return true;
}

void ChainWalk::walk() {
  for (int64_t i = 0;; ++i) {
    accepted_ = i;
    const int64_t x = i < chain_.length ? chain_.id(i) : -1;
    const bool outside = x < -1 || x >= layout_.target.vocab;
    if (outside) status_ |= kBadId;
    const bool ends = outside || x == -1;
    if (!examine_position(i, !ends)) return;
    how_ = How::kPlain;
    if (ends || !passes(i, x)) return;
    score(i, x, row_, twin_);
    how_ = How::kNothing;
  }
}

// Whether x is accepted; otherwise how_ says how the next token is drawn.
bool ChainWalk::passes(int64_t i, int64_t x) {
  if (p_.rule == Rule::kTopM || p_.rule == Rule::kDistance) return passes_by_rank(i, x);
  if (p_.rule == Rule::kTypical) {
    const auto p = static_cast<float>(row_.prob(x));
    if (!(p > 0)) return false;
    if (p > p_.typical_epsilon.of(slot_)) return true;
    return p > p_.typical_delta.of(slot_) * std::exp(-row_.entropy());
  }
  if (target_params_.greedy) return x == row_.argmax;
  return p_.rule == Rule::kRatio ? passes_ratio(i, x) : emit_plain() == x;
}

bool ChainWalk::passes_ratio(int64_t i, int64_t x) {
  if (has_draft_row()) {
    const bool unreadable = has_stats() ? !read_stat(i, x) : drafted_.bad;
    if (unreadable) {
      status_ |= kBadDraft;
      return false;
    }
  }
  const auto q = static_cast<float>(draft_row(i, x, drafted_).prob(x));
  const auto p = static_cast<float>(row_.prob(x));
  if (q == 0) status_ |= kZeroDraft;
  if (p > 0 && q > 0 && mul_rn(coin_at(i), q) < add_rn(p, p_.over_acceptance.of(slot_)))
    return true;
  if (!p_.rejected_from_target) how_ = How::kResidual;
  return false;
}

// topm: fewer than top_m ids lie before x (larger logit, or equal and lower); distance: near
// argmax.
bool ChainWalk::passes_by_rank(int64_t i, int64_t x) {
  const float l = row_.source.logit(x);
  if (!std::isfinite(l)) return false;
  if (i < p_.min_block - 1) return true;
  if (p_.rule == Rule::kDistance) return std::abs(x - row_.argmax) <= p_.max_distance;
  if (p_.top_m == 1) return x == row_.argmax;
  std::vector<int64_t> before(row_.source.tile_count(), 0);
  for_tiles(team_, row_, l, [&](int, int t, const float* tile, int n) {
    const Counts c = tiles().count(tile, n, l);
    const int64_t first = int64_t{t} * kTile;
    before[t] = c.greater;
    if (first + n <= x) before[t] += c.equal;
    if (first <= x && x < first + n) {
      for (int64_t j = 0; j < x - first; ++j) before[t] += tile[j] == l;
    }
  });
  int64_t rank = 0;
  for (const int64_t n : before) rank += n;
  return rank < p_.top_m;
}

// With draft_stats: false if the logsumexp or the logit at x cannot be used.
bool ChainWalk::read_stat(int64_t i, int64_t x) const {
  if (!std::isfinite(chain_.stat(p_.draft_logsumexp, i))) return false;
  const DraftRow row = draft_row(i, x, drafted_);
  const int64_t column = row.column(x);
  return column < 0 || !std::isnan(row.source.logit(column));
}

DraftRow ChainWalk::draft_row(int64_t i, int64_t x, const RowLaw& law) const {
  DraftRow row;
  row.id = x;
  row.point = !has_draft_row();
  if (row.point) return row;
  row.source = chain_.draft(i);
  row.inverse = inverse_.empty() ? nullptr : inverse_.data();
  if (p_.kept) row.kept = law.kept;
  if (has_stats()) {
    const float threshold = chain_.stat(p_.draft_threshold, i);
    // A NaN threshold keeps nothing.
    row.weight = {0.f, draft_params_.inv_t, chain_.stat(p_.draft_logsumexp, i), 1.f,
                  std::isnan(threshold) ? kInf : std::max(threshold, -FLT_MAX)};
  } else {
    row.weight = law.weighting(1 / law.mass);
  }
  return row;
}

// With draft_stats a rejected draft row is first read here.
bool ChainWalk::read_draft_late(int64_t i) {
  if (!has_draft_row() || !has_stats()) return true;
  RowLaw law;
  law.source = chain_.draft(i);
  Examine ask{&law};
  examine(team_, &ask, 1);
  return !law.bad;
}

int64_t ChainWalk::emit_plain() {
  if (drawn_ >= 0) return drawn_;
  Race race(stream(accepted_));
  race_plain(row_, race);
  return drawn_ = race.winner();
}

void ChainWalk::emit() {
  if (how_ == How::kNothing) return write(-1);
  int64_t token = -1;
  if (how_ == How::kResidual) {
    const int64_t x = chain_.id(accepted_);
    if (!has_draft_row()) {  // a point mass: the plain row without x
      Race race(stream(accepted_));
      race.exclude(x);
      race_plain(row_, race);
      token = race.winner();
      if (token < 0) status_ |= kEmptyResidual;
    } else if (!read_draft_late(accepted_)) {
      status_ |= kBadDraft;
    } else {
      DraftRow draft = draft_row(accepted_, x, drafted_);
      draft.widen();
      token = draw_residual(team_, {&row_, &draft, scale_, 1.f}, stream(accepted_));
      if (token < 0) status_ |= kEmptyResidual;
    }
  }
  write(token >= 0 ? token : emit_plain());
}

RowLaw* ChainWalk::twin_of(int64_t i, RowLaw& law) const {
  if (!scores_twins()) return nullptr;
  law = RowLaw{};
  law.source = chain_.target(i, !scores_.raw());
  law.params = scores_.raw() ? RowParams{} : processed_;
  return &law;
}

// What is told of the token of row i.
void ChainWalk::score(int64_t i, int64_t id, const RowLaw& row, const RowLaw& twin) const {
  if (!scores_) return;
  scores_.write(team_, slot_ * (p_.max_draft + 1) + i, scores_twins() ? twin : row, id);
}

void ChainWalk::write(int64_t token) {
  const int64_t width = p_.max_draft + 1;
  for (int64_t i = 0; i < width; ++i) {
    const int64_t id = i < accepted_ ? chain_.id(i) : i == accepted_ ? token : -1;
    const int64_t at = slot_ * width + i;
    store_id(p_.token_ids, p_.draft_ids.wide, at, id);
    if (id >= 0 && i == accepted_) score(i, id, row_, twin_);
    if (id < 0 && scores_) scores_.clear(at);
  }
  p_.num_accepted[slot_] = static_cast<int32_t>(accepted_);
  p_.status[slot_] = status_;
}

namespace {

void verify(const VerifyChainParams& p, const Listing& listing, const WantedEdits& wanted) {
  const ChainLayout layout{p, p.max_draft, p.total, p.draft_ids, p.cu_draft};
  const std::vector<int32_t> inverse = invert(p.token_map, p.draft, p.target.vocab);
  for_requests(p.batch, [&](int64_t slot, const Team& team) {
    ChainWalk(p, listing, wanted, layout, inverse, slot, team).run();
  });
}

void verify_listed(const VerifyChainParams& p, const Listing& listing) { verify(p, listing, {}); }

void verify_chain(const VerifyChainParams& p, const Tensor& /*like*/) { verify(p, {}, {}); }

}  // namespace

SPECDEC_CPU_KERNEL(verify_chain_out, Boxed<verify_chain_params, verify_chain>::call)
SPECDEC_CPU_KERNEL(verify_chain_listed_out, BoxedListed<verify_chain_params, verify_listed>::call)
SPECDEC_CPU_KERNEL(verify_chain_edited_out, BoxedEdited<verify_chain_params, verify>::call)
}  // namespace specdec::cpu
