// What the kernels of all five ops share: the arguments of a call, the numbers kept of a row, the
// workspace.
//
// Every op is a list of rows a request (target rows, then draft rows) whose statistics are taken
// first, a decision on them, and at most two more passes over chosen pairs of rows (pair.cuh).
#pragma once
#include "../common/philox.h"
#include "block.cuh"
#include "masked_row.cuh"

namespace specdec {

constexpr int kPerThread = 16, kTile = 4096;  // ids: kThreads * kPerThread
constexpr int kBlock = 64, kTileBlocks = kTile / kBlock;
constexpr int kListed = 256;  // values that a tile may list between the two ends of a bracket
constexpr int kMaxSamples = 64;
constexpr int kMaxKept = 1024;  // candidates of a draft row

SPECDEC_HD int tiles_of(int64_t vocab) { return static_cast<int>((vocab + kTile - 1) / kTile); }

enum class Task : int { kSample, kChain, kRatios, kResidual, kTree, kLogprobs };

struct GivenSampling {  // of a request
  float temperature = 1.f;
  int top_k = 0;
  float top_p = 1.f, min_p = 0.f;
  bool active = true;
};

struct SamplingView {  // each [batch] or absent
  GlobalVector<float> temperature;
  GlobalVector<int32_t> top_k;
  GlobalVector<float> top_p, min_p;
  GlobalVector<bool> active;
  SamplingView() = default;
  explicit SamplingView(const Sampling& s)
      : temperature(s.temperature),
        top_k(s.top_k),
        top_p(s.top_p),
        min_p(s.min_p),
        active(s.active) {}
  SPECDEC_HD bool filters() const { return top_k || top_p || min_p; }
  __device__ GivenSampling load(int64_t b) const {
    const GivenSampling off;
    return {temperature.get(b, off.temperature), top_k.get(b, off.top_k), top_p.get(b, off.top_p),
            min_p.get(b, off.min_p), active.get(b, true)};
  }
};

// Sampling parameters of a request with the rules for bad values applied.
struct Parameters {
  float inv_t, temperature, top_p, min_p;
  int top_k;
  bool greedy, bad;
  __device__ bool filters() const { return top_k > 0 || top_p < 1.f || min_p > 0.f; }
};

__device__ inline Parameters neutral_parameters() { return {1.f, 1.f, 1.f, 0.f, 0, false, false}; }

__device__ inline Parameters checked(const GivenSampling& s, int64_t vocab) {
  Parameters p = neutral_parameters();
  if (!s.active) return p;
  const float t = s.temperature, inv_t = 1.f / t;
  p.bad = !(t >= 0.f) || s.top_k < 0 || s.top_p != s.top_p || s.min_p != s.min_p;
  p.greedy = p.bad || t == 0.f || !is_finite(inv_t);
  if (p.greedy) return p;
  p.temperature = t;
  p.inv_t = inv_t;
  p.top_k = s.top_k < vocab ? s.top_k : 0;
  p.top_p = s.top_p < 1.f ? s.top_p : 1.f;
  p.min_p = s.min_p > 0.f ? s.min_p : 0.f;
  if (s.top_p <= 0.f) {  // the maximum alone
    p.top_k = 0;
    p.top_p = p.min_p = 1.f;
  }
  return p;
}

// What the blocks of a row do not tell about its filters (filter.cuh).
enum Unknown : int { kSettled, kRank, kFloor, kEdge };

struct RowStats {
  float maximum, mass, threshold, entropy;  // mass: sum over kept of exp((l - maximum) / T)
  float raw_maximum, raw_mass;              // of the unmasked logits at temperature 1
  int argmax, is_near, bad, unknown;        // is_near: the drafted id is among the m largest
  unsigned long long key;                   // winner of the race over the row (race.cuh)
  float low, high;                          // unknown: the ends of its bracket
};

struct Partial {                                        // of one tile
  float maximum, mass, entropy, raw_maximum, raw_mass;  // maximum: NaN if there is one
};

struct Part {  // of the values of a tile above a bracket, or at one of its ends
  float mass;
  int count;
};
struct Gathered {  // of one tile
  Part part[3];    // above the bracket, at its high end, at its low end
  int listed;      // values between the ends; more than kListed are not listed
};

struct Listed {
  float value;
  int id;
};

constexpr float kLowest = -3.402823466e38f, kLog2E = 1.44269504f;

// p(id) = exp((logit - maximum) * inv_t - shift) * scale where logit >= threshold, a finite number;
// or a point mass at `only`.
struct Law {
  float maximum, inv_t, shift, scale, threshold;
  int only;
  __device__ __forceinline__ float at(float logit, int64_t id) const {
    const float unit = fminf(inv_t * kLog2E, 3e38f);  // 0 times an infinite one would be NaN
    const float e = fast_exp2(fmaf(logit - maximum, unit, -shift * kLog2E)) * scale;
    const float p = logit >= threshold ? e : 0.f;
    return only < 0 ? p : static_cast<int>(id) == only ? 1.f : 0.f;
  }
};

enum PairKind : int { kNothing, kPlain, kPair, kPoint };

struct PairTask {   // one pair of rows to be read again: weights (a p - b q)+
  int kind, row;    // row: target (and draft) row of the request
  int place, slot;  // places behind the request's position; row of the statistics
  int num_listed;   // ids whose weights are listed: kPoint leaves them out
  int descends;     // a draw that is a child is accepted (verify_tree)
  float a, b;
  int64_t x;         // kPoint: where q is 1
  float point_left;  // kPoint: what is left of x: its log-weight relative to the others; -inf:
                     // nothing
  int watch_draft;   // the draft row was not read: it may turn out bad, then the draw is plain
  Law target, draft;
};

struct PairPartial {  // of one tile
  float mass;
  int any;  // some weight can be drawn
};

struct ChainState {  // of one request between two kernels
  int length, status, usable_bonus;
};

struct Candidate {          // a node of a tree
  int parent, depth, rank;  // rank: among the nodes of its depth; not there: -1
  int id;                   // or kNoId, kOutside
  int has_children;
};
constexpr int kNoId = -1, kOutside = -2;

struct Mark {  // of a node that is accepted so far
  double score;
  float logprob, token_logprob;
  int token;  // what follows it if the walk ends there
};

struct WalkState {      // of one request between two levels of its walk
  int head, tail;       // of its queue: the nodes whose rows this level reads start at head
  int targets, drafts;  // rows that are read
  int status, best, depth, is_last;  // best: the deepest accepted node so far
  double score;                      // of the best node
};

struct Workspace {
  Global<Partial> partials;   // [rows, tiles]
  Global<uint8_t> maxima;     // [rows, blocks] in the dtype of the row
  Global<Gathered> gathered;  // [rows, tiles], with filters
  Global<uint8_t> lists;      // [rows, tiles, kListed] in the dtype of the row, with filters
  Global<RowStats> rows;      // [rows]
  Global<int32_t> open;       // [rows], with filters: whether they are not settled yet
  Global<PairTask> tasks;     // [batch, pairs]
  Global<PairPartial> pair_partials;  // [batch, pairs, tiles]
  Global<ChainState> states;          // [batch]
  Global<float> weights;              // [batch, max_draft + 1]: w of rule block
  Global<int32_t> columns;            // [vocab]: draft column of a target id; checked when read
  Global<Candidate> candidates;       // [batch, nodes]
  Global<Mark> marks;                 // [batch, nodes]
  Global<int32_t> queue;              // [batch, nodes + 1]
  Global<Listed> listed;              // [batch, nodes]: ids with the weights that they have left
  Global<WalkState> walks;            // [batch]
};

// What the digest of a row holds beside its maxima; and whether packed bits, or edits, are given.
enum DigestFlag : unsigned { kWantsMass = 1, kWantsEntropy = 2, kWantsRaw = 4 };
constexpr unsigned kIsMasked = 8, kIsEdited = 16;

struct Problem {
  Task task;
  unsigned flags;  // of DigestFlag
  Rule rule;
  int64_t batch, vocab, draft_vocab, total;
  int max_draft, target_rows, draft_rows;  // rows of a request in the grid: target rows come first
  int pairs;                               // pair tasks of a request
  int tiles;                               // of the wider vocabulary
  int64_t maxima_bytes;                    // of a row
  bool is_flat, filters, has_stats;
  LogitTable target, draft;
  GlobalIds draft_ids;  // [batch, drafts] or [total]
  int64_t drafts;       // ids, and draft rows, of a request when dense
  GlobalVector<int32_t> cu_draft;
  Global<const float> logsumexp, draft_threshold;  // one entry a draft row
  SamplingView sampling, draft_sampling;
  GlobalVector<int64_t> seed, position, step, lane;
  int64_t purpose;
  int num_samples;
  Global<const int64_t> exclude_ids;  // [batch, num_exclude]
  int64_t num_exclude;
  GlobalVector<int32_t> token_map;
  bool is_kept;        // draft rows hold candidates alone
  GlobalIds kept_ids;  // [draft rows, draft_vocab]
  Global<const float> kept_logsumexp;
  Global<const int32_t> allowed;
  int64_t allowed_row_stride;
  EditTable edits, draft_edits;
  int64_t allowed_rows;             // rows a request when dense, of edits too
  GlobalVector<float> a, b;         // residual ops
  GlobalVector<int64_t> point_ids;  // residual ops
  GlobalKnob over_acceptance, typical_epsilon, typical_delta;
  bool rejected_from_target;
  int64_t top_m, max_distance, min_block;
  TreeRule tree_rule;  // verify_tree
  bool replacement;
  int parts;     // blocks that look at a row, or a pair of rows, again
  bool at_once;  // the rows of all nodes are read before the walk
  int nodes;
  GlobalIds parents;  // [batch, nodes]
  Global<int32_t> path;
  LogprobsMode logprobs_mode;
  GlobalIds token_ids;  // results; those an op does not have are absent
  Global<int32_t> num_accepted, ranks, status;
  Global<float> logprobs, top_logprobs, out_logsumexp, out_threshold, ratio, overlap, probs, mass;
  Workspace work;

  SPECDEC_HD int rows() const { return target_rows + draft_rows; }
  __device__ int64_t row_slot(int64_t b, int r) const { return b * rows() + r; }
  __device__ NoiseStream noise(int64_t b, int64_t i, int64_t wanted_purpose) const {
    const int64_t s = wanted_purpose == kPurposeTarget ? 0 : step.get(b, 0);
    return noise_stream(seed.load(b), position.load(b) + i, s, wanted_purpose, lane.get(b, 0));
  }
  __device__ float coin_of(int64_t b, int64_t i) const {
    return coin(seed.load(b), position.load(b) + i, step.get(b, 0));
  }
};

}  // namespace specdec
