// What the digest of a row says: its statistics, the thresholds of its filters, the winner of its
// race, and where it matters the argmax, or whether the drafted id is among the m largest.
//   stats_kernel    grid = [batch * rows / kWarps]; a warp a row, where no row races or is filtered
//   settle_kernel   grid = [batch * rows]
//   gather_kernel, settle_again_kernel   grid = [thread blocks that fill the GPU]; the rows that
//   are
//                   open, as blocks do not tell their filters, are read again, and settled
// Where a chain has few rows, the kernel behind the digest settles them itself (stats.cuh).
#include "bracket.cuh"
#include "kernels.h"
#include "sample.cuh"
#include "stats.cuh"

namespace specdec {
namespace {

// Rule topm: whether fewer than m ids come before x. Each block above x has one.
template <bool kEdited>
__device__ inline bool is_among_largest(const Problem& p, const Row& row, int64_t x) {
  const LogitRow maxima = block_maxima_of(p, row.slot, row.type<kEdited>());
  const float logit = row.at<kEdited>(x);
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
      row.load8<kEdited>(i * kBlock + j, v);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        before += v[k] > logit || (v[k] == logit && i * kBlock + j + k < x) ? 1 : 0;
      }
    }
  }
  return block_reduce(before, Plus{}) < p.top_m;
}

__device__ inline Race row_race(const Problem& p, const Row& row) {
  Race race{};
  const bool is_sample = p.task == Task::kSample;
  const int64_t purpose = is_sample                ? p.purpose
                          : p.rule == Rule::kMatch ? kPurposeTarget
                                                   : kPurposeResidual;
  race.noise = p.noise(row.b, row.place, purpose);
  race.size = row.size;
  if (is_sample) race.token_map = p.token_map;
  return race;
}

__device__ __forceinline__ float log_weight(const Row& row, const RowStats& r, float l) {
  if (!(l >= r.threshold) || l == -INFINITY) return -INFINITY;
  return mul_rn(sub_rn(l, r.maximum), row.parameters.inv_t);
}

template <bool kEdited, class Best>
__device__ inline void run_row(const Problem& p, const Row& row, const RowStats& r,
                               const Race& race, RaceScratch& scratch, Best& best) {
  const Entrants entrants{r.maximum,
                          row.parameters.inv_t,
                          0.f,
                          fmaxf(r.threshold, kLowest),
                          [&](int64_t first, float (&v)[8]) { row.load8<kEdited>(first, v); },
                          [](int64_t) { return 0.f; },
                          [&](int64_t id, float logit, float) {
                            return is_excluded(p, row.b, id) ? -INFINITY
                                                             : log_weight(row, r, logit);
                          }};
  run_race(race, static_cast<int>(row.blocks()), block_maxima_of(p, row.slot, row.type<kEdited>()),
           {scratch, 0}, best, entrants);
}

// best[0..num_samples) of a row. Out of line: it needs more registers than the race for one.
template <bool kEdited>
static __device__ SPECDEC_NOINLINE void race_for_samples(const Problem& p, const Row& row,
                                                         const RowStats& r, const Race& race,
                                                         RaceScratch& scratch, Key* best) {
  Winners winners{static_cast<int>(p.num_samples), best};
  run_row<kEdited>(p, row, r, race, scratch, winners);
}

// The winner where all that filters keep is in the list: a thread an id. Out of line: see
// race_for_samples.
static __device__ SPECDEC_NOINLINE Key race_list(const Problem& p, const Row& row,
                                                 const RowStats& r, const FilterScratch& scratch) {
  const int own = static_cast<int>(threadIdx.x);
  Key key = 0;
  if (own < scratch.sorted) {
    const int64_t id = scratch.id[own];
    const float weight =
        is_excluded(p, row.b, id) ? -INFINITY : log_weight(row, r, scratch.list[own]);
    if (weight > -INFINITY) key = score_key(weight, row_race(p, row).exponential_of(id), id);
  }
  return block_reduce(key, Larger{});
}

