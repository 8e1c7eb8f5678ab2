// The row-wise operations between the matrix products, each in one pass over memory.
#pragma once
#include "abi.h"
#include "activations.h"
#include "parallel.h"
#include "simd.h"

namespace {

// Elements that are worth a second thread, and the size of a piece of work.
constexpr int64_t kMinParallel = 1 << 15;
constexpr int64_t kElementsPerItem = 1 << 14;

// Calls body(first_row, last_row) for pieces of all rows.
template <class Body>
void for_rows(int64_t num_rows, int64_t row_elements, int num_threads, Body& body) {
  int64_t rows = kElementsPerItem / (row_elements > 0 ? row_elements : 1);
  if (rows < 1) rows = 1;
  if (num_threads <= 1 || num_rows * row_elements < kMinParallel) rows = num_rows;
  if (num_rows == 0) return;
  auto piece = [&](int64_t item) {
    const int64_t first = item * rows;
    body(first, first + rows < num_rows ? first + rows : num_rows);
  };
  parallel_for((num_rows + rows - 1) / rows, num_threads, piece);
}

template <class T>
int32_t rms_norm_rows(const FtRmsNorm& args) {
  const int64_t hidden = args.hidden;
  const T* weight = static_cast<const T*>(args.weight);
  auto body = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      T* x = static_cast<T*>(args.x) + row * args.x_stride;
      const T* delta = args.delta ? static_cast<const T*>(args.delta) + row * args.delta_stride : nullptr;
      T* y = static_cast<T*>(args.y) + row * hidden;
      vf squares[2] = {};
      int64_t i = 0;
      float tail = 0.0f;
      if (delta) {
        for (; i + kLanes <= hidden; i += kLanes) {
          store(x + i, load(x + i) + load(delta + i));
          const vf sum = load(x + i);  // as rounded, for that is what the next layer adds to
          vf& total = squares[i / kLanes % 2];
          total = fma(sum, sum, total);
        }
        for (; i < hidden; ++i) {
          store_one(x + i, to_float(x[i]) + to_float(delta[i]));
          tail += to_float(x[i]) * to_float(x[i]);
        }
      } else {
        for (; i + kLanes <= hidden; i += kLanes) {
          const vf value = load(x + i);
          vf& total = squares[i / kLanes % 2];
          total = fma(value, value, total);
        }
        for (; i < hidden; ++i) tail += to_float(x[i]) * to_float(x[i]);
      }
      const float mean = (sum_of(squares[0] + squares[1]) + tail) / static_cast<float>(hidden);
      const float factor = 1.0f / __builtin_sqrtf(mean + args.eps);
      for (i = 0; i + kLanes <= hidden; i += kLanes)
        store(y + i, load(x + i) * factor * load(weight + i));
      for (; i < hidden; ++i) store_one(y + i, to_float(x[i]) * factor * to_float(weight[i]));
    }
  };
  for_rows(args.num_rows, hidden, args.num_threads, body);
  return FT_OK;
}

// x / rms(x) * weight, in place, as rounded as by a norm of its own.
template <class T>
FT_INLINE void norm_head(T* x, const T* weight, int64_t head_dim, float eps) {
  vf squares = {};
  float tail = 0.0f;
  int64_t i = 0;
  for (; i + kLanes <= head_dim; i += kLanes) {
    const vf value = load(x + i);
    squares = fma(value, value, squares);
  }
  for (; i < head_dim; ++i) tail += to_float(x[i]) * to_float(x[i]);
  const float mean = (sum_of(squares) + tail) / static_cast<float>(head_dim);
  const float factor = 1.0f / __builtin_sqrtf(mean + eps);
  for (i = 0; i + kLanes <= head_dim; i += kLanes) store(x + i, load(x + i) * factor * load(weight + i));
  for (; i < head_dim; ++i) store_one(x + i, to_float(x[i]) * factor * to_float(weight[i]));
}

template <class T>
FT_INLINE void rotate_head(T* x, T* copy, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vf x1 = load(x + i), x2 = load(x + half + i), c = load(cos + i), s = load(sin + i);
    const vf y1 = x1 * c - x2 * s, y2 = x2 * c + x1 * s;
    store(x + i, y1);
    store(x + half + i, y2);
    if (copy) {
      store(copy + i, y1);
      store(copy + half + i, y2);
    }
  }
  for (; i < half; ++i) {
    const float x1 = to_float(x[i]), x2 = to_float(x[half + i]);
    store_one(x + i, x1 * cos[i] - x2 * sin[i]);
    store_one(x + half + i, x2 * cos[i] + x1 * sin[i]);
    if (copy) {
      copy[i] = x[i];
      copy[half + i] = x[half + i];
    }
  }
}

template <class T>
int32_t rotary_store_rows(const FtRotaryStore& args) {
  const int64_t head_dim = args.head_dim, half = head_dim / 2;
  const int64_t token_size = args.num_kv_heads * head_dim;
  const T* q_norm = static_cast<const T*>(args.q_norm);
  const T* k_norm = static_cast<const T*>(args.k_norm);
  auto body = [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const float* cos = args.cos + token * half;
      const float* sin = args.sin + token * half;
      T* q = static_cast<T*>(args.q) + token * args.q_token_stride;
      T* k = static_cast<T*>(args.k) + token * args.k_token_stride;
      for (int64_t head = 0; head < args.num_heads; ++head) {
        if (q_norm) norm_head<T>(q + head * args.q_head_stride, q_norm, head_dim, args.eps);
        rotate_head<T>(q + head * args.q_head_stride, nullptr, cos, sin, half);
      }
      T* stored_k = args.k_cache ? static_cast<T*>(args.k_cache) + args.slots[token] * token_size : nullptr;
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        if (k_norm) norm_head<T>(k + head * args.k_head_stride, k_norm, head_dim, args.eps);
        rotate_head<T>(k + head * args.k_head_stride, stored_k ? stored_k + head * head_dim : nullptr, cos, sin, half);
      }
      if (!args.v_cache) continue;
      const T* v = static_cast<const T*>(args.v) + token * args.v_token_stride;
      T* stored_v = static_cast<T*>(args.v_cache) + args.slots[token] * token_size;
      for (int64_t head = 0; head < args.num_kv_heads; ++head)
        memcpy(stored_v + head * head_dim, v + head * args.v_head_stride, sizeof(T) * head_dim);
    }
  };
  for_rows(args.num_tokens, (args.num_heads + 2 * args.num_kv_heads) * head_dim, args.num_threads, body);
  return FT_OK;
}

template <class T>
int32_t gated_mul_rows(const FtGatedMul& args) {
  auto body = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* gate = static_cast<const T*>(args.gate_up) + row * args.row_stride;
      const T* up = gate + args.inner;
      T* y = static_cast<T*>(args.y) + row * args.inner;
      int64_t i = 0;
      for (; i + kLanes <= args.inner; i += kLanes)
        store(y + i, activate(load(gate + i), args.activation) * load(up + i));
      for (; i < args.inner; ++i)
        store_one(y + i, activate(set1(to_float(gate[i])), args.activation)[0] * to_float(up[i]));
    }
  };
  for_rows(args.num_rows, 2 * args.inner, args.num_threads, body);
  return FT_OK;
}

}  // namespace
