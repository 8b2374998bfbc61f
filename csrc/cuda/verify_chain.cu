// verify_chain: accept a prefix of the draft and draw the token after it.
//   digest, settle      of every row (digest.cu, settle.cu; stats.cuh where rows are few)
//   chain_kernel        grid = [batch]; the accepted prefix, the draw (draw.cuh), all results
// Rule block instead of it:
//   weights_kernel      grid = [batch]; the weights w, and the masses (w p - q)+ that pair.cu sums
//   block_kernel        grid = [batch]; the accepted prefix, the draw, all results
#include "../torch/args.h"
#include "draw.cuh"
#include "kernels.h"
#include "stats.cuh"

namespace specdec {

namespace {

constexpr int kGoesOn = 0x7fffffff;

struct Ending {  // of a walk, in shared memory; a barrier comes before it is read
  Position at;   // the position that is drawn from; of a chain that is lost: none
  int accepted, verdict, status;
  float scale;  // of the target in the residual
};

// The token that follows, and all outputs. x: what is drafted at this thread's position.
__device__ inline void finish(const Problem& p, const Request& q, int64_t b, int64_t x,
                              const Ending& end) {
  __syncthreads();
  write_prefix(p, q, b, end.accepted, x);
  Drawn drawn{-1, 0};
  if (end.verdict != kStop) {
    const RowStats& row = end.at.row;
    if (q.target.greedy || is_argmax_rule(p)) {
      drawn.token = row.argmax;
    } else if (row.key != 0) {  // the row has raced
      drawn.token = key_id(row.key);
    } else {
      const bool is_rejected = end.verdict == kReject;
      drawn = draw(p, b, draw_task(p, end.at, end.accepted, is_rejected, end.scale), false);
    }
  }
  if (threadIdx.x != 0) return;
  p.num_accepted.store(b, end.accepted);
  p.status.store(b, end.status | drawn.status);
  write_id(p, q, b, end.accepted, drawn.token);
}

// First position that does not accept, over chunks of kThreads positions examined at once. `d` is
// what is drafted at this thread's position of the first. Positions that accept have no status.
__device__ inline void walk(const Problem& p, const Request& q, int64_t b, Drafted d, Ending* end) {
  if (q.chain.lost) {
    if (threadIdx.x == 0) {
      end->accepted = 0;
      end->verdict = kStop;
      end->status = q.status;
    }
    return;
  }
  for (int base = 0, last = kGoesOn; last == kGoesOn; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    Fact f{};
    Position at;
    if (i <= q.chain.length) {
      if (base > 0) d = load_drafted(p, q, b, i);
      at = load_position(p, q, b, i, d.x);
      f = examine(p, q, i, at, d);
    }
    last = block_reduce(f.verdict != kAccept ? i : kGoesOn, Smaller{});
    if (i == last) *end = {at, i, f.verdict, q.status | f.status, 1.f};
  }
}

// Rule block, first half: weights w, and the masses S that are still to be summed (pair.cu).
__device__ inline void weigh(const Problem& p, Request& q, int64_t b) {
  using Facts = Fact[kThreads];
  SPECDEC_SHARED(Facts, facts);
  struct Walk {  // what the first thread knows, and the others behind a barrier
    bool goes_on;
    int length;
  };
  SPECDEC_SHARED(Walk, walk);
  float weight = 1.f;
  bool goes_on = !q.chain.lost;
  int length = 0, status = q.status, usable_bonus = goes_on ? 1 : 0;
  if (threadIdx.x == 0) {
    walk = {goes_on, 0};
    p.work.weights.store(b * (p.max_draft + 1), 1.f);
  }
  __syncthreads();
  for (int base = 0; walk.goes_on; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    if (i <= q.chain.length) {
      const Drafted d = load_drafted(p, q, b, i);
      facts[threadIdx.x] = examine(p, q, i, load_position(p, q, b, i, d.x), d);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int j = 0; j < kThreads && goes_on; ++j) {
        const Fact f = facts[j];
        status |= f.status;
        if (f.verdict == kStop) usable_bonus = 0;
        goes_on = f.verdict == kAccept;
        if (!goes_on) break;
        length = base + j + 1;
        weight = fminf(weight * f.ratio, 1.f);
        p.work.weights.store(b * (p.max_draft + 1) + length, weight);
      }
      walk = {goes_on, length};
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) p.work.states.store(b, {length, status, usable_bonus});
  for (int i = 1 + static_cast<int>(threadIdx.x); i < walk.length; i += kThreads) {
    const Position at = load_position(p, q, b, i, draft_id(p, q.chain, b, i));
    PairTask t = draw_task(p, at, i, true, p.work.weights.load(b * (p.max_draft + 1) + i));
    t.watch_draft = 0;
    if (t.kind == kPair) p.work.tasks.store(b * p.pairs + i, t);
  }
  __syncthreads();
}

// Rule block, second half: tau = max{i : eta_i < h_i}.
__device__ inline void walk_weights(const Problem& p, const Request& q, int64_t b, Ending* end) {
  SPECDEC_SHARED(ChainState, state);
  if (threadIdx.x == 0) state = p.work.states.load(b);
  __syncthreads();
  int accepted = 0;
  for (int i = 1 + static_cast<int>(threadIdx.x); i <= state.length; i += kThreads) {
    const float w = p.work.weights.load(b * (p.max_draft + 1) + i);
    float h = w;
    if (i < state.length) {
      float mass;
      if (q.has_draft_law) {
        mass = merged(p, b * p.pairs + i).mass;
      } else {
        const int64_t x = draft_id(p, q.chain, b, i);
        const Law law = target_law(target_stats(p, b, i), q.target);
        mass = w * (1.f - law.at(target_row(p, q.chain, b, i).at(x), x));
      }
      const float free = mass + 1.f - w;
      h = free > 0.f ? mass / free : 1.f;
    }
    if (p.coin_of(b, i - 1) < h) accepted = i;
  }
  accepted = block_reduce(accepted, Larger{});
  if (threadIdx.x != 0) return;
  const bool ends = accepted == state.length;
  const int64_t x = ends ? -1 : draft_id(p, q.chain, b, accepted);
  *end = {load_position(p, q, b, accepted, x), accepted,
          !ends                     ? int{kReject}
          : state.usable_bonus != 0 ? int{kEnd}
                                    : int{kStop},
          state.status, p.work.weights.load(b * (p.max_draft + 1) + accepted)};
}

__global__ void __launch_bounds__(kThreads, 2) chain_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Request, q);
  SPECDEC_SHARED(Ending, end);
  SPECDEC_SHARED(Settled, settled);
  load_request(p, blockIdx.x, &q);
  __syncthreads();
  const Drafted d = load_drafted(p, q, blockIdx.x, threadIdx.x);
  after_last_kernel();
  if (settles_rows(p)) settle_rows(p, blockIdx.x, settled, &q);
  walk(p, q, blockIdx.x, d, &end);
  finish(p, q, blockIdx.x, d.x, end);
}

