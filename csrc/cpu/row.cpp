// Reading rows: tiles, sampling parameters, and the pass that turns a row into a law.
#include "row.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <optional>

#include "filter.h"

namespace specdec::cpu {
namespace {

int element_size(LogitType type) { return type == LogitType::kFloat32 ? 4 : 2; }

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const bool special = magnitude >= (0x7c00u << 13);
  const uint32_t scaled = float_bits(bits_float(magnitude) * 0x1p112f);
  return bits_float(sign | scaled | (special ? 0x7f800000u : 0u));
}

// Everything one chunk of the team learns about one row.
struct Partial {
  std::optional<Race> race;
  std::optional<Candidates> candidates;
  float race_best = -kInf;  // largest logit already offered as a start
};

struct Job {
  Examine* ask;
  std::vector<float> tile_sum, tile_log;
  std::vector<Partial> partial;  // [chunks]
};

bool needs_candidates(const RowLaw& law) {
  return law.params.has_k(law.source.vocab) || law.params.has_m();
}

Job make_job(Examine& ask, int chunks) {
  RowLaw& law = *ask.law;
  Job job{&ask, {}, {}, std::vector<Partial>(chunks)};
  const int n = law.source.tile_count();
  law.tile_max.assign(n, -kInf);
  if (law.params.greedy) {
    ask.mass = ask.entropy = false;
    ask.race = nullptr;
  }
  const bool gathers = ask.mass && needs_candidates(law);
  for (Partial& p : job.partial) {
    if (ask.race) p.race.emplace(*ask.race);
    if (gathers) p.candidates.emplace(law.params, law.source.vocab);
  }
  if (ask.mass && !gathers) {
    job.tile_sum.assign(n, 0.f);
    job.tile_log.assign(n, 0.f);
  }
  return job;
}

// Offers the ids of a tile; the largest first, because a good score to beat saves the noise of
// most others.
void race_tile(const float* tile, int n, int t, float tile_max, Partial& p) {
  Race& race = *p.race;
  if (!(tile_max > -kInf) || tile_max * race.inv_t + kMaxRaceNoise < race.cut()) return;
  const int64_t first = int64_t{t} * kTile;
  if (tile_max > p.race_best) {
    p.race_best = tile_max;
    race.offer_logit(first + tiles().find(tile, n, tile_max), tile_max);
  }
  tiles().race_logits(tile, n, first, race);
}

void examine_tile(Job& job, int t, Partial& p, float* buffer) {
  const Examine& ask = *job.ask;
  RowLaw& law = *ask.law;
  TileMax found;
  const float* tile = law.source.tile(t, buffer, &found);
  const int n = law.source.length(t);
  law.tile_max[t] = found.nan ? NAN : found.max;
  if (found.nan || !std::isfinite(found.max)) return;
  if (p.candidates) p.candidates->add(tile, n, found.max, law.source.ahead(t));
  if (!job.tile_sum.empty()) {
    if (ask.entropy || law.params.inv_t == 0.f) {
      const ExpSums s = tiles().exp_sums(tile, n, {found.max, law.params.inv_t, 0, 1, -FLT_MAX});
      job.tile_sum[t] = s.sum;
      job.tile_log[t] = s.sum_log;
    } else {
      job.tile_sum[t] = tiles().exp_sum(tile, n, found.max, law.params.inv_t, law.source.ahead(t));
    }
  }
  if (p.race) race_tile(tile, n, t, found.max, p);
}

// mass = sum_t s_t exp(d_t), d_t = (m_t - m) * inv_t;  mass_log = sum_t exp(d_t) (a_t + d_t s_t)
void merge_sums(const Job& job, RowLaw& law) {
  law.mass = law.mass_log = 0;
  for (size_t t = 0; t < job.tile_sum.size(); ++t) {
    if (law.tile_max[t] == -kInf) continue;
    const double d = static_cast<double>((law.tile_max[t] - law.max) * law.params.inv_t);
    const double w = std::exp(d);
    if (w == 0) continue;
    law.mass += w * job.tile_sum[t];
    law.mass_log += w * (job.tile_log[t] + d * job.tile_sum[t]);
  }
}

void finish(const Team& team, Job& job) {
  const Examine& ask = *job.ask;
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
  alignas(64) float buffer[kTile];
  const float* tile = law.source.tile(best, buffer);
  law.argmax = int64_t{best} * kTile + tiles().find(tile, law.source.length(best), law.max);
  law.threshold = law.params.greedy ? law.max : -kInf;
  if (ask.race) {
    for (const Partial& p : job.partial) ask.race->merge(*p.race);
  }
  if (!ask.mass) return;
  if (!job.tile_sum.empty()) merge_sums(job, law);
  if (!law.params.filtered(law.source.vocab)) return;
  Candidates* candidates = nullptr;
  if (job.partial[0].candidates) {
    candidates = &*job.partial[0].candidates;
    for (size_t c = 1; c < job.partial.size(); ++c) candidates->merge(*job.partial[c].candidates);
  }
  finish_filters(team, law, candidates, ask.entropy);
}

}  // namespace

