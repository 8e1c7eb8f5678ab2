// All decoder layers of a step in one call: what the layers do for hundreds of tokens takes less time each than calling it
// from Python does.
#pragma once
#include <time.h>

#include "abi.h"
#include "attention.h"
#include "fused_ops.h"
#include "gemm_bf16.h"
#include "gemm_int8.h"

namespace {

// Adds the time that it lives to a total, if there is one.
class Timer {
 public:
  explicit Timer(double* total) : total_(total), started_(total ? now() : 0.0) {}
  ~Timer() {
    if (total_) *total_ += now() - started_;
  }

 private:
  static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  double* total_;
  double started_;
};

template <class T>
class DecoderStep {
 public:
  explicit DecoderStep(const FtDecoder& args) : args_(args), num_rows_(args.num_tokens) {
    q_size_ = int64_t(args.num_heads) * args.head_dim;
    kv_size_ = int64_t(args.num_kv_heads) * args.head_dim;
    residual_ = static_cast<T*>(args.residual);
    normed_ = static_cast<T*>(args.workspace);
    delta_ = normed_ + args.num_tokens * args.hidden;
    qkv_ = delta_ + args.num_tokens * args.hidden;
    attended_ = qkv_ + args.num_tokens * (q_size_ + 2 * kv_size_);
    inner_ = attended_ + args.num_tokens * q_size_;
  }

  int32_t run() {
    for (int64_t index = 0; index < args_.num_layers; ++index) {
      const FtDecoderLayer& layer = args_.layers[index];
      int32_t status = attend(layer);
      if (status == FT_OK) {
        if (index + 1 == args_.num_layers) keep_output_rows();
        status = add(layer);
      }
      if (status != FT_OK) return status;
    }
    return FT_OK;
  }

 private:
  int32_t attend(const FtDecoderLayer& layer) {
    norm(residual_, nullptr, layer.input_norm, normed_);
    if (const int32_t status = multiply(normed_, layer.qkv, nullptr, FT_NO_GATE, qkv_); status != FT_OK) return status;
    const int64_t row = q_size_ + 2 * kv_size_;
    FtRotaryStore turn = {};
    turn.q = qkv_;
    turn.k = qkv_ + q_size_;
    turn.v = qkv_ + q_size_ + kv_size_;
    turn.cos = layer.is_local ? args_.local_cos : args_.cos;
    turn.sin = layer.is_local ? args_.local_sin : args_.sin;
    turn.q_norm = layer.q_norm;
    turn.k_norm = layer.k_norm;
    turn.k_cache = layer.k_cache;
    turn.v_cache = layer.v_cache;
    turn.slots = args_.slots;
    turn.num_tokens = args_.num_tokens;
    turn.q_token_stride = turn.k_token_stride = turn.v_token_stride = row;
    turn.q_head_stride = turn.k_head_stride = turn.v_head_stride = args_.head_dim;
    turn.num_heads = args_.num_heads;
    turn.num_kv_heads = args_.num_kv_heads;
    turn.head_dim = args_.head_dim;
    turn.num_threads = args_.num_threads;
    turn.eps = args_.eps;
    {
      const Timer timer(args_.times ? &args_.times->rotary : nullptr);
      rotary_store_rows<T>(turn);
    }
    FtAttention look = {};
    look.q = qkv_;
    look.k_cache = layer.k_cache;
    look.v_cache = layer.v_cache;
    look.out = attended_;
    look.block_tables = args_.block_tables;
    look.cu_seqlens_q = args_.cu_seqlens_q;
    look.seq_lens = args_.seq_lens;
    look.q_token_stride = row;
    look.q_head_stride = args_.head_dim;
    look.table_stride = args_.table_stride;
    look.num_seqs = args_.num_seqs;
    look.num_heads = args_.num_heads;
    look.num_kv_heads = args_.num_kv_heads;
    look.head_dim = args_.head_dim;
    look.block_size = args_.block_size;
    look.dtype = args_.dtype;
    look.window = layer.window;
    look.num_threads = args_.num_threads;
    look.scale = args_.scale;
    look.soft_cap = args_.soft_cap;
    const Timer timer(args_.times ? &args_.times->attention : nullptr);
    return attention(&look);
  }

