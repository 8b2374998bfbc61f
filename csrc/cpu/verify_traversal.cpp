// Traversal verification (Weng et al.): leaves first, in depth-first order.
//   weight(root) = 1, weight(child) = min(1, weight(parent) p(x) / q(x)). The first leaf is
//   accepted iff its coin < its weight, the root always; else it is deleted, and at its parent,
//   with S = sum (weight p - q)+: p = norm((weight p - q)+), weight = S / (S + 1 - weight), q =
//   norm(q without x)
// No row of p or q is written: a deletion is three numbers, applied again to each tile in turn.
#include <algorithm>

#include "verify_tree.h"

namespace specdec::cpu {
namespace {

// One node as its deletions leave it.
class Node {
 public:
  double weight = 1;        // once something was deleted; of the root from the start
  bool is_changed = false;  // something was deleted
  bool is_empty = false;    // a deletion left nothing of p, which stayed as it was
  bool is_draft_bad = false;
  DraftRow draft;
  std::vector<int64_t> deleted;

  // p(x) / q(x), 0 where q is 0.
  double ratio(const RowLaw& law, int64_t x) const {
    if (draft.point) return law.prob(x) / mass_;
    const double q = draft_left_ > 0 ? draft.prob(x) / draft_left_ : 0;
    return q > 0 ? p(law, x) / q : 0;
  }

  // Takes x from p and q, where the node has weight w.
  void remove(const Team& team, const RowLaw& law, double w, int64_t x) {
    const double mass = draft.point ? remove_point(law, w, x) : remove_drawn(team, law, w, x);
    const double free = mass + 1 - w;
    weight = free > 0 ? mass / free : 1;
    is_changed = true;
    if (!(mass > 0)) is_empty = true;
  }

  // A draw from what is left of p, -1 if nothing is.
  int64_t draw(const Team& team, const RowLaw& law, const NoiseStream& stream) const {
    const auto weights = [&](int t, float* out) {
      alignas(64) float q[kTile];
      return apply(law, t, q, out);
    };
    return is_empty ? -1 : draw_weighted(team, law, scale(), weights, stream);
  }

 private:
  struct Step {  // p = (a p - b q)+, q without the first `hidden` of `deleted`
    double a, b;
    size_t hidden;
  };

  double remove_point(const RowLaw& law, double w, int64_t x) {
    const double left = 1 - law.prob(x) / mass_;
    deleted.push_back(x);
    if (!(w * left > 0)) return 0;
    mass_ *= left;
    return w * left;
  }

  double scale() const {  // what is left is at most this times p, and as much where q is 0
    double scale = 1;
    for (const Step& step : steps_) scale *= step.a;
    return scale;
  }

  bool is_deleted(int64_t x, size_t count) const {
    const auto first = deleted.begin(), last = first + static_cast<int64_t>(count);
    return std::find(first, last, x) != last;
  }

  // Sets draft_left_ and returns the mass that the steps leave of p.
  double sum_left(const Team& team, const RowLaw& law) {
    const auto weight = [&](int64_t x) { return left_of(law, x); };
    if (const auto sum = sum_over_kept(law, draft, scale(), weight)) {
      draft_left_ = 0;
      for (const Candidate& one : *draft.kept) {
        if (!is_deleted(one.id, deleted.size())) draft_left_ += draft.prob(one.id);
      }
      return *sum;
    }
    std::vector<float> sums(law.source.tile_count()), draft_sums(sums.size());
    team.run_tiles(law.source.tile_count(), [&](int, int64_t begin, int64_t end) {
      alignas(64) float p[kTile], q[kTile];
      for (auto t = static_cast<int>(begin); t < end; ++t) {
        sums[t] = apply(law, t, q, p).sum;
        draft_sums[t] = tiles().sum_max(q, law.source.length(t)).sum;
      }
    });
    double mass = 0;
    draft_left_ = 0;
    for (const float s : sums) mass += s;
    for (const float s : draft_sums) draft_left_ += s;
    return mass;
  }

  double remove_drawn(const Team& team, const RowLaw& law, double w, int64_t x) {
    draft.widen();
    steps_.push_back({w / mass_, draft_left_ > 0 ? 1 / draft_left_ : 0, deleted.size()});
    deleted.push_back(x);
    const double mass = sum_left(team, law);
    if (mass > 0) {
      mass_ = mass;
    } else {
      steps_.pop_back();
    }
    return mass;
  }

