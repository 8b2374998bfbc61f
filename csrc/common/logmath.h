// The logarithms of the race, written out once so that every backend gets the same bits.
//   log(2^e (1 + f)) = f - f^2 / 2 + f^3 P(f) + e ln 2,   f in [sqrt(1/2) - 1, sqrt(2) - 1]
// Every operation is rounded to float32 in exactly this order; none is fused.
#pragma once
#include "hd.h"

namespace specdec {

constexpr uint32_t kOneBits = 0x3f800000u;       // 1.0f
constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;  // sqrt(1/2)

SPECDEC_HD float log_core(float f, float e) {
  float p = 0.06746640801429749f;
  p = add_rn(mul_rn(p, f), -0.11675652116537094f);
  p = add_rn(mul_rn(p, f), 0.11888162046670914f);
  p = add_rn(mul_rn(p, f), -0.1240558922290802f);
  p = add_rn(mul_rn(p, f), 0.14219552278518677f);
  p = add_rn(mul_rn(p, f), -0.1666799634695053f);
  p = add_rn(mul_rn(p, f), 0.2000211924314499f);
  p = add_rn(mul_rn(p, f), -0.25000008940696716f);
  p = add_rn(mul_rn(p, f), 0.3333331346511841f);
  const float z = mul_rn(f, f);
  float r = mul_rn(mul_rn(f, z), p);
  r = add_rn(r, mul_rn(e, -2.12194440e-4f));
  r = sub_rn(r, mul_rn(0.5f, z));
  r = add_rn(r, f);
  return add_rn(r, mul_rn(e, 0.693359375f));
}

// x = 2^e m with m in [sqrt(1/2), sqrt(2)), for a positive normal x.
struct Mantissa {
  float m;
  int32_t e;
};

SPECDEC_HD Mantissa split_mantissa(float x) {
  const uint32_t bits = float_bits(x) + (kOneBits - kSqrtHalfBits);
  return {bits_float((bits & 0x007fffffu) + kSqrtHalfBits), static_cast<int32_t>(bits >> 23) - 127};
}

// log(x) of a positive normal x.
SPECDEC_HD float log_normal(float x) {
  const Mantissa s = split_mantissa(x);
  return log_core(sub_rn(s.m, 1.f), static_cast<float>(s.e));
}

// x = (word + 1/2) 2^-32 in float32, at most 1 - 2^-24.
SPECDEC_HD float unit_interval(uint32_t word) {
  const float x = mul_rn(add_rn(static_cast<float>(word), 0.5f), 0x1p-32f);
  return x < 1.f - 0x1p-24f ? x : 1.f - 0x1p-24f;
}

// E = -log1p(-x), in [1.16e-10, 16.64]: exact where x is small, which is where races are won.
SPECDEC_HD float exponential(uint32_t word) {
  const float x = unit_interval(word);
  const Mantissa s = split_mantissa(sub_rn(1.f, x));
  const float f = s.e == 0 ? -x : sub_rn(s.m, 1.f);
  return -log_core(f, static_cast<float>(s.e));
}

}  // namespace specdec
