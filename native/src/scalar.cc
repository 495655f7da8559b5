// The scalar kernels: plain C++, no instruction beyond the platform's own. Every other table must give the same bits.
//
// Rows are kept as one int16 level an input. Read with layout.h and numerics.h.

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "ktplan/kernels.h"
#include "ktplan/numerics.h"
#include "activation.h"
#include "ktplan/tables.h"

namespace ktplan::scalar {
namespace {

using namespace numerics;

std::size_t row_bytes(std::size_t k, int) noexcept { return 2 * k; }

Row quantize(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
  Row row{.bytes = bytes, .scale = 0.0f, .sums = {0, 0}};
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < k; ++i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float amax = std::bit_cast<float>(largest);
  float inverse = 0.0f;
  if (largest >= 0x7f800000u) {
    row.scale = std::numeric_limits<float>::quiet_NaN();
  } else if (amax >= kTiny) {
    const float limit = bits == 8 ? kLimit8 : kLimit16;
    row.scale = numerics == Numerics::kUpstream ? amax * kReciprocal127 : amax / limit;
    inverse = numerics == Numerics::kUpstream ? 1.0f / row.scale : limit / amax;
  }
  for (std::size_t i = 0; i < k; ++i) {
    const auto level = inverse == 0.0f ? std::int16_t{0} : static_cast<std::int16_t>(std::lrintf(x[i] * inverse));
    std::memcpy(bytes + 2 * i, &level, 2);
  }
  return row;
}

std::int16_t level_at(const Row& row, std::size_t i) {
  std::int16_t level;
  std::memcpy(&level, row.bytes + 2 * i, 2);
  return level;
}

void levels(const Row& row, std::size_t k, int, std::int32_t* out) noexcept {
  for (std::size_t i = 0; i < k; ++i) out[i] = level_at(row, i);
}

// The exact dot products of one row with the step's 32 columns.
template <std::size_t kBits>
void dot_row(const WeightStep& step, const Row& row, std::int64_t* out) {
  constexpr Layout layout = kBits == 8 ? kInt8Layout : kInt4Layout;
  std::memset(out, 0, kStepRows * sizeof *out);
  std::size_t input = 0;
  for (std::size_t kb = 0; kb * layout.block_bytes < step.row_bytes; ++kb) {
    const Segment segment = segment_at(step, layout.block_bytes, kb);
    const std::uint8_t* w = segment.bytes;
    for (std::size_t done = 0; done < segment.row_bytes; done += kStepBytes) {
      for (std::size_t column = 0; column < kStepRows; ++column) {
        const std::uint8_t* tile = w + column / kTileRows * kTileBytes + column % kTileRows * 4;
        std::int64_t sum = 0;
        for (std::size_t j = 0; j < kStepBytes; ++j) {
          const std::uint8_t byte = tile[j / 4 * 64 + j % 4];
          if constexpr (kBits == 8) {
            sum += level_at(row, input + j) * static_cast<std::int8_t>(byte);
          } else {  // a nibble n stands for the level 16 n
            sum += level_at(row, input + j) * static_cast<std::int8_t>(byte << 4);
            sum += level_at(row, input + 64 + j) * static_cast<std::int8_t>(byte & 0xf0);
          }
        }
        out[column] += sum;
      }
      w += 2 * kTileBytes;
      input += kStepBytes * 8 / kBits;
    }
  }
}

template <std::size_t kBits>
void dots(const WeightStep& step, const Row* const* rows, std::size_t count, std::int64_t* out) noexcept {
  for (std::size_t r = 0; r < count; ++r) dot_row<kBits>(step, *rows[r], out + r * kStepRows);
}

template <std::size_t kBits>
void project(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead&, float* out,
             std::size_t stride) noexcept {
  std::int64_t sums[kStepRows];
  for (std::size_t r = 0; r < count; ++r) {
    dot_row<kBits>(step, *rows[r], sums);
    for (std::size_t c = 0; c < kStepRows; ++c) {
      out[r * stride + c] = (rows[r]->scale * step.scale[c]) * static_cast<float>(sums[c]);
    }
  }
}

struct Scalars {
  using F = float;
  static constexpr std::size_t kLanes = 1;
  static F load(const float* p) { return *p; }
  static void store(float* p, F x) { *p = x; }
  static F set(float x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F negate(F x) { return -x; }
  static F magnitude(F x) { return std::fabs(x); }
  static F negative_or(F x, F a, F b) { return x < 0.0f ? a : b; }
  // t's low bits hold n; NaN gives some power of two, and NaN times it stays NaN
  static F power(F t) { return std::bit_cast<float>((std::bit_cast<std::uint32_t>(t) + 127u) << 23); }
};

void round_bf16(float* x, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x[i]);
    if ((bits & 0x7fffffffu) > 0x7f800000u) continue;  // NaN stays
    x[i] = std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  }
}

void widen_bf16(const std::uint16_t* x, float* out, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(x[i]) << 16);
}

void accumulate(float* acc, const float* y, float weight, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) acc[i] = std::fma(weight, y[i], acc[i]);
}

void add(float* acc, const float* y, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) acc[i] = acc[i] + y[i];
}

std::uint64_t read(const void* bytes, std::size_t n) noexcept {
  std::uint64_t all = 0;
  const auto* p = static_cast<const std::uint8_t*>(bytes);
  for (std::size_t i = 0; i + 8 <= n; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, p + i, 8);
    all ^= word;
  }
  return all;
}

// --- group-wise int4 ---

