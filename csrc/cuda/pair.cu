// Second pass over chosen pairs of rows, with weights w[v] = (a p[v] - b q[v])+:
//   draw      argmax_v log w[v] - log E[v]      mass     sum_v w[v]
//   overlap   sum_v min(p[v], q[v])             probs    w[v] / mass
// grid = [batch * pairs * tiles]; a block owns kTile target ids of one pair. The block that arrives
// last for a request merges its tiles in index order and writes the results.
#include "decide_op.cuh"
#include "handshake.cuh"
#include "kernels.h"
#include "pair.cuh"
#include "tree_walk.cuh"

namespace specdec {

// Key of one id in the draw.
__device__ inline Key draw_key(const PairTask& t, const Race& race, float logit, float weight,
                               float e, int64_t id) {
  if (t.kind == kPair) {
    return weight >= kTiny ? score_key(log_normal(weight), logit, e, id) : 0;
  }
  if (!race.competes(logit, id) || (t.target.only >= 0 && id != t.target.only)) return 0;
  float log_weight = mul_rn(logit, race.inv_t);
  if (t.kind == kPoint && id == t.x) {
    if (t.point_left == -INFINITY) return 0;
    log_weight = add_rn(log_weight, t.point_left);
  }
  return score_key(log_weight, logit, e, id);
}

__device__ inline Key draw_tile(const PairRows& r, int64_t base, int64_t size,
                                const float (&v)[kPerThread], const float (&weight)[kPerThread]) {
  Key key = 0;
  tile_noise<false, false>(r.race, base, size, [&](int j, float e) {
    const Key one = draw_key(r.task, r.race, v[j], weight[j], e, id_of(base, j));
    key = one > key ? one : key;
  });
  return key;
}

// The plain draw of a row whose residual turned out empty or whose draft row is bad: rare, so one
// block does it.
__device__ inline Key plain_draw(const Problem& p, const PairRows& r) {
  Key key = 0;
  for (int64_t base = 0; base < p.vocab; base += kTile) {
    float v[kPerThread];
    load_tile(r.target, base, p.vocab, v);
    mask_tile(r.allowed, base, p.vocab, v);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (r.task.target.only >= 0 && id_of(base, j) != r.task.target.only) v[j] = -INFINITY;
    }
    const Key one = race_best<false>(r.race, v, base, p.vocab);
    key = one > key ? one : key;
  }
  return block_reduce(key, Larger{});
}

// Statistics that tell whether a draft row that was not read before is bad.
__device__ inline void watch_draft(const Problem& p, const PairRows& r, int64_t base,
                                   PairPartial* part) {
  float l[kPerThread];
  float maximum = -INFINITY;
  int bad = 0;
  load_tile(r.draft, base, p.draft_vocab, l);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    bad |= l[j] != l[j] ? 1 : 0;
    maximum = fmaxf(maximum, l[j]);
  }
  part->bad = block_reduce(bad, Or{});
  part->draft_maximum = block_reduce(maximum, Larger{});
}

struct PairResult {
  Key key;
  float mass, draft_maximum;
  int bad, any;
};

__device__ inline PairResult merge_pair(const Problem& p, int64_t slot) {
  PairResult all{0, 0.f, -INFINITY, 0, 0};
  for (int tile = 0; tile < tiles_of(p.vocab); ++tile) {
    const PairPartial part = p.work.pair_partials.load(slot * p.tiles + tile);
    all.key = part.key > all.key ? part.key : all.key;
    all.mass += part.mass;
    all.draft_maximum = fmaxf(all.draft_maximum, part.draft_maximum);
    all.bad |= part.bad;
    all.any |= part.any;
  }
  return all;
}