  double left_of(const RowLaw& law, int64_t x) const {
    double left = law.prob(x);
    for (const Step& step : steps_) {
      const double q = is_deleted(x, step.hidden) ? 0 : draft.prob(x);
      left = std::max(step.a * left - step.b * q, 0.0);
    }
    return left;
  }

  double p(const RowLaw& law, int64_t x) const { return left_of(law, x) / mass_; }

  // Tile t of what the steps leave of p, not normalised, and of q without all that was deleted.
  SumMax apply(const RowLaw& law, int t, float* q, float* p) const {
    const int n = law.source.length(t);
    const int64_t first = int64_t{t} * kTile;
    const Weighting pw = law.weighting(1 / law.mass);
    const float* target = law.tile_max[t] >= law.threshold ? law.source.tile(t, p) : nullptr;
    tiles().residual(target, nullptr, n, pw, pw, 1.f, 0.f, p);
    tiles().residual(draft.span(int64_t{t} * kTile, n, q), nullptr, n, draft.weight, pw, 1.f, 0.f,
                     q);
    size_t hidden = 0;
    const auto hide = [&](size_t count) {
      for (; hidden < count; ++hidden) {
        const int64_t j = deleted[hidden] - first;
        if (j >= 0 && j < n) q[j] = 0;
      }
    };
    for (const Step& step : steps_) {
      hide(step.hidden);
      const auto a = static_cast<float>(step.a), b = static_cast<float>(step.b);
      for (int j = 0; j < n; ++j) p[j] = std::max(a * p[j] - b * q[j], 0.f);
    }
    hide(deleted.size());
    return tiles().sum_max(p, n);
  }

  std::vector<Step> steps_;
  double mass_ = 1;        // of what the steps leave of p
  double draft_left_ = 1;  // of q without the deleted
};

// The nodes of a request, and which of them still take part.
struct Forest {
  const Tree& tree;
  const std::vector<RowLaw>& laws;
  std::vector<Node> nodes;
  std::vector<bool> alive;

  int64_t first_child(int64_t n) const {
    for (const int64_t child : tree.children(n)) {
      if (alive[child]) return child;
    }
    return -1;
  }

  double child_weight(int64_t n, double weight, int64_t child, int64_t x) const {
    if (nodes[child].is_changed) return nodes[child].weight;
    return std::min(1.0, weight * nodes[n].ratio(laws[n], x));
  }
};

}  // namespace

int64_t TreeWalk::traversal() {
  Forest forest{tree_, laws_, std::vector<Node>(tree_.nodes), std::vector<bool>(tree_.nodes)};
  // A child behind a bad row, and one that is no id, is cut off with its subtree. A greedy request
  // is decided at its first miss; what lies behind is not examined.
  std::vector<double> weight(tree_.nodes, 1);
  forest.alive[0] = true;
  for (int64_t n = 0; n < tree_.nodes; ++n) {
    if (!forest.alive[n] || (target_params_.greedy && weight[n] == 0)) continue;
    Node& node = forest.nodes[n];
    flag_outside_children(n);
    const bool has_candidates = has_usable_child(n);
    const bool reads_draft = has_candidates && has_draft_row();
    if (!examine_row(n, Purpose::kTested, reads_draft) || !has_candidates) continue;
    if (reads_draft && drafted_.bad) {
      status_ |= kBadDraft;
      continue;
    }
    node.draft = draft_row();
    for (const int64_t child : tree_.children(n)) {
      if (!is_usable(child)) continue;
      if (!node.draft.point && node.draft.prob(id(child)) == 0) status_ |= kZeroDraft;
      forest.alive[child] = true;
      weight[child] = forest.child_weight(n, weight[n], child, id(child));
    }
  }
  for (;;) {  // each turn accepts a leaf or deletes one
    int64_t leaf = 0, above = 0;
    double w = forest.nodes[0].weight, w_above = w;
    for (int64_t n = forest.first_child(0); n >= 0; n = forest.first_child(n)) {
      above = leaf;
      w_above = w;
      w = forest.child_weight(leaf, w, n, id(n));
      leaf = n;
    }
    if (leaf == 0 || coin_of(leaf) < static_cast<float>(w)) {
      stand_ = leaf;
      break;
    }
    forest.nodes[above].remove(team_, laws_[above], w_above, id(leaf));
    forest.alive[leaf] = false;
  }
  const Node& node = forest.nodes[stand_];
  const RowLaw& row = laws_[stand_];
  if (row.bad) return -1;
  if (!node.is_changed) return draw_plain_token();
  if (node.draft.point) return draw_without(node.deleted);
  return draw_left(node.draw(team_, row, stream(stand_)));
}

}  // namespace specdec::cpu
