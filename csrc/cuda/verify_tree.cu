// verify_tree: walk from the root to an accepted node, then draw one token.
//   open_kernel       grid = [batch]; checks a tree and puts its root into the queue
//   digest, settle    of the rows of the nodes in the queue, or of all nodes (digest.cu, settle.cu)
//   tree_kernel       grid = [batch]; tries the children of each node in the queue, puts what it
//                     accepts into it, or ends the walk (draw.cuh)
// The rows of a level are read when the walk is there; small trees have all rows read at once.
#include "../torch/tree_args.h"
#include "kernels.h"
#include "traversal.cuh"
#include "tree_rules.cuh"

namespace specdec {
namespace {

constexpr int kFrontier = 8;

using NodeIds = int[kMaxNodes];

// Whether two siblings carry the same id.
__device__ bool has_twins(const TreeTable& t, const NodeIds& id, int nodes) {
  int twins = 0;
  for (int n = threadIdx.x; n < nodes; n += kThreads) {
    if (t.parent[n] < 0 || id[n] < 0) continue;
    for (int m = n + 1; m < nodes; ++m) {
      twins |= t.parent[m] == t.parent[n] && id[m] == id[n] ? 1 : 0;
    }
  }
  return block_reduce(twins, Or{}) != 0;
}

__device__ Candidate checked_node(const TreeTable& t, const NodeIds& id, int n) {
  Candidate c{t.parent[n], t.depth[n], 0, id[n], t.jump[n]};
  for (int m = 0; m < n; ++m) c.rank += t.depth[m] == c.depth ? 1 : 0;
  return c;
}

// Results of a request that is not active; no node is in its queue.
__device__ void write_nothing(const Problem& p, int64_t b) {
  const int64_t width = p.max_draft + 1;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    p.token_ids.store(b * width + i, -1);
    p.path.store(b * width + i, -1);
    if (p.logprobs_mode != LogprobsMode::kNone) p.logprobs.store(b * width + i, 0.f);
  }
  if (threadIdx.x != 0) return;
  p.num_accepted.store(b, 0);
  p.status.store(b, 0);
  p.work.walks.store(b, WalkState{});
}

__global__ void __launch_bounds__(kThreads) open_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(TreeTable, tree);
  SPECDEC_SHARED(NodeIds, id);
  SPECDEC_SHARED(Request, q);
  const int64_t b = blockIdx.x;
  after_last_kernel();
  load_request(p, b, &q);
  __syncthreads();
  if (q.chain.lost) return write_nothing(p, b);
  bool bad = load_tree(p.parents, b, p.nodes, p.max_draft, tree);
  for (int n = threadIdx.x; n < p.nodes; n += kThreads) {
    const int64_t given = n == 0 ? -1 : p.draft_ids.load(b * p.nodes + n);
    const bool is_outside = given < -1 || given >= p.vocab;
    id[n] = is_outside ? kOutside : static_cast<int>(given);
  }
  __syncthreads();
  if (!p.replacement && has_twins(tree, id, p.nodes)) {
    bad = true;
    keep_root(tree, p.nodes);
  }
  mark_parents(tree, p.nodes, tree.jump);
  int candidates = 0;  // children of the root
  for (int n = threadIdx.x; n < p.nodes; n += kThreads) {
    const Candidate c = checked_node(tree, id, n);
    p.work.candidates.store(b * p.nodes + n, c);
    candidates += c.parent == 0 && c.id >= 0 ? 1 : 0;
  }
  candidates = block_reduce(candidates, Plus{});
  if (threadIdx.x != 0) return;
  WalkState w{};
  w.tail = w.targets = 1;
  w.drafts = tree.jump[0];
  w.status = bad ? kBadLayout : 0;
  if (candidates > 0 && q.is_draft_bad) w.status |= kBadSampling;
  p.work.queue.store(b * (p.nodes + 1), 0);
  p.work.walks.store(b, w);
}

// A block a request: one on a multiprocessor may have the registers of two, and spills none.
__global__ void __launch_bounds__(kThreads, 1) tree_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(WalkState, w);
  SPECDEC_SHARED(Request, q);
  SPECDEC_SHARED(Children, children);
  const int64_t b = blockIdx.x;
  after_last_kernel();
  load_request(p, b, &q);
  for (;;) {
    if (threadIdx.x == 0) w = p.work.walks.load(b);
    __syncthreads();
    if (w.targets == 0) return;
    if (p.tree_rule == TreeRule::kTraversal) {
      traverse(p, q, w, b);
    } else if (p.tree_rule == TreeRule::kTypical) {
      walk_typical(p, q, w, b, children);
    } else {
      walk_on(p, q, w, b, children);
    }
    if (!p.at_once) return;
    __syncthreads();
  }
}

