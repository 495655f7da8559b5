// Weights to levels, row scales and packed bytes: what conversion does for every projection of every expert.
//
// The specifications are ktplan/quant/rounding.py and groups.py; every table gives its bytes, bit for bit. Sums that decide something are
// sums of whole numbers (exact in any order) or of 16 float lanes, lane j holding columns j, j + 16, ... in order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ktplan/threads.h"

namespace ktplan {

enum class RowRule { kKt, kSearch };

// One projection of one part: rows of `columns` values, bfloat16 or float32, `stride` elements apart.
struct WeightMatrix {
  const void* data;
  bool bfloat16;
  std::size_t rows, columns, stride;
};

struct RowError {
  double error, energy;  // sums over a row: squared differences, and squared weights
};

struct QuantizeTask {
  WeightMatrix in;
  std::uint8_t* packed;  // in the tile order of layout.h
  void* scale;           // float32, one a row; with groups bfloat16, [rows / 32][columns / group][32]; none for bfloat16
  RowError* errors;      // one a row
};

// How to quantize; shared by all tasks of a call.
struct QuantizeRule {
  RowRule rule;
  int bits;                          // 16 (bfloat16), 8, 4, or 2 (levels -1..1 in INT4 tiles)
  const std::uint16_t* multipliers;  // the search's grid: 16 * levels per largest magnitude, ascending
  std::size_t multiplier_count;
  std::size_t group = 0;             // inputs that share a scale: 32, 64 or 128 with 4 bits; 0: a whole row
  const float* shares = nullptr;     // the search's scales of a group, as multiples of its largest weight
  std::size_t share_count = 0;
};

// Quantizes rows step * 32 .. step * 32 + 31; `scratch` has quantize_scratch(columns) bytes.
// Returns false where one of them holds a NaN or an infinity.
using QuantizeStep = bool (*)(const QuantizeTask& task, const QuantizeRule& rule, std::size_t step, std::uint8_t* scratch) noexcept;

struct QuantizeTable {
  QuantizeStep step;
};

std::size_t quantize_scratch(std::size_t columns);

// The one that goes with the kernel table of that name; nullptr where this build has none.
const QuantizeTable* find_quantize_table(const char* name);

// Runs all tasks on the pool; finite[i] tells whether task i met only finite values. Throws std::bad_alloc before it begins.
void quantize_all(const QuantizeTable& table, const QuantizeRule& rule, const QuantizeTask* tasks, std::size_t count, bool* finite,
                  Pool& pool);

}  // namespace ktplan
