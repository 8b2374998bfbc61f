// The block that arrives last for a request: what each op does with the statistics of its rows.
#pragma once
#include "decide.cuh"

namespace specdec {

// First position that does not accept, over chunks of kThreads positions examined at once.
__device__ inline void walk(const Problem& p, const Request& q, int64_t b) {
  using Facts = Fact[kThreads];
  SPECDEC_SHARED(Facts, facts);
  SPECDEC_SHARED(int, verdict);
  SPECDEC_SHARED(int, accepted);
  SPECDEC_SHARED(int, status);
  if (threadIdx.x == 0) {
    verdict = kAccept;
    accepted = 0;
    status = q.status;
  }
  __syncthreads();
  if (q.chain.lost) {
    finish_chain(p, q, b, 0, kStop, q.status, 1.f);
    return;
  }
  for (int base = 0; verdict == kAccept; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    if (i <= q.chain.length) facts[threadIdx.x] = examine(p, q, b, i);
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int j = 0; j < kThreads && base + j <= q.chain.length && verdict == kAccept; ++j) {
        status |= facts[j].status;
        verdict = facts[j].verdict;
        accepted = base + j;
      }
    }
    __syncthreads();
  }
  finish_chain(p, q, b, accepted, verdict, status, 1.f);
}

// Rule block, first half: weights w, and the masses S that are still to be summed (pair.cuh).
// Returns true if none are, so that the request can be finished at once.
__device__ inline bool walk_block(const Problem& p, Request& q, int64_t b) {
  using Facts = Fact[kThreads];
  SPECDEC_SHARED(Facts, facts);
  SPECDEC_SHARED(float, weight);
  SPECDEC_SHARED(int, going);
  SPECDEC_SHARED(int, length);
  SPECDEC_SHARED(int, status);
  SPECDEC_SHARED(int, usable_bonus);
  if (threadIdx.x == 0) {
    weight = 1.f;
    going = q.chain.lost ? 0 : 1;
    length = 0;
    status = q.status;
    usable_bonus = q.chain.lost ? 0 : 1;
    p.work.weights.store(b * (p.max_draft + 1), 1.f);
  }
  for (int i = threadIdx.x; i < p.pairs; i += kThreads) {
    p.work.tasks.store(b * p.pairs + i, PairTask{});
  }
  __syncthreads();
  for (int base = 0; going != 0; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    if (i <= q.chain.length) facts[threadIdx.x] = examine(p, q, b, i);
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int j = 0; j < kThreads && going != 0; ++j) {
        const Fact f = facts[j];
        status |= f.status;
        if (f.verdict == kStop) usable_bonus = 0;
        if (f.verdict != kAccept) {
          going = 0;
          break;
        }
        length = base + j + 1;
        weight = fminf(weight * f.ratio, 1.f);
        p.work.weights.store(b * (p.max_draft + 1) + length, weight);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) p.work.states.store(b, {length, 0, status, usable_bonus});
  __syncthreads();
  for (int i = 1 + static_cast<int>(threadIdx.x); i < length; i += kThreads) {
    PairTask t = draw_task(p, q, b, i, true, p.work.weights.load(b * (p.max_draft + 1) + i));
    t.watch_draft = 0;
    if (t.kind == kPair) p.work.tasks.store(b * p.pairs + i, t);
  }
  return length <= 1 || !q.has_draft_law;
}

// Sum of (a p - b q)+ of pair task `slot`, merged in tile order.
__device__ inline float merged_mass(const Problem& p, int64_t slot) {
  float mass = 0.f;
  const int tiles = tiles_of(p.vocab);
  for (int tile = 0; tile < tiles; ++tile) {
    mass += p.work.pair_partials.load(slot * p.tiles + tile).mass;
  }
  return mass;
}

// Rule block, second half: tau = max{i : eta_i < h_i}.
__device__ inline void finish_block(const Problem& p, const Request& q, int64_t b) {
  SPECDEC_SHARED(int, shared_accepted);
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
        mass = merged_mass(p, b * p.pairs + i);
      } else {
        const int64_t x = draft_id(p, q.chain, b, i);
        const Law law = target_law(target_stats(p, b, i), q.target);
        mass = w * (1.f - law.at(target_logit(p, q.chain, b, i, x), x));
      }
      const float free = mass + 1.f - w;
      h = free > 0.f ? mass / free : 1.f;
    }
    if (p.coin_of(b, i - 1) < h) accepted = i;
  }
  accepted = block_reduce(accepted, Larger{});
  if (threadIdx.x == 0) shared_accepted = accepted;
  __syncthreads();
  const bool full = shared_accepted == state.length;
  const int verdict = full ? (state.usable_bonus ? kEnd : kStop) : kReject;
  const float scale = p.work.weights.load(b * (p.max_draft + 1) + shared_accepted);
  finish_chain(p, q, b, shared_accepted, verdict, state.status, scale);
}

__device__ inline void decide_chain(const Problem& p, int64_t b) {
  SPECDEC_SHARED(Request, q);
  if (threadIdx.x == 0) q = load_request(p, b);
  __syncthreads();
  if (p.rule != Rule::kBlock || q.target.greedy) {
    for (int i = threadIdx.x; i < p.pairs; i += kThreads) {
      p.work.tasks.store(b * p.pairs + i, PairTask{});
    }
    __syncthreads();
    walk(p, q, b);
  } else if (walk_block(p, q, b)) {
    finish_block(p, q, b);
  }
}

