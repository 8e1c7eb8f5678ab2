// y = x W^T + b with weights packed for the register tile; the rows of x are read where they lie.
//
// A panel of the weight is 64 columns: [steps over in_features][columns], a lane two neighbouring bf16 of one output
// channel. Six rows of x times one panel is one pass over the panel, so the panel is read from the second-level cache once
// per six rows; a few panels and some rows make one item of work.
#pragma once
#include "abi.h"
#include "activations.h"
#include "parallel.h"
#include "tiles.h"

#if defined(FT_BF16_DOT)

namespace {

constexpr int64_t kPanel = kTileVectors * kLanes;
// Rows of one item: they and the weights of a panel stay in the second-level cache.
constexpr int64_t kRowsPerItem = 96;

int32_t pack_bf16(const FtPack* pack) {
  const FtPack& args = *pack;
  const bf16* weight = static_cast<const bf16*>(args.weight);
  const int64_t steps = (args.in_features + 1) / 2;
  auto body = [&](int64_t panel) {
    uint32_t* lanes = static_cast<uint32_t*>(args.packed) + panel * steps * kPanel;
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t channel = panel * kPanel + column;
      const bf16* row = weight + channel * args.in_features;
      for (int64_t step = 0; step < steps; ++step) {
        uint32_t lane = 0;
        if (channel < args.out_features) {
          lane = row[2 * step];
          if (2 * step + 1 < args.in_features) lane |= uint32_t(row[2 * step + 1]) << 16;
        }
        lanes[step * kPanel + column] = lane;
      }
    }
  };
  parallel_for((args.out_features + kPanel - 1) / kPanel, args.num_threads, body);
  return FT_OK;
}

template <int kRows>
FT_INLINE void linear_tile(const FtLinear& args, int64_t row, int64_t panel) {
  const int64_t steps = args.in_features / 2;
  const uint32_t* weight = static_cast<const uint32_t*>(args.weight) + panel * ((args.in_features + 1) / 2) * kPanel;
  const bf16* x = static_cast<const bf16*>(args.x) + row * args.x_stride;
  const bf16* bias = static_cast<const bf16*>(args.bias);
  bf16* y = static_cast<bf16*>(args.y) + row * args.out_features;
  const bf16* addend = args.addend ? static_cast<const bf16*>(args.addend) + row * args.out_features : nullptr;
  vf sums[kRows][kTileVectors] = {};
  {
    const bf16* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = x + r * args.x_stride;
#pragma GCC unroll 2
    for (int64_t step = 0; step < steps; ++step) {
      vu columns[kTileVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) columns[v] = load_as<vu>(weight + step * kPanel + v * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const vu lane = set1u(load_as<uint32_t>(rows[r] + 2 * step));
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] = Pairs::multiply_add(lane, columns[v], sums[r][v]);
      }
    }
    if (args.in_features % 2)
      for (int v = 0; v < kTileVectors; ++v) {
        const vu column = load_as<vu>(weight + steps * kPanel + v * kLanes);
        for (int r = 0; r < kRows; ++r)
          sums[r][v] = Pairs::multiply_add(set1u(rows[r][2 * steps]), column, sums[r][v]);
      }
  }
  const int64_t first = panel * kPanel;
  if (args.activation != FT_NO_GATE) {
    constexpr int kHalf = kTileVectors / 2;
    bf16* gated = static_cast<bf16*>(args.y) + row * (args.out_features / 2) + first / 2;
    for (int v = 0; v < kHalf; ++v) {
      const vf gate_bias = bias ? load(bias + first + v * kLanes) : vf{};
      const vf up_bias = bias ? load(bias + first + (kHalf + v) * kLanes) : vf{};
      for (int r = 0; r < kRows; ++r)
        store(gated + r * (args.out_features / 2) + v * kLanes,
              activate(sums[r][v] + gate_bias, args.activation) * (sums[r][kHalf + v] + up_bias));
    }
    return;
  }
  for (int v = 0; v < kTileVectors; ++v) {
    const int64_t column = first + v * kLanes, rest = args.out_features - column;
    if (rest >= kLanes) {
      const vf added = bias ? load(bias + column) : vf{};
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = r * args.out_features + column;
        store(y + at, addend ? sums[r][v] + added + load(addend + at) : sums[r][v] + added);
      }
    } else if (rest > 0) {
      for (int r = 0; r < kRows; ++r)
        for (int64_t lane = 0; lane < rest; ++lane)
          store_one(y + r * args.out_features + column + lane,
                    sums[r][v][lane] + (bias ? to_float(bias[column + lane]) : 0.0f) +
                        (addend ? to_float(addend[r * args.out_features + column + lane]) : 0.0f));
    }
  }
}

int32_t linear_bf16(const FtLinear* linear) {
  const FtLinear& args = *linear;
  const int64_t num_panels = (args.out_features + kPanel - 1) / kPanel;
  const int64_t num_row_parts = (args.num_rows + kRowsPerItem - 1) / kRowsPerItem;
  if (num_row_parts == 0) return FT_OK;
  // few rows: many panels per item, so that handing out work costs little
  int64_t panels_per_item = num_panels / (args.num_threads * 8) + 1;
  const int64_t most = args.num_rows >= kTileRows ? 8 : 64;
  if (panels_per_item > most) panels_per_item = most;
  const int64_t num_panel_parts = (num_panels + panels_per_item - 1) / panels_per_item;
  auto body = [&](int64_t item) {
    const int64_t row_part = item % num_row_parts, panel_part = item / num_row_parts;
    const int64_t last_row =
        (row_part + 1) * kRowsPerItem < args.num_rows ? (row_part + 1) * kRowsPerItem : args.num_rows;
    const int64_t last_panel =
        (panel_part + 1) * panels_per_item < num_panels ? (panel_part + 1) * panels_per_item : num_panels;
    for (int64_t panel = panel_part * panels_per_item; panel < last_panel; ++panel) {
      int64_t row = row_part * kRowsPerItem;
      for (; row + kTileRows <= last_row; row += kTileRows) linear_tile<kTileRows>(args, row, panel);
      switch (last_row - row) {
        case 1: linear_tile<1>(args, row, panel); break;
        case 2: linear_tile<2>(args, row, panel); break;
        case 3: linear_tile<3>(args, row, panel); break;
        case 4: linear_tile<4>(args, row, panel); break;
        case 5: linear_tile<5>(args, row, panel); break;
        default: break;
      }
    }
  };
  parallel_for(num_row_parts * num_panel_parts, args.num_threads, body);
  return FT_OK;
}

}  // namespace

#endif  // FT_BF16_DOT
