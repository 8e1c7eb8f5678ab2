// y = x W^T + b with int8 weights, one scale per output channel, and inputs quantized as they come, by groups of a row.
//
//   x[t, i]  ~  (a[t, i] - 128) * x_scale[t, g]      a unsigned, because the instruction multiplies unsigned with signed
//   w[o, i]  ~  q[o, i] * w_scale[o]
//   y[t, o]  =  w_scale[o] * sum_g x_scale[t, g] * (sum_i a q  -  128 * sum_i q[o, i])      i in group g
//
// Integers within a group, which is exact, fp32 between them. One scale for a whole row would be set by the few features
// that are tens of times as large as all others in trained models, and leave the others a few steps of the grid.
//
// A lane holds four neighbouring int8 of one channel; without VNNI they are multiplied as 16-bit numbers, just as exact.
#pragma once
#include "abi.h"
#include "activations.h"
#include "parallel.h"
#include "tiles.h"

namespace {

constexpr int64_t kInt8Panel = kTileVectors * kLanes;
constexpr int64_t kInt8RowsPerItem = 96;
constexpr int32_t kZeroPoint = 128;
// Features that share a scale, and the steps of the product that they take.
constexpr int64_t kGroup = 64;
constexpr int64_t kGroupSteps = kGroup / 4;

FT_INLINE vi multiply_add_int8(uint32_t row, vu column, vi sum) {
#if defined(FT_VNNI)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)row), (__m512i)column);
#else
  const uint32_t even = row & 0x00ff00ffu, odd = row >> 8 & 0x00ff00ffu;
#if defined(FT_AVX512)
  const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)column, 8), 8);
  const __m512i high = _mm512_srai_epi16((__m512i)column, 8);
  const __m512i products = _mm512_add_epi32(_mm512_madd_epi16(_mm512_set1_epi32((int)even), low),
                                            _mm512_madd_epi16(_mm512_set1_epi32((int)odd), high));
  return sum + (vi)products;
#elif defined(FT_AVX2)
  const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)column, 8), 8);
  const __m256i high = _mm256_srai_epi16((__m256i)column, 8);
  const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(_mm256_set1_epi32((int)even), low),
                                            _mm256_madd_epi16(_mm256_set1_epi32((int)odd), high));
  return sum + (vi)products;
#else
  const vi lanes = (vi)column;
  sum += (int32_t)(even & 0xffu) * ((lanes << 24) >> 24);
  sum += (int32_t)(odd & 0xffu) * ((lanes << 16) >> 24);
  sum += (int32_t)(even >> 16) * ((lanes << 8) >> 24);
  return sum + (int32_t)(odd >> 16) * (lanes >> 24);
#endif
#endif
}

template <class T>
int32_t pack_int8_rows(const FtPack& args) {
  const T* weight = static_cast<const T*>(args.weight);
  const int64_t steps = (args.in_features + 3) / 4;
  const int64_t num_groups = (steps + kGroupSteps - 1) / kGroupSteps;
  auto body = [&](int64_t panel) {
    int8_t* lanes = static_cast<int8_t*>(args.packed) + panel * steps * kInt8Panel * 4;
    int32_t* sums = args.sums + panel * num_groups * kInt8Panel;
    for (int64_t column = 0; column < kInt8Panel; ++column) {
      const int64_t channel = panel * kInt8Panel + column;
      const bool is_inside = channel < args.out_features;
      const T* row = weight + channel * args.in_features;
      float largest = 0.0f;
      if (is_inside)
        for (int64_t i = 0; i < args.in_features; ++i) {
          const float size = __builtin_fabsf(to_float(row[i]));
          largest = size > largest ? size : largest;
        }
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      args.scales[channel] = largest / 127.0f;
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t end = (group + 1) * kGroup < 4 * steps ? (group + 1) * kGroup : 4 * steps;
        int32_t sum = 0;
        for (int64_t i = group * kGroup; i < end; ++i) {
          const float value = is_inside && i < args.in_features ? to_float(row[i]) * inverse : 0.0f;
          const int32_t quantized = static_cast<int32_t>(__builtin_rintf(value));
          sum += quantized;
          lanes[(i / 4 * kInt8Panel + column) * 4 + i % 4] = static_cast<int8_t>(quantized);
        }
        sums[group * kInt8Panel + column] = -kZeroPoint * sum;
      }
    }
  };
  parallel_for((args.out_features + kInt8Panel - 1) / kInt8Panel, args.num_threads, body);
  return FT_OK;
}

