// tree_from_marginals: every node offers its best child that is none yet, and the best offer
// becomes a node. A position's candidates are sorted when a node first reaches it.
#include <algorithm>
#include <limits>
#include <vector>

#include "../torch/tree_args.h"
#include "race.h"
#include "team.h"

namespace specdec::cpu {
namespace {

// The candidates of one request, [depth, width].
struct Marginals {
  Ids ids;
  int64_t b;
  const float* logprobs;
  int64_t depth, width;

  int64_t id(int64_t i) const { return ids.at(b, i); }
  int32_t status() const {
    bool bad_id = false, bad_logprob = false;
    for (int64_t i = 0; i < depth * width; ++i) {
      const int64_t token = id(i);
      bad_id |= !is_token(token) && token != -1;
      bad_logprob |= is_token(token) && !(logprobs[i] <= 1.f);
    }
    return (bad_id ? kBadId : 0) | (bad_logprob ? kBadDraft : 0);
  }
  static bool is_token(int64_t id) { return id >= 0 && id <= std::numeric_limits<int32_t>::max(); }
};

// Candidates best first, of each position at most as many as a tree can use.
class Ranking {
 public:
  Ranking(const Marginals& marginals, int64_t most)
      : marginals_(marginals), most_(most), positions_(marginals.depth) {}

  // The candidate of this rank by its number; its score is -inf where there is none.
  Entrant at(int64_t position, size_t rank) {
    if (position >= marginals_.depth) return {-kInf, -1};
    Position& p = positions_[position];
    if (!p.is_sorted) sort(position, p);
    return rank < p.best.size() ? p.best[rank] : Entrant{-kInf, -1};
  }

 private:
  struct Position {
    bool is_sorted = false;
    std::vector<Entrant> best;
  };

  void sort(int64_t position, Position& p) {
    p.is_sorted = true;
    sorted_.clear();
    for (int64_t w = 0; w < marginals_.width; ++w) {
      const int64_t i = position * marginals_.width + w;
      const float logprob = marginals_.logprobs[i];
      if (!Marginals::is_token(marginals_.id(i)) || !(logprob > -kInf)) continue;  // nor NaN
      sorted_.push_back({std::min(logprob, 0.f), w});
    }
    std::sort(sorted_.begin(), sorted_.end(), kBeats);
    for (const Entrant& c : sorted_) {
      if (static_cast<int64_t>(p.best.size()) == most_) break;
      const int64_t base = position * marginals_.width, id = marginals_.id(base + c.id);
      const bool is_repeated =
          std::any_of(p.best.begin(), p.best.end(),
                      [&](const Entrant& better) { return marginals_.id(base + better.id) == id; });
      if (!is_repeated) p.best.push_back(c);
    }
  }

  const Marginals& marginals_;
  int64_t most_;
  std::vector<Position> positions_;
  std::vector<Entrant> sorted_;
};

// The child that a node would have next.
struct Offer {
  float score;
  int32_t parent;
  int32_t index;                              // of the candidate, at its position
  bool operator<(const Offer& other) const {  // comes later
    return score < other.score || (score == other.score && parent > other.parent);
  }
};

struct Node {
  float score;  // sum of its path
  int32_t depth, children;
};

void build(const Marginals& marginals, int64_t limit, const TreeOutput& out) {
  Ranking ranking(marginals, limit - 1);
  std::vector<Node> nodes{{0.f, 0, 0}};
  std::vector<Offer> heap;
  nodes.reserve(limit);
  heap.reserve(limit);
  const auto offer = [&](int32_t parent) {
    Node& node = nodes[parent];
    const Entrant c = ranking.at(node.depth, node.children++);
    const float score = node.score + c.score;
    if (!(score > -kInf)) return;
    heap.push_back({score, parent, static_cast<int32_t>(c.id)});
    std::push_heap(heap.begin(), heap.end());
  };
  offer(0);
  while (!heap.empty() && static_cast<int64_t>(nodes.size()) < limit) {
    std::pop_heap(heap.begin(), heap.end());
    const Offer best = heap.back();
    heap.pop_back();
    const auto number = static_cast<int32_t>(nodes.size());
    const int32_t position = nodes[best.parent].depth;
    const int64_t source = position * marginals.width + best.index;
    nodes.push_back({best.score, position + 1, 0});
    out.write(marginals.b, number, marginals.id(source), best.parent, source);
    offer(best.parent);
    offer(number);
  }
}

void tree_from_marginals(SPECDEC_TREE_FROM_MARGINALS_ARGS) {
  const int64_t depth = candidate_ids.size(1), width = candidate_ids.size(2), row = depth * width;
  const Ids ids{candidate_ids.const_data_ptr(), row, 1, ids_of(candidate_ids).wide};
  const auto* values = static_cast<const float*>(logprobs.const_data_ptr());
  const auto limits = vector_of<int32_t>(max_nodes);
  const TreeOutput out = tree_output(out_token_ids, out_parents, out_source, out_status);
  for_requests(candidate_ids.size(0), [&](int64_t b, const Team&) {
    const Marginals marginals{ids, b, values + b * row, depth, width};
    const int64_t limit = limits ? std::min<int64_t>(limits[b], num_nodes) : num_nodes;
    out.clear(b, limit > 1 ? marginals.status() : 0);
    if (root_ids) out.write(b, 0, ids_of(*root_ids).at(0, b), -1, -1);
    if (limit > 1) build(marginals, limit, out);
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(tree_from_marginals_out, tree_from_marginals)
}  // namespace specdec::cpu
