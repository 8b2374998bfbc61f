// A row of logits as a law: the row itself plus a handful of numbers, never a probability row.
#pragma once
#include <cstdint>
#include <vector>

#include "team.h"
#include "tile.h"

namespace specdec::cpu {

// The logits of one row as float tiles.
struct RowSource {
  const char* data;
  LogitType type;
  int64_t vocab;
  const int32_t* allowed;  // bits, or null
  RowEdits edits;          // of this row

  int tile_count() const { return static_cast<int>((vocab + kTile - 1) / kTile); }
  int64_t padded() const { return (vocab + kPad - 1) / kPad * kPad; }
  int length(int t) const {  // padded
    return static_cast<int>(std::min<int64_t>(kTile, padded() - int64_t{t} * kTile));
  }
  // n logits from `first`, both multiples of kPad, padded with -inf: the row's own memory where
  // that will do, else `buffer`, edited and masked.
  const float* span(int64_t first, int n, float* buffer) const;
  const float* tile(int t, float* buffer) const { return span(int64_t{t} * kTile, kTile, buffer); }
  // The same without conversion where memory holds the whole tile as it is.
  RawTile raw_tile(int t, float* buffer) const;
  // The tile in memory, without edits; null where it is masked or not whole.
  RawTile own_tile(int t) const;
  void prefetch(int64_t first, int n) const;
  bool is_edited(int64_t first, int n) const;
  float logit(int64_t id) const;      // -inf where not allowed
  float own_logit(int64_t id) const;  // as it is in memory
  bool is_plain() const { return !allowed && !edits.bits; }

 private:
  const void* whole(int64_t first, int n) const;  // null where a copy is needed
  void edit(int64_t first, int n, float* logits) const;
  const void* ahead(int t) const;
  bool allows(int64_t id) const {
    return !allowed || ((static_cast<uint32_t>(allowed[id >> 5]) >> (id & 31)) & 1) != 0;
  }
};

RowSource row_source(const Logits& logits, int64_t b, int64_t i, const int32_t* allowed = nullptr,
                     const RowEdits& edits = {});

// Sampling parameters of one request, with the rules for bad values applied.
struct RowParams {
  float temperature = 1.f, inv_t = 1.f;  // 1 where greedy
  int64_t top_k = 0;                     // 0 is off
  float top_p = 1.f, min_p = 0.f;        // 1 and 0 are off
  bool greedy = false, bad = false;

  bool has_k(int64_t vocab) const { return top_k > 0 && top_k < vocab; }
  bool has_p() const { return top_p < 1.f; }
  bool has_m() const { return min_p > 0.f; }
  bool filtered(int64_t vocab) const { return has_k(vocab) || has_p() || has_m(); }
};

RowParams row_params(const Sampling& s, int64_t b);

struct Candidate {
  int64_t id;
  float logit;
};

// What is known of a row after `examine`.
struct RowLaw {
  RowSource source;
  RowParams params;
  bool bad = false;         // NaN, or no finite maximum: nothing below is valid
  float max = 0.f;          // raw logit
  float threshold = -kInf;  // raw logit
  double mass = 1.0;        // sum over kept of exp((l - max) * inv_t); 1 where greedy
  double mass_log = 0.0;    // sum of weight * log(weight), if asked for
  int64_t argmax = 0;       // lowest id of the maximum
  // The digest of the row: the largest logit of each tile, and of each block of 64 ids, padded with
  // -inf to whole tiles. Filters and races look only into blocks that can matter. A greedy row has
  // no blocks unless it is edited.
  std::vector<float> tile_max, block_max;

  std::vector<Candidate> kept;  // read_kept: columns that are no padding, by id

  const float* tile_blocks(int t) const { return block_max.data() + int64_t{t} * kTileBlocks; }
  bool keeps(int64_t id, float logit) const {
    return params.greedy ? id == argmax : logit >= threshold && logit > -kInf;
  }
  double prob(int64_t id) const;
  float logprob(int64_t id) const;
  float logprob_of(float logit) const;  // of a kept id, given its logit
  float logsumexp() const;
  double entropy() const;
  // Kept ids weigh scale * exp((l - max) * inv_t); a greedy row is the caller's business.
  Weighting weighting(double scale) const;
};

// What to find out about a row beyond its maximum.
struct Examine {
  RowLaw* law;  // source and params set
  bool mass = false, entropy = false;
  // The same row in memory as another law, with its mass: found in the same pass over it.
  RowLaw* twin = nullptr;
};

// One pass over one or two rows (more where filters need it), split over the team.
void examine(const Team& team, const Examine* rows, int count);

// f(chunk, t, tile, n) for the tiles whose maximum is at least `level`.
template <class F>
void for_tiles(const Team& team, const RowLaw& law, float level, const F& f) {
  team.run(law.source.tile_count(), [&](int chunk, int64_t begin, int64_t end) {
    alignas(64) float buffer[kTile];
    for (auto t = static_cast<int>(begin); t < end; ++t) {
      if (!(law.tile_max[t] >= level) || law.tile_max[t] == -kInf) continue;
      f(chunk, t, law.source.tile(t, buffer), law.source.length(t));
    }
  });
}

}  // namespace specdec::cpu
