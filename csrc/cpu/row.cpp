// Reading rows: tiles, sampling parameters, and the pass that turns a row into a law.
#include "row.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <optional>

#include "../torch/dispatch.h"
#include "filter.h"

namespace specdec::cpu {
namespace {

int element_size(LogitType type) { return type == LogitType::kFloat32 ? 4 : 2; }

struct Job {
  Examine ask;
  std::optional<ExpShift> shift;  // none: every tile is summed about its own maximum
  std::vector<float> tile_sum, tile_log;
  std::vector<char> is_pending;  // tiles whose edits are to come
};

// The laws of one row in memory, whose tiles are examined in turn while they lie in L1.
struct Pass {
  Job job;
  std::optional<Job> twin;
  // What the job looks for is part of what its twin, never greedy, finds.
  bool follows_twin = false;
};

// A center near the row's maximum, which is most likely close to that of the first tile. None where
// that tile holds no finite logit, or temperature and logits are too extreme for the arithmetic.
std::optional<ExpShift> shift_of(const RowLaw& law) {
  if (law.source.vocab == 0 || law.params.inv_t == 0) return {};
  alignas(64) float buffer[kTile], blocks[kTileBlocks];
  const RawTile tile = law.source.raw_tile(0, buffer);
  const TileMax found = tiles().digest[tile.index()](tile, law.source.length(0), blocks);
  const double k = static_cast<double>(law.params.inv_t) * std::log2(std::exp(1.0));
  const double bias = std::round(8 * found.max * k) / 8;
  const double lowest = (bias - kExpRoom) / k, highest = (bias + kExpRoom) / k;
  if (found.nan || !(std::abs(bias) < 0x1p18) || lowest < -FLT_MAX) return {};
  const auto rounded = static_cast<float>(k);
  return ExpShift{found.max,
                  law.params.inv_t,
                  rounded,
                  static_cast<float>(bias),
                  static_cast<float>(lowest),
                  static_cast<float>(std::min<double>(highest, FLT_MAX))};
}

// Sums of the whole row are not needed where top-k or min-p leave only logits that are gathered.
bool is_summed(const Examine& ask) {
  return ask.mass && !ask.law->params.has_k(ask.law->source.vocab) && !ask.law->params.has_m();
}

Job make_job(const Examine& asked) {
  Job job{asked, {}, {}, {}, {}};
  Examine& ask = job.ask;
  RowLaw& law = *ask.law;
  const int n = law.source.tile_count();
  law.tile_max.assign(n, -kInf);
  if (law.params.greedy) ask.mass = ask.entropy = false;
  const bool only_argmax = law.params.greedy && !law.source.edits.bits;
  law.block_max.assign(only_argmax ? 0 : int64_t{n} * kTileBlocks, -kInf);
  if (!is_summed(ask)) {
    if (law.source.edits.bits) job.is_pending.assign(n, false);
  } else {
    job.tile_sum.assign(n, 0.f);
    if (ask.entropy) {
      job.tile_log.assign(n, 0.f);
    } else {
      job.shift = shift_of(law);
    }
  }
  return job;
}

// Whether two laws have the same logits.
bool is_same_row(const RowSource& a, const RowSource& b) {
  return a.data == b.data && a.allowed == b.allowed && a.edits.bits == b.edits.bits;
}

Pass make_pass(const Examine& ask) {
  Pass pass{make_job(ask), {}, false};
  if (!ask.twin) return pass;
  pass.twin = make_job({ask.twin, true});
  const Job &job = pass.job, &twin = *pass.twin;
  const bool is_unsummed = job.tile_sum.empty();
  const bool has_sums = !twin.tile_sum.empty() && job.tile_log.empty() &&
                        ask.law->params.inv_t == ask.twin->params.inv_t;
  pass.follows_twin = is_same_row(ask.law->source, ask.twin->source) && (is_unsummed || has_sums);
  return pass;
}

// Sum and maximum of a tile in one pass; false where the shift does not suit it.
bool sum_shifted(Job& job, int t, const RawTile& tile) {
  RowLaw& law = *job.ask.law;
  const int n = law.source.length(t);
  float* blocks = law.block_max.data() + int64_t{t} * kTileBlocks;
  const SumMax s = tiles().exp_sum[tile.index()](tile, n, *job.shift, blocks);
  if (std::isnan(s.sum) || s.max > job.shift->highest) return false;
  job.tile_sum[t] = s.sum;
  law.tile_max[t] = s.max;
  return true;
}

// Sums about the tile's own maximum.
void sum_alone(Job& job, int t, const float* tile) {
  const RowLaw& law = *job.ask.law;
  const Weighting w{law.tile_max[t], law.params.inv_t, 0, 1, -FLT_MAX};
  const ExpSums s = tiles().exp_sums(tile, law.source.length(t), w);
  job.tile_sum[t] = s.sum;
  if (job.ask.entropy) job.tile_log[t] = s.sum_log;
}

// The logits that edits list of consecutive tiles, before and after.
struct EditedLogits {
  alignas(64) float before[kEditTiles * kTile], after[kEditTiles * kTile];
  int padded = 0;

