// What the 512-bit kernels share. Everything has internal linkage, so that no function compiled for one machine is ever
// taken for another.
#pragma once

#include "unrolled.h"
#include "vectors512.h"

namespace ktplan {
namespace {

// 64 bytes of weights as level + 128: 16 columns x 4 inputs (int8), or the inputs of the low and those of the high
// nibbles.
template <std::size_t kBits>
struct Levels {
  __m512i of[8 / kBits];
};

template <std::size_t kBits>
[[gnu::always_inline]] inline Levels<kBits> load(const std::uint8_t* w) {
  const __m512i bytes = _mm512_loadu_si512(w);
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
  if constexpr (kBits == 8) {
    return {_mm512_xor_si512(bytes, offset)};
  } else {  // (byte ^ 0x80) & 0xf0 in one operation
    const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0));
    return {_mm512_ternarylogic_epi32(_mm512_slli_epi16(bytes, 4), offset, upper, 0x28),
            _mm512_ternarylogic_epi32(bytes, offset, upper, 0x28)};
  }
}

}  // namespace
}  // namespace ktplan
