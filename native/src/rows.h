// How rows of activations are quantized ("quantize" in numerics.h) and kept, over a set of vector operations V. Internal
// linkage.
//
//   pairs   int16 levels, four inputs 0 1 2 3 as 0 2 1 3: a dword holds the inputs that stand in the even, or in the odd,
//           bytes of a word of weights
//   bytes   a dword of four signed bytes for four inputs; with 16 bits the dword of upper bytes, then that of lower ones.
//   floats  float32 values, for bfloat16 weights; with 8 bits rounded to bfloat16
//
// Where weights have groups, behind a row's levels stand kSumBytes for each group: -kOffset * (sum of the group's levels)
// as an int32, what weights as unsigned numbers, level + kOffset, make too much; and that sum as a float, exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktplan/kernels.h"
#include "ktplan/numerics.h"

namespace ktplan {
namespace {

constexpr std::size_t kSumBytes = 8, kFloatSum = 4;

template <class V>
struct Rows {
  using F = typename V::F;
  using I = typename V::I;

  template <std::size_t kGroup>
  static constexpr std::size_t sums_bytes(std::size_t k) {
    return kGroup == 0 ? 0 : k / (kGroup == 0 ? 1 : kGroup) * kSumBytes;
  }
  template <std::size_t kGroup>
  static std::size_t pairs_bytes(std::size_t k, int) noexcept {
    return 2 * k + sums_bytes<kGroup>(k);
  }
  static std::size_t floats_bytes(std::size_t k, int) noexcept { return 4 * k; }
  template <std::size_t kGroup>
  static std::size_t plain_bytes(std::size_t k, int bits) noexcept {
    return k * static_cast<std::size_t>(bits) / 8 + sums_bytes<kGroup>(k);
  }

  template <std::size_t kGroup>
  static Row pairs(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
    const Scaling scaling(x, k, bits, numerics);
    std::uint8_t* sums = bytes + 2 * k;
    for (std::size_t begin = 0, length = kGroup == 0 ? k : kGroup; begin < k; begin += length) {
      I group_sum = V::set32(0);
      for (std::size_t i = begin; i < begin + length; i += V::kLanes) {
        const I level = scaling.levels(x + i);
        if constexpr (kGroup != 0) group_sum = V::add32(group_sum, level);
        V::store_pairs(bytes + 2 * i, level);
      }
      if constexpr (kGroup != 0) sums = store_sum<0>(sums, V::sum32(group_sum));
    }
    return Row{.bytes = bytes, .scale = scaling.scale, .sums = {0, 0}};
  }

  // kOffset: what the kernel adds to the weights' levels.
  template <std::size_t kGroup, int kOffset>
  static Row plain(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
    const Scaling scaling(x, k, bits, numerics);
    Row row{.bytes = bytes, .scale = scaling.scale, .sums = {0, 0}};
    std::uint8_t* sums = bytes + k * static_cast<std::size_t>(bits) / 8;
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
        sums = store_sum<kOffset>(sums, V::sum32(group_sum));
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
  // What stands behind the levels for a group; returns where the next group's goes.
  template <int kOffset>
  static std::uint8_t* store_sum(std::uint8_t* to, std::int32_t sum) {
    const std::int32_t excess = -kOffset * sum;
    const float whole = static_cast<float>(sum);
    std::memcpy(to, &excess, 4);
    std::memcpy(to + kFloatSum, &whole, 4);
    return to + kSumBytes;
  }

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
