// The numbers that Python and the kernels share. specdec_kernels/_codes.py has the same ones;
// tests/test_codes.py compares them.
#pragma once
#include <cstdint>

namespace specdec {

// Bits of a request's status.
constexpr int32_t kBadTarget = 1;
constexpr int32_t kBadDraft = 2;
constexpr int32_t kBadId = 4;
constexpr int32_t kEmptyResidual = 8;
constexpr int32_t kZeroDraft = 16;
constexpr int32_t kBadLayout = 32;
constexpr int32_t kBadSampling = 64;

// Purposes of random numbers: independent streams of one (seed, position, step).
constexpr int64_t kPurposeTarget = 0;
constexpr int64_t kPurposeCoin = 1;
constexpr int64_t kPurposeResidual = 2;
constexpr int64_t kPurposeDraft = 3;

enum class Rule : int64_t {
  kRatio = 0,
  kBlock = 1,
  kMatch = 2,
  kGreedy = 3,
  kTypical = 4,
  kTopM = 5,
  kDistance = 6
};

enum class TreeRule : int64_t {
  kMatch = 0,
  kGreedy = 1,
  kTypical = 2,
  kRecursive = 3,
  kGreedyMultiDraft = 4,
  kTargetOnly = 5,
  kTraversal = 6
};

enum class LogprobsMode : int64_t { kNone = 0, kProcessed = 1, kRaw = 2 };

enum class MaskFormat : int64_t {
  kBool = 0,
  kAdditive = 1,
  kFlat = 2,
  kFlatPacked = 3,
  kInt32 = 4,
  kInt64 = 5,
  kXqa = 6,
  kSglangPacked = 7
};

}  // namespace specdec