int32_t pack_int8(const FtPack* args) {
  return args->dtype == FT_BF16 ? pack_int8_rows<bf16>(*args) : pack_int8_rows<float>(*args);
}

// One group as unsigned numbers around 128; returns its scale. What is not a number makes the scale such, and so the row.
template <class T>
FT_INLINE float quantize_group(const T* x, int64_t count, uint8_t* out, int64_t padded_count) {
  vf sizes = {}, spoiled = {};
  int64_t i = 0;
  float largest = 0.0f, tail = 0.0f;
  for (; i + kLanes <= count; i += kLanes) {
    const vf value = load(x + i);
    sizes = max(sizes, max(value, -value));
    spoiled += value * 0.0f;
  }
  for (; i < count; ++i) {
    const float value = to_float(x[i]), size = __builtin_fabsf(value);
    largest = size > largest ? size : largest;
    tail += value * 0.0f;
  }
  const float vector_largest = max_of(sizes);
  largest = vector_largest > largest ? vector_largest : largest;
  tail += sum_of(spoiled);
  if (tail != 0.0f) largest = 0.0f;
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  i = 0;
#if defined(FT_AVX512)
  if (tail == 0.0f)
    for (; i + kLanes <= count; i += kLanes) {
      const __m512i rounded = _mm512_cvtps_epi32((__m512)(load(x + i) * inverse));
      const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(rounded, _mm512_set1_epi32(kZeroPoint)));
      _mm_storeu_si128((__m128i*)(out + i), bytes);
    }
#endif
  for (; i < count; ++i) {
    const float value = tail == 0.0f ? to_float(x[i]) * inverse : 0.0f;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(__builtin_rintf(value)) + kZeroPoint);
  }
  for (; i < padded_count; ++i) out[i] = kZeroPoint;
  return tail == 0.0f ? largest / 127.0f : tail;
}

