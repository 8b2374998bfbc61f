// What the digest of a row says: its statistics, the thresholds of its filters, the winner of its
// race, and where it matters the argmax, or whether the drafted id is among the m largest.
//   stats_kernel    grid = [batch * rows / kWarps]; a warp a row, where no row races nor is
//   filtered settle_kernel   grid = [batch * rows] gather_kernel   grid = [batch * rows * parts];
//   reads the rows again whose filters are not
//                   settled; settle_kernel follows once more. Only with filters
#include "bracket.cuh"
#include "kernels.h"
#include "sample.cuh"

namespace specdec {
namespace {

constexpr int kNowhere = 0x7fffffff;

// sum exp((l - maximum) / T), and e^s s with s = (l - maximum) / T.
struct Moments {
  float maximum = -INFINITY, mass = 0.f, entropy = 0.f;

  __device__ void shift_to(float most, float inv_t) {
    const float shift = (maximum - most) * inv_t, factor = expf(shift);
    if (maximum != most && mass != 0.f) {
      entropy = factor > 0.f ? factor * (entropy + shift * mass) : 0.f;
      mass *= factor;
    }
    maximum = most;
  }
  __device__ void add(Moments other, float inv_t) {
    const float most = max_nan(maximum, other.maximum);
    shift_to(most, inv_t);
    other.shift_to(most, inv_t);
    mass += other.mass;
    entropy += other.entropy;
  }
  // Over a warp.
  __device__ void merge(float inv_t, bool has_entropy) {
    shift_to(warp_reduce(maximum, [](float a, float b) { return max_nan(a, b); }), inv_t);
    mass = warp_reduce(mass, Plus{});
    if (has_entropy) entropy = warp_reduce(entropy, Plus{});
  }
};

struct RowSum {
  Moments own, raw;
  int tile;  // the first one that has the maximum; of a lane
};

// The tiles of a row, by one warp: lane l has the tiles l, l + 32, ...
__device__ inline RowSum merge_tiles(const Problem& p, const Row& row) {
  const float inv_t = row.parameters.inv_t;
  const bool has_raw = (p.flags & kWantsRaw) != 0;
  RowSum all{};
  float most = -INFINITY;
  for (int tile = threadIdx.x % 32; tile < row.tiles(); tile += 32) {
    const Partial part = p.work.partials.load(row.slot * p.tiles + tile);
    if (part.maximum > most) all.tile = tile;
    most = fmaxf(most, part.maximum);
    all.own.add({part.maximum, part.mass, part.entropy}, inv_t);
    if (has_raw) all.raw.add({part.raw_maximum, part.raw_mass, 0.f}, 1.f);
  }
  all.own.merge(inv_t, (p.flags & kWantsEntropy) != 0);
  if (has_raw) all.raw.merge(1.f, false);
  all.tile = warp_reduce(most == all.own.maximum ? all.tile : kNowhere, Smaller{});
  return all;
}

// First place of a number among 64, of which the first eight lanes have eight each.
__device__ inline int place_of(float number, const float (&v)[8]) {
  int place = kNowhere;
#pragma unroll
  for (int j = 7; j >= 0; --j) {
    if (v[j] == number) place = static_cast<int>(threadIdx.x) % 32 * 8 + j;
  }
  return warp_reduce(place, Smaller{});
}

// The first id of the maximum: in the first block of the tile that has it.
template <bool kEdited>
__device__ inline int find_argmax(const Problem& p, const Row& row, int tile, float maximum) {
  static_assert(kTileBlocks == 64 && kBlock == 64);
  const int lane = threadIdx.x % 32;
  float v[8];
#pragma unroll
  for (float& one : v) one = NAN;
  const int64_t block = tile * int64_t{kTileBlocks};
  if (lane < 8)
    block_maxima_of(p, row.slot, row.type<kEdited>()).load8(block + lane * 8, row.blocks(), v);
  const int64_t first = (block + place_of(maximum, v)) * kBlock;
  if (lane < 8) row.load8<kEdited>(first + lane * 8, v);
  return static_cast<int>(first) + place_of(maximum, v);
}

// Statistics of a row before its filters; by one warp, for its first lane.
template <bool kEdited>
__device__ inline RowStats plain_stats(const Problem& p, const Row& row) {
  const Parameters& s = row.parameters;
  const RowSum sum = merge_tiles(p, row);
  RowStats r{};
  r.maximum = sum.own.maximum;
  r.mass = s.greedy ? 1.f : sum.own.mass;
  r.threshold = s.greedy ? r.maximum : -INFINITY;
  if ((p.flags & kWantsEntropy) != 0 && !s.greedy) {
    r.entropy = logf(r.mass) - sum.own.entropy / r.mass;
  }
  r.raw_maximum = sum.raw.maximum;
  r.raw_mass = sum.raw.mass;
  r.bad = !is_finite(r.maximum);
  if ((s.greedy || is_argmax_rule(p)) && !r.bad) {
    r.argmax = find_argmax<kEdited>(p, row, sum.tile, r.maximum);
  }
  return r;
}

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
                          r.threshold,
                          [&](int64_t first, float (&v)[8]) { row.load8<kEdited>(first, v); },
                          [&](int64_t id, float logit) {
                            return is_excluded(p, row.b, id) ? -INFINITY
                                                             : log_weight(row, r, logit);
                          }};
  run_race(race, static_cast<int>(row.blocks()), block_maxima_of(p, row.slot, row.type<kEdited>()),
           scratch, best, entrants);
}

