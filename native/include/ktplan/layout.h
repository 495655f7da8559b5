// The packed expert weights, in kt-kernel's order: the file format in code.
//
// A projection has `n` outputs (rows) and `k` inputs. A row holds one signed byte an input (int8), or one byte for two
// inputs (int4: in each 128 inputs, byte j has input j in its low and input 64 + j in its high nibble), or two bytes an
// input (bfloat16). Bytes lie in this order, each level inside the one before:
//
//   n-block   64 rows (int8, bfloat16) or 128 rows (int4);         the last may be shorter
//   k-block   3584 (int8, bfloat16) or 1792 bytes of each row;    the last may be shorter
//   step      32 rows: what one call of a kernel multiplies
//   k-step    64 bytes of each row
//   tile      16 rows: 1024 bytes, word w (4 bytes) of all 16 rows side by side, 16 words
//
// So a load of 64 bytes gives four consecutive inputs (two of bfloat16) of 16 rows: the operand of vpdpbusd, vdpbf16ps
// and of an AMX tile alike. The same order, written independently in numpy, is the test of this header.
//
// Scales: float32, one a row; or, where `group` inputs of a row share one (int4 only), bfloat16 [step][group][32 rows],
// so that one line of 64 bytes serves a group of a step. bfloat16 weights have none.
//
// A weight is level * scale; in layouts with offsets (level + (last two bits of the scale + 1) / 2) * scale. Those bits are
// part of the scale's value all the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktplan {

inline constexpr std::size_t kStepRows = 32;  // rows a kernel call handles
inline constexpr std::size_t kTileRows = 16;  // rows that share one 64-byte load
inline constexpr std::size_t kTileBytes = 1024;
inline constexpr std::size_t kStepBytes = 64;     // bytes of one row in a k-step
inline constexpr std::size_t kMaxInputs = 65536;  // above it an int32 sum of products could overflow

// Sizes that depend on the width of the weights.
struct Layout {
  std::size_t bits;         // 8, 4 or 16 (bfloat16)
  std::size_t block_rows;   // rows of a full n-block
  std::size_t block_bytes;  // bytes of a row in a full k-block
  std::size_t k_multiple;   // inputs must be a multiple of this
  std::size_t group = 0;    // inputs that share a scale; 0: a whole row does
  bool offsets = false;     // a group's scale also chooses what is added to its levels

  constexpr std::size_t row_bytes(std::size_t k) const { return k * bits / 8; }
  constexpr std::size_t packed_bytes(std::size_t n, std::size_t k) const { return n * row_bytes(k); }
};

inline constexpr Layout kInt8Layout{.bits = 8, .block_rows = 64, .block_bytes = 3584, .k_multiple = 64};
inline constexpr Layout kInt4Layout{.bits = 4, .block_rows = 128, .block_bytes = 1792, .k_multiple = 128};
inline constexpr Layout kBf16Layout{.bits = 16, .block_rows = 64, .block_bytes = 3584, .k_multiple = 32};

// INT4 with a scale for each `group` inputs: 32, 64 or 128.
constexpr Layout grouped(std::size_t group, bool offsets = false) {
  Layout layout = kInt4Layout;
  layout.group = group;
  layout.offsets = offsets;
  return layout;
}

// What is added to a group's levels, by the last two bits of its scale.
inline constexpr float kOffsets[4] = {0.5f, 1.0f, 1.5f, 2.0f}, kNoOffsets[4] = {};

// 32 rows of a packed projection: what a kernel multiplies at a time.
struct WeightStep {
  const std::uint8_t* bytes;  // first byte of these rows in the first k-block
  std::size_t block_rows;     // rows in the n-block that holds them
  std::size_t index;          // which step of the n-block
  std::size_t row_bytes;      // bytes of a whole row
  const float* scale;         // one for each of the 32 rows; null where groups have them
  const std::uint16_t* group_scale;  // bfloat16 [groups][32]; null where rows have them
  const float* offsets;              // kOffsets or kNoOffsets
};

// Where k-block `kb` of the step begins, and how many bytes of each row it holds.
struct Segment {
  const std::uint8_t* bytes;
  std::size_t row_bytes;
};

// step_at and segment_at are called by kernels compiled for different machines: static, so that each file keeps its own
// copy.
static inline WeightStep step_at(const Layout& layout, const std::uint8_t* packed, const void* scale, std::size_t n,
                                 std::size_t row_bytes, std::size_t step) {
  const std::size_t row = step * kStepRows;
  const std::size_t block = row / layout.block_rows;
  const std::size_t first = block * layout.block_rows;
  const std::size_t rest = n - first;
  const bool rows_have_scales = layout.group == 0 && layout.bits != 16;
  const std::size_t groups = layout.group == 0 ? 0 : row_bytes * 8 / layout.bits / layout.group;
  return WeightStep{.bytes = packed + first * row_bytes,
                    .block_rows = rest < layout.block_rows ? rest : layout.block_rows,
                    .index = (row - first) / kStepRows,
                    .row_bytes = row_bytes,
                    .scale = rows_have_scales ? static_cast<const float*>(scale) + row : nullptr,
                    .group_scale = groups == 0 ? nullptr : static_cast<const std::uint16_t*>(scale) + row * groups,
                    .offsets = layout.offsets ? kOffsets : kNoOffsets};
}

static inline Segment segment_at(const WeightStep& step, std::size_t block_bytes, std::size_t kb) {
  const std::size_t rest = step.row_bytes - kb * block_bytes;
  const std::size_t bytes = rest < block_bytes ? rest : block_bytes;
  return Segment{.bytes = step.bytes + kb * block_bytes * step.block_rows + step.index * kStepRows * bytes,
                 .row_bytes = bytes};
}

}  // namespace ktplan
