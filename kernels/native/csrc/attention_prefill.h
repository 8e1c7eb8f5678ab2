// FlashAttention for chunks of several tokens: online softmax over blocks of keys, exact, nothing of size S x S.
//
//   pack      keys and values of a sequence are read from their paged blocks once and laid out for the register tile:
//             K^T as [head_dim lanes][keys], V as [key lanes][head_dim], in blocks of `kKeys` keys
//   tiles     the query heads of one KV head are rows of one tile; row = token * group_size + head of the group
//   6 rows    scores of 6 rows with a block of keys (registers, then a buffer in the first-level cache), softmax,
//             then the product with the values; the block of K and V stays in that cache while all rows use it
//
// Blocks of keys start at multiples of kKeys of the sequence, whatever the chunk, so a row comes out the same to the last
// bit in every chunking and in every batch.
#pragma once
#include "abi.h"
#include "parallel.h"
#include "tiles.h"

namespace {

template <class Math>
struct PrefillLayout {
  // keys per block: 32 KiB of K and V together for heads of 64
  static constexpr int kKeys = 64 * Math::kPerLane;
  int64_t head_dim;
  int64_t key_steps;     // lanes of a query row
  int64_t value_width;   // columns of V, padded to whole vectors
  int64_t key_lanes;     // of one packed block
  int64_t value_lanes;

  explicit PrefillLayout(int64_t dim) : head_dim(dim) {
    key_steps = (dim + Math::kPerLane - 1) / Math::kPerLane;
    value_width = (dim + kLanes - 1) / kLanes * kLanes;
    key_lanes = key_steps * kKeys;
    value_lanes = kKeys / Math::kPerLane * value_width;
  }
  int64_t block_lanes() const { return key_lanes + value_lanes; }
};

struct PrefillSequence {
  int64_t seq;
  int64_t first_row;  // in q and out
  int64_t query_len;
  int64_t context_len;
  int64_t seq_len;
  int64_t first_block;  // of keys that any row sees
  int64_t num_blocks;
  int64_t packed_offset;  // in blocks, of KV head 0
  int64_t tile_tokens;
  int64_t num_tiles;
  int64_t first_pack_item;
  int64_t first_tile_item;
};

FT_INLINE void copy_lanes(float* lanes, int64_t stride, const float* source, int64_t count) {
  for (int64_t i = 0; i < count; ++i) lanes[i * stride] = source[i];
}
FT_INLINE void copy_lanes(float* lanes, int64_t stride, const bf16* source, int64_t count) {
  for (int64_t i = 0; i < count; ++i) lanes[i * stride] = to_float(source[i]);
}

template <class T>
FT_INLINE void copy_row(float* lanes, const T* source, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(lanes + i, load(source + i));
  for (; i < count; ++i) lanes[i] = to_float(source[i]);
}

// One row of values as fp32.
template <class T>
FT_INLINE void pack_value_rows(float* lanes, const T* even, const T*, int64_t head_dim, int64_t width) {
  int64_t d = 0;
  if (even)
    for (; d + kLanes <= head_dim; d += kLanes) store(lanes + d, load(even + d));
  for (; d < width; ++d) lanes[d] = even && d < head_dim ? to_float(even[d]) : 0.0f;
}

#if defined(FT_BF16_DOT)
FT_INLINE void copy_lanes(uint32_t* lanes, int64_t stride, const bf16* source, int64_t count) {
  int64_t pair = 0;
  for (; pair < count / 2; ++pair) lanes[pair * stride] = load_as<uint32_t>(source + 2 * pair);
  if (count % 2) lanes[pair * stride] = source[count - 1];
}

FT_INLINE void copy_row(uint32_t* lanes, const bf16* source, int64_t count) {
  if (count % 2) lanes[count / 2] = 0;
  memcpy(lanes, source, sizeof(bf16) * count);
}

// Two rows of values, lane by lane.
FT_INLINE void pack_value_rows(uint32_t* lanes, const bf16* even, const bf16* odd, int64_t head_dim, int64_t width) {
  int64_t d = 0;
  if (even)
    for (; d + kLanes <= head_dim; d += kLanes) {
      const vu low = (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(even + d)));
      vu high = {};
      if (odd) high = (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + d)));
      const vu both = low | (high << 16);
      memcpy(lanes + d, &both, sizeof(both));
    }
  for (; d < width; ++d) {
    const bool is_inside = even && d < head_dim;
    lanes[d] = is_inside ? uint32_t(even[d]) | (odd ? uint32_t(odd[d]) << 16 : 0u) : 0u;
  }
}
#endif