// best[0..num_samples) of a row. Out of line: it needs more registers than the race for one.
template <bool kEdited>
static __device__ SPECDEC_NOINLINE void race_for_samples(const Problem& p, const Row& row,
                                                         const RowStats& r, const Race& race,
                                                         RaceScratch& scratch, Key* best) {
  Winners winners{static_cast<int>(p.num_samples), best};
  run_row<kEdited>(p, row, r, race, scratch, winners);
}

// The winner of a row's race, and the next best where several samples are drawn.
template <bool kEdited>
__device__ inline Key race_row(const Problem& p, const Row& row, const RowStats& r,
                               RaceScratch& scratch, Key* best) {
  SPECDEC_SHARED(Race, race);
  if (threadIdx.x == 0) race = row_race(p, row);
  __syncthreads();
  if (p.task == Task::kSample && p.num_samples > 1) {
    race_for_samples<kEdited>(p, row, r, race, scratch, best);
    return best[0];
  }
  Winner winner{0};
  run_row<kEdited>(p, row, r, race, scratch, winner);
  return winner.key;
}

// A warp a row.
template <bool kEdited>
__global__ void __launch_bounds__(kThreads) stats_kernel(const __grid_constant__ Problem p) {
  using Rows = Row[kWarps];
  SPECDEC_SHARED(Rows, rows);
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  after_last_kernel();
  if (slot >= p.batch * p.rows()) return;
  Row& row = rows[threadIdx.x / 32];
  load_row<kEdited>(p, slot, &row);
  __syncwarp();
  if (!row.active) return;
  const RowStats r = plain_stats<kEdited>(p, row);
  if (threadIdx.x % 32 == 0) p.work.rows.store(slot, r);
}

struct SettleScratch {
  RaceScratch race;
};

