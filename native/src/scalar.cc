// The scalar kernels: plain C++, no instruction beyond the platform's own. Every other table must give the same bits.
//
// Rows are kept as one int16 level an input. Read with layout.h and numerics.h.

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "ktplan/kernels.h"
#include "ktplan/numerics.h"
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

float exponential(float x) {
  x = x > kExpHigh ? kExpHigh : x;  // comparisons that let NaN through
  x = x < kExpLow ? kExpLow : x;
  const float t = std::fma(x, kLog2e, kMagic);
  const float n = t - kMagic;
  float r = std::fma(n, -kLn2High, x);
  r = std::fma(n, -kLn2Low, r);
  float p = kP0;
  p = std::fma(p, r, kP1);
  p = std::fma(p, r, kP2);
  p = std::fma(p, r, kP3);
  p = std::fma(p, r, kP4);
  p = std::fma(p, r, kP5);
  p = std::fma(p, r * r, r);
  p = p + 1.0f;
  // t's low bits hold n; NaN gives some power of two, and NaN times it stays NaN
  const std::uint32_t power = (std::bit_cast<std::uint32_t>(t) + 127u) << 23;
  return p * std::bit_cast<float>(power);
}

void swiglu(const float* gate, const float* up, float* out, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; ++i) out[i] = (gate[i] / (1.0f + exponential(-gate[i]))) * up[i];
}

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

constexpr ProjectKernels kWeight8{.project = project<8>, .dots = dots<8>, .max_rows = 8};
constexpr ProjectKernels kWeight4{.project = project<4>, .dots = dots<4>, .max_rows = 8};

}  // namespace

const KernelTable kTable{
    .name = "scalar",
    .words = "plain C++",
    .row_bytes = row_bytes,
    .quantize = quantize,
    .levels = levels,
    .a8_w8 = kWeight8,
    .a8_w4 = kWeight4,
    .a16_w8 = kWeight8,
    .a16_w4 = kWeight4,
    .swiglu = swiglu,
    .round_bf16 = round_bf16,
    .widen_bf16 = widen_bf16,
    .accumulate = accumulate,
    .add = add,
    .read = read,
};

}  // namespace ktplan::scalar