// The winner of a row's race, and the next best where several samples are drawn.
template <bool kFilters>
__device__ inline Key race_row(const Problem& p, const Row& row, const RowStats& r,
                               const Race& race, RaceScratch& scratch, Key* best) {
  if (p.task == Task::kSample && p.num_samples > 1) {
    race_for_samples<kFilters>(p, row, r, race, scratch, best);
    return best[0];
  }
  Winner winner{0};
  run_row<kFilters>(p, row, r, race, scratch, winner);
  return winner.key;
}

// A warp a row.
template <bool kEdited>
__global__ void __launch_bounds__(kThreads) stats_kernel(const __grid_constant__ Problem p) {
  using Rows = Row[kWarps];
  SPECDEC_SHARED(Rows, rows);
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const bool has_row = slot < p.batch * p.rows(), is_given = p.task != Task::kTree;
  Row& row = rows[threadIdx.x / 32];
  if (has_row && is_given) load_row<kEdited>(p, slot, &row);
  after_last_kernel();
  if (!has_row) return;
  if (!is_given) load_row<kEdited>(p, slot, &row);  // the walk says which
  __syncwarp();
  if (!row.active) return;
  const RowStats r = plain_stats<kEdited>(p, row);
  if (threadIdx.x % 32 == 0) p.work.rows.store(slot, r);
}

// Whether a row is drawn from, as far as is known before its digest.
__device__ inline bool may_race(const Problem& p, const Row& row) {
  return races_rows(p) && row.active && row.is_target && !row.parameters.greedy;
}

// The race of a row whose digest is not needed yet.
__device__ inline void open_race(const Problem& p, const Row& row, Race* race,
                                 RaceScratch& scratch) {
  __syncthreads();
  if (!may_race(p, row)) return;
  if (threadIdx.x == 0) *race = row_race(p, row);
  __syncthreads();
  BlockQueue{scratch, 0}.set_luck(*race);
}

struct SettleScratch {
  RaceScratch race;
};

