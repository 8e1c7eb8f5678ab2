// Attention of sequences with one new token: keys and values are read where they lie, in their paged blocks.
//
// The context is cut into parts of a fixed number of keys, so that one long sequence keeps all threads busy and the result
// depends neither on the batch nor on the number of threads; the parts are joined by their maxima and sums. A part
// computes all heads, because the heads of a token lie side by side: memory is read once and in order.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kKeysPerPart = 128;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kMinParallelProducts = 1 << 18;

FT_INLINE void prefetch(const void* address, int64_t num_bytes) {
  for (int64_t offset = 0; offset < num_bytes; offset += kCacheLine)
    __builtin_prefetch(static_cast<const char*>(address) + offset, 0, 2);
}

// rows[r] += products of q and k[r], not yet summed over the lanes
template <int kRows>
FT_INLINE void partial_dots(const float* q, const float* k, int64_t token_stride, int64_t head_dim, vf (&rows)[kRows]) {
  for (int64_t d = 0; d + kLanes <= head_dim; d += kLanes) {
    const vf query = load(q + d);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) rows[r] = fma(query, load(k + r * token_stride + d), rows[r]);
  }
}

template <int kRows>
FT_INLINE void partial_dots(const bf16* q, const bf16* k, int64_t token_stride, int64_t head_dim, vf (&rows)[kRows]) {
  int64_t d = 0;
#if defined(FT_BF16_DOT)
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    const vu query = load_as<vu>(q + d);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      rows[r] = (vf)_mm512_dpbf16_ps((__m512)rows[r], (__m512bh)query, (__m512bh)load_as<vu>(k + r * token_stride + d));
  }
#endif
  for (; d + kLanes <= head_dim; d += kLanes) {
    const vf query = load(q + d);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) rows[r] = fma(query, load(k + r * token_stride + d), rows[r]);
  }
}

// What whole vectors leave over.
template <class T>
FT_INLINE float tail_dot(const T* q, const T* k, int64_t head_dim) {
  float sum = 0.0f;
  for (int64_t d = head_dim / kLanes * kLanes; d < head_dim; ++d) sum += to_float(q[d]) * to_float(k[d]);
  return sum;
}

#if defined(FT_AVX512)
FT_INLINE __m512 add_low_and_high(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

FT_INLINE __m512 add_pairs(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

// Sums of 16 vectors as the lanes of one, by adding while transposing: a third of the work of summing each.
FT_INLINE vf sum_each(const vf (&rows)[16]) {
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 first = add_low_and_high((__m512)rows[4 * i], (__m512)rows[4 * i + 1]);
    const __m512 second = add_low_and_high((__m512)rows[4 * i + 2], (__m512)rows[4 * i + 3]);
    quads[i] = add_pairs(first, second);
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44), _mm512_shuffle_f32x4(quads[0], quads[1], 0xee));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44), _mm512_shuffle_f32x4(quads[2], quads[3], 0xee));
  return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
#endif

// scores[i] = q . k[i] * scale for a run of neighbouring slots
template <class T>
FT_INLINE void score_run(const T* q, const T* k, int64_t token_stride, int64_t num_keys, int64_t head_dim, float scale,
                         float* scores) {
  int64_t i = 0;
#if defined(FT_AVX512)
  for (; i + 16 <= num_keys; i += 16) {
    vf rows[16] = {};
    partial_dots<16>(q, k + i * token_stride, token_stride, head_dim, rows);
    store(scores + i, sum_each(rows) * scale);
  }
#endif
  for (; i < num_keys; ++i) {
    vf rows[1] = {};
    partial_dots<1>(q, k + i * token_stride, token_stride, head_dim, rows);
    scores[i] = sum_of(rows[0]) * scale;
  }
  if (head_dim % kLanes)
    for (i = 0; i < num_keys; ++i) scores[i] += tail_dot(q, k + i * token_stride, head_dim) * scale;
}

// out[g] += weights[g] * v for all keys of a run, with the sums of a few vectors of columns in registers
template <class T, int kHeads, int kVectors>
FT_INLINE void add_columns(float* out, int64_t out_stride, const float* weights, int64_t num_keys, const T* v,
                           int64_t token_stride) {
  vf sums[kHeads][kVectors];
  for (int g = 0; g < kHeads; ++g)
    for (int c = 0; c < kVectors; ++c) sums[g][c] = load(out + g * out_stride + c * kLanes);
  for (int64_t key = 0; key < num_keys; ++key) {
    vf values[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) values[c] = load(v + key * token_stride + c * kLanes);
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g) {
      const vf weight = set1(weights[g * kKeysPerPart + key]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) sums[g][c] = fma(weight, values[c], sums[g][c]);
    }
  }
  for (int g = 0; g < kHeads; ++g)
    for (int c = 0; c < kVectors; ++c) store(out + g * out_stride + c * kLanes, sums[g][c]);
}

template <class T, int kHeads>
FT_INLINE void add_run(float* out, int64_t out_stride, const float* weights, int64_t num_keys, const T* v,
                       int64_t token_stride, int64_t head_dim) {
  int64_t d = 0;
  for (; d + kTileVectors * kLanes <= head_dim; d += kTileVectors * kLanes)
    add_columns<T, kHeads, kTileVectors>(out + d, out_stride, weights, num_keys, v + d, token_stride);
  for (; d + kLanes <= head_dim; d += kLanes)
    add_columns<T, kHeads, 1>(out + d, out_stride, weights, num_keys, v + d, token_stride);
  for (; d < head_dim; ++d)
    for (int g = 0; g < kHeads; ++g)
      for (int64_t key = 0; key < num_keys; ++key)
        out[g * out_stride + d] += weights[g * kKeysPerPart + key] * to_float(v[key * token_stride + d]);
}

