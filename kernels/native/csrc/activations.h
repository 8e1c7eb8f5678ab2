// What gated products apply to their gates.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

// silu(x) = x / (1 + exp(-x)); gelu by tanh is the same with another argument, because 1 + tanh(z) = 2 / (1 + exp(-2 z)).
FT_INLINE vf activate(vf x, int32_t activation) {
  constexpr float kSqrt2OverPi = 0.7978845608028654f;
  const vf z = activation == FT_GELU_TANH ? (2.0f * kSqrt2OverPi) * fma(x * x * x, set1(0.044715f), x) : x;
  const vf power = z * -kLog2E;
  // 2^126 is as good as infinity here: the quotient is a rounded 0
  return x / (1.0f + exp2(power > 126.0f ? set1(126.0f) : power));
}

}  // namespace