// Rule of the chain that treats a single row alike.
Rule row_rule(TreeRule rule) {
  return rule == TreeRule::kMatch     ? Rule::kMatch
         : rule == TreeRule::kGreedy  ? Rule::kGreedy
         : rule == TreeRule::kTypical ? Rule::kTypical
                                      : Rule::kRatio;
}

// Levels of the deepest walk. One of rule typical that does not fill its rows empties the queue, so
// that only nodes further down are left.
int levels_of(const Problem& p, int frontier) {
  const int depth = p.max_draft < p.nodes - 1 ? p.max_draft : p.nodes - 1;
  if (p.tree_rule == TreeRule::kTypical) return depth + p.nodes / frontier + 2;
  return depth + 1;
}

// Whether reading the rows of all nodes costs less than the kernels of a level, which wait for one
// another: 15 to 22 us a level on an H200, of which 12 are saved, against the rows that a walk
// would not visit, at 3500 bytes a nanosecond.
bool is_small(const Problem& p, int levels) {
  const int64_t bytes = p.vocab * (p.target.type() == LogitType::kFloat32 ? 4 : 2);
  return p.batch * (p.nodes - levels) * bytes / 3500 < (levels - 1) * int64_t{12000};
}

void verify_tree_out(const VerifyTreeParams& v, const Tensor& like) {
  const OnDevice on(like);
  const TreeRule tree_rule = v.rule;
  const bool reads_draft = tree_rule == TreeRule::kRecursive ||
                           tree_rule == TreeRule::kGreedyMultiDraft ||
                           tree_rule == TreeRule::kTraversal;
  const Logits draft = reads_draft ? v.draft : Logits{};
  Problem p = pair_problem(Task::kTree, v, draft, v.nodes);
  set_verify(&p, v, v.ids);
  p.tree_rule = tree_rule;
  p.rule = row_rule(tree_rule);
  p.replacement = v.replacement;
  p.nodes = static_cast<int>(v.nodes);
  STD_TORCH_CHECK(v.max_depth < 0x7fffffff, "verify_tree: max_depth ", v.max_depth);
  p.max_draft = static_cast<int>(v.max_depth);
  p.draft_ids = GlobalIds(v.ids);
  p.parents = GlobalIds(v.parents);
  p.drafts = p.nodes;
  p.path = Global<int32_t>(v.path);
  const int frontier = p.nodes < kFrontier ? p.nodes : kFrontier;
  const int levels = levels_of(p, frontier);
  p.at_once = tree_rule == TreeRule::kTraversal || is_small(p, levels);
  p.target_rows = p.at_once ? p.nodes : tree_rule == TreeRule::kTypical ? frontier : 1;
  p.draft_rows = !p.draft ? 0 : p.at_once ? p.nodes : 1;
  STD_TORCH_CHECK(tree_rule != TreeRule::kTraversal || p.nodes <= kMaxTraversal,
                  "verify_tree: traversal of ", p.nodes);
  p.filters = tree_rule != TreeRule::kGreedy &&
              (p.sampling.filters() || (p.draft && p.draft_sampling.filters()));
  const bool draws = reads_draft || tree_rule == TreeRule::kTargetOnly || p.filters;
  if (draws || p.logprobs_mode != LogprobsMode::kNone) p.flags |= kWantsMass;
  if (tree_rule == TreeRule::kTypical) p.flags |= kWantsMass | kWantsEntropy;
  if (p.logprobs_mode == LogprobsMode::kRaw) p.flags |= kWantsRaw;
  const Reserved reserved(&p, like);
  launch_columns(p, on);
  launch_phase(open_kernel, p.batch, on, p);
  for (int level = 0; level < (p.at_once ? 1 : levels); ++level) {
    launch_digest(p, on);
    launch_settle(p, on);
    launch_kept(p, on);
    launch_phase(tree_kernel, p.batch, on, p);
  }
}

}  // namespace
}  // namespace specdec

SPECDEC_REGISTER(verify_tree,
                 (specdec::Boxed<specdec::verify_tree_params, specdec::verify_tree_out>::call))
