// What a block knows of the row it works on.
#pragma once
#include "tile.cuh"

namespace specdec {

struct RowTask {
  bool active, is_target;
  int index, tiles;                       // row of the request; tiles of its vocabulary
  int place;                              // of the token it speaks of, behind the position
  int target_count, draft_count;          // rows that the request has
  int has_children;                       // of the node: verify_tree
  unsigned request_blocks, request_rows;  // that arrive for the whole request
  int64_t size;
  LogitRow row;
  Parameters parameters;
  Global<const int32_t> allowed;
  bool races, wants_entropy, wants_raw, wants_rank;
  Race race;
  int64_t x;  // drafted id: wants_rank
  float x_logit;
  Chain chain;
};

SPECDEC_HD int tiles_of(int64_t vocab) { return static_cast<int>((vocab + kTile - 1) / kTile); }

__device__ inline float target_logit(const Problem& p, const Chain& c, int64_t b, int64_t i,
                                     int64_t id) {
  const Global<const int32_t> allowed = allowed_row(p, c, b, i);
  if (allowed && (allowed.load(id >> 5) >> (id & 31) & 1) == 0) return -INFINITY;
  return target_row(p, c, b, i).at(id);
}

__device__ inline bool row_races(const Problem& p, const RowTask& t) {
  if (!t.is_target || t.parameters.greedy) return false;
  if (p.task == Task::kSample) return true;
  if (p.task != Task::kChain && p.task != Task::kTree) return false;
  if (p.rule == Rule::kMatch || p.rule == Rule::kTypical) return true;
  if (p.task == Task::kTree) return !is_argmax_rule(p) && t.has_children == 0;
  return !is_argmax_rule(p) && t.index == t.chain.length;
}

__device__ inline Race row_race(const Problem& p, int64_t b, int place, const Parameters& s) {
  Race race;
  const bool is_sample = p.task == Task::kSample;
  const int64_t purpose = is_sample                ? p.purpose
                          : p.rule == Rule::kMatch ? kPurposeTarget
                                                   : kPurposeResidual;
  race.noise = p.noise(b, place, purpose);
  race.inv_t = s.inv_t;
  race.threshold = -INFINITY;
  if (is_sample) {
    race.excluded = p.exclude_ids ? p.exclude_ids + b * p.exclude_row_stride : p.exclude_ids;
    race.count = p.num_exclude;
    race.stride = p.exclude_stride;
    race.token_map = p.token_map;
  }
  return race;
}

// The node of a tree whose row this is: in rule traversal each has its own place in the grid.
__device__ inline bool find_tree_row(const Problem& p, int64_t b, RowTask* t) {
  int node = t->index;
  if (p.tree_rule != TreeRule::kTraversal) {
    if (node >= t->target_count) return false;
    const WalkState s = p.work.walks.load(p.walk_slot(b, p.level));
    node = p.work.queue.load(b * (p.nodes + 1) + s.head + node);
  }
  const Candidate c = p.work.candidates.load(b * p.nodes + node);
  t->index = node;
  t->place = c.depth;
  t->has_children = c.has_children;
  return c.depth >= 0 && (t->is_target || (t->draft_count > 0 && c.has_children != 0));
}

// Finds which of the request's rows is row r of the grid; false if it has no such row.
__device__ inline bool find_row(const Problem& p, int64_t b, int r, RowTask* t) {
  t->is_target = r < p.target_rows;
  t->index = t->place = t->is_target ? r : r - p.target_rows;
  if (p.task == Task::kTree) return find_tree_row(p, b, t);
  return t->index < (t->is_target ? t->target_count : t->draft_count);
}

// Row r of request b. One thread calls it; the block shares the result.
__device__ inline RowTask make_row_task(const Problem& p, int64_t b, int r) {
  RowTask t{};
  t.chain = load_chain(p, b);
  const Parameters target = target_parameters(p, b);
  Parameters draft = neutral_parameters();
  bool uses_draft = false;
  if (p.draft) {
    draft = load_parameters(p.draft_sampling, b, p.draft_vocab);
    uses_draft = has_draft_law(p, target, draft) && !(p.has_stats && p.rule == Rule::kRatio);
  }
  const int bonus = p.task == Task::kChain || p.task == Task::kSample ? 1 : 0;
  t.target_count = t.chain.lost ? 0 : t.chain.length + bonus;
  t.draft_count = uses_draft && !t.chain.lost ? t.chain.length : 0;
  if (p.task == Task::kTree) {
    const WalkState s = p.work.walks.load(p.walk_slot(b, p.level));
    t.target_count = s.targets;
    t.draft_count = uses_draft ? s.drafts : 0;
  }
  t.active = find_row(p, b, r, &t);
  t.request_rows = t.target_count + t.draft_count;
  t.request_blocks = t.target_count * tiles_of(p.vocab) + t.draft_count * tiles_of(p.draft_vocab);
  if (!t.active) return t;
  t.size = t.is_target ? p.vocab : p.draft_vocab;
  t.tiles = tiles_of(t.size);
  t.parameters = t.is_target ? target : draft;
  t.row = t.is_target ? target_row(p, t.chain, b, t.index) : draft_row(p, t.chain, b, t.index);
  if (!t.is_target) return t;
  t.allowed = allowed_row(p, t.chain, b, t.index);
  t.wants_entropy = (p.task == Task::kChain || p.task == Task::kTree) && p.rule == Rule::kTypical;
  t.wants_raw = p.logprobs_mode == LogprobsMode::kRaw;
  t.races = row_races(p, t);
  if (t.races) t.race = row_race(p, b, t.place, t.parameters);
  t.wants_rank = p.task == Task::kChain && p.rule == Rule::kTopM && t.index < t.chain.length;
  if (t.wants_rank) {
    t.x = draft_id(p, t.chain, b, t.index);
    t.x_logit = target_logit(p, t.chain, b, t.index, t.x);
  }
  return t;
}

// Statistics of the tile at `base` from its values in registers; for thread 0.
__device__ inline Partial tile_partial(const RowTask& t, int64_t base,
                                       const float (&v)[kPerThread]) {
  Partial part{};
  const Key top = tile_maximum(v, base);
  part.bad = top == kNotANumber;
  part.maximum = part.bad ? -INFINITY : key_value(top);
  part.argmax = static_cast<int>(key_id(top));
  const float inv_t = t.parameters.inv_t;
  float mass = 0.f, entropy = 0.f;
  int rank = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (v[j] == -INFINITY) continue;
    const float s = (v[j] - part.maximum) * inv_t, e = expf(s);
    mass += e;
    entropy += e * s;
    if (t.wants_rank) {
      rank += v[j] > t.x_logit || (v[j] == t.x_logit && id_of(base, j) < t.x) ? 1 : 0;
    }
  }
  part.mass = block_reduce(mass, Plus{});
  if (t.wants_entropy) part.entropy = block_reduce(entropy, Plus{});
  if (t.wants_rank) part.rank = block_reduce(rank, Plus{});
  return part;
}