// Scores of one head to weights, in place; returns their sum.
FT_INLINE float weigh_row(float* row, int64_t num_keys, float soft_cap, float& best) {
  if (soft_cap > 0.0f) {
    // cap * tanh(x / cap) in units of log2(e); beyond 40 the hyperbolic tangent is 1 in fp32
    const float cap = soft_cap * kLog2E;
    for (int64_t i = 0; i < num_keys; ++i) {
      const float x = row[i] > 40.0f * cap ? 40.0f * cap : row[i];
      row[i] = cap - 2.0f * cap / (exp2_one(x * (2.0f * kLog2E / cap)) + 1.0f);
    }
  }
  best = kNegInfinity;
  for (int64_t i = 0; i < num_keys; ++i) best = row[i] > best ? row[i] : best;
  vf sums = {};
  int64_t i = 0;
  for (; i + kLanes <= num_keys; i += kLanes) {
    const vf weight = exp2(load(row + i) - best);
    store(row + i, weight);
    sums += weight;
  }
  float total = sum_of(sums);
  for (; i < num_keys; ++i) total += row[i] = exp2_one(row[i] - best);
  return total;
}

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

struct DecodePart {
  int32_t seq;
  int32_t begin, end;  // keys
};

// Result of one part of one query head: maximum, sum, then head_dim weighted values.
FT_INLINE int64_t part_floats(const FtAttention& args) { return args.head_dim + 2; }

// Neighbouring slots of one block.
struct Run {
  int64_t begin;   // key, counted from the start of the part
  int64_t length;
  int64_t offset;  // of the first key of KV head 0 in the cache
};

FT_INLINE Run run_at(const FtAttention& args, const DecodePart& part, int64_t key) {
  const int64_t in_block = key % args.block_size;
  const int64_t length = args.block_size - in_block < part.end - key ? args.block_size - in_block : part.end - key;
  const int64_t block = args.block_tables[part.seq * args.table_stride + key / args.block_size];
  return {key - part.begin, length,
          (block * args.block_size + in_block) * int64_t(args.num_kv_heads) * args.head_dim};
}

template <class T>
bool attend_part(const FtAttention& args, const DecodePart& part, float* results) {
  const int64_t group_size = args.num_heads / args.num_kv_heads;
  const int64_t head_dim = args.head_dim, floats = part_floats(args);
  const int64_t token_stride = int64_t(args.num_kv_heads) * head_dim;
  const T* keys = static_cast<const T*>(args.k_cache);
  const T* values = static_cast<const T*>(args.v_cache);
  const T* queries = static_cast<const T*>(args.q) + args.cu_seqlens_q[part.seq] * args.q_token_stride;
  float* scores = static_cast<float*>(ft_scratch(FT_SCRATCH_WORKER, sizeof(float) * args.num_heads * kKeysPerPart));
  if (!scores) return false;

  for (int64_t key = part.begin; key < part.end;) {
    const Run run = run_at(args, part, key);
    key += run.length;
    if (key < part.end) {
      const Run next = run_at(args, part, key);
      prefetch(keys + next.offset, sizeof(T) * next.length * token_stride);
    }
    // the values will be wanted when all scores are there
    prefetch(values + run.offset, sizeof(T) * run.length * token_stride);
    for (int64_t head = 0; head < args.num_heads; ++head)
      score_run<T>(queries + head * args.q_head_stride, keys + run.offset + head / group_size * head_dim, token_stride,
                   run.length, head_dim, args.scale * kLog2E, scores + head * kKeysPerPart + run.begin);
  }
  for (int64_t head = 0; head < args.num_heads; ++head) {
    float* out = results + head * floats;
    out[1] = weigh_row(scores + head * kKeysPerPart, part.end - part.begin, args.soft_cap, out[0]);
    for (int64_t d = 0; d < head_dim; ++d) out[2 + d] = 0.0f;
  }
  for (int64_t key = part.begin; key < part.end;) {
    const Run run = run_at(args, part, key);
    key += run.length;
    for (int64_t kv_head = 0; kv_head < args.num_kv_heads; ++kv_head) {
      const T* v = values + run.offset + kv_head * head_dim;
      int64_t head = kv_head * group_size;
      const int64_t last = head + group_size;
      const auto add = [&](auto num_heads) {
        constexpr int kHeads = decltype(num_heads)::value;
        add_run<T, kHeads>(results + head * floats + 2, floats, scores + head * kKeysPerPart + run.begin, run.length, v,
                           token_stride, head_dim);
        head += kHeads;
      };
      while (last - head >= 4) add(Number<4>());
      if (last - head == 3) add(Number<3>());
      if (last - head == 2) add(Number<2>());
      if (last - head == 1) add(Number<1>());
    }
  }
  return true;
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
  int32_t status = FT_OK;
  auto attend = [&](int64_t part) {
    if (!attend_part<T>(args, parts[part], results + part * part_stride))
      __atomic_store_n(&status, int32_t(FT_OUT_OF_MEMORY), __ATOMIC_RELAXED);
  };
  // waking a thread costs more than it saves for a few hundred keys
  int64_t num_keys = 0;
  for (int64_t part = 0; part < num_parts; ++part) num_keys += parts[part].end - parts[part].begin;
  const int num_threads = num_keys * args.num_heads * args.head_dim < kMinParallelProducts ? 1 : args.num_threads;
  parallel_for(num_parts, num_threads, attend);
  if (status != FT_OK) return status;

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