template <class T, int kRows>
FT_INLINE void int8_tile(const FtLinear& args, const uint32_t* x, const float* x_scales, int64_t steps, int64_t row,
                         int64_t panel) {
  const int64_t num_groups = (steps + kGroupSteps - 1) / kGroupSteps;
  const uint32_t* weight = static_cast<const uint32_t*>(args.weight) + panel * steps * kInt8Panel;
  const int32_t* starts = args.sums + panel * num_groups * kInt8Panel;
  const T* bias = static_cast<const T*>(args.bias);
  const uint32_t* rows = x + row * steps;
  const float* scales = x_scales + row * num_groups;
  vf totals[kRows][kTileVectors] = {};
  for (int64_t group = 0; group < num_groups; ++group) {
    vi sums[kRows][kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) {
      const vi start = load_as<vi>(starts + group * kInt8Panel + v * kLanes);
      for (int r = 0; r < kRows; ++r) sums[r][v] = start;
    }
    const int64_t end = (group + 1) * kGroupSteps < steps ? (group + 1) * kGroupSteps : steps;
#pragma GCC unroll 2
    for (int64_t step = group * kGroupSteps; step < end; ++step) {
      vu columns[kTileVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) columns[v] = load_as<vu>(weight + step * kInt8Panel + v * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const uint32_t lane = rows[r * steps + step];
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] = multiply_add_int8(lane, columns[v], sums[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const vf scale = set1(scales[r * num_groups + group]);
      for (int v = 0; v < kTileVectors; ++v)
        totals[r][v] = fma(__builtin_convertvector(sums[r][v], vf), scale, totals[r][v]);
    }
  }
  const int64_t first = panel * kInt8Panel;
  if (args.activation != FT_NO_GATE) {
    constexpr int kHalf = kTileVectors / 2;
    T* gated = static_cast<T*>(args.y) + row * (args.out_features / 2) + first / 2;
    for (int v = 0; v < kHalf; ++v) {
      const int64_t gate = first + v * kLanes, up = gate + kHalf * kLanes;
      const vf gate_scale = load(args.scales + gate), up_scale = load(args.scales + up);
      const vf gate_bias = bias ? load(bias + gate) : vf{}, up_bias = bias ? load(bias + up) : vf{};
      for (int r = 0; r < kRows; ++r)
        store(gated + r * (args.out_features / 2) + v * kLanes,
              activate(totals[r][v] * gate_scale + gate_bias, args.activation) *
                  (totals[r][kHalf + v] * up_scale + up_bias));
    }
    return;
  }
  T* y = static_cast<T*>(args.y) + row * args.out_features;
  const T* addend = args.addend ? static_cast<const T*>(args.addend) + row * args.out_features : nullptr;
  for (int v = 0; v < kTileVectors; ++v) {
    const int64_t column = first + v * kLanes, rest = args.out_features - column;
    if (rest <= 0) break;
    const vf scale = load(args.scales + column);
    for (int r = 0; r < kRows; ++r) {
      vf value = totals[r][v] * scale;
      const int64_t at = r * args.out_features + column;
      if (rest >= kLanes) {
        if (bias) value += load(bias + column);
        if (addend) value += load(addend + at);
        store(y + at, value);
      } else {
        for (int64_t lane = 0; lane < rest; ++lane)
          store_one(y + at + lane, value[lane] + (bias ? to_float(bias[column + lane]) : 0.0f) +
                                       (addend ? to_float(addend[at + lane]) : 0.0f));
      }
    }
  }
}

template <class T>
int32_t linear_int8_rows(const FtLinear& args) {
  const int64_t steps = (args.in_features + 3) / 4;
  const int64_t num_groups = (steps + kGroupSteps - 1) / kGroupSteps;
  if (args.num_rows == 0) return FT_OK;
  const int64_t row_bytes = 4 * steps + num_groups * int64_t(sizeof(float));
  uint8_t* quantized = static_cast<uint8_t*>(ft_scratch(FT_SCRATCH_CALL, args.num_rows * row_bytes + 64));
  if (!quantized) return FT_OUT_OF_MEMORY;
  float* x_scales = reinterpret_cast<float*>(quantized + args.num_rows * 4 * steps);
  constexpr int64_t kQuantizedRows = 16;
  auto quantize = [&](int64_t item) {
    for (int64_t row = item * kQuantizedRows; row < (item + 1) * kQuantizedRows && row < args.num_rows; ++row) {
      const T* source = static_cast<const T*>(args.x) + row * args.x_stride;
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t start = group * kGroup, rest = args.in_features - start, padded_rest = 4 * steps - start;
        x_scales[row * num_groups + group] =
            quantize_group(source + start, rest < kGroup ? rest : kGroup, quantized + row * 4 * steps + start,
                           padded_rest < kGroup ? padded_rest : kGroup);
      }
    }
  };
  parallel_for((args.num_rows + kQuantizedRows - 1) / kQuantizedRows, args.num_threads, quantize);

  const uint32_t* x = reinterpret_cast<const uint32_t*>(quantized);
  const int64_t num_panels = (args.out_features + kInt8Panel - 1) / kInt8Panel;
  const int64_t num_row_parts = (args.num_rows + kInt8RowsPerItem - 1) / kInt8RowsPerItem;
  int64_t panels_per_item = num_panels / (args.num_threads * 8) + 1;
  const int64_t most = args.num_rows >= kTileRows ? 8 : 64;
  if (panels_per_item > most) panels_per_item = most;
  const int64_t num_panel_parts = (num_panels + panels_per_item - 1) / panels_per_item;
  auto body = [&](int64_t item) {
    const int64_t first_row = item % num_row_parts * kInt8RowsPerItem, panel_part = item / num_row_parts;
    const int64_t last_row =
        first_row + kInt8RowsPerItem < args.num_rows ? first_row + kInt8RowsPerItem : args.num_rows;
    for (int64_t i = 0; i < panels_per_item; ++i) {
      const int64_t panel = panel_part * panels_per_item + i;
      if (panel >= num_panels) break;
      int64_t row = first_row;
      for (; row + kTileRows <= last_row; row += kTileRows) int8_tile<T, kTileRows>(args, x, x_scales, steps, row, panel);
      switch (last_row - row) {
        case 1: int8_tile<T, 1>(args, x, x_scales, steps, row, panel); break;
        case 2: int8_tile<T, 2>(args, x, x_scales, steps, row, panel); break;
        case 3: int8_tile<T, 3>(args, x, x_scales, steps, row, panel); break;
        case 4: int8_tile<T, 4>(args, x, x_scales, steps, row, panel); break;
        case 5: int8_tile<T, 5>(args, x, x_scales, steps, row, panel); break;
        default: break;
      }
    }
  };
  parallel_for(num_row_parts * num_panel_parts, args.num_threads, body);
  return FT_OK;
}

int32_t linear_int8(const FtLinear* args) {
  return args->dtype == FT_BF16 ? linear_int8_rows<bf16>(*args) : linear_int8_rows<float>(*args);
}

}  // namespace