// Draws from a row whose filters are settled, and writes what is known of it.
template <bool kFilters, class Scratch>
__device__ inline void close_race(const Problem& p, const Row& row, bool is_open, Scratch& scratch,
                                  Race* race, Key* best, RowStats* r) {
  if (!r->bad && may_race(p, row)) {
    Key key = 0;
    bool is_listed = false;
    if constexpr (kFilters) {
      is_listed = scratch.sorted > 0 && (p.task != Task::kSample || p.num_samples == 1);
      if (is_listed) key = race_list(p, row, *r, scratch);
    }
    if (!is_listed) {
      if (!is_open) open_race(p, row, race, scratch.race);
      key = race_row<kFilters>(p, row, *r, *race, scratch.race, best);
    }
    if (threadIdx.x == 0) r->key = key;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.work.rows.store(row.slot, *r);
  if (p.task == Task::kSample) write_sample<kFilters>(p, row.b, row, *r, best);
}

// kFilters: rows may have filters, or edits.
template <bool kFilters>
__global__ void __launch_bounds__(kThreads, kFilters ? 2 : 3)
    settle_kernel(const __grid_constant__ Problem p) {
  using Best = Key[kMaxSamples];
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(Best, best);
  SPECDEC_SHARED(Race, race);
  using Scratch = std::conditional_t<kFilters, FilterScratch, SettleScratch>;
  SPECDEC_SHARED(Scratch, scratch);
  const int64_t slot = blockIdx.x;
  const bool is_given = p.task != Task::kTree;  // else the walk says which row it is
  const bool is_early = is_given && !kFilters;  // filters use the place of the race
  if (threadIdx.x < 32 && is_given) load_row<kFilters>(p, slot, &row);
  if (is_early) open_race(p, row, &race, scratch.race);
  after_last_kernel();
  if (threadIdx.x < kMaxSamples) best[threadIdx.x] = 0;
  if constexpr (kFilters) {
    if (threadIdx.x == 0) {
      scratch.sorted = 0;
      if (p.filters) p.work.open.store(slot, 0);
    }
  }
  if (threadIdx.x < 32) {
    if (!is_given) load_row<kFilters>(p, slot, &row);
    __syncwarp();
    if (row.active) {
      const RowStats mine = plain_stats<kFilters>(p, row);
      if (threadIdx.x == 0) r = mine;
    }
  }
  __syncthreads();
  if (!row.active) {
    if (p.task == Task::kSample) write_no_sample(p, row.b);
    return;
  }
  const Parameters& s = row.parameters;
  if (!r.bad && row.is_target && p.task == Task::kChain && p.rule == Rule::kTopM &&
      row.index < row.chain.length) {
    const bool is_near =
        is_among_largest<kFilters>(p, row, draft_id(p, row.chain, row.b, row.index));
    if (threadIdx.x == 0) r.is_near = is_near;
  }
  if constexpr (kFilters) {
    if (!r.bad && !s.greedy && s.filters()) {
      RowStats mine = r;
      const FilteredRow f{p,       row,          block_maxima_of(p, slot, row.type()),
                          scratch, mine.maximum, mine.mass};
      __syncthreads();
      if (!settle_from_blocks(f, &mine)) open_row(f, &mine);
      if (threadIdx.x == 0) r = mine;
      __syncthreads();
      if (mine.unknown != kSettled) {
        if (threadIdx.x != 0) return;
        p.work.rows.store(slot, mine);
        p.work.open.store(slot, 1);  // the kernels behind only read it
        return;
      }
    }
  }
  close_race<kFilters>(p, row, is_early, scratch, &race, best, &r);
}

// f(slot, part) for each part of the rows that are open: they are dealt out to all thread blocks.
template <class F>
__device__ inline void each_open(const Problem& p, int parts, const F& f) {
  constexpr int kAsked = 4;  // rows that a thread asks of
  using Slots = int[kAsked * kThreads];
  SPECDEC_SHARED(Slots, slots);
  const int64_t rows = p.batch * p.rows();
  for (int64_t first = 0; first < rows; first += kAsked * kThreads) {
    unsigned open = 0;
#pragma unroll
    for (int k = 0; k < kAsked; ++k) {
      const int64_t slot = first + k * kThreads + threadIdx.x;
      if (slot < rows && p.work.open.load(slot) != 0) open |= 1u << k;
    }
    int total, at = block_exclusive_sum(__popc(open), &total);
    for (; open != 0; open &= open - 1) {
      slots[at++] = static_cast<int>(first) + lowest_bit(open) * kThreads + threadIdx.x;
    }
    __syncthreads();
    for (int64_t i = blockIdx.x; i < int64_t{total} * parts; i += gridDim.x) {
      f(slots[i / parts], static_cast<int>(i % parts));
      __syncthreads();
    }
    __syncthreads();
  }
}

// A part of a row is every p.parts-th tile of it.
template <bool kEdited>
__global__ void __launch_bounds__(kThreads, kEdited ? 3 : 4)
    gather_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(FilterScratch, scratch);
  after_last_kernel();
  each_open(p, p.parts, [&](int64_t slot, int part) {
    if (threadIdx.x < 32) load_row<kEdited>(p, slot, &row);
    if (threadIdx.x == 0) r = p.work.rows.load(slot);
    __syncthreads();
    const FilteredRow f{p, row, LogitRow(), scratch, r.maximum, r.mass};
    for (int tile = part; tile < row.tiles(); tile += p.parts) {
      const int64_t at = slot * p.tiles + tile;
      const Gathered g = gather_tile<kEdited>(f, tile, {r.low, r.high}, scratch.list, kListed);
      for (int i = threadIdx.x; i < g.listed && g.listed <= kListed; i += kThreads) {
        store_as(row.type(), p.work.lists, at * kListed + i, scratch.list[i]);
      }
      if (threadIdx.x == 0) p.work.gathered.store(at, g);
    }
  });
}

// The rows that are settled by what was gathered.
__global__ void __launch_bounds__(kThreads, 2)
    settle_again_kernel(const __grid_constant__ Problem p) {
  using Best = Key[kMaxSamples];
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(Best, best);
  SPECDEC_SHARED(Race, race);
  SPECDEC_SHARED(FilterScratch, scratch);
  after_last_kernel();
  each_open(p, 1, [&](int64_t slot, int) {
    if (threadIdx.x < 32) load_row(p, slot, &row);
    if (threadIdx.x < kMaxSamples) best[threadIdx.x] = 0;
    if (threadIdx.x == 0) scratch.sorted = 0;
    __syncthreads();
    RowStats mine = p.work.rows.load(slot);
    close_row({p, row, LogitRow(), scratch, mine.maximum, mine.mass}, slot, &mine);
    if (threadIdx.x == 0) r = mine;
    __syncthreads();
    close_race<true>(p, row, false, scratch, &race, best, &r);
  });
}

