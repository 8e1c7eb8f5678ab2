// The register tile that all matrix products are made of: 6 rows times some vectors of columns, accumulated in fp32.
//
// A lane of the left factor is broadcast, the right factor is packed so that one load gives the same lane of all columns.
// With AVX-512 BF16 a lane holds two neighbouring bf16 (`Pairs`), else one fp32 (`Floats`).
#pragma once
#include "simd.h"

namespace {

struct Floats {
  typedef float Lane;
  typedef vf Vector;
  static constexpr int kPerLane = 1;
  static FT_INLINE vf load_lanes(const Lane* address) { return load(address); }
  static FT_INLINE vf broadcast(const Lane* address) { return set1(*address); }
  static FT_INLINE vf multiply_add(vf a, vf b, vf sum) { return fma(a, b, sum); }
  static FT_INLINE vf power_of_two(vf x) { return exp2(x); }
};

#if defined(FT_BF16_DOT)
struct Pairs {
  typedef uint32_t Lane;
  typedef vu Vector;
  static constexpr int kPerLane = 2;
  static FT_INLINE vu load_lanes(const Lane* address) { return load_as<vu>(address); }
  static FT_INLINE vu broadcast(const Lane* address) { return set1u(load_as<uint32_t>(address)); }
  static FT_INLINE vf multiply_add(vu a, vu b, vf sum) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  // To 3e-6, a thousandth of what rounding to bf16 loses; masked scores give 0. Two thirds of the work of exp2().
  static FT_INLINE vf power_of_two(vf x) {
    const vf part = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf y = fma(part, set1(0.013520603068172932f), set1(0.05203742906451225f));
    y = fma(part, y, set1(0.2414274960756302f));
    y = fma(part, y, set1(0.6930066347122192f));
    y = fma(part, y, set1(1.0000025033950806f));
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)x);
  }
};
#endif

// sums[r][v] += sum over steps of left[r * row_stride + step * step_stride] * right[step * right_stride + v]
template <class Math, int kRows, int kVectors>
FT_INLINE void multiply_tile(const typename Math::Lane* left, int64_t row_stride, int64_t step_stride,
                             const typename Math::Lane* right, int64_t right_stride, int64_t num_steps,
                             vf (&sums)[kRows][kVectors]) {
#pragma GCC unroll 2
  for (int64_t step = 0; step < num_steps; ++step) {
    typename Math::Vector columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) columns[v] = Math::load_lanes(right + step * right_stride + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const typename Math::Vector row = Math::broadcast(left + r * row_stride + step * step_stride);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Math::multiply_add(row, columns[v], sums[r][v]);
    }
  }
}

}  // namespace