const float* RowSource::tile(int t, float* buffer, TileMax* max) const {
  const int64_t first = int64_t{t} * kTile;
  const auto n = static_cast<int>(std::min<int64_t>(kTile, vocab - first));
  const char* from = data + first * element_size(type);
  if (type == LogitType::kFloat32 && !allowed && n == kTile) {
    const auto* own = reinterpret_cast<const float*>(from);
    if (max) *max = tiles().max(own, n);
    return own;
  }
  const int32_t* bits = allowed ? allowed + first / 32 : nullptr;
  const TileMax found = tiles().load[static_cast<int>(type)](from, n, bits, buffer);
  if (max) *max = found;
  return buffer;
}

Ahead RowSource::ahead(int t) const {
  const int size = element_size(type);
  return {data + int64_t{t + 1} * kTile * size, size};
}

float RowSource::logit(int64_t id) const {
  if (allowed && ((static_cast<uint32_t>(allowed[id >> 5]) >> (id & 31)) & 1) == 0) return -kInf;
  if (type == LogitType::kFloat32) {
    float l;
    std::memcpy(&l, data + id * 4, sizeof l);
    return l;
  }
  uint16_t h;
  std::memcpy(&h, data + id * 2, sizeof h);
  return type == LogitType::kBFloat16 ? bits_float(static_cast<uint32_t>(h) << 16)
                                      : half_to_float(h);
}

RowSource row_source(const Logits& logits, int64_t b, int64_t i, const int32_t* allowed) {
  return {static_cast<const char*>(logits.data) + logits.offset(b, i) * element_size(logits.type),
          logits.type, logits.vocab, allowed};
}

RowParams row_params(const Sampling& s, int64_t b) {
  RowParams r;
  const float t = s.temperature.get(b, 1.f), top_p = s.top_p.get(b, 1.f);
  const float min_p = s.min_p.get(b, 0.f);
  const int32_t top_k = s.top_k.get(b, 0);
  r.bad = std::isnan(t) || t < 0 || top_k < 0 || std::isnan(top_p) || std::isnan(min_p);
  r.greedy = r.bad || t == 0 || std::isinf(1.f / t);
  if (r.greedy) return r;
  r.temperature = t;
  r.inv_t = 1.f / t;
  r.top_k = top_k;
  r.top_p = top_p >= 1 ? 1.f : top_p;
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
  if (!keeps(id, l)) return -kInf;
  if (params.greedy) return 0.f;
  return static_cast<float>((static_cast<double>(l) - max) * params.inv_t - std::log(mass));
}

float RowLaw::logsumexp() const {
  if (params.greedy) return 0.f;
  return static_cast<float>(static_cast<double>(max) * params.inv_t + std::log(mass));
}

double RowLaw::entropy() const { return params.greedy ? 0 : std::log(mass) - mass_log / mass; }

Weighting RowLaw::weighting(double scale) const {
  return {max, params.inv_t, 0.f, static_cast<float>(scale), std::max(threshold, -FLT_MAX)};
}

void examine(const Team& team, Examine* rows, int count) {
  std::vector<Job> jobs;
  int64_t total = 0;
  for (int r = 0; r < count; ++r) {
    jobs.push_back(make_job(rows[r], team.chunks()));
    total += rows[r].law->source.tile_count();
  }
  team.run_tiles(total, [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile];
    int64_t first = 0;  // the rows' tiles are numbered on through all rows
    for (Job& job : jobs) {
      const int n = job.ask->law->source.tile_count();
      const int64_t from = std::max(begin - first, int64_t{0});
      const int64_t to = std::min<int64_t>(end - first, n);
      for (int64_t t = from; t < to; ++t) {
        examine_tile(job, static_cast<int>(t), job.partial[chunk], buffer);
      }
      first += n;
    }
  });
  for (Job& job : jobs) finish(team, job);
}

}  // namespace specdec::cpu
