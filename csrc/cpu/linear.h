// A matrix times a few vectors: the tokens of one decoding step. BLAS libraries are made for many.
#pragma once
#include <cstdint>

namespace specdec::cpu {

constexpr int kOutputBlock = 4;  // weight rows worked on at once
constexpr int kInputUnit = 16;   // inputs are a multiple of it

// y[row, output] = bias[output] + sum over i of x[row, i] * weight[output, i], all dense.
struct LinearRows {
  const float* x;
  const void* weight;  // of LogitType
  const float* bias;   // or null
  float* y;
  int64_t rows, inputs, outputs;
};

// Blocks of kOutputBlock outputs, from first to end - 1. The order of a sum does not depend on who
// computes it, and of the number of rows only on whether it is below kManyRows.
using Linear = void (*)(const LinearRows& l, int64_t first, int64_t end);

}  // namespace specdec::cpu
