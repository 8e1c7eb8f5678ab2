// Attention of sequences with one new token: keys and values are read where they lie, in their paged blocks.
//
// The context is cut into parts of a fixed number of keys, so that one long sequence keeps all threads busy and the result
// depends neither on the batch nor on the number of threads; the parts are joined by their maxima and sums.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kKeysPerPart = 512;
// Query heads that share one pass over a row of values.
constexpr int64_t kMaxGroup = 8;

// q in fp32, k in its own dtype
FT_INLINE float dot(const float* q, const float* k, int64_t head_dim) {
  vf sum = {};
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) sum = fma(load(q + d), load(k + d), sum);
  float total = sum_of(sum);
  for (; d < head_dim; ++d) total += q[d] * k[d];
  return total;
}

FT_INLINE float dot(const bf16* q, const bf16* k, int64_t head_dim) {
  vf sum = {};
  int64_t d = 0;
#if defined(FT_BF16_DOT)
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes)
    sum = (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)load_as<__m512i>(q + d), (__m512bh)load_as<__m512i>(k + d));
#endif
  for (; d + kLanes <= head_dim; d += kLanes) sum = fma(load(q + d), load(k + d), sum);
  float total = sum_of(sum);
  for (; d < head_dim; ++d) total += to_float(q[d]) * to_float(k[d]);
  return total;
}

// out[g] += weights[g] * v for every head of the group
template <class T>
FT_INLINE void add_row(float* out, int64_t out_stride, const float* weights, int64_t weight_stride, int64_t num_heads,
                       const T* v, int64_t head_dim) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    const vf value = load(v + d);
    for (int64_t g = 0; g < num_heads; ++g) {
      float* sum = out + g * out_stride + d;
      store(sum, fma(set1(weights[g * weight_stride]), value, load(sum)));
    }
  }
  for (; d < head_dim; ++d)
    for (int64_t g = 0; g < num_heads; ++g) out[g * out_stride + d] += weights[g * weight_stride] * to_float(v[d]);
}

// The same for all keys of a run of neighbouring slots, with the sums of 64 columns of one head in registers.
template <class T, int kHeads>
FT_INLINE void add_run(float* out, int64_t out_stride, const float* weights, int64_t num_keys, const T* v,
                       int64_t token_stride, int64_t num_columns) {
  constexpr int kVectors = FT_TILE_VECTORS;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= num_columns; d += kVectors * kLanes) {
    vf sums[kHeads][kVectors];
    for (int g = 0; g < kHeads; ++g)
      for (int c = 0; c < kVectors; ++c) sums[g][c] = load(out + g * out_stride + d + c * kLanes);
    for (int64_t key = 0; key < num_keys; ++key) {
      vf values[kVectors];
      for (int c = 0; c < kVectors; ++c) values[c] = load(v + key * token_stride + d + c * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const vf weight = set1(weights[g * kKeysPerPart + key]);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sums[g][c] = fma(weight, values[c], sums[g][c]);
      }
    }
    for (int g = 0; g < kHeads; ++g)
      for (int c = 0; c < kVectors; ++c) store(out + g * out_stride + d + c * kLanes, sums[g][c]);
  }
  if (d < num_columns)
    for (int64_t key = 0; key < num_keys; ++key)
      add_row(out + d, out_stride, weights + key, kKeysPerPart, kHeads, v + key * token_stride + d, num_columns - d);
}

struct DecodePart {
  int32_t seq;
  int32_t begin, end;  // keys
};

// Result of one part of one query head: maximum, sum, then head_dim weighted values.
FT_INLINE int64_t part_floats(const FtAttention& args) { return args.head_dim + 2; }

