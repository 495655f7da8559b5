// What every instruction set provides: one table of functions, filled by one source file an instruction set.
//
// All tables compute the same bits for whole-number weights. The integer dot products are exact, so their order is free;
// every float operation has one fixed order, written out in numerics.h, and no file is compiled with contraction or
// reassociation. Sums of bfloat16 products are the exception: their order is each table's own. Rows are independent: a
// row's result does not depend on which other rows it is multiplied with.
//
// To add an instruction set: write one file with a `const KernelTable`, name its compile flags in CMakeLists.txt, list
// it in dispatch.cc, best first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "ktplan/layout.h"

namespace ktplan {

// Whose rounding to follow. kUpstream: kt-kernel's (8-bit activations, bf16 between the steps), to compare with it.
enum class Numerics { kKtplan, kUpstream };

// A row of activations, quantized: levels = round(x / scale). For bfloat16 weights the values themselves, with a scale
// of 1. The bytes' order is private to the kernels that wrote them.
struct Row {
  const std::uint8_t* bytes;
  float scale;           // NaN where the row held a NaN or an infinity: its results are all NaN
  std::int32_t sums[2];  // sums of the levels' upper and lower bytes; for tables whose weights are offset
};

// What to bring near while multiplying: lines [first_line, last_line) of the 32 in each k-step (2 KB) of the step that
// comes next, which has the same shape. A hint only.
struct Ahead {
  const WeightStep* next = nullptr;
  std::size_t first_line = 0, last_line = 0;
};

// out[r * stride + c], 32 columns; see "project" in numerics.h.
using Project = void (*)(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead,
                         float* out, std::size_t stride) noexcept;

// The exact dot products alone, for tests: out[r * 32 + c].
using Dots = void (*)(const WeightStep& step, const Row* const* rows, std::size_t count, std::int64_t* out) noexcept;

// Functions for one width of activations.
struct ProjectKernels {
  Project project;
  Dots dots;             // null for groups and bfloat16
  std::size_t max_rows;  // rows that one call takes
};

// Rows of activations in blocks of kBlockRows, for instruction sets that multiply whole blocks (AMX).
struct BlockedRows {
  const std::uint8_t* blocks;  // one behind the other; only the last may hold fewer rows
  std::size_t block_bytes;
  const Row* const* rows;  // for their scales
  std::size_t count;       // at most kMaxBlocks * kBlockRows
};
inline constexpr std::size_t kBlockRows = 16;
inline constexpr std::size_t kMaxBlocks = 6;

// How rows get into blocks, and what one or two steps of weights give with them. All null where a table takes rows as
// they are. Results are those of ProjectKernels, bit for bit, except that bfloat16 weights have blocks always or never.
struct BlockKernels {
  std::size_t min_rows = 0;  // an expert's own tokens from which blocks are faster
  std::size_t (*block_bytes)(std::size_t k) noexcept = nullptr;
  // Copies a quantized row to place `index` of a block.
  void (*place)(const Row& row, std::size_t k, std::uint8_t* block, std::size_t index) noexcept = nullptr;
  // out[s][r * stride + c], 32 columns of steps[s]; `count` 1 or 2 steps of the same shape.
  void (*project)(const WeightStep* steps, std::size_t count, const BlockedRows& rows, float* const* out,
                  std::size_t stride) noexcept = nullptr;
  void (*dots)(const WeightStep& step, const BlockedRows& rows, std::int64_t* out) noexcept = nullptr;

  bool take(std::size_t rows) const { return place != nullptr && rows >= min_rows; }
};

// One format of weights: how rows of activations are kept for it, and multiplied with it.
struct FormatKernels {
  // Bytes of a quantized row; `bits` is 8 or 16, k a multiple of the layout's.
  std::size_t (*row_bytes)(std::size_t k, int bits) noexcept;
  // Quantizes k values to levels of at most `limit` in size, writes them to `bytes`.
  Row (*quantize)(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept;
  ProjectKernels a8, a16;
  BlockKernels blocks8{}, blocks16{};

  const ProjectKernels& projections(int activation_bits) const { return activation_bits == 8 ? a8 : a16; }
  const BlockKernels& blocks(int activation_bits) const { return activation_bits == 8 ? blocks8 : blocks16; }
};

// What stands between gate, up and down; "activate" in numerics.h.
struct Activation {
  enum class Kind { kSilu, kGelu, kGeluTanh, kSwigluOai } kind = Kind::kSilu;
  float alpha = 1.702f;                                      // of kSwigluOai
  float limit = std::numeric_limits<float>::infinity();      // gate at most this, up within +-this
};

struct KernelTable {
  const char* name;
  const char* words;       // for people
  const char* bf16_words;  // what multiplies bfloat16 weights, for people

  FormatKernels int8, int4, int4_g32, int4_g64, int4_g128, bf16;

  // The levels of a row that int8's `quantize` wrote (other formats may keep the same levels otherwise), for tests.
  void (*levels)(const Row& row, std::size_t k, int bits, std::int32_t* out) noexcept;

  // n a multiple of 16; out may be up.
  void (*activate)(const Activation& activation, const float* gate, const float* up, float* out,
                   std::size_t n) noexcept;
  // Rounds to the nearest bfloat16 and back, in place.
  void (*round_bf16)(float* x, std::size_t n) noexcept;
  void (*widen_bf16)(const std::uint16_t* x, float* out, std::size_t n) noexcept;
  // acc = fma(weight, y, acc)
  void (*accumulate)(float* acc, const float* y, float weight, std::size_t n) noexcept;
  // acc = acc + y
  void (*add)(float* acc, const float* y, std::size_t n) noexcept;
  // Reads every byte once and returns their 64-bit words' exclusive or: what memory alone costs.
  std::uint64_t (*read)(const void* bytes, std::size_t n) noexcept;

  const FormatKernels& format(const Layout& layout) const {
    if (layout.bits == 16) return bf16;
    if (layout.bits == 8) return int8;
    switch (layout.group) {
      case 32: return int4_g32;
      case 64: return int4_g64;
      case 128: return int4_g128;
      default: return int4;
    }
  }
};

}  // namespace ktplan
