// How rows of activations are quantized ("quantize" in numerics.h) and kept, over a set of vector operations V. Internal
// linkage.
//
//   pairs   int16 levels, four inputs 0 1 2 3 as 0 2 1 3: a dword holds the inputs that stand in the even, or in the odd,
//           bytes of a word of weights
//   bytes   a dword of four signed bytes for four inputs; with 16 bits the dword of upper bytes, then that of lower ones.
//           Where weights have groups, behind them for each group -kOffset * (sum of the group's levels), an int32: what
//           weights as unsigned numbers, level + kOffset, make too much
//   floats  float32 values, for bfloat16 weights; with 8 bits rounded to bfloat16
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktplan/kernels.h"
#include "ktplan/numerics.h"

namespace ktplan {
namespace {

template <class V>
struct Rows {
  using F = typename V::F;
  using I = typename V::I;

  static std::size_t pairs_bytes(std::size_t k, int) noexcept { return 2 * k; }
  static std::size_t floats_bytes(std::size_t k, int) noexcept { return 4 * k; }
  template <std::size_t kGroup>
  static std::size_t plain_bytes(std::size_t k, int bits) noexcept {
    return k * static_cast<std::size_t>(bits) / 8 + (kGroup == 0 ? 0 : k / kGroup * 4);
  }

  static Row pairs(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
    const Scaling scaling(x, k, bits, numerics);
    for (std::size_t i = 0; i < k; i += V::kLanes) V::store_pairs(bytes + 2 * i, scaling.levels(x + i));
    return Row{.bytes = bytes, .scale = scaling.scale, .sums = {0, 0}};
  }

  // kOffset: what the kernel adds to the weights' levels.
  template <std::size_t kGroup, int kOffset>
  static Row plain(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
    const Scaling scaling(x, k, bits, numerics);
    Row row{.bytes = bytes, .scale = scaling.scale, .sums = {0, 0}};
    std::uint8_t* excess = bytes + k * static_cast<std::size_t>(bits) / 8;
    I high_sum = V::set32(0), low_sum = V::set32(0);
    for (std::size_t begin = 0, length = kGroup == 0 ? k : kGroup; begin < k; begin += length) {
      I group_sum = V::set32(0);
      for (std::size_t i = begin; i < begin + length; i += V::kLanes) {
        const I level = scaling.levels(x + i);
        group_sum = V::add32(group_sum, level);
        if (bits == 8) {
          V::store_low_bytes(bytes + i, level);
        } else {
          const I high = V::template shift_right<8>(V::add32(level, V::set32(128)));
          V::store_planes(bytes + 2 * i, high, level);
          high_sum = V::add32(high_sum, high);
          low_sum = V::add32(low_sum, V::sub32(level, V::template shift_left<8>(high)));
        }
      }
      if constexpr (kGroup == 0) {
        if (bits == 8) high_sum = group_sum;
      } else {
        const std::int32_t value = -kOffset * V::sum32(group_sum);
        std::memcpy(excess, &value, 4);
        excess += 4;
      }
    }
    row.sums[0] = V::sum32(high_sum);
    row.sums[1] = V::sum32(low_sum);
    return row;
  }

  static Row floats(const float* x, std::size_t k, int bits, Numerics, std::uint8_t* bytes) noexcept {
    const bool finite = largest(x, k) < 0x7f800000u;
    for (std::size_t i = 0; i < k; i += V::kLanes) {
      const I value = V::load_bytes(x + i);
      V::store_bytes(bytes + 4 * i, bits == 8 ? V::nearest_bf16(value) : value);
    }
    return Row{.bytes = bytes, .scale = finite ? 1.0f : __builtin_nanf(""), .sums = {0, 0}};
  }

  static void levels_of_pairs(const Row& row, std::size_t k, int, std::int32_t* out) noexcept {
    for (std::size_t i = 0; i < k; ++i) {
      constexpr std::size_t place[] = {0, 2, 1, 3};
      std::int16_t level;
      std::memcpy(&level, row.bytes + 2 * (i / 4 * 4 + place[i % 4]), 2);
      out[i] = level;
    }
  }

  static void levels_of_bytes(const Row& row, std::size_t k, int bits, std::int32_t* out) noexcept {
    const auto* bytes = reinterpret_cast<const std::int8_t*>(row.bytes);
    for (std::size_t i = 0; i < k; ++i) {
      const std::int8_t* four = bytes + i / 4 * 8 + i % 4;
      out[i] = bits == 8 ? bytes[i] : 256 * four[0] + four[4];
    }
  }

 private:
  // The largest |x| as a bit pattern: NaN and infinity are above every finite value.
  static std::uint32_t largest(const float* x, std::size_t k) {
    I most = V::set32(0);
    for (std::size_t i = 0; i < k; i += V::kLanes) {
      most = V::max_unsigned32(most, V::both(V::load_bytes(x + i), V::set32(0x7fffffff)));
    }
    std::uint32_t lanes[V::kLanes], top = 0;
    V::store_bytes(lanes, most);
    for (const std::uint32_t lane : lanes) top = lane > top ? lane : top;
    return top;
  }

  struct Scaling {
    float scale = 0.0f;
    F factor;
    I keep;  // none where the factor is zero: it must clear what is not finite too

    Scaling(const float* x, std::size_t k, int bits, Numerics numerics) {
      const std::uint32_t top = largest(x, k);
      float amax, inverse = 0.0f;
      std::memcpy(&amax, &top, 4);
      if (top >= 0x7f800000u) {
        scale = __builtin_nanf("");
      } else if (amax >= numerics::kTiny) {
        const float limit = bits == 8 ? numerics::kLimit8 : numerics::kLimit16;
        scale = numerics == Numerics::kUpstream ? amax * numerics::kReciprocal127 : amax / limit;
        inverse = numerics == Numerics::kUpstream ? 1.0f / scale : limit / amax;
      }
      factor = V::set(inverse);
      keep = V::set32(inverse == 0.0f ? 0 : -1);
    }

    I levels(const float* x) const { return V::both(keep, V::rounded(V::mul(V::load(x), factor))); }
  };
};

}  // namespace
}  // namespace ktplan
