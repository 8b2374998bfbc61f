// The state of one head over the tokens of a step: read once, written once.
#pragma once
#include <cstdint>

namespace specdec::cpu {

constexpr int kStateColumns = 64;  // most columns of a block; 128 rows of them are 32 KB of L1

struct ReplayHead {
  void* state;  // [d_k, d_v] of LogitType: float32 or bfloat16
  int64_t d_k, d_v;
  int64_t tokens;       // at least one
  const float* keys;    // [tokens, d_k]
  const float* decay;   // [tokens, d_k]: factors
  const float* values;  // [tokens, pitch]: d_v numbers, then zeros up to a whole block
  const float* beta;    // [tokens], or null: no delta rule
  int64_t pitch;
  float* block;  // [d_k, kStateColumns]: scratch
};

using Replay = void (*)(const ReplayHead& h);

}  // namespace specdec::cpu