template <class T>
void attend_part(const FtAttention& args, const DecodePart& part, int64_t kv_head, float* results) {
  const int64_t group_size = args.num_heads / args.num_kv_heads;
  const int64_t head_dim = args.head_dim, floats = part_floats(args);
  const int64_t token_stride = int64_t(args.num_kv_heads) * head_dim;
  const int32_t* table = args.block_tables + part.seq * args.table_stride;
  const T* keys = static_cast<const T*>(args.k_cache) + kv_head * head_dim;
  const T* values = static_cast<const T*>(args.v_cache) + kv_head * head_dim;
  const T* queries = static_cast<const T*>(args.q) + args.cu_seqlens_q[part.seq] * args.q_token_stride;
  const int64_t num_keys = part.end - part.begin;
  const float scale = args.scale * kLog2E;
  alignas(64) float scores[kMaxGroup * kKeysPerPart];

  for (int64_t first = 0; first < group_size; first += kMaxGroup) {
    const int64_t num_heads = group_size - first < kMaxGroup ? group_size - first : kMaxGroup;
    for (int64_t key = part.begin; key < part.end;) {
      const int64_t in_block = key % args.block_size;
      int64_t run = args.block_size - in_block;
      if (run > part.end - key) run = part.end - key;
      const T* k = keys + (int64_t(table[key / args.block_size]) * args.block_size + in_block) * token_stride;
      for (int64_t g = 0; g < num_heads; ++g) {
        const T* q = queries + (kv_head * group_size + first + g) * args.q_head_stride;
        float* row = scores + g * kKeysPerPart + (key - part.begin);
        for (int64_t i = 0; i < run; ++i) row[i] = dot(q, k + i * token_stride, head_dim) * scale;
      }
      key += run;
    }
    float* out = results + first * floats;
    for (int64_t g = 0; g < num_heads; ++g) {
      float* row = scores + g * kKeysPerPart;
      float best = kNegInfinity, total = 0.0f;
      if (args.soft_cap > 0.0f) {
        const float cap = args.soft_cap * kLog2E;
        for (int64_t i = 0; i < num_keys; ++i) row[i] = cap - 2.0f * cap / (exp2_one(2.0f * kLog2E / cap * (row[i] > 40.0f * cap ? 40.0f * cap : row[i])) + 1.0f);
      }
      for (int64_t i = 0; i < num_keys; ++i) best = row[i] > best ? row[i] : best;
      int64_t i = 0;
      vf sums = {};
      for (; i + kLanes <= num_keys; i += kLanes) {
        const vf weight = exp2(load(row + i) - best);
        store(row + i, weight);
        sums += weight;
      }
      total = sum_of(sums);
      for (; i < num_keys; ++i) total += row[i] = exp2_one(row[i] - best);
      out[g * floats] = best;
      out[g * floats + 1] = total;
      for (int64_t d = 0; d < head_dim; ++d) out[g * floats + 2 + d] = 0.0f;
    }
    for (int64_t key = part.begin; key < part.end;) {
      const int64_t in_block = key % args.block_size;
      int64_t run = args.block_size - in_block;
      if (run > part.end - key) run = part.end - key;
      const T* v = values + (int64_t(table[key / args.block_size]) * args.block_size + in_block) * token_stride;
      const float* weights = scores + (key - part.begin);
      int64_t g = 0;
      for (; g + 3 <= num_heads; g += 3)
        add_run<T, 3>(out + g * floats + 2, floats, weights + g * kKeysPerPart, run, v, token_stride, head_dim);
      for (; g + 2 <= num_heads; g += 2)
        add_run<T, 2>(out + g * floats + 2, floats, weights + g * kKeysPerPart, run, v, token_stride, head_dim);
      if (g < num_heads)
        add_run<T, 1>(out + g * floats + 2, floats, weights + g * kKeysPerPart, run, v, token_stride, head_dim);
      key += run;
    }
  }
}

