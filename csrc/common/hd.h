// Host and device spelling of one source: the two macros and two operations that differ.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SPECDEC_HD __host__ __device__ __forceinline__
#else
#define SPECDEC_HD inline
#endif

// A loop that a GPU does not unroll: code that runs once waits for its instructions, a
// hundred cycles for each 128 bytes of them (H200), and not for its arithmetic.
#if defined(__CUDA_ARCH__)
#define SPECDEC_ROLLED _Pragma("unroll 1")
#else
#define SPECDEC_ROLLED
#endif

namespace specdec {

// Products and sums that no compiler may fuse: every backend must round at the same places.
// Host files are built with -ffp-contract=off; device code asks for the rounding by name.
SPECDEC_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

SPECDEC_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

SPECDEC_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

SPECDEC_HD float sub_rn(float a, float b) { return add_rn(a, -b); }

SPECDEC_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

SPECDEC_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// Both zeros have the same order.
SPECDEC_HD uint32_t ordered_bits(float x) {
  const uint32_t bits = float_bits(add_rn(x, 0.f));
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

SPECDEC_HD float from_ordered_bits(uint32_t ordered) {
  return bits_float(ordered ^ ((ordered >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

}  // namespace specdec