// Lays out the block of keys that starts at token `start`; slots beyond the sequence are never read and count as zeros.
template <class Math, class T>
void pack_block(const FtAttention& args, const PrefillLayout<Math>& layout, const PrefillSequence& sequence,
                int64_t kv_head, int64_t start, typename Math::Lane* packed) {
  constexpr int64_t kKeys = PrefillLayout<Math>::kKeys;
  const int32_t* table = args.block_tables + sequence.seq * args.table_stride;
  const int64_t token_stride = int64_t(args.num_kv_heads) * args.head_dim;
  const int64_t end = start + kKeys < sequence.seq_len ? start + kKeys : sequence.seq_len;
  int64_t offsets[kKeys];
  for (int64_t token = start; token < end;) {
    const int64_t in_block = token % args.block_size;
    int64_t offset = (int64_t(table[token / args.block_size]) * args.block_size + in_block) * token_stride;
    offset += kv_head * args.head_dim;
    for (int64_t i = in_block; i < args.block_size && token < end; ++i, ++token, offset += token_stride)
      offsets[token - start] = offset;
  }
  const T* keys = static_cast<const T*>(args.k_cache);
  const T* values = static_cast<const T*>(args.v_cache);
  typename Math::Lane* value_lanes = packed + layout.key_lanes;
  if (end < start + kKeys) memset(packed, 0, sizeof(*packed) * layout.key_lanes);
  for (int64_t token = start; token < end; ++token)
    copy_lanes(packed + (token - start), kKeys, keys + offsets[token - start], layout.head_dim);
  for (int64_t row = 0; row < kKeys; row += Math::kPerLane) {
    const int64_t token = start + row;
    const T* even = token < end ? values + offsets[row] : nullptr;
    const T* odd = Math::kPerLane == 2 && token + 1 < end ? values + offsets[row + 1] : nullptr;
    pack_value_rows(value_lanes + row / Math::kPerLane * layout.value_width, even, odd, layout.head_dim,
                    layout.value_width);
  }
}

FT_INLINE void store_weights(float* address, vf weights) { store(address, weights); }
FT_INLINE void store_weights(uint32_t* address, vf weights) { store(reinterpret_cast<bf16*>(address), weights); }

// What one tile of query rows carries from block to block of keys.
template <class Math>
struct Tile {
  const PrefillLayout<Math>& layout;
  typename Math::Lane* queries;  // (num_rows, key_steps)
  float* sums;                   // (num_rows, value_width)
  float* row_max;                // of the scores times log2(e)
  float* row_sum;
  int32_t* positions;            // of the rows in their sequence
};

