// Vectors of floats of the widest kind that the build's instruction set has, by the compiler's vector extensions.
//
// Everything here is in an unnamed namespace: several builds are linked into one library, and a function shared between
// them would carry the instructions of one into another.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FT_AVX512 1
#define FT_LANES 16
#define FT_TILE_VECTORS 4
#elif defined(__AVX2__) && defined(__FMA__)
#define FT_AVX2 1
#define FT_LANES 8
#define FT_TILE_VECTORS 2
#else
#define FT_LANES 4
#define FT_TILE_VECTORS 2
#endif

#if defined(FT_AVX512) && defined(__AVX512BF16__)
#define FT_BF16_DOT 1
#endif
#if defined(FT_AVX512) && defined(__AVX512VNNI__)
#define FT_VNNI 1
#endif

#define FT_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = FT_LANES;
// Rows and vectors of the register tile of all matrix products: 6 x 4 accumulators leave room for operands in 32
// registers, 6 x 2 in 16.
constexpr int kTileRows = 6;
constexpr int kTileVectors = FT_TILE_VECTORS;

typedef float vf __attribute__((vector_size(4 * FT_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * FT_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * FT_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * FT_LANES)));

typedef uint16_t bf16;

template <class T>
FT_INLINE T load_as(const void* address) {
  T value;
  memcpy(&value, address, sizeof(T));
  return value;
}

FT_INLINE vf set1(float value) { return vf{} + value; }
FT_INLINE vu set1u(uint32_t value) { return vu{} + value; }

FT_INLINE vf load(const float* address) { return load_as<vf>(address); }
FT_INLINE void store(float* address, vf value) { memcpy(address, &value, sizeof(value)); }

FT_INLINE float to_float(float value) { return value; }
FT_INLINE float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

FT_INLINE vf load(const bf16* address) {
#if defined(FT_AVX512)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)address)), 16);
#elif defined(FT_AVX2)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)address)), 16);
#else
  return (vf)(__builtin_convertvector(load_as<vh>(address), vu) << 16);
#endif
}

// Rounds to nearest, ties to even; not a number stays that.
FT_INLINE vh to_bf16(vf value) {
#if defined(FT_BF16_DOT)
  return (vh)_mm512_cvtneps_pbh((__m512)value);
#else
  const vu bits = (vu)value;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu quiet = (bits >> 16) | 0x40u;
  const vu is_nan = (vu)(value != value);
  const vu chosen = (rounded & ~is_nan) | (quiet & is_nan);
#if defined(FT_AVX512)
  return (vh)_mm512_cvtepi32_epi16((__m512i)chosen);
#else
  return __builtin_convertvector(chosen, vh);
#endif
#endif
}

FT_INLINE void store(bf16* address, vf value) {
  const vh rounded = to_bf16(value);
  memcpy(address, &rounded, sizeof(rounded));
}

FT_INLINE void store_one(float* address, float value) { *address = value; }
FT_INLINE void store_one(bf16* address, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  *address = value != value ? bf16((bits >> 16) | 0x40u) : bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

FT_INLINE vf fma(vf a, vf b, vf c) {
#if defined(FT_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(FT_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

FT_INLINE vf max(vf a, vf b) {
#if defined(FT_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(FT_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

FT_INLINE vf select(vi condition, vf yes, vf no) {
  return (vf)(((vi)yes & condition) | ((vi)no & ~condition));
}

FT_INLINE float sum_of(vf value) {
#if defined(FT_AVX512)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[kLanes], total = 0;
  store(lanes, value);
  for (int step = kLanes / 2; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
  total = lanes[0];
  return total;
#endif
}

FT_INLINE float max_of(vf value) {
#if defined(FT_AVX512)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float lanes[kLanes];
  store(lanes, value);
  float best = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) best = lanes[lane] > best ? lanes[lane] : best;
  return best;
#endif
}

FT_INLINE vi lane_index() {
  vi index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane;
  return index;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNegInfinity = -__builtin_inff();

// Stands for minus infinity among scores: far below every score, and differences with it stay finite.
constexpr float kMasked = -1e30f;

// 2^x to 8e-8 of its value for x < 128, 0 far below; not a number stays that, minus infinity becomes it.
FT_INLINE vf exp2(vf x) {
#if defined(FT_AVX512)
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf part = x - (vf)whole;
#else
  const vf clamped = max(x, set1(-127.0f));
  const vf shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the lowest bits hold the rounded x
  const vf part = clamped - (shifted - 12582912.0f);
#endif
  vf y = fma(part, set1(0.0013266970636323094f), set1(0.009675459936261177f));
  y = fma(part, y, set1(0.05550742521882057f));
  y = fma(part, y, set1(0.24022121727466583f));
  y = fma(part, y, set1(0.6931469440460205f));
  y = fma(part, y, set1(1.0f));
#if defined(FT_AVX512)
  return (vf)_mm512_scalef_ps((__m512)y, whole);
#else
  const vf scaled = (vf)((vi)y + ((vi)shifted << 23));
  return select(x != x, x, select(x < set1(-126.0f), vf{}, scaled));
#endif
}

FT_INLINE float exp2_one(float x) { return exp2(set1(x))[0]; }

}  // namespace
