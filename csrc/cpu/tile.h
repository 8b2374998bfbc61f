// Row work is done in fixed tiles of a float row in L1. One table of tile functions per instruction
// set (tile_kernels.h compiled once for each); everything else in this folder is plain C++ on top.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../common/edit_params.h"
#include "../common/logmath.h"
#include "../common/params.h"
#include "attention.h"
#include "linear.h"
#include "race.h"
#include "replay.h"

namespace specdec::cpu {

// Ids per tile, aligned to id 0. A row sum is the sum of its tiles' sums in index order, so it does
// not depend on who computes which tile. One thread with 48 KB of L1, 1024 / 2048 / 4096 ids:
// verify_chain, batch 16, vocabulary 128256, float32 7.6 / 7.5 / 7.3 ms, bfloat16 6.3 / 5.2 / 5.6
// ms; verify_tree, match, batch 8, float32 2.6 / 2.4 / 2.6 ms.
constexpr int kTile = 2048;
constexpr int kPad = 64;  // tiles are padded with -inf to a multiple of this
constexpr int kTileBlocks =
    kTile / kNoiseBlock;  // blocks of a tile, each with a maximum of its own

// A tile in memory as it is, or a buffer of floats; and what will be read soon.
struct RawTile {
  const void *logits, *ahead;
  LogitType type;
  int index() const { return static_cast<int>(type); }
};

inline RawTile float_tile(const float* buffer) { return {buffer, buffer, LogitType::kFloat32}; }

// How many ids before its turn the memory of a row is asked for: the machine's own prefetcher
// follows too closely. One core of an EPYC (family 26), AVX-512, 128256 ids, us a row with its
// maxima without / 2048 / 3072 / 4096 / 6144 / 8192: bfloat16 from DRAM 8.7 / 7.4 / 6.7 / 6.4 / 6.3
// / 7.0, from L3 6.1 / 5.0 / 4.6 / 4.1 / 3.9 / 3.8; float32 from DRAM 15.8 / 14.4 / 14.0 / 14.0
// / 14.7 / 14.8, from L3 9.5 / 8.4 / 8.3 / 7.4 / 7.8 / 7.9.
constexpr int kAhead = 4096;

// Inlined, since g++ 12 takes away a call that does no more than ask for memory.
[[gnu::always_inline]] inline void prefetch_lines(const void* from, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i);
}

struct TileMax {
  float max;  // means nothing where one is NaN
  bool nan;
};

// weight(l) = l >= threshold ? scale * exp((l - max) * inv_t - shift) : 0.
// A law after its filters: scale = 1 / Z, shift = 0; from draft_stats: max = 0, shift = logsumexp.
struct Weighting {
  float max, inv_t, shift, scale;
  float threshold;  // at least -FLT_MAX, so that -inf never has weight, not even with inv_t = 0
};

struct ExpSums {
  float sum;      // sum of weights, scale 1
  float sum_log;  // sum of weight * log(weight)
};

// Weights exp((l - center) * inv_t) about a center that is chosen before the row is read, so that
// one pass sums them: they may grow to 2^kExpRoom, and a tile beyond that is summed by itself.
constexpr double kExpRoom = 100;

struct ExpShift {
  float center, inv_t;
  float k;                // inv_t * log2(e)
  float bias;             // center * k, rounded to a multiple of 1/8
  float lowest, highest;  // logits: below lowest all weigh 2^-kExpRoom
};

struct SumMax {
  float sum, max;
};

// Tiles whose edits are done at once, behind the pass over them: a tile alone lists little more
// than a vector. AVX-512 picks the maxima of so many blocks from its registers. `greedy`, batch 16,
// 1000 tokens, 128256 ids in bfloat16, one core of an EPYC (family 26): edits add 0.22 ms with 1
// tile, 0.19 with 2; with 16 and maxima from memory 0.18, but 0.07 more where rows come from DRAM,
// which then waits for the edits.
constexpr int kEditTiles = 2;  // `edit_pending` and `BlockMaxima` know no other number

