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

// Log-weights of eight ids of a plain row, or of one where x has lost some of its weight.
__device__ inline void plain_weights(const PairTask& t, int64_t first, float (&w)[8]) {
  const Law& law = t.target;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const bool competes =
        w[j] >= law.threshold && w[j] > -INFINITY && (law.only < 0 || law.only == first + j);
    w[j] = competes ? mul_rn(sub_rn(w[j], law.maximum), law.inv_t) : -INFINITY;
    if (t.kind == kPoint && first + j == t.x) w[j] = add_rn(w[j], t.point_left);
  }
}

__device__ inline void pair_weights(const PairTask& t, int64_t first, const float (&q)[8],
                                    float (&w)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float weight = pair_weight(t, w[j], q[j], first + j);
    w[j] = weight >= kTiny ? log_normal(weight) : -INFINITY;
  }
}

// What the draft logits were that a draw has looked at.
enum Seen : int { kSawBad = 1, kSawFinite = 2 };

// Best key of a pair of rows; 0: nothing is left.
__device__ inline Key draw_key(const Problem& p, const PairRows& r, int64_t b, int* seen) {
  SPECDEC_SHARED(Race, race);
  if (threadIdx.x == 0) {  // who has also written r
    race = Race{};
    race.noise = pair_noise(p, b, r.task.place);
    race.size = p.vocab;
  }
  __syncthreads();
  const PairTask& t = r.task;
  const Law& law = t.target;
  const LogitRow maxima = block_maxima_of(p, p.row_slot(b, t.slot), r.target.logits.type());
  const float log_scale = t.kind == kPair ? fast_log(fmaxf(t.a, 0.f)) + fast_log(law.scale) : 0.f;
  const auto of_block = [&](int64_t block) {
    if (law.only >= 0) return law.only / kBlock == block ? 1e30f : -INFINITY;
    const float most = maxima.at(block);
    if (!(most >= law.threshold) || most == -INFINITY) return -INFINITY;
    return (most - law.maximum) * law.inv_t + log_scale;
  };
  int saw = 0;
  const auto of_eight = [&](int64_t first, float (&w)[8]) {
    r.target.load8(first, p.vocab, w);
    if (t.kind == kPair) {
      float q[8];
      r.load_draft8(p, first, q);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        saw |= q[j] != q[j] || q[j] == INFINITY ? kSawBad : q[j] > -INFINITY ? kSawFinite : 0;
      }
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
  Key best = 0;
  if (t.kind == kPair) {
    for (int i = threadIdx.x; i < t.num_listed; i += kThreads) {
      const Listed one = p.work.listed.load(b * p.nodes + i);
      if (one.value < kTiny) continue;
      best = larger(best, score_key(log_normal(one.value), noise_of(race.noise, one.id), one.id));
    }
    best = block_reduce(best, Larger{});
  }
  best = race_blocks(race, (p.vocab + kBlock - 1) / kBlock, best, of_block, of_eight);
  *seen = block_reduce(saw, Or{});
  return best;
}

__device__ inline float drafted_logit(const Problem& p, const PairRows& r, const PairTask& task) {
  const int64_t column = column_of(p, task.x);
  return column < 0 ? -INFINITY : r.draft.at(column);
}

// Draws as `task` says; from the target row where nothing is left, or where the draft row is bad.
// is_empty: known to the caller beforehand. Out of line: it needs many registers, what calls it
// keeps few.
static __device__ SPECDEC_NOINLINE Drawn draw(const Problem& p, int64_t b, const PairTask& task,
                                              bool is_empty) {
  SPECDEC_SHARED(PairRows, r);
  __syncthreads();
  if (threadIdx.x == 0) r = load_pair(p, b, task);
  int seen = 0, status = 0;
  Key key = is_empty ? 0 : draw_key(p, r, b, &seen);
  if (key == 0 && task.kind != kPlain) status = kEmptyResidual;
  if (task.watch_draft) {
    // A drafted id of no weight in a row without any: the row is bad.
    const bool is_nothing = (seen & kSawFinite) == 0 && !(drafted_logit(p, r, task) > -INFINITY);
    if ((seen & kSawBad) != 0 || is_nothing) {
      status = kBadDraft;
      key = 0;
    }
  }
  if (key == 0) {
    if (threadIdx.x == 0) {
      r.task.kind = kPlain;
      r.task.num_listed = 0;
    }
    key = draw_key(p, r, b, &seen);
  }
  return {key == 0 ? -1 : key_id(key), status};
}

}  // namespace specdec