// sample: log-sum, threshold, and the best keys in order.
__device__ inline void decide_sample(const Problem& p, int64_t b, const Key* keys) {
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(Parameters, s);
  if (threadIdx.x == 0) {
    r = target_stats(p, b, 0);
    s = target_parameters(p, b);
  }
  __syncthreads();
  const Chain c{};
  if (threadIdx.x == 0) {
    p.status.store(b, (s.bad ? kBadSampling : 0) | (r.bad ? kBadTarget : 0));
    p.out_logsumexp.store(b, r.bad ? NAN : s.greedy ? 0.f : r.maximum * s.inv_t + logf(r.mass));
    p.out_threshold.store(b, r.bad ? NAN : r.threshold);
  }
  for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
    // Scores that overflowed only count where all did.
    const bool drawn = !r.bad && keys[i] != 0 && keys[i] >> 63 == keys[0] >> 63;
    const int64_t column = drawn ? key_id(keys[i]) : -1;
    float logprob = 0.f;
    if (column >= 0) {
      logprob = token_logprob(p, r, s, target_logit(p, c, b, 0, column), column);
    }
    const int64_t id = column >= 0 && p.token_map ? p.token_map.load(column) : column;
    p.token_ids.store(b * p.num_samples + i, id);
    p.logprobs.store(b * p.num_samples + i, logprob);
  }
}

// acceptance_ratios: min(1, p / q) at each id; the overlaps that need a pass over both rows become
// pair tasks.
__device__ inline void decide_ratios(const Problem& p, int64_t b) {
  SPECDEC_SHARED(Request, q);
  if (threadIdx.x == 0) q = load_request(p, b);
  __syncthreads();
  int status = q.status | (p.draft_given && q.draft.bad && q.chain.length > 0 ? kBadSampling : 0);
  if (!q.chain.lost) status |= q.chain.end_status;
  for (int i = threadIdx.x; i < p.max_draft; i += kThreads) {
    float ratio = 0.f, overlap = 0.f;
    PairTask task{};
    if (i < q.chain.length && !q.chain.lost) {
      const RowStats row = target_stats(p, b, i);
      const bool bad_draft = q.has_draft_law && draft_stats(p, b, i).bad;
      status |= (row.bad ? kBadTarget : 0) | (bad_draft ? kBadDraft : 0);
      if (!row.bad && !bad_draft) {
        const int64_t x = draft_id(p, q.chain, b, i);
        task.row = i;
        task.a = task.b = 1.f;
        task.x = -1;
        task.target = target_law(row, q.target);
        const float px = task.target.at(target_logit(p, q.chain, b, i, x), x);
        float qx = 1.f;
        overlap = px;
        if (q.has_draft_law) {
          task.kind = kPair;
          task.draft = draft_law(p, q.chain, b, i, q.draft);
          const int64_t column = column_of(p, x);
          qx = column < 0 ? 0.f : task.draft.at(draft_row(p, q.chain, b, i).at(column), column);
        }
        if (qx == 0.f) status |= kZeroDraft;
        ratio = qx > 0.f ? fminf(px / qx, 1.f) : 0.f;
      }
    }
    p.ratio.store(b * p.max_draft + i, ratio);
    p.overlap.store(b * p.max_draft + i, overlap);
    p.work.tasks.store(b * p.pairs + i, task);
  }
  status = block_reduce(status, Or{});
  if (threadIdx.x == 0) p.status.store(b, status);
}

// residual_probs, residual_sample: the pair of rows and its scales.
__device__ inline void decide_residual(const Problem& p, int64_t b) {
  if (threadIdx.x != 0) return;
  const Parameters target = target_parameters(p, b);
  Parameters draft = neutral_parameters();
  const RowStats row = target_stats(p, b, 0);
  int status = (target.bad ? kBadSampling : 0) | (row.bad ? kBadTarget : 0);
  PairTask t{};
  t.a = p.a.load(b);
  t.b = p.b.load(b);
  t.point_left = -INFINITY;
  int64_t id = p.point_ids.get(b, -1);
  const bool known = id >= 0 && id < p.vocab;
  if (!known && id != -1) status |= kBadId;
  t.x = known ? id : -1;
  t.kind = known ? kPoint : kPlain;
  if (p.draft) {
    draft = load_parameters(p.draft_sampling, b, p.draft_vocab);
    if (draft.bad) status |= kBadSampling;
    if (!draft.greedy) {
      const RowStats drafted = draft_stats(p, b, 0);
      t.kind = drafted.bad ? kPlain : kPair;
      if (drafted.bad) status |= kBadDraft;
      t.x = -1;
      t.draft = draft_law(p, Chain{}, b, 0, draft);
    }
  }
  if (t.b == 0.f) t.kind = kPlain;
  if (row.bad) {
    t.kind = kNothing;
  } else {
    t.target = target_law(row, target);
    if (t.kind == kPoint) {
      const float px = t.target.at(target_logit(p, Chain{}, b, 0, id), id);
      const float rest = fmaxf(t.a * px - t.b, 0.f);
      if (rest >= kTiny) t.point_left = log_normal(fmaxf(rest / fmaxf(t.a * px, kTiny), kTiny));
    }
  }
  p.work.tasks.store(b, t);
  p.work.states.store(b, {1, 0, status, 0});
  if (t.kind != kNothing) return;
  p.status.store(b, status);
  p.mass.store(b, 0.f);
  if (p.wants_draw) p.token_ids.store(b, -1);
}

}  // namespace specdec
