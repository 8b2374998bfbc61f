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

// Log-weights of eight ids of a plain row, or of one where x has lost some of its weight.
__device__ inline void plain_weights(const PairTask& t, int64_t first, float (&w)[8]) {
  const Law& law = t.target;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const bool competes = w[j] >= law.threshold && (law.only < 0 || law.only == first + j);
    w[j] = competes ? mul_rn(sub_rn(w[j], law.maximum), law.inv_t) : -INFINITY;
    if (t.kind == kPoint && first + j == t.x) w[j] = add_rn(w[j], t.point_left);
  }
}

// Weights of eight ids of a pair; 0: out.
__device__ inline void pair_weights(const PairTask& t, int64_t first, const float (&q)[8],
                                    float (&w)[8]) {
  const Law target = t.target, draft = t.draft;
  const float a = t.a, b = t.b;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float bq = mul_rn(b, draft.at(q[j], first + j));
    w[j] = sub_rn(mul_rn(a, target.at(w[j], first + j)), bq);
    if (!(w[j] >= kTiny)) w[j] = -INFINITY;
  }
}

// What the draft logits were that a draw has looked at.
enum Seen : int { kSawBad = 1, kSawFinite = 2 };

__device__ inline int seen_in(const float (&q)[8]) {
  int saw = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    saw |= q[j] != q[j] || q[j] == INFINITY ? kSawBad : q[j] > -INFINITY ? kSawFinite : 0;
  }
  return saw;
}

// Best key of a pair of rows; 0: nothing is left.
__device__ inline Key draw_key(const Problem& p, const PairRows& r, const Race& race, int64_t b,
                               int* seen) {
  const PairTask& t = r.task;
  const Law& law = t.target;
  const LogitRow maxima = block_maxima_of(p, p.row_slot(b, t.slot), r.target.type());
  const float log_scale = t.kind == kPair ? fast_log(fmaxf(t.a, 0.f)) + fast_log(law.scale) : 0.f;
  const auto of_block = [&](int block, float most) {
    if (law.only >= 0) return law.only / kBlock == block ? 1e30f : -INFINITY;
    return most >= law.threshold ? (most - law.maximum) * law.inv_t + log_scale : -INFINITY;
  };
  int saw = 0;
  const auto of_eight = [&](int64_t first, float (&w)[8]) {
    r.target.load8(first, p.vocab, w);
    if (t.kind == kPair) {
      float q[8];
      r.load_draft8(p, first, q);
      if (t.watch_draft) saw |= seen_in(q);
      pair_weights(t, first, q, w);
    } else {
      plain_weights(t, first, w);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (t.num_listed > 0 && w[j] > -INFINITY && is_listed(p, b, t.num_listed, first + j)) {
        w[j] = -INFINITY;
      }
    }
  };
  Key best = t.kind == kPair && t.num_listed > 0 ? best_listed(p, race, b, t.num_listed) : 0;
  const auto log_of = [&](float w, bool is_exact) {
    return t.kind != kPair ? w : is_exact ? log_normal(w) : fast_log(w);
  };
  SPECDEC_SHARED(Bounds, bounds);
  best = race_blocks(race, static_cast<int>((p.vocab + kBlock - 1) / kBlock), maxima, bounds, best,
                     of_block, of_eight, log_of);
  *seen = t.watch_draft ? block_reduce(saw, Or{}) : 0;
  return best;
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
