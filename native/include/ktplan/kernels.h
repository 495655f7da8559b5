// What every instruction set provides: one table of functions, filled by one source file an instruction set.
//
// All tables compute the same bits. The integer dot products are exact, so their order is free; every float operation
// has one fixed order, written out in numerics.h, and no file is compiled with contraction or reassociation. Rows are
// independent: a row's result does not depend on which other rows it is multiplied with.
//
// Names: project_a{activation bits}_w{weight bits}. To add an instruction set (avx-vnni, avx512 without VNNI,
// amx-int8): write one file with a `const KernelTable`, name its compile flags in CMakeLists.txt, list it in
// dispatch.cc, best first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktplan/layout.h"

namespace ktplan {

// Whose rounding to follow. kUpstream: kt-kernel's (8-bit activations, bf16 between the steps), to compare with it.
enum class Numerics { kKtplan, kUpstream };

// A row of activations, quantized: levels = round(x / scale). The bytes' order is private to the table that wrote them.
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

// out[r * stride + c] = (rows[r].scale * step.scale[c]) * float32(exact dot product), 32 columns.
using Project = void (*)(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead,
                         float* out, std::size_t stride) noexcept;

// The exact dot products alone, for tests: out[r * 32 + c].
using Dots = void (*)(const WeightStep& step, const Row* const* rows, std::size_t count, std::int64_t* out) noexcept;

// Functions for one width of activations and one of weights.
struct ProjectKernels {
  Project project;
  Dots dots;
  std::size_t max_rows;  // rows that one call takes
};

struct KernelTable {
  const char* name;
  const char* words;  // for people

  // Bytes of a quantized row; `bits` is 8 or 16, k a multiple of 64.
  std::size_t (*row_bytes)(std::size_t k, int bits) noexcept;
  // Quantizes k values to levels of at most `limit` in size, writes them to `bytes`.
  Row (*quantize)(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept;
  // The levels of a quantized row, for tests.
  void (*levels)(const Row& row, std::size_t k, int bits, std::int32_t* out) noexcept;

  ProjectKernels a8_w8, a8_w4, a16_w8, a16_w4;

  // out = silu(gate) * up; n a multiple of 16.
  void (*swiglu)(const float* gate, const float* up, float* out, std::size_t n) noexcept;
  // Rounds to the nearest bfloat16 and back, in place.
  void (*round_bf16)(float* x, std::size_t n) noexcept;
  void (*widen_bf16)(const std::uint16_t* x, float* out, std::size_t n) noexcept;
  // acc = fma(weight, y, acc)
  void (*accumulate)(float* acc, const float* y, float weight, std::size_t n) noexcept;
  // acc = acc + y
  void (*add)(float* acc, const float* y, std::size_t n) noexcept;
  // Reads every byte once and returns their 64-bit words' exclusive or: what memory alone costs.
  std::uint64_t (*read)(const void* bytes, std::size_t n) noexcept;

  const ProjectKernels& projections(int activation_bits, std::size_t weight_bits) const {
    if (activation_bits == 8) return weight_bits == 8 ? a8_w8 : a8_w4;
    return weight_bits == 8 ? a16_w8 : a16_w4;
  }
};

}  // namespace ktplan
