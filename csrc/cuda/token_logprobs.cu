// token_logprobs: log p(x) = (l(x) - max) / T - log mass, the rank of x, and the ids of the largest
// logits, of rows that are settled.
//   look_kernel   grid = [rows]; reads the blocks of 64 ids whose largest logit is above x's, and
//   those that can hold one of the largest: about as many as are wanted
#include "../torch/args.h"
#include "decide.cuh"
#include "filter.cuh"
#include "kernels.h"

namespace specdec {
namespace {

constexpr int kMostTop = 128;
constexpr int kCopied = 4096;  // block maxima in shared memory: 262144 ids
constexpr int kFull = 512,
              kRoom = kFull + kGroupsOf8 * kBlock;  // a look at 32 blocks has room left

struct Lists {
  float most[kCopied];      // largest logits of the first blocks
  uint16_t block[kWindow];  // those of a window that are looked into, in order
  Key key[kRoom], best[kMostTop];
};

struct Looked {  // a row
  const Row& row;
  LogitRow maxima;
  Lists& lists;
  float maximum;

  __device__ float most_of(int64_t block) const {
    return block < kCopied ? lists.most[block] : maxima.at(block);
  }
};

// The smallest number above.
__device__ __forceinline__ float next_above(float x) {
  return from_ordered_bits(ordered_bits(x) + 1);
}

// Lists the blocks of a window that have an id from `least` on; returns how many there are.
__device__ inline int pick(const Looked& f, int64_t window, float least) {
  const int64_t first = window + threadIdx.x * 8;
  int own = 0, total;
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    own += first + j < f.row.blocks() && f.most_of(first + j) >= least ? 1 : 0;
  }
  int at = block_exclusive_sum(own, &total);
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    if (first + j < f.row.blocks() && f.most_of(first + j) >= least) {
      f.lists.block[at++] = static_cast<uint16_t>(threadIdx.x * 8 + j);
    }
  }
  __syncthreads();
  return total;
}

// How many ids are at least `least`.
template <bool kEdited>
__device__ inline int count_ids(const Looked& f, float least) {
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  int own = 0;
  for (int64_t window = 0; window < f.row.blocks(); window += kWindow) {
    const int picked = pick(f, window, least);
    for (int first = group; first < picked; first += kAtOnce * kGroupsOf8) {
      float v[kAtOnce][8];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k * kGroupsOf8;
#pragma unroll
        for (int j = 0; j < 8; ++j) v[k][j] = -INFINITY;
        if (i < picked) {
          f.row.load8<kEdited>((window + f.lists.block[i]) * kBlock + lane * 8, v[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int j = 0; j < 8; ++j) own += v[k][j] >= least ? 1 : 0;
      }
    }
    __syncthreads();
  }
  return block_reduce(own, Plus{});
}

// The largest key that `wanted` of those listed reach.
__device__ inline Key nth_key(const Lists& lists, int listed, int wanted) {
  const auto count = [&](const Key(&least)[kTried], int (&sum)[kTried]) {
    for (int i = threadIdx.x; i < listed; i += kThreads) {
#pragma unroll
      for (int k = 0; k < kTried; ++k) sum[k] += lists.key[i] >= least[k] ? 1 : 0;
    }
  };
  return last_with(kNobody, ~Key{0} >> 1, wanted, -1, count);
}

// The largest `wanted` keys of those listed, in order; 0 behind the last.
__device__ inline void order(Lists* lists, int listed, int wanted) {
  for (int i = threadIdx.x; i < wanted; i += kThreads) lists->best[i] = 0;
  __syncthreads();
  const Key least = listed > kThreads ? nth_key(*lists, listed, wanted) : kNobody;
  for (int i = threadIdx.x; i < listed; i += kThreads) {
    const Key mine = lists->key[i];
    int before = 0;
    for (int j = 0; mine >= least && j < listed; ++j) before += lists->key[j] > mine ? 1 : 0;
    if (mine >= least && before < wanted) lists->best[before] = mine;
  }
  __syncthreads();
}

// The best keys stay listed; returns how small a logit that comes later may be.
__device__ inline float shorten(Lists* lists, int listed, int wanted) {
  order(lists, listed, wanted);
  const float last = key_score(lists->best[wanted - 1]);
  for (int i = threadIdx.x; i < wanted; i += kThreads) lists->key[i] = lists->best[i];
  __syncthreads();
  return next_above(last);
}

// The `wanted` first kept ids by falling logit, then by id. Blocks come by rising id, so an equal
// logit that comes later is behind.
template <bool kEdited>
__device__ inline void find_best(const Looked& f, const RowStats& r, int wanted) {
  const int group = static_cast<int>(threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  if (f.row.parameters.greedy) {
    if (threadIdx.x == 0) f.lists.key[0] = key_of(r.maximum, r.argmax);
    return order(&f.lists, 1, wanted);
  }
  float least = fmaxf(r.threshold, kLowest);
  if (wanted < f.row.blocks()) {
    const auto each = [&](const auto& count) {
      for (int64_t i = threadIdx.x; i < f.row.blocks(); i += kThreads) count(i, f.most_of(i));
    };
    least = fmaxf(least, bound_of_rank(f.maxima.type(), f.maximum, wanted, each));
  }
  int listed = 0;
  for (int64_t window = 0; window < f.row.blocks(); window += kWindow) {
    const int picked = pick(f, window, least);
    for (int first = 0; first < picked; first += kGroupsOf8) {
      float v[8];
      int64_t id = 0;
      int own = 0, total;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = -INFINITY;
      if (first + group < picked) {
        id = (window + f.lists.block[first + group]) * kBlock + lane * 8;
        if (f.most_of(id / kBlock) >= least) f.row.load8<kEdited>(id, v);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) own += v[j] >= least ? 1 : 0;
      int at = listed + block_exclusive_sum(own, &total);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (v[j] >= least) f.lists.key[at++] = key_of(v[j], id + j);
      }
      listed += total;
      if (listed > kFull) {
        least = fmaxf(least, shorten(&f.lists, listed, wanted));
        listed = wanted;
      }
    }
  }
  order(&f.lists, listed, wanted);
}

struct Asked {  // of a row
  RowStats r;
  int64_t id;
  float logit;
  bool has, is_bad;  // has: the id is one of the vocabulary
};

// By one thread, for all.
template <bool kEdited>
__device__ inline void load_asked(const Problem& p, const Row& row, Asked* shared) {
  Asked a{};
  a.id = -1;
  if (row.active) {
    a.r = p.work.rows.load(row.slot);
    a.id = p.draft_ids.load(row.b);
    a.is_bad = a.r.bad != 0;
  }
  a.has = a.id >= 0 && a.id < row.size;
  if (a.has && !a.is_bad) a.logit = row.at<kEdited>(a.id);
  *shared = a;
}

// Log-probability and rank of the row's token.
struct Own {
  float logprob = 0.f;
  int rank = 0;
};
template <bool kEdited>
__device__ inline Own look_at(const Looked& f, const Asked& a) {
  const Parameters& s = f.row.parameters;
  if (s.greedy) return a.id == a.r.argmax ? Own{0.f, 1} : Own{-INFINITY, 2};
  const float logprob = logprob_of(a.r, s, a.logit);
  const float least = logprob > -INFINITY ? next_above(a.logit) : fmaxf(a.r.threshold, kLowest);
  return {logprob, 1 + count_ids<kEdited>(f, least)};
}

__device__ inline void write_best(const Problem& p, const Row& row, const RowStats& r,
                                  const Key* best) {
  for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
    const Key key = best[i];
    const float logprob = logprob_of(r, row.parameters, key_score(key));
    p.token_ids.store(row.b * p.num_samples + i, key == 0 ? -1 : key_id(key));
    p.top_logprobs.store(row.b * p.num_samples + i, key == 0 ? -INFINITY : logprob);
  }
}

