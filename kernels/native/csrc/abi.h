// What Python passes to the kernels and what every build of them offers; library.py mirrors the structs field by field.
#pragma once
#include <cstdint>

extern "C" {

enum FtDtype : int32_t { FT_FP32 = 0, FT_BF16 = 1 };
// Of a gated product: what is applied to the gate before it is multiplied with `up`.
enum FtActivation : int32_t { FT_NO_GATE = 0, FT_SILU = 1, FT_GELU_TANH = 2 };
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

// Rotates queries and keys in place, half-split layout, and stores keys and values in their slots. With `q_norm` and
// `k_norm`, every head of the queries and keys is divided by its root mean square first, and multiplied with those.
struct FtRotaryStore {
  void* q;
  void* k;
  const void* v;
  const float* cos;  // (num_tokens, head_dim / 2)
  const float* sin;
  const void* q_norm;  // (head_dim), dtype of q, or null
  const void* k_norm;
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
  float eps;
};

// y = activation(gate) * up.
struct FtGatedMul {
  const void* gate_up;  // (num_rows, 2 * inner)
  void* y;              // (num_rows, inner), contiguous
  int64_t num_rows, inner, row_stride;
  int32_t dtype;
  int32_t activation;
  int32_t num_threads;
};

// y = x W^T + bias + addend. The weight is packed by the same build: bf16 pairs, or int8 quadruples with a scale per channel.
//
// With an activation it is a gated product: the first half of every panel's channels are gates, the second half the ups that
// belong to them, whole panels only; y has half as many columns, and there is no addend.
struct FtLinear {
  const void* x;       // (num_rows, in_features), bf16 or fp32 (int8 weights)
  const void* weight;  // packed
  const float* scales;  // (out_features padded), int8 only
  const int32_t* sums;  // (panels, groups of in_features, channels of a panel), int8 only
  const void* bias;     // (out_features), dtype of x, or null
  const void* addend;   // (num_rows, out_features), contiguous, dtype of x, or null; may be y itself
  void* y;              // (num_rows, out_features), contiguous, dtype of x
  int64_t num_rows, x_stride, in_features, out_features;
  int32_t dtype;
  int32_t activation;
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

// A packed weight and its bias.
struct FtWeight {
  const void* data;
  const float* scales;  // null: bf16
  const int32_t* sums;
  const void* bias;  // or null
  int64_t in_features, out_features;
};

// One decoder layer; norms are (hidden), those of heads (head_dim).
struct FtDecoderLayer {
  const void* input_norm;
  const void* q_norm;  // or null
  const void* k_norm;
  const void* post_attention_norm;  // of what attention gives, before it is added; or null
  const void* mlp_norm;
  const void* post_mlp_norm;  // likewise of what the MLP gives
  FtWeight qkv, o, gate_up, down;
  void* k_cache;
  void* v_cache;
  int32_t window;    // 0 is all
  int32_t is_local;  // turns by the second pair of tables
};

// Where a step's seconds went, by the clock.
struct FtDecoderTimes {
  double products, attention, norms, rotary;
};

// All layers of one step, one after the other; the same kernels as above. After the attention of the last layer only
// `output_rows` go on.
struct FtDecoder {
  const FtDecoderLayer* layers;
  void* residual;  // (num_tokens, hidden), overwritten
  void* out;       // (num_output_rows, hidden): what the last layer leaves
  void* workspace; // (num_tokens, 2 * hidden + heads of q, k and v + heads of q + inner), dtype of residual
  const float* cos;  // (num_tokens, head_dim / 2)
  const float* sin;
  const float* local_cos;
  const float* local_sin;
  const int64_t* slots;
  const int32_t* block_tables;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  const int64_t* output_rows;
  FtDecoderTimes* times;  // added to; or null
  int64_t num_layers, num_tokens, num_output_rows, hidden, inner, table_stride;
  int32_t num_seqs, num_heads, num_kv_heads, head_dim, block_size;
  int32_t dtype, activation, num_threads;
  float scale, soft_cap, eps;
};

}  // extern "C"

// One build of all kernels for one instruction set.
struct FtKernels {
  const char* isa;
  int64_t panel;  // output channels that packed weights are padded to a multiple of
  int32_t (*attention)(const FtAttention*);
  int32_t (*rms_norm)(const FtRmsNorm*);
  int32_t (*rotary_store)(const FtRotaryStore*);
  int32_t (*gated_mul)(const FtGatedMul*);
  int32_t (*linear_bf16)(const FtLinear*);
  int32_t (*pack_bf16)(const FtPack*);
  int32_t (*linear_int8)(const FtLinear*);
  int32_t (*pack_int8)(const FtPack*);
  int32_t (*decoder)(const FtDecoder*);
};
