// The rules that correct p and q after each rejection at a node.
//   recursive: C = 0, Z = 1, Q = 0; child x is accepted iff u q(x) Z < (p(x) - C q(x)) (1 - Q);
//   a rejected x sets C += Z / (1 - Q), Z = sum (p - C q)+, and without replacement Q += q(x).
//   In the end (p - C q)+ is left; where q is a point mass at each child, p without the rejected.
#include <algorithm>

#include "verify_tree.h"

namespace specdec::cpu {
namespace {

// What the rejections at one node leave.
struct Left {
  const Team& team;
  const RowLaw& p;
  DraftRow& q;
  bool replacement;
  double scale = 0, mass = 1, gone = 0;  // C, Z, Q
  bool is_mass_known = true;             // the sum waits until another child asks for it
  std::vector<int64_t> rejected = {};

  Residual residual() const { return {&p, &q, 1.f, static_cast<float>(scale)}; }

  bool was_rejected(int64_t x) const {
    return std::find(rejected.begin(), rejected.end(), x) != rejected.end();
  }

  // Whether x with coin u is accepted; px and qx are its probabilities before any rejection.
  bool accepts(int64_t x, float u, double px, double qx) {
    if (!is_mass_known) {
      q.widen();
      mass = residual_mass(team, residual());
      is_mass_known = true;
    }
    const double room = q.point ? 1 : std::max(1 - gone, 0.0);
    const double rest = !q.point ? px - scale * qx : was_rejected(x) ? 0 : px;
    return mul_rn(u, static_cast<float>(qx * mass)) < static_cast<float>(rest * room) &&
           static_cast<float>(px) > 0 && static_cast<float>(qx) > 0;
  }

  void reject(int64_t x, double px, double qx) {
    if (q.point) {
      if (!was_rejected(x)) mass = std::max(mass - px, 0.0);
    } else {
      const double room = std::max(1 - gone, 0.0);
      if (room > 0) scale += mass / room;
      if (!replacement) gone += qx;
      is_mass_known = false;
    }
    rejected.push_back(x);
  }
};

}  // namespace

int64_t TreeWalk::recursive() {
  for (;;) {
    const bool has_candidates = has_usable_child(stand_);
    const bool reads_draft = has_candidates && has_draft_row();
    if (!examine_row(stand_, has_candidates ? Purpose::kTested : Purpose::kDrawn, reads_draft)) {
      flag_outside_children(stand_);
      return -1;
    }
    const RowLaw& row = laws_[stand_];
    const bool is_draft_bad = reads_draft && drafted_.bad;
    if (is_draft_bad) status_ |= kBadDraft;
    DraftRow draft = draft_row();
    Left left{team_, row, draft, p_.replacement};
    int64_t next = -1;
    for (const int64_t child : tree_.children(stand_)) {
      flag_outside(child);
      if (!is_usable(child) || is_draft_bad) continue;
      const int64_t x = id(child);
      draft.id = x;
      const double px = row.prob(x), qx = draft.prob(x);
      if (static_cast<float>(qx) == 0) status_ |= kZeroDraft;
      if (left.accepts(x, coin_of(child), px, qx)) {
        next = child;
        break;
      }
      left.reject(x, px, qx);
    }
    if (next < 0) {
      if (left.rejected.empty()) return draw_plain_token();
      if (draft.point) return draw_without(left.rejected);
      draft.widen();
      return draw_left(draw_residual(team_, left.residual(), stream(stand_)));
    }
    stand_ = next;
  }
}

// The last child X was drawn from q without the other children S0, which are deterministic: it is
// accepted iff u q'(X) < p(X), q' = q without S0, normalised. Else y from norm((p - q')+), and y is
// accepted if it is in S0.
int64_t TreeWalk::greedy_multi_draft() {
  for (;;) {
    flag_outside_children(stand_);
    int64_t last = -1;
    std::vector<int64_t> others;
    for (const int64_t child : tree_.children(stand_)) {
      if (last >= 0 && is_usable(last)) others.push_back(id(last));
      last = child;
    }
    const bool is_tested = last >= 0 && is_usable(last);
    const bool reads_draft = has_draft_row() && (is_tested || !others.empty());
    if (!examine_row(stand_, is_tested ? Purpose::kTested : Purpose::kDrawn, reads_draft)) {
      return -1;
    }
    if (reads_draft && drafted_.bad) {
      if (is_tested) status_ |= kBadDraft;
      return draw_plain_token();
    }
    int64_t token = -1;
    if (is_tested) {
      const RowLaw& row = laws_[stand_];
      const int64_t x = id(last);
      DraftRow draft = draft_row();
      double room = 1;
      draft.id = x;
      if (!draft.point) {
        for (const int64_t other : others) room -= draft.prob(other);
        std::sort(others.begin(), others.end());
        draft.hidden = std::move(others);
      }
      const double scale = room > 0 ? 1 / room : 0;
      const auto px = static_cast<float>(row.prob(x));
      const auto qx = static_cast<float>(scale * draft.prob(x));
      if (qx == 0) status_ |= kZeroDraft;
      if (px > 0 && qx > 0 && mul_rn(coin_of(last), qx) < px) {
        stand_ = last;
        continue;
      }
      if (draft.point) {
        token = draw_without({x});
      } else {
        draft.widen();
        const Residual residual{&row, &draft, 1.f, static_cast<float>(scale)};
        token = draw_left(draw_residual(team_, residual, stream(stand_)));
      }
    } else {
      token = draw_plain_token();
    }
    const int64_t next = child_with(token);
    if (next < 0 || next == last) return token;
    stand_ = next;
  }
}

}  // namespace specdec::cpu