// Of a row that is bad or not active.
__device__ inline void write_nothing(const Problem& p, int64_t b, float logprob) {
  for (int i = threadIdx.x; i < p.num_samples; i += kThreads) {
    p.token_ids.store(b * p.num_samples + i, -1);
    p.top_logprobs.store(b * p.num_samples + i, logprob);
  }
}

__device__ inline void write_own(const Problem& p, const Row& row, const Asked& a, Own own) {
  if (threadIdx.x != 0) return;
  int status = a.is_bad ? kBadTarget : 0;
  if (row.active && row.parameters.bad) status |= kBadSampling;
  if (!a.has && a.id != -1) status |= kBadId;
  p.logprobs.store(row.b, a.has && a.is_bad ? NAN : own.logprob);
  p.ranks.store(row.b, own.rank);
  p.status.store(row.b, status);
}

template <bool kEdited>
__global__ void __launch_bounds__(kThreads, 3) look_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(Asked, asked);
  SPECDEC_SHARED(Lists, lists);
  const int64_t slot = blockIdx.x;
  after_last_kernel();
  if (threadIdx.x < 32) {
    load_row<kEdited>(p, slot, &row);
    if (threadIdx.x == 0) load_asked<kEdited>(p, row, &asked);
  }
  __syncthreads();
  if (!row.active || asked.is_bad) {
    write_nothing(p, row.b, row.active ? -INFINITY : 0.f);
    return write_own(p, row, asked, {});
  }
  const Looked f{row, block_maxima_of(p, slot, row.type<kEdited>()), lists, asked.r.maximum};
  for (int i = threadIdx.x; i < kCopied && i < f.row.blocks(); i += kThreads) {
    lists.most[i] = f.maxima.at(i);
  }
  __syncthreads();
  Own own;
  if (asked.has) own = look_at<kEdited>(f, asked);
  write_own(p, row, asked, own);
  if (p.num_samples == 0) return;
  find_best<kEdited>(f, asked.r, p.num_samples);
  write_best(p, row, asked.r, lists.best);
}

}  // namespace

void token_logprobs_out(const TokenLogprobsParams& t, const Tensor& like) {
  const OnDevice on(like);
  Problem p = base_problem(Task::kLogprobs, t.rows, t.logits, Logits{}, t.sampling, Sampling{});
  p.target = LogitTable(t.logits, t.logits.row_stride, 0);
  p.target_rows = 1;
  p.filters = p.sampling.filters();
  p.draft_ids = GlobalIds(const_cast<void*>(t.token_ids.data), t.token_ids.wide);
  set_vocabulary(&p, {}, t.allowed, 1);
  set_edits(&p, t.edits, RowEdits{});
  STD_TORCH_CHECK(t.top >= 0 && t.top <= kMostTop, "token_logprobs: top ", t.top);
  p.num_samples = static_cast<int>(t.top);
  p.logprobs = Global<float>(t.logprobs);
  p.ranks = Global<int32_t>(t.ranks);
  p.token_ids = GlobalIds(t.top_ids, t.token_ids.wide);
  p.top_logprobs = Global<float>(t.top_logprobs);
  p.status = Global<int32_t>(t.status);
  p.flags = kWantsMass;
  const Reserved reserved(&p, like);
  launch_rows(p, on);
  if (p.edits) return launch_phase(look_kernel<true>, p.batch, on, p);
  launch_phase(look_kernel<false>, p.batch, on, p);
}

}  // namespace specdec

SPECDEC_REGISTER(
    token_logprobs,
    (specdec::Boxed<specdec::token_logprobs_params, specdec::token_logprobs_out>::call))