// The entries that edits list of kEditTiles consecutive whole tiles, or of fewer.
struct ListedTiles {
  const int64_t* bits;                           // [tiles * kTileBlocks]
  const int32_t* start;                          // [tiles * kTileBlocks + 1]
  int64_t first;                                 // column of the first tile
  int tiles, count;                              // how many tiles and entries
  const float *bias, *repetition, *minus, *ids;  // of each entry
};

// The list of what a request edits, made of bits and counts: whole tiles of them.
struct EditList {
  // Entries of a table of counts that are ids of the row [first, first + vocab), as its columns.
  // The results have room for as many as the table.
  int (*take)(const CountTables& tables, int64_t slot, int64_t first, int64_t vocab,
              int32_t* columns, int32_t* counts);
  // How many bits there are before each of n words, and in all of them.
  void (*number)(const int64_t* bits, int n, int32_t* start);
  // Columns and their counts, at their places in the list.
  void (*place)(const int64_t* bits, const int32_t* start, const int32_t* columns,
                const int32_t* counts, int n, int32_t* out, float* ids);
};

struct Bracketed {
  float above, inside;  // sums of weights
  int count;            // inside
};

struct Counts {
  int greater, equal;
};

// n is the padded length of a tile except in `load`. `tile` pointers need no alignment.
struct TileTable {
  // Converts n logits (indexed by LogitType), sets ids without their bit to -inf, pads with -inf.
  void (*load[3])(const void* logits, int n, const int32_t* allowed, float* tile);
  // Of n (a multiple of kPad) logits of LogitType in memory, the largest, and the largest of each
  // block if `blocks` is given. What lies ahead is asked for between the blocks: at once it is no
  // gain.
  TileMax (*digest[3])(const RawTile& tile, int n, float* blocks);
  ExpSums (*exp_sums)(const float* tile, int n, const Weighting& w);
  // The same and the sum of weights, not filtered. A NaN makes the sum NaN; where the maximum
  // exceeds shift.highest, the sum means nothing.
  SumMax (*exp_sum[3])(const RawTile& tile, int n, const ExpShift& shift, float* blocks);
  // The logits of the entries before and after their edits, padded with -inf to a multiple of kPad,
  // given the tiles and the maxima of their blocks, which follow them, as those of the tiles do. No
  // NaN is in the tiles; false where an edit makes one.
  bool (*edit[3])(const void* logits, const ListedTiles& edits, float* before, float* after,
                  float* blocks, float* maxima);
  EditList edit_list;
  // Copies low <= l < high to `out`, which has room for n + kPad, and sums the weights of these and
  // of l >= high; none may exceed w.max.
  Bracketed (*bracket)(const float* tile, int n, const Weighting& w, float low, float high,
                       float* out);
  Counts (*count)(const float* tile, int n, float logit);
  int (*find)(const float* tile, int n, float value);                          // first index, or n
  int (*gather)(const float* tile, int n, float low, float high, float* out);  // low <= l < high
  // out = (a p - b q)+ and out = min(p, q); a null tile has weight 0 everywhere.
  using Residual = void(const float* p, const float* q, int n, const Weighting& pw,
                        const Weighting& qw, float a, float b, float* out);
  Residual *residual, *overlap;
  SumMax (*sum_max)(const float* tile, int n);
  // The blocks of a tile that may win the race, as bits, given the largest logit or weight of each;
  // and the words of their minima.
  uint32_t (*race_logits)(const float* blocks, int64_t first_id, const Race& race, uint32_t* words);
  uint32_t (*race_weights)(const float* blocks, int64_t first_id, const Race& race,
                           uint32_t* words);
  Attention attention[kKeyTypes];
  Linear linear[3];  // by LogitType of the weight
  Replay replay[2];  // by LogitType of the state
};

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

const TileTable& portable_tiles();
#if defined(__x86_64__)
const TileTable& avx2_tiles();
const TileTable& avx512_tiles();
const TileTable& amx_tiles();
#endif

// The table in use: the best of this machine unless set_cpu_isa chose another.
const TileTable& tiles();

}  // namespace specdec::cpu