// Maximum and sum of exp of the unmasked values; a NaN among them makes the sum NaN.
__device__ inline void raw_partial(const float (&v)[kPerThread], Partial* part) {
  float maximum = -INFINITY;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) maximum = fmaxf(maximum, v[j]);
  maximum = block_reduce(maximum, Larger{});
  float mass = 0.f;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) mass += v[j] == -INFINITY ? 0.f : expf(v[j] - maximum);
  part->raw_maximum = maximum;
  part->raw_mass = block_reduce(mass, Plus{});
}

// Numbers of a row whose law needs no filter.
__device__ inline RowStats plain_stats(const RowSum& sum, const Parameters& s) {
  RowStats r{};
  r.maximum = sum.maximum;
  r.mass = s.greedy ? 1.f : sum.mass;
  r.threshold = s.greedy ? sum.maximum : -INFINITY;
  r.entropy = s.greedy ? 0.f : logf(sum.mass) - sum.entropy / sum.mass;
  r.raw_maximum = sum.raw_maximum;
  r.raw_mass = sum.raw_mass;
  r.argmax = sum.argmax;
  r.rank = sum.rank;
  r.bad = sum.bad != 0 || !is_finite(sum.maximum);
  r.key = sum.key;
  return r;
}

}  // namespace specdec