__device__ inline void finish_draw(const Problem& p, const PairRows& r, int64_t b, int64_t slot) {
  SPECDEC_SHARED(PairResult, result);
  if (threadIdx.x == 0) result = merge_pair(p, slot);
  __syncthreads();
  const bool late = r.task.watch_draft && (result.bad || !is_finite(result.draft_maximum));
  const bool is_chain = p.task == Task::kChain || p.task == Task::kTree;
  const bool empty = is_chain ? r.task.kind != kPlain && result.key == 0 : result.any == 0;
  Key key = result.key;
  if (late || empty || key == 0) key = plain_draw(p, r);
  if (r.task.descends && descend(p, b, r.task, key_id(key), empty ? kEmptyResidual : 0)) return;
  if (threadIdx.x != 0) return;
  const ChainState state = p.work.states.load(b);
  const int64_t token = key == 0 ? -1 : key_id(key);
  p.status.store(b, state.status | (late ? kBadDraft : empty ? kEmptyResidual : 0));
  if (!is_chain) {
    p.token_ids.store(b, token);
    p.mass.store(b, result.mass);
    return;
  }
  const int64_t at = b * (p.max_draft + 1) + r.task.place;
  p.token_ids.store(at, token);
  if (p.logprobs_mode == LogprobsMode::kNone) return;
  const float logit = target_logit(p, r.chain, b, r.task.row, token);
  const Parameters s = target_parameters(p, b);
  p.logprobs.store(at, token_logprob(p, target_stats(p, b, r.task.slot), s, logit, token));
}

__device__ inline void finish_pass(const Problem& p, Pass pass, const PairRows& r, int64_t b,
                                   int64_t slot) {
  if (pass == Pass::kDraw) return finish_draw(p, r, b, slot);
  if (p.task == Task::kChain) {
    SPECDEC_SHARED(Request, q);
    if (threadIdx.x == 0) q = load_request(p, b);
    __syncthreads();
    return finish_block(p, q, b);
  }
  if (threadIdx.x != 0) return;
  const PairResult result = merge_pair(p, slot);
  if (pass == Pass::kOverlap) {
    p.overlap.store(slot, result.mass);
  } else {
    p.mass.store(b, result.mass);
    p.status.store(b, p.work.states.load(b).status | (result.any ? 0 : kEmptyResidual));
  }
}

// Tickets of a pass: the masses of rule block meet per request, everything else per pair.
struct Meeting {
  Global<unsigned> ticket;
  unsigned expected;
};

__device__ inline Meeting meeting_of(const Problem& p, Pass pass, int64_t b, int64_t slot) {
  const unsigned tiles = tiles_of(p.vocab);
  if (pass == Pass::kMass && p.task == Task::kChain) {
    const int length = p.work.states.load(b).length;
    return {p.work.request_tickets + b, (length - 1) * tiles};
  }
  if (pass == Pass::kOverlap) return {p.work.row_tickets + slot, tiles};
  return {p.work.request_tickets + b, tiles};
}

__device__ inline void write_probs(const Problem& p, const PairRows& r, int64_t b, int64_t base,
                                   const float (&v)[kPerThread],
                                   const float (&weight)[kPerThread]) {
  SPECDEC_SHARED(float, mass);
  SPECDEC_SHARED(int, status);
  if (threadIdx.x == 0) {
    mass = p.mass.load(b);
    status = p.status.load(b);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t id = id_of(base, j);
    if (id >= p.vocab) continue;
    float prob = 0.f;
    if (r.task.kind != kNothing) {
      prob = (status & kEmptyResidual) != 0 ? r.task.target.at(v[j], id) : weight[j] / mass;
    }
    p.probs.store(b * p.vocab + id, prob);
  }
}

// Pair tasks of a request that a pass looks at. The draw's is the last; rule block sums the masses
// of the others.
SPECDEC_HD int pairs_of(const Problem& p, Pass pass) {
  if (pass == Pass::kDraw) return 1;
  return p.task == Task::kChain ? p.pairs - 1 : p.pairs;
}

