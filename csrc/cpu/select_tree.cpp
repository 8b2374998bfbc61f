// select_tree: the root and the best candidates, where one counts min(its score, its parent's):
// then what is kept is connected, and its order topological.
#include <algorithm>
#include <cmath>

#include "../torch/tree_args.h"
#include "row.h"
#include "tree.h"

namespace specdec::cpu {
namespace {

// Candidates that are kept, in node order: the num_nodes best, ties to the lower number.
std::vector<int64_t> best_candidates(const Tree& tree, const Ids& ids, const RowSource& scores,
                                     int64_t b, int64_t num_nodes) {
  std::vector<Entrant> kept{{kInf, 0}};
  std::vector<float> score(tree.nodes, -kInf);
  score[0] = kInf;
  for (int64_t n = 1; n < tree.nodes; ++n) {
    const float own = scores.logit(n);
    if (!tree.has(n) || ids.at(b, n) < 0 || std::isnan(own)) continue;
    score[n] = std::min(own, score[tree.parent[n]]);
    if (score[n] > -kInf) kept.push_back({score[n], n});
  }
  if (static_cast<int64_t>(kept.size()) > num_nodes) {
    std::nth_element(kept.begin(), kept.begin() + num_nodes, kept.end(), kBeats);
    kept.resize(num_nodes);
  }
  std::vector<int64_t> nodes;
  for (const Entrant& e : kept) nodes.push_back(e.id);
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

void select_tree(SPECDEC_SELECT_TREE_ARGS) {
  const int64_t batch = parents.size(0), candidates = parents.size(1);
  const Ids ids = ids_of(token_ids), given = ids_of(parents);
  const Logits rows = logits_of(scores);
  const TreeOutput out = tree_output(out_token_ids, out_parents, out_source, out_status);
  for_requests(batch, [&](int64_t b, const Team&) {
    const Tree tree(given, b, candidates, candidates - 1);
    const std::vector<int64_t> kept =
        best_candidates(tree, ids, row_source(rows, 0, b), b, num_nodes);
    std::vector<int32_t> number(candidates, -1);
    out.clear(b, tree.status());
    for (size_t i = 0; i < kept.size(); ++i) {
      const int64_t n = kept[i];
      number[n] = static_cast<int32_t>(i);
      const int32_t parent = tree.parent[n] < 0 ? -1 : number[tree.parent[n]];
      out.write(b, number[n], ids.at(b, n), parent, n);
    }
  });
}

}  // namespace

SPECDEC_CPU_KERNEL(select_tree_out, select_tree)
}  // namespace specdec::cpu
