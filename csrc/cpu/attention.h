// Attention of rows (the nodes of a tree times the query heads of one key head) over blocks of
// keys. Many rows are vector lanes: scores, weights and outputs lie [key or dim, row], so softmax
// needs no sum across lanes, and each key is converted once for all rows. A few rows would leave
// most lanes empty: there keys are lanes of scores, and dims of values.
#pragma once
#include <cstdint>

namespace specdec::cpu {

constexpr int kKeyBlock = 64;
constexpr int kMaxValueDim = 512;
constexpr int kPanel = 64;  // rows worked on at once; the last panel has a multiple of kRowUnit
constexpr int kRowUnit = 16;
constexpr int kFewUnit = 4;   // what a few rows are padded to
constexpr int kDimUnit = 16;  // what values' dims are padded to in scratch
constexpr int kSumUnit = 32;  // what keys' dims are padded to: a tile register sums over so many

// Of keys and values: the types of LogitType, then 8 bits.
enum class KeyType : int { kFloat32, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2 };
constexpr int kKeyTypes = 5;

// Keys and values of a block. A null row is not read and nobody attends it; rows behind `count` are
// null.
struct AttentionKeys {
  const void* key[kKeyBlock];
  const void* value[kKeyBlock];
  int count;
  int first_node;             // node of key 0; -1: the keys are cached ones
  int64_t reach;              // of cached key 0: depths <= reach + i see key i
  const AttentionKeys* next;  // the block that is attended next, or null
};

// The rows of one request and key head. Panel r of many rows starts at r * kPanel rows: [dim, row
// of it]. Queries and outputs of a few rows lie [row, dim], their scores [row, kKeyBlock].
struct AttentionRows {
  int64_t rows;  // padded to kRowUnit, a few to kFewUnit
  int dim, value_dim;
  float* query;  // zeros behind dim; of many rows as `prepare` leaves them
  float scale;
  const int32_t* depth;  // [rows]
  const int32_t* words;  // [ceil(nodes / 32), rows]: bit j: the row attends node j
  const int32_t* node_depth;
  int32_t deepest;                // of any row
  int32_t window;                 // 0 is off
  float *keys, *values, *scores;  // scratch: [kKeyBlock, dim], the same, [kKeyBlock, kPanel]
  // The result so far: sum of exp(score - max) value, the sum of weights, and a maximum that may
  // lag behind.
  float *output, *sum, *max;  // panels [value_dim padded, row] or [row, ..], [rows], [rows]
};

struct Attention {
  void (*prepare)(const AttentionRows& rows);  // once for new queries of many rows
  // Adds a block of keys to the result.
  void (*attend)(const AttentionKeys& keys, const AttentionRows& rows);
  void (*attend_few)(const AttentionKeys& keys, const AttentionRows& rows);
  int most_few;  // rows that attend_few takes
};

inline int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace specdec::cpu