  // Of tiles that are whole in memory; their maxima and those of their blocks follow. False where a
  // logit is NaN.
  bool take(RowLaw& law, int begin, int end);
  SumMax sum(const float* values, const ExpShift& shift) const {
    alignas(64) float maxima[kTileBlocks];
    return tiles().exp_sum[0](float_tile(values), padded, shift, maxima);
  }
};

bool EditedLogits::take(RowLaw& law, int begin, int end) {
  const RowEdits& edits = law.source.edits;
  const RawTile tile = law.source.own_tile(begin);
  const int64_t block = int64_t{begin} * kTileBlocks, plane = edits.plane;
  const int32_t* start = edits.start + block;
  const int count = edits.start[int64_t{end} * kTileBlocks] - *start;
  const float* bias = edits.values + *start;
  const ListedTiles listed{edits.bits + block,
                           start,
                           int64_t{begin} * kTile,
                           end - begin,
                           count,
                           bias,
                           bias + plane,
                           bias + 2 * plane,
                           bias + 3 * plane};
  padded = (count + kPad - 1) / kPad * kPad;
  return tiles().edit[tile.index()](tile.logits, listed, before, after, &law.block_max[block],
                                    &law.tile_max[begin]);
}

// A tile with edits from the row's own memory: what they change is taken out of its sum and put in
// anew. Half of the sum at most is taken out, so that its rounding error grows twofold at most.
// False where that, or another shortcut, does not hold; then the tile is copied.
bool sum_edited(Job& job, int t) {
  RowLaw& law = *job.ask.law;
  const RawTile tile = law.source.own_tile(t);
  if (!tile.logits || !job.shift) return false;
  const float highest = job.shift->highest;
  float* blocks = law.block_max.data() + int64_t{t} * kTileBlocks;
  const SumMax all = tiles().exp_sum[tile.index()](tile, kTile, *job.shift, blocks);
  law.tile_max[t] = all.max;
  EditedLogits edited;
  if (std::isnan(all.sum) || all.max > highest || !edited.take(law, t, t + 1)) return false;
  const SumMax before = edited.sum(edited.before, *job.shift);
  const SumMax after = edited.sum(edited.after, *job.shift);
  if (before.sum > all.sum / 2 || after.max > highest) return false;
  job.tile_sum[t] = (all.sum - before.sum) + after.sum;
  return true;
}

// Maxima of a tile without its edits, which edit_pending puts in.
bool digest_unedited(Job& job, int t) {
  RowLaw& law = *job.ask.law;
  const RawTile tile = law.source.own_tile(t);
  if (!tile.logits) return false;
  float* blocks = law.block_max.data() + int64_t{t} * kTileBlocks;
  const TileMax found = tiles().digest[tile.index()](tile, kTile, blocks);
  law.tile_max[t] = found.max;
  job.is_pending[t] = !found.nan;
  return !found.nan;
}

// A tile as it is, or a copy with its edits.
void examine_whole(Job& job, int t, float* buffer) {
  RowLaw& law = *job.ask.law;
  const RowSource& row = law.source;
  const RawTile tile = row.raw_tile(t, buffer);
  if (job.shift && sum_shifted(job, t, tile)) return;
  float* blocks = law.block_max.empty() ? nullptr : &law.block_max[int64_t{t} * kTileBlocks];
  const TileMax found = tiles().digest[tile.index()](tile, row.length(t), blocks);
  law.tile_max[t] = found.nan ? NAN : found.max;
  if (job.tile_sum.empty() || found.nan || !std::isfinite(found.max)) return;
  const bool is_float = tile.type == LogitType::kFloat32;
  sum_alone(job, t, is_float ? static_cast<const float*>(tile.logits) : row.tile(t, buffer));
}

void examine_tile(Job& job, int t, float* buffer) {
  if (job.ask.law->source.is_edited(int64_t{t} * kTile, kTile)) {
    if (job.tile_sum.empty() ? digest_unedited(job, t) : sum_edited(job, t)) return;
  }
  examine_whole(job, t, buffer);
}

// The edits of kEditTiles tiles or fewer.
void edit_pending(Job& job, int begin, int end, float* buffer) {
  if (job.is_pending.empty()) return;
  RowLaw& law = *job.ask.law;
  while (begin < end && !job.is_pending[begin]) ++begin;
  while (begin < end && !job.is_pending[end - 1]) --end;
  EditedLogits edited;
  if (begin == end || edited.take(law, begin, end)) return;
  for (int t = begin; t < end; ++t) examine_whole(job, t, buffer);
}

// The tiles [begin, end) of a row.
void examine_tiles(Pass& pass, int begin, int end, float* buffer) {
  for (int t = begin; t < end;) {
    const int first = t;
    for (const int last = std::min(t + kEditTiles, end); t < last; ++t) {
      if (pass.twin) examine_tile(*pass.twin, t, buffer);
      if (!pass.follows_twin) examine_tile(pass.job, t, buffer);
    }
    if (pass.twin) edit_pending(*pass.twin, first, t, buffer);
    if (!pass.follows_twin) edit_pending(pass.job, first, t, buffer);
  }
  if (!pass.follows_twin) return;
  const auto copy = [](const std::vector<float>& from, std::vector<float>& to, int64_t first,
                       int64_t last) {
    if (!to.empty()) std::copy(from.begin() + first, from.begin() + last, to.begin() + first);
  };
  RowLaw& law = *pass.job.ask.law;
  const RowLaw& twin = *pass.twin->ask.law;
  copy(twin.tile_max, law.tile_max, begin, end);
  copy(twin.block_max, law.block_max, int64_t{begin} * kTileBlocks, int64_t{end} * kTileBlocks);
  copy(pass.twin->tile_sum, pass.job.tile_sum, begin, end);
}

// The weight that exp_sum gives to one logit.
float shifted_weight(const ExpShift& shift, float logit) {
  alignas(64) float lanes[kPad], block;
  std::fill(lanes, lanes + kPad, -kInf);
  lanes[0] = logit;
  return tiles().exp_sum[0](float_tile(lanes), kPad, shift, &block).sum;
}

// Tiles summed about the shift weigh `unit` each 1, such that the largest logit weighs exactly 1.
// Others: mass = sum_t s_t exp(d_t), d_t = (m_t - m) * inv_t;
//         mass_log = sum_t exp(d_t) (a_t + d_t s_t)
void merge_sums(const Job& job, RowLaw& law) {
  const auto is_shifted = [&](float max) { return job.shift && max <= job.shift->highest; };
  double unit = 0;
  if (job.shift) {
    const float l = is_shifted(law.max) ? law.max : job.shift->center;
    unit = std::exp((static_cast<double>(l) - law.max) * law.params.inv_t) /
           shifted_weight(*job.shift, l);
  }
  law.mass = law.mass_log = 0;
  for (size_t t = 0; t < job.tile_sum.size(); ++t) {
    const float max = law.tile_max[t];
    if (max == -kInf) continue;
    if (is_shifted(max)) {
      law.mass += unit * job.tile_sum[t];
      continue;
    }
    const auto d = static_cast<double>((max - law.max) * law.params.inv_t);
    const double w = std::exp(d);
    if (w == 0) continue;
    law.mass += w * job.tile_sum[t];
    if (job.ask.entropy) law.mass_log += w * (job.tile_log[t] + d * job.tile_sum[t]);
  }
}

// The lowest id of the largest logit, which is in tile t.
int64_t place_of_maximum(const RowLaw& law, int t) {
  alignas(64) float buffer[kTile];
  int64_t first = int64_t{t} * kTile;
  int n = law.source.length(t);
  if (!law.block_max.empty()) {
    const float* blocks = law.tile_blocks(t);
    first += (std::find(blocks, blocks + kTileBlocks, law.max) - blocks) * kNoiseBlock;
    n = kNoiseBlock;
  }
  return first + tiles().find(law.source.span(first, n, buffer), n, law.max);
}

void finish(const Team& team, Job& job) {
  const Examine& ask = job.ask;
  RowLaw& law = *ask.law;
  int best = 0;
  law.bad = law.tile_max.empty();
  for (int t = 0; t < static_cast<int>(law.tile_max.size()); ++t) {
    if (std::isnan(law.tile_max[t])) law.bad = true;
    if (law.tile_max[t] > law.tile_max[best]) best = t;
  }
  if (law.bad || !std::isfinite(law.tile_max[best])) {
    law.bad = true;
    return;
  }
  law.max = law.tile_max[best];
  law.argmax = place_of_maximum(law, best);
  law.threshold = law.params.greedy ? law.max : -kInf;
  if (!ask.mass) return;
  if (!job.tile_sum.empty()) merge_sums(job, law);
  if (!law.params.filtered(law.source.vocab)) return;
  finish_filters(team, law, ask.entropy);
}

}  // namespace

const float* RowSource::span(int64_t first, int n, float* buffer) const {
  if (const void* own = type == LogitType::kFloat32 ? whole(first, n) : nullptr) {
    return static_cast<const float*>(own);
  }
  const auto count = static_cast<int>(std::min<int64_t>(n, vocab - first));
  const int32_t* bits = allowed ? allowed + first / 32 : nullptr;
  tiles().load[static_cast<int>(type)](data + first * element_size(type), count, bits, buffer);
  if (edits.bits) edit(first, count, buffer);
  return buffer;
}

void RowSource::edit(int64_t first, int n, float* buffer) const {
  for (int64_t block = first / kEditBlock; block * kEditBlock < first + n; ++block) {
    auto left = static_cast<uint64_t>(edits.bits[block]);
    for (int64_t i = edits.start[block]; left != 0; left &= left - 1, ++i) {
      const int64_t id = block * kEditBlock + std::countr_zero(left);
      float& logit = buffer[id - first];
      logit = allows(id) ? edits.apply(logit, i) : -kInf;
    }
  }
}

RawTile RowSource::raw_tile(int t, float* buffer) const {
  if (const void* own = whole(int64_t{t} * kTile, kTile)) return {own, ahead(t), type};
  return float_tile(tile(t, buffer));
}

const void* RowSource::whole(int64_t first, int n) const {
  const bool is_copied = allowed || first + n > vocab || is_edited(first, n);
  return is_copied ? nullptr : data + first * element_size(type);
}

RawTile RowSource::own_tile(int t) const {
  const int64_t first = int64_t{t} * kTile;
  const bool is_copied = allowed || first + kTile > vocab;
  return {is_copied ? nullptr : data + first * element_size(type), ahead(t), type};
}

const void* RowSource::ahead(int t) const {
  return data + (int64_t{t} * kTile + kAhead) * element_size(type);
}

void RowSource::prefetch(int64_t first, int n) const {
  prefetch_lines(data + first * element_size(type), n * element_size(type));
}

bool RowSource::is_edited(int64_t first, int n) const {
  if (!edits.bits) return false;
  const int64_t end = std::min((first + n + kEditBlock - 1) / kEditBlock, edits.blocks);
  return edits.start[first / kEditBlock] != edits.start[end];
}

float RowSource::logit(int64_t id) const {
  if (!allows(id)) return -kInf;
  const float raw = own_logit(id);
  if (!edits.bits) return raw;
  const auto bits = static_cast<uint64_t>(edits.bits[id / kEditBlock]);
  const uint64_t mine = uint64_t{1} << (id % kEditBlock);
  if ((bits & mine) == 0) return raw;
  return edits.apply(raw, edits.start[id / kEditBlock] + std::popcount(bits & (mine - 1)));
}

float RowSource::own_logit(int64_t id) const {
  float logit = 0;
  dispatch_logits(type, [&](auto tag) {
    typename decltype(tag)::type own;
    std::memcpy(&own, data + id * sizeof own, sizeof own);
    logit = static_cast<float>(own);
  });
  return logit;
}

RowSource row_source(const Logits& logits, int64_t b, int64_t i, const int32_t* allowed,
                     const RowEdits& edits) {
  return {static_cast<const char*>(logits.data) + logits.offset(b, i) * element_size(logits.type),
          logits.type, logits.vocab, allowed, edits};
}

RowParams row_params(const Sampling& s, int64_t b) {
  RowParams r;
  if (!s.active.get(b, true)) return r;
  const float t = s.temperature.get(b, 1.f), top_p = s.top_p.get(b, 1.f);
  const float min_p = s.min_p.get(b, 0.f);
  const int32_t top_k = s.top_k.get(b, 0);
  r.bad = std::isnan(t) || t < 0 || top_k < 0 || std::isnan(top_p) || std::isnan(min_p);
  r.greedy = r.bad || t == 0 || std::isinf(1.f / t);
  if (r.greedy) return r;
  r.temperature = t;
  r.inv_t = 1.f / t;
  r.top_k = top_k;
  r.top_p = std::clamp(top_p, 0.f, 1.f);
  r.min_p = min_p <= 0 ? 0.f : min_p;
  return r;
}

double RowLaw::prob(int64_t id) const {
  const float l = source.logit(id);
  if (!keeps(id, l)) return 0;
  if (params.greedy) return 1;
  return std::exp((static_cast<double>(l) - max) * params.inv_t) / mass;
}

float RowLaw::logprob(int64_t id) const {
  if (bad) return NAN;  // a raw row whose NaN the mask hid from the draw
  const float l = source.logit(id);
  return keeps(id, l) ? logprob_of(l) : -kInf;
}

float RowLaw::logprob_of(float logit) const {
  if (params.greedy) return 0.f;
  return static_cast<float>((static_cast<double>(logit) - max) * params.inv_t - std::log(mass));
}

float RowLaw::logsumexp() const {
  if (params.greedy) return 0.f;
  return static_cast<float>(static_cast<double>(max) * params.inv_t + std::log(mass));
}

double RowLaw::entropy() const { return params.greedy ? 0 : std::log(mass) - mass_log / mass; }

Weighting RowLaw::weighting(double scale) const {
  return {max, params.inv_t, 0.f, static_cast<float>(scale), std::max(threshold, -FLT_MAX)};
}

void examine(const Team& team, const Examine* rows, int count) {
  std::vector<Pass> passes;
  int64_t total = 0;
  for (int r = 0; r < count; ++r) {
    passes.push_back(make_pass(rows[r]));
    total += rows[r].law->source.tile_count();
  }
  team.run_tiles(total, [&](int, int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile];
    int64_t first = 0;  // the rows' tiles are numbered on through all rows
    for (Pass& pass : passes) {
      const int n = pass.job.ask.law->source.tile_count();
      const int64_t from = std::max(begin - first, int64_t{0});
      const int64_t to = std::min<int64_t>(end - first, n);
      if (from < to) examine_tiles(pass, static_cast<int>(from), static_cast<int>(to), buffer);
      first += n;
    }
  });
  for (Pass& pass : passes) {
    finish(team, pass.job);
    if (pass.twin) finish(team, *pass.twin);
  }
}

}  // namespace specdec::cpu
