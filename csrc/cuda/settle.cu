// What the digest of a row says: its statistics, the thresholds of its filters, the winner of its
// race, and where it matters the argmax, or whether the drafted id is among the m largest.
//   settle_kernel   grid = [batch * rows]; tiles are merged in index order, so that no split shows
//   gather_kernel   grid = [batch * rows * parts]; reads the rows again whose filters are not
//                   settled; settle_kernel follows once more. Only with filters
#include "bracket.cuh"
#include "kernels.h"
#include "sample.cuh"

namespace specdec {
namespace {

struct RowSum {
  float maximum = -INFINITY, mass = 0.f, entropy = 0.f, raw_maximum = -INFINITY, raw_mass = 0.f;
};

__device__ inline void shift_mass(float maximum, float inv_t, float other, float* mass,
                                  float* entropy) {
  if (other == maximum || *mass == 0.f) return;
  const float shift = (other - maximum) * inv_t, factor = expf(shift);
  *entropy = factor > 0.f ? factor * (*entropy + shift * *mass) : 0.f;
  *mass *= factor;
}

__device__ inline RowSum merge(RowSum a, RowSum b, float inv_t) {
  RowSum all;
  float unused = 0.f;
  all.maximum = max_nan(a.maximum, b.maximum);
  shift_mass(all.maximum, inv_t, a.maximum, &a.mass, &a.entropy);
  shift_mass(all.maximum, inv_t, b.maximum, &b.mass, &b.entropy);
  all.mass = a.mass + b.mass;
  all.entropy = a.entropy + b.entropy;
  all.raw_maximum = max_nan(a.raw_maximum, b.raw_maximum);
  shift_mass(all.raw_maximum, 1.f, a.raw_maximum, &a.raw_mass, &unused);
  shift_mass(all.raw_maximum, 1.f, b.raw_maximum, &b.raw_mass, &unused);
  all.raw_mass = a.raw_mass + b.raw_mass;
  return all;
}

__device__ inline RowSum shuffle_xor(const RowSum& r, int mask) {
  RowSum o;
  o.maximum = __shfl_xor_sync(0xffffffffu, r.maximum, mask);
  o.mass = __shfl_xor_sync(0xffffffffu, r.mass, mask);
  o.entropy = __shfl_xor_sync(0xffffffffu, r.entropy, mask);
  o.raw_maximum = __shfl_xor_sync(0xffffffffu, r.raw_maximum, mask);
  o.raw_mass = __shfl_xor_sync(0xffffffffu, r.raw_mass, mask);
  return o;
}

// The tiles of a row, by one warp: lane l has the tiles l, l + 32, ...
__device__ inline RowSum merge_tiles(const Problem& p, int64_t slot, int tiles, float inv_t) {
  const int lane = threadIdx.x % 32;
  RowSum all;
  for (int tile = lane; tile < tiles; tile += 32) {
    const Partial part = p.work.partials.load(slot * p.tiles + tile);
    all =
        merge(all, {part.maximum, part.mass, part.entropy, part.raw_maximum, part.raw_mass}, inv_t);
  }
  for (int mask = 1; mask < 32; mask *= 2) {
    const RowSum other = shuffle_xor(all, mask);
    // The lower lane's part comes first on both sides, so that both compute the same bits.
    all = (lane & mask) == 0 ? merge(all, other, inv_t) : merge(other, all, inv_t);
  }
  return all;
}

// Lowest i of [0, count) with f(i), over a warp.
template <class F>
__device__ int first_that(int count, const F& f) {
  int first = 0x7fffffff;
  for (int i = threadIdx.x % 32; i < count && first == 0x7fffffff; i += 32) {
    if (f(i)) first = i;
  }
  return warp_reduce(first, Smaller{});
}

// The first id of the maximum: in the first tile, and there in the first block, that has it.
__device__ inline int find_argmax(const Problem& p, const Row& row, const LogitRow& maxima,
                                  int64_t slot, float maximum) {
  const int tile = first_that(row.tiles(), [&](int i) {
    return p.work.partials.load(slot * p.tiles + i).maximum == maximum;
  });
  const int64_t first_block = tile * int64_t{kTileBlocks}, blocks = row.blocks() - first_block;
  const int block = first_that(blocks < kTileBlocks ? static_cast<int>(blocks) : kTileBlocks,
                               [&](int i) { return maxima.at(first_block + i) == maximum; });
  const int64_t first = (first_block + block) * kBlock, left = row.size - first;
  const int id = first_that(left < kBlock ? static_cast<int>(left) : kBlock,
                            [&](int i) { return row.at(first + i) == maximum; });
  return static_cast<int>(first) + id;
}

__device__ inline RowStats plain_stats(const RowSum& sum, const Parameters& s) {
  RowStats r{};
  r.maximum = sum.maximum;
  r.mass = s.greedy ? 1.f : sum.mass;
  r.threshold = s.greedy ? sum.maximum : -INFINITY;
  r.entropy = s.greedy ? 0.f : logf(sum.mass) - sum.entropy / sum.mass;
  r.raw_maximum = sum.raw_maximum;
  r.raw_mass = sum.raw_mass;
  r.bad = !is_finite(sum.maximum);
  return r;
}

// Rule topm: whether fewer than m ids come before x. Each block above x has one.
__device__ inline bool is_among_largest(const Problem& p, const Row& row, const LogitRow& maxima,
                                        int64_t x) {
  const float logit = row.at(x);
  int sure = 0;
  for (int64_t i = threadIdx.x; i < row.blocks(); i += kThreads) {
    sure += maxima.at(i) > logit ? 1 : 0;
  }
  if (block_reduce(sure, Plus{}) >= p.top_m) return false;
  int before = 0;
  for (int64_t i = threadIdx.x; i < row.blocks(); i += kThreads) {
    const float most = maxima.at(i);
    if (!(most > logit || (most == logit && i * kBlock < x))) continue;
    for (int j = 0; j < kBlock; j += 8) {
      float v[8];
      row.load8(i * kBlock + j, v);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        before += v[k] > logit || (v[k] == logit && i * kBlock + j + k < x) ? 1 : 0;
      }
    }
  }
  return block_reduce(before, Plus{}) < p.top_m;
}

__device__ inline Race row_race(const Problem& p, int64_t b, const Row& row) {
  Race race{};
  const bool is_sample = p.task == Task::kSample;
  const int64_t purpose = is_sample                ? p.purpose
                          : p.rule == Rule::kMatch ? kPurposeTarget
                                                   : kPurposeResidual;
  race.noise = p.noise(b, row.place, purpose);
  race.size = row.size;
  if (is_sample) race.token_map = p.token_map;
  return race;
}

// Whether the row's draw is wanted whatever the walk decides.
__device__ inline bool row_races(const Problem& p, const Row& t) {
  if (!t.is_target || t.parameters.greedy) return false;
  if (p.task == Task::kSample) return true;
  if (p.task != Task::kChain && p.task != Task::kTree) return false;
  if (p.rule == Rule::kMatch || p.rule == Rule::kTypical) return true;
  if (p.task == Task::kTree) return !is_argmax_rule(p) && t.has_children == 0;
  return !is_argmax_rule(p) && t.index == t.chain.length;
}

// The winner of a row's race, and the next best where several samples are drawn.
__device__ inline Key race_row(const Problem& p, int64_t b, const Row& row, const LogitRow& maxima,
                               const RowStats& r, Key* best) {
  SPECDEC_SHARED(Race, race);
  if (threadIdx.x == 0) race = row_race(p, b, row);
  __syncthreads();
  const auto log_weight = [&](float l) {
    if (!(l >= r.threshold) || l == -INFINITY) return -INFINITY;
    return mul_rn(sub_rn(l, r.maximum), row.parameters.inv_t);
  };
  const auto of_block = [&](int64_t block) { return log_weight(maxima.at(block)); };
  const auto of_eight = [&](int64_t first, float (&w)[8]) {
    row.load8(first, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      w[j] = log_weight(w[j]);
      if (w[j] > -INFINITY && is_excluded(p, b, first + j)) w[j] = -INFINITY;
    }
  };
  if (p.task != Task::kSample || p.num_samples == 1) {
    return race_blocks(race, row.blocks(), 0, of_block, of_eight);
  }
  race_for_best(race, row.blocks(), p.num_samples, best, of_block, of_eight);
  return best[0];
}

template <bool kFilters>
__global__ void __launch_bounds__(kThreads) settle_kernel(const __grid_constant__ Problem p) {
  using Best = Key[kMaxSamples];
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(Best, best);
  const int64_t slot = blockIdx.x, b = slot / p.rows();
  after_last_kernel();
  if (threadIdx.x < kMaxSamples) best[threadIdx.x] = 0;
  if (threadIdx.x < 32) {
    const Row mine = make_row(p, b, static_cast<int>(slot - b * p.rows()));
    if (threadIdx.x == 0) {
      row = mine;
      if (p.again && mine.active) r = p.work.rows.load(slot);
    }
  }
  __syncthreads();
  if (p.task == Task::kSample && !row.active && !p.again) write_no_sample(p, b);
  if (!row.active || (p.again && r.unknown == kSettled)) return;
  const Parameters& s = row.parameters;
  const LogitRow maxima = block_maxima_of(p, slot, row.type());
  if (!p.again) {
    if (threadIdx.x < 32) {
      const RowSum sum = merge_tiles(p, slot, row.tiles(), s.inv_t);
      const bool needs_argmax = s.greedy || is_argmax_rule(p);
      int argmax = 0;
      if (needs_argmax && is_finite(sum.maximum)) {
        argmax = find_argmax(p, row, maxima, slot, sum.maximum);
      }
      if (threadIdx.x == 0) {
        r = plain_stats(sum, s);
        r.argmax = argmax;
      }
    }
    __syncthreads();
  }
  if (!r.bad && row.is_target && p.task == Task::kChain && p.rule == Rule::kTopM &&
      row.index < row.chain.length) {
    const bool is_near = is_among_largest(p, row, maxima, draft_id(p, row.chain, b, row.index));
    if (threadIdx.x == 0) r.is_near = is_near;
  }
  if constexpr (kFilters) {
    if (!r.bad && !s.greedy && s.filters()) {
      SPECDEC_SHARED(FilterScratch, scratch);
      RowStats mine = r;
      const FilteredRow f{p, row, maxima, scratch, mine.maximum, mine.mass};
      __syncthreads();
      if (p.again) {
        close_row(f, slot, &mine);
      } else if (!settle_from_blocks(f, &mine)) {
        open_row(f, &mine);
      }
      if (threadIdx.x == 0) r = mine;
      __syncthreads();
      if (mine.unknown != kSettled) {
        if (threadIdx.x == 0) p.work.rows.store(slot, mine);
        return;
      }
    }
  }
  if (!r.bad && row_races(p, row)) {
    const Key key = race_row(p, b, row, maxima, r, best);
    if (threadIdx.x == 0) r.key = key;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.work.rows.store(slot, r);
  if (p.task == Task::kSample) write_sample(p, b, row, r, best);
}

// A block reads every p.parts-th tile of a row.
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(int, is_open);
  const int64_t slot = blockIdx.x / p.parts, b = slot / p.rows();
  after_last_kernel();
  if (threadIdx.x < 32) {
    const Row mine = make_row(p, b, static_cast<int>(slot - b * p.rows()));
    if (threadIdx.x == 0) {
      row = mine;
      if (mine.active) r = p.work.rows.load(slot);
      is_open = mine.active && r.unknown != kSettled;
    }
  }
  __syncthreads();
  if (is_open == 0) return;
  SPECDEC_SHARED(FilterScratch, scratch);
  const FilteredRow f{p, row, LogitRow(), scratch, r.maximum, r.mass};
  for (int tile = static_cast<int>(blockIdx.x - slot * p.parts); tile < row.tiles();
       tile += p.parts) {
    const int64_t at = slot * p.tiles + tile;
    const Gathered g = gather_tile(f, tile, {r.low, r.high}, scratch.list, kListed);
    for (int i = threadIdx.x; i < g.listed && g.listed <= kListed; i += kThreads) {
      store_as(row.type(), p.work.lists, at * kListed + i, scratch.list[i]);
    }
    if (threadIdx.x == 0) p.work.gathered.store(at, g);
  }
}

// columns[token_map[c]] = c; grid = [ceil(draft_vocab / kThreads)].
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ Problem p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  after_last_kernel();
  if (column >= p.draft_vocab) return;
  const int64_t id = p.token_map.load(column);
  if (id >= 0 && id < p.vocab) p.work.columns.store(id, static_cast<int32_t>(column));
}

}  // namespace

void launch_columns(const Problem& p, Stream stream) {
  if (!p.work.columns) return;
  launch_phase(columns_kernel, (p.draft_vocab + kThreads - 1) / kThreads, kThreads, stream, p);
}

void launch_rows(const Problem& p, Stream stream) {
  launch_columns(p, stream);
  launch_digest(p, stream);
  launch_settle(p, stream);
}

void launch_settle(const Problem& problem, Stream stream) {
  Problem p = problem;
  const int64_t rows = p.batch * p.rows();
  p.again = false;
  if (!p.filters) return launch_phase(settle_kernel<false>, rows, kThreads, stream, p);
  p.parts = p.tiles < 8 ? p.tiles : 8;  // few: most rows are settled at once, and blocks find that
  launch_phase(settle_kernel<true>, rows, kThreads, stream, p);
  launch_phase(gather_kernel, rows * p.parts, kThreads, stream, p);
  p.again = true;
  launch_phase(settle_kernel<true>, rows, kThreads, stream, p);
}

}  // namespace specdec