template <class Math, int kVectors>
FT_INLINE void score_columns(const Tile<Math>& tile, const typename Math::Lane* queries,
                             const typename Math::Lane* keys, float* scores) {
  constexpr int kKeys = PrefillLayout<Math>::kKeys;
  vf sums[kTileRows][kVectors] = {};
  multiply_tile<Math, kTileRows, kVectors>(queries, tile.layout.key_steps, 1, keys, kKeys, tile.layout.key_steps, sums);
  for (int r = 0; r < kTileRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(scores + r * kKeys + v * kLanes, sums[r][v]);
}

template <class Math, int kVectors>
FT_INLINE void add_values(const Tile<Math>& tile, const typename Math::Lane* weights,
                          const typename Math::Lane* values, int64_t num_steps, const float* factors, float* out) {
  constexpr int kKeys = PrefillLayout<Math>::kKeys;
  const int64_t width = tile.layout.value_width;
  // from zero for every block: thousands of additions to one running sum would lose more digits
  vf sums[kTileRows][kVectors] = {};
  multiply_tile<Math, kTileRows, kVectors>(weights, kKeys / Math::kPerLane, 1, values, width, num_steps, sums);
  for (int r = 0; r < kTileRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* sum = out + r * width + v * kLanes;
      store(sum, fma(load(sum), set1(factors[r]), sums[r][v]));
    }
}

// cap * tanh(x / cap), in units of log2(e) throughout: `cap` and `x` are both multiplied by it already.
FT_INLINE vf cap_scores(vf x, float cap) {
  // tanh(y) = 1 - 2 / (exp(2 y) + 1); beyond 40 it is 1 in fp32
  vf y = x * (2.0f * kLog2E / cap);
  y = y > 80.0f ? set1(80.0f) : y;
  return cap - (2.0f * cap) / (exp2(y) + 1.0f);
}

struct Visible {
  int64_t begin;  // first key of the block that a row sees
  int64_t end;    // one past the last
};

// Rows of a group, padded to whole vectors.
constexpr int kStateRows = (kTileRows + kLanes - 1) / kLanes * kLanes;

FT_INLINE void store_rows(float* address, vf values, int count) {
  for (int lane = 0; lane < kLanes && lane < count; ++lane) address[lane] = values[lane];
}

// Six rows against one block of keys.
template <class Math>
FT_INLINE void attend_block(const Tile<Math>& tile, int64_t group, const typename Math::Lane* block,
                            const Visible* visible, int64_t num_keys, bool is_masked, float scale, float soft_cap) {
  constexpr int kKeys = PrefillLayout<Math>::kKeys;
  alignas(64) float scores[kTileRows * kKeys];
  alignas(64) typename Math::Lane weights[kTileRows * kKeys / Math::kPerLane];
  const typename Math::Lane* queries = tile.queries + group * kTileRows * tile.layout.key_steps;
  const int num_vectors = static_cast<int>((num_keys + kLanes - 1) / kLanes);
  int first = 0;
  for (; first + kTileVectors <= num_vectors; first += kTileVectors)
    score_columns<Math, kTileVectors>(tile, queries, block + first * kLanes, scores + first * kLanes);
  switch (num_vectors - first) {
    case 1: score_columns<Math, 1>(tile, queries, block + first * kLanes, scores + first * kLanes); break;
#if FT_TILE_VECTORS > 2
    case 2: score_columns<Math, 2>(tile, queries, block + first * kLanes, scores + first * kLanes); break;
    case 3: score_columns<Math, 3>(tile, queries, block + first * kLanes, scores + first * kLanes); break;
#endif
    default: break;
  }

  if (soft_cap > 0.0f)
    for (int r = 0; r < kTileRows; ++r)
      for (int v = 0; v < num_vectors; ++v) {
        float* cell = scores + r * kKeys + v * kLanes;
        store(cell, cap_scores(load(cell) * scale, soft_cap * kLog2E));
      }
  if (is_masked)
    for (int r = 0; r < kTileRows; ++r) {
      const vi begin = vi{} + static_cast<int32_t>(visible[r].begin);
      const vi end = vi{} + static_cast<int32_t>(visible[r].end);
      vi key = lane_index();
      for (int v = 0; v < num_vectors; ++v, key += kLanes) {
        float* cell = scores + r * kKeys + v * kLanes;
        store(cell, select((key >= begin) & (key < end), load(cell), set1(kMasked)));
      }
    }

  // The steps of the softmax are taken for all rows before the next one, because each has to wait for itself only.
  // The scale is positive, so the largest score is found before it is applied.
  const float factor = soft_cap > 0.0f ? 1.0f : scale;
  float* row_max = tile.row_max + group * kTileRows;
  float* row_sum = tile.row_sum + group * kTileRows;
  alignas(64) float shifts[kStateRows] = {}, factors[kStateRows], totals[kTileRows];
  for (int r = 0; r < kTileRows; ++r) {
    const float* row = scores + r * kKeys;
    vf best = load(row);
    for (int v = 1; v < num_vectors; ++v) best = max(best, load(row + v * kLanes));
    shifts[r] = max_of(best) * factor;
  }
  for (int r = 0; r < kStateRows; r += kLanes) {
    const vf old_max = load(row_max + r), block_max = load(shifts + r);
    const vf new_max = max(block_max, old_max);
    // a row that has not seen any key yet: all its weights are 0, whatever they are compared with
    const vf shift = select(new_max < set1(kMasked * 1e-6f), vf{}, new_max);
    store(shifts + r, shift);
    store(factors + r, exp2(old_max - shift));
    store_rows(row_max + r, new_max, kTileRows - r);
  }
  for (int r = 0; r < kTileRows; ++r) {
    const float* row = scores + r * kKeys;
    typename Math::Lane* row_weights = weights + r * (kKeys / Math::kPerLane);
    const vf shift = set1(-shifts[r]);
    vf total = {};
    for (int v = 0; v < num_vectors; ++v) {
      const vf weight = Math::power_of_two(fma(load(row + v * kLanes), set1(factor), shift));
      total += weight;
      store_weights(row_weights + v * kLanes / Math::kPerLane, weight);
    }
    totals[r] = sum_of(total);
  }
  for (int r = 0; r < kTileRows; ++r) row_sum[r] = row_sum[r] * factors[r] + totals[r];

  const typename Math::Lane* values = block + tile.layout.key_lanes;
  const int64_t num_steps = (num_keys + Math::kPerLane - 1) / Math::kPerLane;
  float* out = tile.sums + group * kTileRows * tile.layout.value_width;
  const int64_t width = tile.layout.value_width / kLanes;
  int64_t column = 0;
  for (; column + kTileVectors <= width; column += kTileVectors)
    add_values<Math, kTileVectors>(tile, weights, values + column * kLanes, num_steps, factors, out + column * kLanes);
  switch (width - column) {
    case 1: add_values<Math, 1>(tile, weights, values + column * kLanes, num_steps, factors, out + column * kLanes); break;
#if FT_TILE_VECTORS > 2
    case 2: add_values<Math, 2>(tile, weights, values + column * kLanes, num_steps, factors, out + column * kLanes); break;
    case 3: add_values<Math, 3>(tile, weights, values + column * kLanes, num_steps, factors, out + column * kLanes); break;
#endif
    default: break;
  }
}

FT_INLINE int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// One tile of query tokens of one KV head. Returns false where there is no memory.
template <class Math, class T>
bool attend_tile(const FtAttention& args, const PrefillLayout<Math>& layout, const PrefillSequence& sequence,
                 int64_t kv_head, int64_t first_token, const typename Math::Lane* packed) {
  typedef typename Math::Lane Lane;
  constexpr int64_t kKeys = PrefillLayout<Math>::kKeys;
  const int64_t group_size = args.num_heads / args.num_kv_heads;
  const int64_t rest = sequence.query_len - first_token;
  const int64_t num_tokens = sequence.tile_tokens < rest ? sequence.tile_tokens : rest;
  const int64_t num_rows = num_tokens * group_size;
  const int64_t num_groups = (num_rows + kTileRows - 1) / kTileRows;
  const int64_t padded_rows = num_groups * kTileRows;
  const int64_t query_lanes = padded_rows * layout.key_steps;
  const int64_t sum_floats = padded_rows * layout.value_width;
  char* memory = static_cast<char*>(
      ft_scratch(FT_SCRATCH_WORKER, sizeof(Lane) * query_lanes + sizeof(float) * (sum_floats + 3 * padded_rows + kStateRows)));
  if (!memory) return false;
  Tile<Math> tile{layout, nullptr, nullptr, nullptr, nullptr, nullptr};
  tile.sums = reinterpret_cast<float*>(memory);
  tile.row_max = tile.sums + sum_floats;
  tile.row_sum = tile.row_max + padded_rows;
  tile.positions = reinterpret_cast<int32_t*>(tile.row_sum + padded_rows + kStateRows);
  tile.queries = reinterpret_cast<Lane*>(tile.positions + padded_rows);
  memset(tile.sums, 0, sizeof(float) * sum_floats);
  const int64_t first_position = sequence.context_len + first_token;
  for (int64_t row = 0; row < padded_rows; ++row) {
    tile.row_max[row] = kMasked;
    tile.row_sum[row] = 0.0f;
    // rows that only fill the last group see what the last true one sees
    const int64_t token_of_row = (row < num_rows ? row : num_rows - 1) / group_size;
    tile.positions[row] = static_cast<int32_t>(first_position + token_of_row);
    Lane* lanes = tile.queries + row * layout.key_steps;
    if (row < num_rows) {
      const int64_t token = sequence.first_row + first_token + row / group_size;
      const int64_t head = kv_head * group_size + row % group_size;
      const T* source = static_cast<const T*>(args.q) + token * args.q_token_stride + head * args.q_head_stride;
      copy_row(lanes, source, layout.head_dim);
    } else {
      memset(lanes, 0, sizeof(Lane) * layout.key_steps);
    }
  }

  const float scale = args.scale * kLog2E;
  const int64_t last_position = first_position + num_tokens - 1;
  const int64_t window_start = args.window > 0 ? first_position - args.window + 1 : 0;
  const int64_t first_block = window_start > 0 ? window_start / kKeys : 0;
  for (int64_t block = first_block; block <= last_position / kKeys; ++block) {
    const int64_t start = block * kKeys;
    const Lane* lanes = packed + (block - sequence.first_block) * layout.block_lanes();
    for (int64_t group = 0; group < num_groups; ++group) {
      Visible visible[kTileRows];
      for (int64_t r = 0; r < kTileRows; ++r) {
        const int64_t position = tile.positions[group * kTileRows + r];
        visible[r].end = clamp(position + 1 - start, 0, kKeys);
        visible[r].begin = args.window > 0 ? clamp(position - args.window + 1 - start, 0, kKeys) : 0;
      }
      const int64_t num_keys = visible[kTileRows - 1].end;
      if (num_keys == 0 || visible[0].begin == kKeys) continue;
      const bool is_masked = visible[0].end < kKeys || visible[kTileRows - 1].begin > 0;
      attend_block<Math>(tile, group, lanes, visible, num_keys, is_masked, scale, args.soft_cap);
    }
  }

  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t token = sequence.first_row + first_token + row / group_size;
    const int64_t head = kv_head * group_size + row % group_size;
    T* out = static_cast<T*>(args.out) + (token * args.num_heads + head) * args.head_dim;
    const float* sums = tile.sums + row * layout.value_width;
    const float inverse = 1.0f / tile.row_sum[row];
    int64_t d = 0;
    for (; d + kLanes <= layout.head_dim; d += kLanes) store(out + d, load(sums + d) * inverse);
    for (; d < layout.head_dim; ++d) store_one(out + d, sums[d] * inverse);
  }
  return true;
}

