// Block verification (Sun et al.): the longest prefix that the draft's joint law allows.
//   w_0 = 1, w_{i+1} = min(1, w_i p_i(x_i) / q_i(x_i)), S_i = sum_v (w_i p_i(v) - q_i(v))+
//   h_i = S_i / (S_i + 1 - w_i) for 0 < i < K, h_K = w_K;  tau = max{i: coin_{i-1} < h_i}, else 0
// and the token after the prefix is drawn from norm((w_tau p - q)+), the bonus from its row.
#include <algorithm>
#include <cmath>

#include "verify_chain.h"

namespace specdec::cpu {

void ChainWalk::walk_block() {
  std::vector<RowLaw> target, twin, draft;
  std::vector<double> w{1.0};
  bool bonus_bad = false;
  int64_t length = 0;
  for (int64_t i = 0;; ++i) {
    const int64_t x = i < chain_.length ? chain_.id(i) : -1;
    const bool outside = x < -1 || x >= layout_.target.vocab;
    if (outside) status_ |= kBadId;
    const bool ends = outside || x == -1;
    target.resize(i + 1);
    twin.resize(i + 1);
    draft.resize(i + 1);
    target[i].source = chain_.target(i);
    target[i].params = target_params_;
    Examine asks[2] = {{&target[i], true, false, twin_of(i, twin[i])}, {}};
    const bool reads_draft = !ends && has_draft_row();
    if (reads_draft) {
      draft[i].source = chain_.draft(i);
      draft[i].params = draft_params_;
      asks[1] = {&draft[i], true};
    }
    examine(team_, asks, reads_draft ? 2 : 1);
    if (reads_draft) read_kept(p_.kept, chain_.draft_number(i), layout_.target.vocab, draft[i]);
    if (target[i].bad) {
      status_ |= kBadTarget;
      bonus_bad = true;
      break;
    }
    if (ends) break;
    const bool bad_stat = has_stats() && !std::isfinite(chain_.stat(p_.draft_logsumexp, i));
    if (reads_draft && (draft[i].bad || bad_stat)) {
      status_ |= kBadDraft;
      break;
    }
    length = i + 1;
    const double q = draft_row(i, x, draft[i]).prob(x);
    if (q == 0) status_ |= kZeroDraft;
    w.push_back(q > 0 ? std::min(1.0, w[i] * target[i].prob(x) / q) : 0.0);
  }
  for (int64_t i = 1; i <= length; ++i) {
    double h = w[i];
    if (i < length) {
      const int64_t x = chain_.id(i);
      DraftRow q = draft_row(i, x, draft[i]);
      q.widen();
      const double s = q.point
                           ? w[i] * (1 - target[i].prob(x))
                           : residual_mass(team_, {&target[i], &q, static_cast<float>(w[i]), 1.f});
      const double free = s + 1 - w[i];
      h = free > 0 ? s / free : 1.0;
    }
    if (coin_at(i - 1) < static_cast<float>(h)) accepted_ = i;
  }
  const bool full = accepted_ == length;
  how_ = !full ? How::kResidual : bonus_bad ? How::kNothing : How::kPlain;
  scale_ = static_cast<float>(w[accepted_]);
  for (int64_t i = 0; i < accepted_; ++i) score(i, chain_.id(i), target[i], twin[i]);
  row_ = std::move(target[accepted_]);
  twin_ = std::move(twin[accepted_]);
  drafted_ = std::move(draft[accepted_]);
}

}  // namespace specdec::cpu
