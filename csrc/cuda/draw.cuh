// The draw from norm((a p - b q)+) by the block that has decided on it. As (a p - b q)+ <= a p, the
// block maxima of the target row bound this race too: mostly a few dozen blocks of both rows are
// read, and never one twice.
#pragma once
#include "pair.cuh"

namespace specdec {

struct Drawn {
  int64_t token;
  int status;
};

__device__ inline bool is_listed(const Problem& p, int64_t b, int count, int64_t id) {
  for (int i = 0; i < count; ++i) {
    if (p.work.listed.load(b * p.nodes + i).id == id) return true;
  }
  return false;
}

// Best key of the listed ids, by their listed weights.
__device__ inline Key best_listed(const Problem& p, const Race& race, int64_t b, int count) {
  Key best = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Listed one = p.work.listed.load(b * p.nodes + i);
    if (one.value < kTiny) continue;
    best = larger(best, score_key(log_normal(one.value), noise_of(race.noise, one.id), one.id));
  }
  return block_reduce(best, Larger{});
}

// What the draft logits were that a draw has looked at.
enum Seen : int { kSawBad = 1, kSawFinite = 2 };

__device__ inline int seen_in(float q) {
  return q != q || q == INFINITY ? kSawBad : q > -INFINITY ? kSawFinite : 0;
}

// What the draft logits of eight target ids are. Out of line, as few draws ask.
static __device__ SPECDEC_NOINLINE int seen_in_eight(const Problem& p, const PairRows& r,
                                                     int64_t first) {
  int seen = 0;
  if (p.is_kept) {
    for (int i = 0; i < p.draft_vocab; ++i) {
      if (r.ids[i] >= first && r.ids[i] < first + 8) seen |= seen_in(r.draft.at(i));
    }
    return seen;
  }
  float q[8];
  r.load_draft8(p, first, q);
#pragma unroll
  for (const float one : q) seen |= seen_in(one);
  return seen;
}

// The draft logit of an id, where the weight is made of one.
__device__ inline float drawn_draft(const Problem& p, const PairRows& r, int64_t id) {
  return r.task.kind == kPair ? r.draft_at(p, id) : 0.f;
}

// Log-weight of an id with these logits; -inf: out.
__device__ inline float drawn_weight(const Problem& p, const PairRows& r, int64_t b, int64_t id,
                                     float logit, float q, int* seen) {
  const PairTask& t = r.task;
  const Law& law = t.target;
  if (t.num_listed > 0 && is_listed(p, b, t.num_listed, id)) return -INFINITY;
  if (t.kind != kPair) {
    if (!(logit >= law.threshold) || (law.only >= 0 && law.only != id)) return -INFINITY;
    const float weight = mul_rn(sub_rn(logit, law.maximum), law.inv_t);
    return t.kind == kPoint && id == t.x ? add_rn(weight, t.point_left) : weight;
  }
  *seen |= seen_in(q);
  const float weight = sub_rn(mul_rn(t.a, law.at(logit, id)), mul_rn(t.b, t.draft.at(q, id)));
  return weight >= kTiny ? log_normal(weight) : -INFINITY;
}

// Best key of a pair of rows; 0: nothing is left.
__device__ inline Key draw_key(const Problem& p, const PairRows& r, const Race& race, int64_t b,
                               int* seen) {
  const PairTask& t = r.task;
  const Law& law = t.target;
  SPECDEC_SHARED(RaceScratch, scratch);
  int saw = 0;
  Winner winner{t.kind == kPair && t.num_listed > 0 ? best_listed(p, race, b, t.num_listed) : 0};
  if (law.only >= 0) {
    const float weight =
        drawn_weight(p, r, b, law.only, r.target.at(law.only), drawn_draft(p, r, law.only), &saw);
    winner.key = larger(winner.key, key_of(weight, law.only));
  } else {
    const float scale = t.kind == kPair ? fast_log(fmaxf(t.a, 0.f)) + fast_log(law.scale) : 0.f;
    const Entrants entrants{law.maximum,
                            law.inv_t,
                            scale,
                            law.threshold,
                            [&](int64_t first, float (&v)[8]) {
                              r.target.load8(first, p.vocab, v);
                              if (t.watch_draft) saw |= seen_in_eight(p, r, first);
                            },
                            [&](int64_t id) { return drawn_draft(p, r, id); },
                            [&](int64_t id, float logit, float q) {
                              return drawn_weight(p, r, b, id, logit, q, &saw);
                            }};
    BlockQueue{scratch, 0}.set_luck(race);
    run_race(race, static_cast<int>((p.vocab + kBlock - 1) / kBlock),
             block_maxima_of(p, p.row_slot(b, t.slot), r.target.type()), {scratch, 0}, winner,
             entrants);
  }
  *seen = t.watch_draft ? block_reduce(saw, Or{}) : 0;
  return winner.key;
}

__device__ inline float drafted_logit(const Problem& p, const PairRows& r) {
  const int64_t column = column_of(p, r.task.x);
  return column < 0 ? -INFINITY : r.draft.at(column);
}

// Draws as `task` says; from the target row where nothing is left, or where the draft row is bad.
// is_empty: known to the caller beforehand. `task` is read in thread 0 alone.
__device__ inline Drawn draw(const Problem& p, int64_t b, const PairTask& task, bool is_empty) {
  SPECDEC_SHARED(PairRows, r);
  SPECDEC_SHARED(Race, race);
  __syncthreads();
  if (threadIdx.x == 0) {
    race = Race{};
    race.noise = pair_noise(p, b, task.place);
    race.size = p.vocab;
    load_pair(p, b, task, &r);
  }
  int status = 0;
  Key key = 0;
  for (int look = is_empty ? 1 : 0; look < 2 && key == 0; ++look) {
    __syncthreads();
    if (p.is_kept && look == 0 && r.task.kind == kPair) load_kept(p, r.kept, r.ids);
    if (look == 1) {
      if (threadIdx.x == 0) {
        r.task.kind = kPlain;
        r.task.num_listed = 0;
      }
      __syncthreads();
    }
    int seen = 0;
    key = draw_key(p, r, race, b, &seen);
    if (look == 0 && key == 0 && r.task.kind != kPlain) status = kEmptyResidual;
    if (look == 0 && r.task.watch_draft) {
      // A drafted id of no weight in a row without any: the row is bad.
      const bool is_nothing = (seen & kSawFinite) == 0 && !(drafted_logit(p, r) > -INFINITY);
      if ((seen & kSawBad) != 0 || is_nothing) {
        status = kBadDraft;
        key = 0;
      }
    }
  }
  return {key == 0 ? -1 : key_id(key), status};
}

}  // namespace specdec