// columns[token_map[c]] = c; grid = [ceil(draft_vocab / kThreads)].
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ Problem p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  after_last_kernel();
  if (column >= p.draft_vocab) return;
  const int64_t id = p.token_map.load(column);
  if (id >= 0 && id < p.vocab) p.work.columns.store(id, static_cast<int32_t>(column));
}

// A draft row whose candidates are no distribution is bad. grid = [rows]
__global__ void __launch_bounds__(kThreads) kept_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Row, row);
  const int64_t slot = blockIdx.x;
  after_last_kernel();
  if (threadIdx.x < 32) load_row<false>(p, slot, &row);
  __syncthreads();
  if (!row.active || row.is_target) return;
  SPECDEC_SHARED(KeptIds, ids);
  const int64_t number = draft_number(p, row.chain, row.b, row.index);
  const int count = static_cast<int>(p.draft_vocab);
  load_kept(p, number * count, ids);
  int bad = 0;
  for (int j = threadIdx.x; j < count; j += kThreads) {
    if (ids[j] < 0) {  // padding has no logit
      const bool is_padding =
          p.kept_ids.load(number * count + j) == -1 && row.at<false>(j) == -INFINITY;
      bad |= is_padding ? 0 : 1;
      continue;
    }
    for (int i = j + 1; i < count; ++i) bad |= ids[i] == ids[j] ? 1 : 0;
  }
  bad = block_reduce(bad, Or{});
  if (threadIdx.x != 0) return;
  RowStats r = p.work.rows.load(slot);
  const double given = p.kept_logsumexp.load(number);
  const double own =
      static_cast<double>(r.maximum) * row.parameters.inv_t + log(static_cast<double>(r.mass));
  if (!(fabs(own - given) <= kept_tolerance(given))) bad = 1;
  if (bad == 0) return;
  r.bad = 1;
  p.work.rows.store(slot, r);
}

}  // namespace

void launch_kept(const Problem& p, const OnDevice& on) {
  if (!p.is_kept || p.draft_rows == 0) return;
  launch_phase(kept_kernel, p.batch * p.rows(), on, p);
}

void launch_columns(const Problem& p, const OnDevice& on) {
  if (!p.work.columns) return;
  launch_phase(columns_kernel, (p.draft_vocab + kThreads - 1) / kThreads, on, p);
}

void launch_rows(const Problem& p, const OnDevice& on) {
  launch_columns(p, on);
  launch_digest(p, on);
  launch_settle(p, on);
  launch_kept(p, on);
}

void launch_settle(const Problem& problem, const OnDevice& on) {
  Problem p = problem;
  const int64_t rows = p.batch * p.rows();
  const bool is_edited = p.edits || p.draft_edits;
  if (settles_rows(p)) return;
  if (!p.filters && !races_rows(p) && p.rule != Rule::kTopM) {
    const int64_t blocks = (rows + kWarps - 1) / kWarps;
    if (is_edited) return launch_phase(stats_kernel<true>, blocks, on, p);
    return launch_phase(stats_kernel<false>, blocks, on, p);
  }
  if (!p.filters && !is_edited) return launch_phase(settle_kernel<false>, rows, on, p);
  launch_phase(settle_kernel<true>, rows, on, p);
  if (!p.filters) return;
  p.parts = p.tiles < 8 ? p.tiles : 8;
  const int64_t parts = rows * p.parts, most = 4 * multiprocessors();
  if (is_edited) {
    launch_phase(gather_kernel<true>, parts < most ? parts : most, on, p);
  } else {
    launch_phase(gather_kernel<false>, parts < most ? parts : most, on, p);
  }
  launch_phase(settle_again_kernel, rows < most ? rows : most, on, p);
}

}  // namespace specdec