template <Pass kPass>
__global__ void __launch_bounds__(kThreads, kPass == Pass::kMass || kPass == Pass::kOverlap ? 3 : 2)
    pair_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(PairRows, r);
  const int tiles = tiles_of(p.vocab), pairs = pairs_of(p, kPass);
  const int64_t block = blockIdx.x, which = block / tiles, b = which / pairs;
  const int64_t slot = b * p.pairs + (kPass == Pass::kDraw ? p.pairs - 1 : which - b * pairs);
  const int tile = static_cast<int>(block - which * tiles);
  if (threadIdx.x == 0) {
    r = load_pair(p, b, p.work.tasks.load(slot));
    if (kPass == Pass::kDraw && r.task.kind != kNothing)
      r.race.noise = pair_noise(p, b, r.task.place);
  }
  __syncthreads();
  if (kPass != Pass::kProbs && r.task.kind == kNothing) return;

  const int64_t base = static_cast<int64_t>(tile) * kTile;
  float v[kPerThread], weight[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) v[j] = weight[j] = -INFINITY;
  if (r.task.kind != kNothing) {
    load_tile(r.target, base, p.vocab, v);
    mask_tile(r.allowed, base, p.vocab, v);
    if (r.task.kind == kPair) load_draft(p, r, base, weight);
  }
  PairPartial part{};
  float mass = 0.f;
  int any = 0, bad = 0;
  float draft_maximum = -INFINITY;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int64_t id = id_of(base, j);
    const float logit = weight[j];
    bad |= logit != logit ? 1 : 0;
    draft_maximum = fmaxf(draft_maximum, logit);
    if (kPass == Pass::kOverlap) {
      weight[j] = fminf(r.task.target.at(v[j], id), pair_q(r.task, logit, id));
    } else {
      weight[j] = r.task.kind == kNothing ? 0.f : pair_weight(r.task, v[j], logit, id);
    }
    if (id >= p.vocab) weight[j] = 0.f;
  }
  if (kPass == Pass::kDraw && r.task.num_listed > 0) apply_list(p, r.task, b, base, v, weight);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    mass += weight[j];
    any |= weight[j] >= kTiny ? 1 : 0;
  }
  if (kPass == Pass::kProbs) {
    write_probs(p, r, b, base, v, weight);
    return;
  }
  if (kPass != Pass::kDraw || p.wants_mass) {
    part.mass = block_reduce(mass, Plus{});
    part.any = block_reduce(any, Or{});
  }
  if (kPass == Pass::kDraw) {
    part.key = block_reduce(draw_tile(r, base, p.vocab, v, weight), Larger{});
    if (r.task.watch_draft) {
      if (p.token_map) {
        watch_draft(p, r, base, &part);
      } else {
        part.bad = block_reduce(bad, Or{});
        part.draft_maximum = block_reduce(draft_maximum, Larger{});
      }
    }
  }
  if (threadIdx.x == 0) p.work.pair_partials.store(slot * p.tiles + tile, part);
  SPECDEC_SHARED(Meeting, meeting);
  if (threadIdx.x == 0) meeting = meeting_of(p, kPass, b, slot);
  __syncthreads();
  if (!is_last_block(meeting.ticket, meeting.expected)) return;
  finish_pass(p, kPass, r, b, slot);
}

void launch_pairs(const Problem& p, Pass pass, Stream stream) {
  const int64_t tiles = tiles_of(p.vocab), blocks = p.batch * pairs_of(p, pass) * tiles;
  switch (pass) {
    case Pass::kDraw:
      return launch(pair_kernel<Pass::kDraw>, blocks, kThreads, stream, p);
    case Pass::kMass:
      return launch(pair_kernel<Pass::kMass>, blocks, kThreads, stream, p);
    case Pass::kOverlap:
      return launch(pair_kernel<Pass::kOverlap>, blocks, kThreads, stream, p);
    case Pass::kProbs:
      return launch(pair_kernel<Pass::kProbs>, blocks, kThreads, stream, p);
  }
}

}  // namespace specdec
