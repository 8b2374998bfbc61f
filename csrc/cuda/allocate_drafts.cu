// allocate_drafts: P[b, i] = c[b, 0] ... c[b, i]; the n drafts of largest P are kept.
// products_kernel: a thread owns a request, grid = [batch / 256]. rank_kernel: how many drafts come
// before each; a thread owns a draft, grid = [batch * draft / 256]. allot_kernel: how many of the
// best pay, written request after request; grid = [1].
#include <array>

#include "../torch/allocate_args.h"
#include "block.cuh"
#include "global.cuh"

namespace specdec {
namespace {

struct AllotParams : AllocateParams {
  int total;               // batch * draft
  Global<float> products;  // [draft, batch]: the earlier of two equal drafts comes first
  Global<int32_t> ranks;   // [draft, batch]; capacity: never kept
  Global<float> ranked;    // [capacity]: products, the best first
};

constexpr int kAhead = 8;  // drafts of a thread that are asked for at once

__global__ void __launch_bounds__(kThreads) products_kernel(const __grid_constant__ AllotParams p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  after_last_kernel();
  for (int64_t n = b; n < p.capacity; n += static_cast<int64_t>(gridDim.x) * kThreads) {
    p.ranked.store(n, 0.0f);
  }
  if (b >= p.batch) return;
  const int64_t drafts = GlobalVector(p.active).get(b, true) ? p.draft : 0;
  float product = 1.0f;
  int status = 0;
  bool is_open = true;
  for (int64_t first = 0; first < p.draft; first += kAhead) {
    int64_t id[kAhead];
    float c[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const bool is_there = first + j < drafts;
      id[j] = is_there ? GlobalIds(p.draft_ids).load(b * p.draft + first + j) : -1;
      c[j] = is_there ? Global(p.confidence).load(b * p.draft + first + j) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int fault = draft_fault(id[j], c[j]);
      if (is_open && fault != 0) status = id[j] == -1 ? 0 : fault;
      is_open = is_open && fault == 0;
      product = is_open ? mul_rn(product, c[j]) : 0.0f;
      if (first + j < p.draft) p.products.store((first + j) * p.batch + b, product);
    }
  }
  Global(p.status).store(b, status);
}

using Tile = float[kThreads];

__global__ void __launch_bounds__(kThreads) rank_kernel(const __grid_constant__ AllotParams p) {
  SPECDEC_SHARED(Tile, theirs);
  const int mine = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  after_last_kernel();
  const float product = mine < p.total ? p.products.load(mine) : 0.0f;
  const int last = block_reduce(product > 0.0f ? 1 : 0, Or{}) != 0 ? p.total : 0;
  int before = 0;
  for (int first = 0; first < last; first += kThreads) {
    const int other = first + static_cast<int>(threadIdx.x);
    theirs[threadIdx.x] = other < p.total ? p.products.load(other) : -1.0f;
    __syncthreads();
#pragma unroll 16
    for (int i = 0; i < kThreads; ++i) {
      before += theirs[i] > product || (theirs[i] == product && first + i < mine) ? 1 : 0;
    }
    __syncthreads();
  }
  if (mine >= p.total) return;
  p.ranks.store(mine, product > 0.0f ? before : static_cast<int>(p.capacity));
  if (product > 0.0f && before < p.capacity) p.ranked.store(before, product);
}

// The best number of drafts so far, and what comes behind the last one that was looked at.
struct Choice {
  int kept;
  int64_t tokens;
  double yield;
};

// Looks at drafts first + 1 ... first + kThreads. False: no later number can be chosen.
__device__ bool choose(const AllotParams& p, int first, Choice* choice) {
  const int lane = static_cast<int>(threadIdx.x), n = first + lane;
  const float product = n < p.capacity ? p.ranked.load(n) : 0.0f;
  const bool is_paying = product > 0.0f;
  int64_t all = 0;
  const int64_t more = tokens_of(product);
  const int64_t before = choice->tokens + block_exclusive_sum(more, &all);
  choice->tokens += all;
  double yield = -INFINITY, yield_before = -INFINITY;
  if (is_paying && p.cost) {
    yield = yield_of(before + more, GlobalVector(p.cost).load(n + 1));
    yield_before = yield_of(before, GlobalVector(p.cost).load(n));
  }
  if (!p.compare_all) {
    const bool rises = is_paying && (!p.cost || yield > yield_before);
    const int run = block_reduce(rises ? kThreads : lane, Smaller{});
    choice->kept += run;
    return run == kThreads;
  }
  const double best = block_reduce(yield, Larger{});
  const int at = block_reduce(yield == best ? n + 1 : 0x7fffffff, Smaller{});
  if (best > choice->yield) {
    choice->yield = best;
    choice->kept = at;
  }
  return block_reduce(is_paying ? 0 : 1, Or{}) == 0;
}

// How many of the best drafts are kept; the same in all threads.
__device__ int count_kept(const AllotParams& p) {
  int running = 0;
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads)
    running += GlobalVector(p.active).get(b, true);
  Choice choice{0, block_reduce(running, Plus{}) * tokens_of(1.0f), 0.0};
  if (p.cost) choice.yield = yield_of(choice.tokens, GlobalVector(p.cost).load(0));
  for (int first = 0; first < p.capacity; first += kThreads) {
    if (!choose(p, first, &choice)) break;
  }
  return choice.kept;
}

__global__ void __launch_bounds__(kThreads, 1) allot_kernel(const __grid_constant__ AllotParams p) {
  after_last_kernel();
  const GlobalIds out_ids(p.out_ids, p.draft_ids.wide);
  const int kept = count_kept(p);
  int at = 0;
  for (int64_t first = 0; first < p.batch; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    int count = 0;
    if (b < p.batch) {
      while (count < p.draft && p.ranks.load(count * p.batch + b) < kept) ++count;
    }
    int total = 0;
    const int begin = at + block_exclusive_sum(count, &total);
    if (b < p.batch) {
      Global(p.num_draft).store(b, count);
      Global(p.cu_draft).store(b, begin);
    }
    for (int i = 0; i < count; ++i) {
      out_ids.store(begin + i, GlobalIds(p.draft_ids).load(b * p.draft + i));
      Global(p.source).store(begin + i, static_cast<int32_t>(b * p.draft + i));
    }
    at += total;
  }
  if (threadIdx.x == 0) Global(p.cu_draft).store(p.batch, at);
  for (int i = at + static_cast<int>(threadIdx.x); i < p.capacity; i += kThreads) {
    out_ids.store(i, -1);
    Global(p.source).store(i, -1);
  }
}

}  // namespace

void allocate_drafts_out(const AllocateParams& a, const Tensor& like) {
  const OnDevice on(like);
  AllotParams p{a, static_cast<int>(a.batch * a.draft), {}, {}, {}};
  const Tensor scratch = torch::stable::new_empty(
      like, std::array<int64_t, 1>{2 * int64_t{p.total} + p.capacity}, ScalarType::Float);
  p.products = Global<float>(static_cast<float*>(scratch.mutable_data_ptr()));
  p.ranks = (p.products + p.total).as<int32_t>();
  p.ranked = p.products + 2 * int64_t{p.total};
  const auto blocks = [](int64_t n) { return (n + kThreads - 1) / kThreads; };
  launch_phase(products_kernel, blocks(a.batch), on, p);
  launch_phase(rank_kernel, blocks(p.total), on, p);
  launch_phase(allot_kernel, 1, on, p);
}

}  // namespace specdec

SPECDEC_REGISTER(allocate_drafts,
                 (specdec::Boxed<specdec::allocate_params, specdec::allocate_drafts_out>::call))
