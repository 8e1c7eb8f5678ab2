// What Python passes to the kernels and what every build of them offers; library.py mirrors the structs field by field.
#pragma once
#include <cstdint>

extern "C" {

enum FtDtype : int32_t { FT_FP32 = 0, FT_BF16 = 1 };
enum FtStatus : int32_t { FT_OK = 0, FT_OUT_OF_MEMORY = 1, FT_NOT_SUPPORTED = 2 };

// Attention of one layer over a paged KV cache. Strides are in elements; the last dimension is contiguous.
struct FtAttention {
  const void* q;        // (num_tokens, num_heads, head_dim)
  const void* k_cache;  // (num_blocks, block_size, num_kv_heads, head_dim), contiguous
  const void* v_cache;
  void* out;                    // (num_tokens, num_heads, head_dim), contiguous
  const int32_t* block_tables;  // (num_seqs, table_stride)
  const int32_t* cu_seqlens_q;  // (num_seqs + 1)
  const int32_t* seq_lens;      // (num_seqs), context and new tokens
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t table_stride;
  int32_t num_seqs;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t dtype;
  int32_t window;  // keys a query sees, itself included; 0 is all
  int32_t num_threads;
  float scale;
  float soft_cap;  // 0 is none
};

// y = x / rms(x) * weight; with `delta`, x += delta first, in place.
struct FtRmsNorm {
  void* x;
  const void* delta;  // or null
  const void* weight;
  void* y;
  int64_t num_rows;
  int64_t x_stride;
  int64_t delta_stride;
  int64_t hidden;
  int32_t dtype;
  int32_t num_threads;
  float eps;
};

// Rotates queries and keys in place, half-split layout, and stores keys and values in their slots.
struct FtRotaryStore {
  void* q;
  void* k;
  const void* v;
  const float* cos;  // (num_tokens, head_dim / 2)
  const float* sin;
  void* k_cache;  // or null: rotate only
  void* v_cache;
  const int64_t* slots;  // (num_tokens)
  int64_t num_tokens;
  int64_t q_token_stride, q_head_stride;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t dtype;
  int32_t num_threads;
};

struct FtSiluMul {
  const void* gate_up;  // (num_rows, 2 * inner)
  void* y;              // (num_rows, inner), contiguous
  int64_t num_rows, inner, row_stride;
  int32_t dtype;
  int32_t num_threads;
};

// y = x W^T + bias + addend. The weight is packed by the same build: bf16 pairs, or int8 quadruples with a scale per channel.
struct FtLinear {
  const void* x;       // (num_rows, in_features), bf16 or fp32 (int8 weights)
  const void* weight;  // packed
  const float* scales;  // (out_features padded), int8 only
  const int32_t* sums;  // (out_features padded), int8 only: sum of each channel's weights
  const void* bias;     // (out_features), dtype of x, or null
  const void* addend;   // (num_rows, out_features), contiguous, dtype of x, or null; may be y itself
  void* y;              // (num_rows, out_features), contiguous, dtype of x
  int64_t num_rows, x_stride, in_features, out_features;
  int32_t dtype;
  int32_t num_threads;
};

struct FtPack {
  const void* weight;  // (out_features, in_features), contiguous
  void* packed;
  float* scales;
  int32_t* sums;
  int64_t in_features, out_features;
  int32_t dtype;
  int32_t num_threads;
};

}  // extern "C"

// One build of all kernels for one instruction set.
struct FtKernels {
  const char* isa;
  int64_t panel;  // output channels that packed weights are padded to a multiple of
  int32_t (*attention)(const FtAttention*);
  int32_t (*rms_norm)(const FtRmsNorm*);
  int32_t (*rotary_store)(const FtRotaryStore*);
  int32_t (*silu_mul)(const FtSiluMul*);
  int32_t (*linear_bf16)(const FtLinear*);
  int32_t (*pack_bf16)(const FtPack*);
  int32_t (*linear_int8)(const FtLinear*);
  int32_t (*pack_int8)(const FtPack*);
};
