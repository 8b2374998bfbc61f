// A request of a call: which ids it has, under which parameters, and where its rows lie.
#pragma once
#include "problem.cuh"

namespace specdec {

// The ids of a request: K of them are usable.
struct Chain {
  int64_t first;  // flat: index of the first id
  int length, status, end_status;
  bool lost;  // none of its rows is read: where they lie is unknown, or it is not active
};

// Number of a drafted id, or of a draft row, among all.
__device__ inline int64_t draft_number(const Problem& p, const Chain& c, int64_t b, int64_t i) {
  return p.is_flat ? c.first + i : b * p.drafts + i;
}

__device__ inline int64_t draft_id(const Problem& p, const Chain& c, int64_t b, int64_t i) {
  return p.draft_ids.load(draft_number(p, c, b, i));
}

// Where the ids of a request of flat rows lie, and how many there are.
__device__ inline void open_flat(const GlobalVector<int32_t>& cu_draft, int64_t total,
                                 int64_t max_draft, int64_t b, Chain* c) {
  c->first = cu_draft.load(b);
  const int64_t last = cu_draft.load(b + 1);
  c->lost = c->first < 0 || c->first > total;
  const bool bad = c->lost || last < c->first || last > total || last - c->first > max_draft ||
                   (b == 0 && c->first != 0);
  if (bad) c->status = kBadLayout;
  c->length = bad ? 0 : static_cast<int>(last - c->first);
}

// Where the ids of a request lie, and how many there are at most.
__device__ inline Chain open_chain(const Problem& p, int64_t b) {
  Chain c{0, 0, 0, 0, !p.sampling.active.get(b, true)};
  if (c.lost) return c;
  if (p.task == Task::kSample || p.task == Task::kTree) return c;
  c.length = p.task == Task::kResidual ? 1 : p.max_draft;
  if (p.is_flat) open_flat(p.cu_draft, p.total, p.max_draft, b, &c);
  return c;
}

// The ids that can be used, up to the first that is none. A whole warp calls it, a lane an id.
__device__ inline Chain load_chain(const Problem& p, int64_t b) {
  Chain c = open_chain(p, b);
  if (p.task != Task::kChain && p.task != Task::kRatios) return c;
  const int lane = threadIdx.x % 32, width = c.length;
  for (int base = 0; base < width; base += 32) {
    const int64_t id = base + lane < width ? draft_id(p, c, b, base + lane) : 0;
    const bool ends = id < 0 || id >= p.vocab;
    const int end = warp_reduce(ends ? 2 * lane + (id != -1 ? 1 : 0) : 64, Smaller{});
    if (end == 64) continue;
    if (end % 2 != 0) c.end_status = kBadId;
    c.length = base + end / 2;
    break;
  }
  return c;
}

// The ids of a draft row's candidates, by all threads; those outside the vocabulary as -1.
using KeptIds = int[kMaxKept];
__device__ inline void load_kept(const Problem& p, int64_t start, KeptIds& ids) {
  for (int64_t j = threadIdx.x; j < p.draft_vocab; j += kThreads) {
    const int64_t id = p.kept_ids.load(start + j);
    ids[j] = id < 0 || id >= p.vocab ? -1 : static_cast<int>(id);
  }
  __syncthreads();
}

// Number of a row among those of the mask and of the edits; a draft row has its target row's.
__device__ inline int64_t row_number(const Problem& p, const Chain& c, int64_t b, int64_t i) {
  return p.is_flat ? c.first + b + i : b * p.allowed_rows + i;
}

// Rows without their edits.
__device__ inline MaskedRow plain_target_row(const Problem& p, const Chain& c, int64_t b,
                                             int64_t i) {
  const int64_t at = row_number(p, c, b, i);
  return {p.is_flat ? p.target.row(0, at) : p.target.row(b, i),
          p.allowed ? p.allowed + at * p.allowed_row_stride : p.allowed,
          {}};
}

__device__ inline LogitRow plain_draft_row(const Problem& p, const Chain& c, int64_t b, int64_t i) {
  return p.is_flat ? p.draft.row(0, c.first + i) : p.draft.row(b, i);
}

__device__ inline MaskedRow target_row(const Problem& p, const Chain& c, int64_t b, int64_t i) {
  MaskedRow row = plain_target_row(p, c, b, i);
  row.edits = p.edits.row(row_number(p, c, b, i));
  return row;
}

__device__ inline MaskedRow draft_row(const Problem& p, const Chain& c, int64_t b, int64_t i) {
  return {plain_draft_row(p, c, b, i), {}, p.draft_edits.row(row_number(p, c, b, i))};
}

// Whether a draft row has a law of its own: otherwise the draft is a point mass.
__device__ inline bool has_draft_law(const Problem& p, const Parameters& target,
                                     const Parameters& draft) {
  if (!p.draft || draft.greedy) return false;
  if (p.task == Task::kChain || p.task == Task::kTree) {
    return !target.greedy && (p.rule == Rule::kRatio || p.rule == Rule::kBlock);
  }
  return true;
}

__device__ inline bool is_argmax_rule(const Problem& p) {
  return (p.task == Task::kChain || p.task == Task::kTree) &&
         (p.rule == Rule::kGreedy || p.rule == Rule::kTopM || p.rule == Rule::kDistance);
}

// Whether every row that may be emitted from is drawn from before the walk (settle.cu).
SPECDEC_HD bool races_rows(const Problem& p) {
  if (p.task == Task::kSample) return true;
  if (p.task != Task::kChain && p.task != Task::kTree) return false;
  return p.rule == Rule::kMatch || p.rule == Rule::kTypical;
}

struct Request {  // what all its rows and positions share
  Chain chain;
  Parameters target, draft;
  bool has_draft_law;
  bool is_draft_bad;  // the draft's sampling parameters are, and they would be read
  float over_acceptance, typical_epsilon, typical_delta;
  int status;
  const RowStats* settled;  // of its rows, by the kernel that walks them; or absent
};

// A whole warp calls it, its first lane gets it. All is asked for before any of it is awaited.
__device__ inline Request make_request(const Problem& p, int64_t b) {
  Request q{};
  GivenSampling target, draft;
  if (threadIdx.x % 32 == 0) {
    if (!is_argmax_rule(p)) target = p.sampling.load(b);  // argmax decoding reads none
    if (p.draft) draft = p.draft_sampling.load(b);
    q.over_acceptance = p.over_acceptance.load(b);
    q.typical_epsilon = p.typical_epsilon.load(b);
    q.typical_delta = p.typical_delta.load(b);
  }
  q.chain = load_chain(p, b);
  if (threadIdx.x % 32 != 0) return q;
  q.target = checked(target, p.vocab);
  q.draft = checked(draft, p.draft_vocab);
  q.status = q.chain.status;
  q.has_draft_law = has_draft_law(p, q.target, q.draft);
  q.is_draft_bad = p.draft && q.draft.bad && !q.target.greedy;
  if (q.target.bad || (q.is_draft_bad && q.chain.length > 0)) q.status |= kBadSampling;
  return q;
}

}  // namespace specdec
