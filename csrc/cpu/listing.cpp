#include "listing.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>

#include "filter.h"

namespace specdec::cpu {
namespace {

// How many ids of a row are kept and larger than `logit`; of a tile, neighbouring blocks at once.
int64_t count_larger(const Team& team, const RowLaw& law, float logit) {
  std::vector<int64_t> counts(team.chunks(), 0);
  team.run_tiles(law.source.tile_count(), [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile];
    for (auto t = static_cast<int>(begin); t < end; ++t) {
      if (!(law.tile_max[t] > logit)) continue;
      const float* maxima = law.tile_blocks(t);
      const int blocks = law.source.length(t) / kNoiseBlock;
      for (int i = 0; i < blocks; ++i) {
        const int first = i;
        while (i < blocks && maxima[i] > logit) ++i;
        const int n = (i - first) * kNoiseBlock;
        if (n == 0) continue;
        const int64_t id = int64_t{t} * kTile + int64_t{first} * kNoiseBlock;
        counts[chunk] += tiles().count(law.source.span(id, n, buffer), n, logit).greater;
      }
    }
  });
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// The largest float below one that is not -inf.
float below(float value) { return std::nextafter(value, -kInf); }

int64_t rank_of(const Team& team, const RowLaw& law, int64_t id) {
  const float logit = law.source.logit(id);
  if (law.params.greedy) return id == law.argmax ? 1 : 2;
  const float least = std::max(law.threshold, -FLT_MAX);
  return 1 + count_larger(team, law, law.keeps(id, logit) ? logit : below(least));
}

// The best of a list stay, and whatever comes later must be larger than the last of them.
float keep_best(std::vector<Entrant>& list, int64_t top) {
  std::nth_element(list.begin(), list.begin() + (top - 1), list.end(), kBeats);
  list.resize(top);
  return list[top - 1].score;
}

// The first `top` kept ids by falling logit, then by id.
std::vector<Entrant> largest(const RowLaw& law, int64_t top) {
  if (top == 0) return {};
  if (law.params.greedy) return {{law.max, law.argmax}};
  const float least = std::max({law.threshold, bound_of(law, top), -FLT_MAX});
  float beaten = below(least);
  const size_t most = 4 * top + kNoiseBlock;
  std::vector<Entrant> list;
  alignas(64) float buffer[kNoiseBlock];
  for (const int i : blocks_from(law, least)) {
    if (!(law.block_max[i] > beaten)) continue;
    const int64_t first = int64_t{i} * kNoiseBlock;
    const float* block = law.source.span(first, kNoiseBlock, buffer);
    for (int64_t j = 0; j < kNoiseBlock; ++j) {
      if (block[j] > beaten) list.push_back({block[j], first + j});
    }
    if (list.size() > most) beaten = std::max(beaten, keep_best(list, top));
  }
  if (list.size() > static_cast<size_t>(top)) keep_best(list, top);
  std::sort(list.begin(), list.end(), kBeats);
  return list;
}

}  // namespace

void Listing::clear(int64_t place, float missing) const {
  ranks[place] = 0;
  for (int64_t at = place * top; at < (place + 1) * top; ++at) {
    store_id(ids, wide, at, -1);
    logprobs[at] = missing;
  }
}

void Listing::write(const Team& team, int64_t place, const RowLaw& law, int64_t id) const {
  clear(place, -kInf);
  if (law.bad) return;
  if (id >= 0) ranks[place] = static_cast<int32_t>(rank_of(team, law, id));
  int64_t at = place * top;
  for (const Entrant& one : largest(law, top)) {
    store_id(ids, wide, at, one.id);
    logprobs[at++] = law.logprob_of(one.score);
  }
}

}  // namespace specdec::cpu