// The exact dot product of one row with 32 columns over one group, levels of 16 n.
template <std::size_t kGroup>
void dot_group(const std::uint8_t* step, const Row& row, std::size_t input, std::int32_t* out) {
  for (std::size_t column = 0; column < kStepRows; ++column) {
    const std::uint8_t* tile = step + column / kTileRows * kTileBytes + column % kTileRows * 4;
    std::int32_t sum = 0;
    for (std::size_t i = input; i < input + kGroup; ++i) {
      const std::size_t j = i % 64;
      const std::uint8_t byte = tile[j / 4 * 64 + j % 4];
      sum += level_at(row, i) * static_cast<std::int8_t>(i % 128 < 64 ? byte << 4 : byte & 0xf0);
    }
    out[column] = sum;
  }
}

template <std::size_t kGroup>
void project_groups(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead&, float* out,
                    std::size_t stride) noexcept {
  for (std::size_t r = 0; r < count; ++r) {
    float sums[kStepRows] = {};
    std::size_t input = 0;
    const std::uint16_t* scale = step.group_scale;
    for (std::size_t kb = 0; kb * kInt4Layout.block_bytes < step.row_bytes; ++kb) {
      const Segment segment = segment_at(step, kInt4Layout.block_bytes, kb);
      for (std::size_t done = 0; done < segment.row_bytes; done += kStepBytes) {
        for (const std::size_t end = input + 128; input < end; input += kGroup, scale += kStepRows) {
          std::int32_t dots[kStepRows];
          dot_group<kGroup>(segment.bytes + done * kStepRows, *rows[r], input, dots);
          std::int32_t levels = 0;
          for (std::size_t i = input; i < input + kGroup; ++i) levels += level_at(*rows[r], i);
          for (std::size_t c = 0; c < kStepRows; ++c) {
            const float width = std::bit_cast<float>(std::uint32_t{scale[c]} << 16) * 0.0625f;
            const float offset = 16.0f * step.offsets[scale[c] & 3];
            const float dot = std::fma(static_cast<float>(levels), offset, static_cast<float>(dots[c]));
            sums[c] = std::fma(dot, width, sums[c]);
          }
        }
      }
    }
    for (std::size_t c = 0; c < kStepRows; ++c) out[r * stride + c] = rows[r]->scale * sums[c];
  }
}

// --- bfloat16: a row is float32 values; with 8 bits they are rounded to bfloat16 ---

std::size_t row_bytes_bf16(std::size_t k, int) noexcept { return 4 * k; }

Row encode_bf16(const float* x, std::size_t k, int bits, Numerics, std::uint8_t* bytes) noexcept {
  Row row{.bytes = bytes, .scale = 1.0f, .sums = {0, 0}};
  auto* values = reinterpret_cast<float*>(bytes);
  std::memcpy(values, x, k * sizeof *x);
  if (bits == 8) round_bf16(values, k);
  for (std::size_t i = 0; i < k; ++i) {
    if (!std::isfinite(x[i])) row.scale = std::numeric_limits<float>::quiet_NaN();
  }
  return row;
}

void project_bf16(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead&, float* out,
                  std::size_t stride) noexcept {
  for (std::size_t r = 0; r < count; ++r) {
    const auto* x = reinterpret_cast<const float*>(rows[r]->bytes);
    float sums[kStepRows] = {};
    for (std::size_t kb = 0; kb * kBf16Layout.block_bytes < step.row_bytes; ++kb) {
      const Segment segment = segment_at(step, kBf16Layout.block_bytes, kb);
      for (std::size_t done = 0; done < segment.row_bytes; done += kStepBytes, x += 32) {
        for (std::size_t c = 0; c < kStepRows; ++c) {
          const std::uint8_t* tile = segment.bytes + done * kStepRows + c / kTileRows * kTileBytes + c % kTileRows * 4;
          for (std::size_t i = 0; i < 32; ++i) {
            std::uint16_t weight;
            std::memcpy(&weight, tile + i / 2 * 64 + i % 2 * 2, 2);
            sums[c] = std::fma(std::bit_cast<float>(std::uint32_t{weight} << 16), x[i], sums[c]);
          }
        }
      }
    }
    for (std::size_t c = 0; c < kStepRows; ++c) out[r * stride + c] = rows[r]->scale * sums[c];
  }
}

template <std::size_t kBits>
constexpr FormatKernels kRows{.row_bytes = row_bytes,
                              .quantize = quantize,
                              .a8 = {.project = project<kBits>, .dots = dots<kBits>, .max_rows = 8},
                              .a16 = {.project = project<kBits>, .dots = dots<kBits>, .max_rows = 8}};

template <std::size_t kGroup>
constexpr FormatKernels kGroups{.row_bytes = row_bytes,
                                .quantize = quantize,
                                .a8 = {.project = project_groups<kGroup>, .dots = nullptr, .max_rows = 8},
                                .a16 = {.project = project_groups<kGroup>, .dots = nullptr, .max_rows = 8}};

constexpr FormatKernels kBf16{.row_bytes = row_bytes_bf16,
                              .quantize = encode_bf16,
                              .a8 = {.project = project_bf16, .dots = nullptr, .max_rows = 8},
                              .a16 = {.project = project_bf16, .dots = nullptr, .max_rows = 8}};

}  // namespace

constinit const KernelTable kTable{
    .name = "scalar",
    .words = "plain C++",
    .bf16_words = "plain C++",
    .int8 = kRows<8>,
    .int4 = kRows<4>,
    .int4_g32 = kGroups<32>,
    .int4_g64 = kGroups<64>,
    .int4_g128 = kGroups<128>,
    .bf16 = kBf16,
    .levels = levels,
    .activate = Activating<Scalars>::activate,
    .round_bf16 = round_bf16,
    .widen_bf16 = widen_bf16,
    .accumulate = accumulate,
    .add = add,
    .read = read,
};

}  // namespace ktplan::scalar