// kFilters: rows may have filters, or edits.
template <bool kFilters>
__global__ void __launch_bounds__(kThreads, kFilters ? 2 : 3)
    settle_kernel(const __grid_constant__ Problem p) {
  using Best = Key[kMaxSamples];
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(Best, best);
  using Scratch = std::conditional_t<kFilters, FilterScratch, SettleScratch>;
  SPECDEC_SHARED(Scratch, scratch);
  const int64_t slot = blockIdx.x;
  after_last_kernel();
  if (threadIdx.x < kMaxSamples) best[threadIdx.x] = 0;
  if (threadIdx.x < 32) {
    load_row<kFilters>(p, slot, &row);
    __syncwarp();
    if (row.active) {
      const RowStats mine = p.again ? p.work.rows.load(slot) : plain_stats<kFilters>(p, row);
      if (threadIdx.x == 0) r = mine;
    }
  }
  __syncthreads();
  if (p.task == Task::kSample && !row.active && !p.again) write_no_sample(p, row.b);
  if (!row.active || (p.again && r.unknown == kSettled)) return;
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
  if (!r.bad && row.is_target && !s.greedy && races_rows(p)) {
    const Key key = race_row<kFilters>(p, row, r, scratch.race, best);
    if (threadIdx.x == 0) r.key = key;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.work.rows.store(row.slot, r);
  if (p.task == Task::kSample) write_sample<kFilters>(p, row.b, row, r, best);
}

// A block reads every p.parts-th tile of a row.
template <bool kEdited>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Row, row);
  SPECDEC_SHARED(RowStats, r);
  SPECDEC_SHARED(int, is_open);
  const int64_t slot = blockIdx.x / p.parts;
  after_last_kernel();
  if (threadIdx.x < 32) {
    load_row<kEdited>(p, slot, &row);
    if (threadIdx.x == 0) {
      if (row.active) r = p.work.rows.load(slot);
      is_open = row.active && r.unknown != kSettled;
    }
  }
  __syncthreads();
  if (is_open == 0) return;
  SPECDEC_SHARED(FilterScratch, scratch);
  const FilteredRow f{p, row, LogitRow(), scratch, r.maximum, r.mass};
  for (int tile = static_cast<int>(blockIdx.x - slot * p.parts); tile < row.tiles();
       tile += p.parts) {
    const int64_t at = slot * p.tiles + tile;
    const Gathered g = gather_tile<kEdited>(f, tile, {r.low, r.high}, scratch.list, kListed);
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

// A draft row whose candidates are no distribution is bad. grid = [rows]
__global__ void __launch_bounds__(kThreads) kept_kernel(const __grid_constant__ Problem p) {
  SPECDEC_SHARED(Row, row);
  const int64_t slot = blockIdx.x;
  after_last_kernel();
  if (threadIdx.x < 32) load_row<false>(p, slot, &row);
  __syncthreads();
  if (!row.active || row.is_target) return;
  SPECDEC_SHARED(KeptIds, ids);
  const int64_t number = kept_number(p, row.chain, row.b, row.index);
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

void launch_kept(const Problem& p, Stream stream) {
  if (!p.is_kept || p.draft_rows == 0) return;
  launch_phase(kept_kernel, p.batch * p.rows(), kThreads, stream, p);
}

void launch_columns(const Problem& p, Stream stream) {
  if (!p.work.columns) return;
  launch_phase(columns_kernel, (p.draft_vocab + kThreads - 1) / kThreads, kThreads, stream, p);
}

void launch_rows(const Problem& p, Stream stream) {
  launch_columns(p, stream);
  launch_digest(p, stream);
  launch_settle(p, stream);
  launch_kept(p, stream);
}

void launch_settle(const Problem& problem, Stream stream) {
  Problem p = problem;
  const int64_t rows = p.batch * p.rows();
  p.again = false;
  const bool is_edited = p.edits || p.draft_edits;
  if (!p.filters && !races_rows(p) && p.rule != Rule::kTopM) {
    const int64_t blocks = (rows + kWarps - 1) / kWarps;
    if (is_edited) return launch_phase(stats_kernel<true>, blocks, kThreads, stream, p);
    return launch_phase(stats_kernel<false>, blocks, kThreads, stream, p);
  }
  if (!p.filters && !is_edited)
    return launch_phase(settle_kernel<false>, rows, kThreads, stream, p);
  p.parts = p.tiles < 8 ? p.tiles : 8;  // few: most rows are settled at once, and blocks find that
  launch_phase(settle_kernel<true>, rows, kThreads, stream, p);
  if (!p.filters) return;
  if (is_edited) {
    launch_phase(gather_kernel<true>, rows * p.parts, kThreads, stream, p);
  } else {
    launch_phase(gather_kernel<false>, rows * p.parts, kThreads, stream, p);
  }
  p.again = true;
  launch_phase(settle_kernel<true>, rows, kThreads, stream, p);
}

}  // namespace specdec