  void keep_output_rows() {
    const Timer timer(args_.times ? &args_.times->norms : nullptr);
    T* out = static_cast<T*>(args_.out);
    for (int64_t row = 0; row < args_.num_output_rows; ++row) {
      const int64_t source = args_.output_rows[row];
      memcpy(out + row * args_.hidden, residual_ + source * args_.hidden, sizeof(T) * args_.hidden);
      // queries, keys and values are of no use any more
      memcpy(qkv_ + row * q_size_, attended_ + source * q_size_, sizeof(T) * q_size_);
    }
    residual_ = out;
    attended_ = qkv_;
    num_rows_ = args_.num_output_rows;
  }

  int32_t add(const FtDecoderLayer& layer) {
    int32_t status = multiply(attended_, layer.o, nullptr, FT_NO_GATE, delta_);
    if (status != FT_OK) return status;
    const T* added = delta_;
    if (layer.post_attention_norm) {
      norm(delta_, nullptr, layer.post_attention_norm, normed_);
      added = normed_;
    }
    // row by row: where `added` lies in the same place, it is read before it is overwritten
    norm(residual_, added, layer.mlp_norm, normed_);
    status = multiply(normed_, layer.gate_up, nullptr, args_.activation, inner_);
    if (status != FT_OK) return status;
    if (!layer.post_mlp_norm) return multiply(inner_, layer.down, residual_, FT_NO_GATE, residual_);
    status = multiply(inner_, layer.down, nullptr, FT_NO_GATE, delta_);
    if (status != FT_OK) return status;
    norm(delta_, nullptr, layer.post_mlp_norm, normed_);
    add_rows(normed_);
    return FT_OK;
  }

  // y = norm(x + delta), and x += delta
  void norm(T* x, const T* delta, const void* weight, T* y) {
    const Timer timer(args_.times ? &args_.times->norms : nullptr);
    FtRmsNorm norm = {};
    norm.x = x;
    norm.delta = delta;
    norm.weight = weight;
    norm.y = y;
    norm.num_rows = num_rows_;
    norm.x_stride = norm.delta_stride = norm.hidden = args_.hidden;
    norm.num_threads = args_.num_threads;
    norm.eps = args_.eps;
    rms_norm_rows<T>(norm);
  }

  void add_rows(const T* delta) {
    const Timer timer(args_.times ? &args_.times->norms : nullptr);
    const int64_t hidden = args_.hidden;
    auto body = [&](int64_t first, int64_t last) {
      int64_t i = first * hidden;
      for (; i + kLanes <= last * hidden; i += kLanes) store(residual_ + i, load(residual_ + i) + load(delta + i));
      for (; i < last * hidden; ++i) store_one(residual_ + i, to_float(residual_[i]) + to_float(delta[i]));
    };
    for_rows(num_rows_, hidden, args_.num_threads, body);
  }

  int32_t multiply(const T* x, const FtWeight& weight, const T* addend, int32_t activation, T* y) {
    const Timer timer(args_.times ? &args_.times->products : nullptr);
    FtLinear linear = {};
    linear.x = x;
    linear.weight = weight.data;
    linear.scales = weight.scales;
    linear.sums = weight.sums;
    linear.bias = weight.bias;
    linear.addend = addend;
    linear.y = y;
    linear.num_rows = num_rows_;
    linear.x_stride = linear.in_features = weight.in_features;
    linear.out_features = weight.out_features;
    linear.dtype = args_.dtype;
    linear.activation = activation;
    linear.num_threads = args_.num_threads;
    if (weight.scales) return linear_int8_rows<T>(linear);
#if defined(FT_BF16_DOT)
    if (args_.dtype == FT_BF16) return linear_bf16(&linear);
#endif
    return FT_NOT_SUPPORTED;
  }

  const FtDecoder& args_;
  int64_t num_rows_, q_size_, kv_size_;
  T* residual_;
  T* normed_;
  T* delta_;
  T* qkv_;
  T* attended_;
  T* inner_;
};

int32_t decoder(const FtDecoder* args) {
  return args->dtype == FT_BF16 ? DecoderStep<bf16>(*args).run() : DecoderStep<float>(*args).run();
}

}  // namespace