__global__ void __launch_bounds__(kThreads) weights_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Request, q);
  const int64_t b = blockIdx.x;
  load_request(p, b, &q);
  after_last_kernel();
  for (int i = threadIdx.x; i < p.pairs; i += kThreads) {
    p.work.tasks.store(b * p.pairs + i, PairTask{});
  }
  __syncthreads();
  if (!q.target.greedy) weigh(p, q, b);
}

__global__ void __launch_bounds__(kThreads, 2) block_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Request, q);
  SPECDEC_SHARED(Ending, end);
  const int64_t b = blockIdx.x;
  load_request(p, b, &q);
  __syncthreads();
  const Drafted d = load_drafted(p, q, b, threadIdx.x);
  after_last_kernel();
  if (q.target.greedy) {
    walk(p, q, b, d, &end);
  } else {
    walk_weights(p, q, b, &end);
  }
  finish(p, q, b, d.x, end);
}

}  // namespace

void verify_chain_out(const VerifyChainParams& v, const Tensor& like) {
  const OnDevice on(like);
  const bool reads_draft = v.rule == Rule::kRatio || v.rule == Rule::kBlock;
  const bool is_argmax =
      v.rule == Rule::kGreedy || v.rule == Rule::kTopM || v.rule == Rule::kDistance;
  Problem p = chain_problem(Task::kChain, v, reads_draft ? v.draft : Logits{});
  set_verify(&p, v, v.draft_ids);
  p.has_stats = v.draft_logsumexp && v.draft;
  p.logsumexp = Global<const float>(v.draft_logsumexp);
  p.draft_threshold = Global<const float>(v.draft_threshold);
  p.rule = v.rule;
  p.over_acceptance = GlobalKnob(v.over_acceptance);
  p.rejected_from_target = v.rejected_from_target;
  p.top_m = v.top_m;
  p.max_distance = v.max_distance;
  p.min_block = v.min_block;
  p.target_rows = p.max_draft + 1;
  const bool reads_draft_rows = p.draft && !(p.has_stats && v.rule == Rule::kRatio);
  p.draft_rows = reads_draft_rows ? p.max_draft : 0;
  p.filters =
      !is_argmax && (p.sampling.filters() || (reads_draft_rows && p.draft_sampling.filters()));
  p.pairs = v.rule == Rule::kBlock && p.draft && p.max_draft > 1 ? p.max_draft : 0;
  // Masses: of every law that draws, for top-p, and for processed log-probabilities.
  const bool draws = reads_draft || v.rule == Rule::kTypical;
  if (draws || p.filters || p.logprobs_mode != LogprobsMode::kNone) p.flags |= kWantsMass;
  if (v.rule == Rule::kTypical) p.flags |= kWantsEntropy;
  if (p.logprobs_mode == LogprobsMode::kRaw) p.flags |= kWantsRaw;
  const Reserved reserved(&p, like);
  launch_rows(p, on);
  if (v.rule != Rule::kBlock) return launch_phase(chain_kernel, p.batch, on, p);
  launch_phase(weights_kernel, p.batch, on, p);
  if (p.pairs > 0) launch_pairs(p, Pass::kMass, on);
  launch_phase(block_kernel, p.batch, on, p);
}

}  // namespace specdec

SPECDEC_REGISTER(verify_chain,
                 (specdec::Boxed<specdec::verify_chain_params, specdec::verify_chain_out>::call))