// Packed keys and values of the sequences of one round stay below this, unless a single sequence needs more.
constexpr int64_t kMaxPackedBytes = int64_t(64) << 20;
// Rows of a tile: enough to use a block of keys many times, few enough to stay in the second-level cache.
constexpr int64_t kRowsPerTile = 192;
constexpr int64_t kMinTileTokens = 8;
constexpr int64_t kItemsPerThread = 6;

// All sequences with more than one new token.
template <class Math, class T>
int32_t attend_prefills(const FtAttention& args) {
  typedef typename Math::Lane Lane;
  constexpr int64_t kKeys = PrefillLayout<Math>::kKeys;
  const PrefillLayout<Math> layout(args.head_dim);
  const int64_t group_size = args.num_heads / args.num_kv_heads;
  PrefillSequence* sequences =
      static_cast<PrefillSequence*>(ft_scratch(FT_SCRATCH_ITEMS, sizeof(PrefillSequence) * (args.num_seqs + 1)));
  if (!sequences) return FT_OUT_OF_MEMORY;

  for (int64_t seq = 0; seq < args.num_seqs;) {
    int64_t count = 0, num_blocks = 0, num_pack_items = 0, num_tile_items = 0, num_new_tokens = 0;
    const int64_t first_seq = seq;
    for (; seq < args.num_seqs; ++seq) {
      PrefillSequence next;
      next.seq = seq;
      next.first_row = args.cu_seqlens_q[seq];
      next.query_len = args.cu_seqlens_q[seq + 1] - next.first_row;
      if (next.query_len < 2) continue;
      next.seq_len = args.seq_lens[seq];
      next.context_len = next.seq_len - next.query_len;
      const int64_t first_key = args.window > 0 ? next.context_len - args.window + 1 : 0;
      next.first_block = first_key > 0 ? first_key / kKeys : 0;
      next.num_blocks = (next.seq_len + kKeys - 1) / kKeys - next.first_block;
      const int64_t needed = next.num_blocks * args.num_kv_heads;
      if (count && (num_blocks + needed) * layout.block_lanes() * int64_t(sizeof(Lane)) > kMaxPackedBytes) break;
      next.packed_offset = num_blocks;
      num_blocks += needed;
      num_new_tokens += next.query_len;
      sequences[count++] = next;
    }
    if (!count) {
      if (seq == first_seq) break;
      continue;
    }
    // fewer tokens per tile where there would not be enough tiles for all threads
    int64_t tile_tokens = kRowsPerTile / group_size;
    const int64_t wanted = kItemsPerThread * args.num_threads / args.num_kv_heads + 1;
    if (num_new_tokens / wanted < tile_tokens) tile_tokens = num_new_tokens / wanted;
    if (tile_tokens < kMinTileTokens) tile_tokens = kMinTileTokens;
    for (int64_t i = 0; i < count; ++i) {
      sequences[i].tile_tokens = tile_tokens;
      sequences[i].num_tiles = (sequences[i].query_len + tile_tokens - 1) / tile_tokens;
      sequences[i].first_pack_item = num_pack_items;
      sequences[i].first_tile_item = num_tile_items;
      num_pack_items += sequences[i].num_blocks * args.num_kv_heads;
      num_tile_items += sequences[i].num_tiles * args.num_kv_heads;
    }
    Lane* packed = static_cast<Lane*>(ft_scratch(FT_SCRATCH_CALL, sizeof(Lane) * num_blocks * layout.block_lanes()));
    if (!packed) return FT_OUT_OF_MEMORY;

    auto pack = [&](int64_t item) {
      int64_t i = count - 1;
      while (sequences[i].first_pack_item > item) --i;
      const PrefillSequence& sequence = sequences[i];
      const int64_t local = item - sequence.first_pack_item;
      const int64_t kv_head = local / sequence.num_blocks, block = local % sequence.num_blocks;
      pack_block<Math, T>(args, layout, sequence, kv_head, (sequence.first_block + block) * kKeys,
                          packed + (sequence.packed_offset + local) * layout.block_lanes());
    };
    parallel_for(num_pack_items, args.num_threads, pack);

    int32_t status = FT_OK;
    auto attend = [&](int64_t item) {
      int64_t i = count - 1;
      while (sequences[i].first_tile_item > item) --i;
      const PrefillSequence& sequence = sequences[i];
      const int64_t local = item - sequence.first_tile_item;
      const int64_t kv_head = local % args.num_kv_heads;
      // the last tile sees the most keys: begun first, it does not leave the other threads waiting at the end
      const int64_t index = sequence.num_tiles - 1 - local / args.num_kv_heads;
      const Lane* lanes = packed + (sequence.packed_offset + kv_head * sequence.num_blocks) * layout.block_lanes();
      if (!attend_tile<Math, T>(args, layout, sequence, kv_head, index * sequence.tile_tokens, lanes))
        __atomic_store_n(&status, int32_t(FT_OUT_OF_MEMORY), __ATOMIC_RELAXED);
    };
    parallel_for(num_tile_items, args.num_threads, attend);
    if (status != FT_OK) return status;
  }
  return FT_OK;
}

}  // namespace