// Joins the parts of one query head of one sequence.
template <class T>
void join_parts(const FtAttention& args, int64_t seq, int64_t head, const float* first, int64_t num_parts,
                int64_t part_stride) {
  float best = kNegInfinity;
  bool is_nan = false;
  for (int64_t part = 0; part < num_parts; ++part) {
    const float part_max = first[part * part_stride];
    best = part_max > best ? part_max : best;
    is_nan |= first[part * part_stride + 1] != first[part * part_stride + 1];
  }
  T* out = static_cast<T*>(args.out) + (args.cu_seqlens_q[seq] * int64_t(args.num_heads) + head) * args.head_dim;
  float total = 0.0f;
  for (int64_t part = 0; part < num_parts; ++part)
    total += first[part * part_stride + 1] * exp2_one(first[part * part_stride] - best);
  const float inverse = is_nan ? __builtin_nanf("") : 1.0f / total;
  for (int64_t d = 0; d < args.head_dim; d += kLanes) {
    const int64_t width = args.head_dim - d < kLanes ? args.head_dim - d : kLanes;
    vf sum = {};
    for (int64_t part = 0; part < num_parts; ++part) {
      const float* values = first + part * part_stride + 2 + d;
      const vf factor = set1(exp2_one(first[part * part_stride] - best));
      if (width == kLanes) {
        sum = fma(factor, load(values), sum);
      } else {
        for (int64_t lane = 0; lane < width; ++lane) sum[lane] += factor[0] * values[lane];
      }
    }
    sum *= inverse;
    if (width == kLanes)
      store(out + d, sum);
    else
      for (int64_t lane = 0; lane < width; ++lane) store_one(out + d + lane, sum[lane]);
  }
}

// All sequences with one new token.
template <class T>
int32_t attend_decodes(const FtAttention& args) {
  int64_t num_parts = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq)
    if (args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq] == 1)
      num_parts += (args.seq_lens[seq] + kKeysPerPart - 1) / kKeysPerPart + 1;
  if (!num_parts) return FT_OK;
  DecodePart* parts = static_cast<DecodePart*>(ft_scratch(FT_SCRATCH_ITEMS, sizeof(DecodePart) * num_parts));
  if (!parts) return FT_OUT_OF_MEMORY;
  num_parts = 0;
  for (int32_t seq = 0; seq < args.num_seqs; ++seq) {
    if (args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq] != 1) continue;
    const int64_t seq_len = args.seq_lens[seq];
    int64_t begin = args.window > 0 && seq_len > args.window ? seq_len - args.window : 0;
    while (begin < seq_len) {
      int64_t end = (begin / kKeysPerPart + 1) * kKeysPerPart;
      if (end > seq_len) end = seq_len;
      parts[num_parts++] = DecodePart{seq, int32_t(begin), int32_t(end)};
      begin = end;
    }
  }
  const int64_t part_stride = args.num_heads * part_floats(args);
  float* results = static_cast<float*>(ft_scratch(FT_SCRATCH_CALL, sizeof(float) * num_parts * part_stride));
  if (!results) return FT_OUT_OF_MEMORY;
  const int64_t group_size = args.num_heads / args.num_kv_heads;
  auto attend = [&](int64_t item) {
    const int64_t part = item / args.num_kv_heads, kv_head = item % args.num_kv_heads;
    attend_part<T>(args, parts[part], kv_head, results + part * part_stride + kv_head * group_size * part_floats(args));
  };
  // waking a thread costs more than it saves for a few hundred keys
  int64_t num_keys = 0;
  for (int64_t part = 0; part < num_parts; ++part) num_keys += parts[part].end - parts[part].begin;
  const int num_threads = num_keys * args.num_kv_heads < 1024 ? 1 : args.num_threads;
  parallel_for(num_parts * args.num_kv_heads, num_threads, attend);

  for (int64_t first = 0; first < num_parts;) {
    int64_t last = first;
    while (last < num_parts && parts[last].seq == parts[first].seq) ++last;
    for (int64_t head = 0; head < args.num_heads; ++head)
      join_parts<T>(args, parts[first].seq, head, results + first * part_stride + head * part_floats(args),
                    last - first, part_stride);
    first = last;
  }
  return FT_OK;
}

}  // namespace
