// What the 512-bit kernels share. Everything has internal linkage, so that no function compiled for one machine is ever
// taken for another.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#define INLINE __attribute__((always_inline))  // also for lambdas, which take no other spelling

namespace ktplan {
namespace {

[[gnu::always_inline]] inline __m512i broadcast(const std::uint8_t* four) {
  int value;
  __builtin_memcpy(&value, four, 4);
  return _mm512_set1_epi32(value);
}

// Into the second-level cache.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// f(0) ... f(kCount - 1), each index a constant: sums indexed by it stay in registers, which a loop does not promise.
template <int kCount, typename F>
[[gnu::always_inline]] inline void each(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>)
      INLINE { (f(std::integral_constant<int, i>{}), ...); }(std::make_integer_sequence<int, kCount>{});
}

struct Floats {
  using F = __m512;
  static constexpr std::size_t kLanes = 16;
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F negate(F x) { return _mm512_xor_ps(x, set(-0.0f)); }
  static F magnitude(F x) { return _mm512_andnot_ps(set(-0.0f), x); }
  static F negative_or(F x, F a, F b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), b, a);
  }
  static F power(F t) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127)), 23));
  }
};

// The nearest bfloat16 values, ties to even; NaN stays.
inline void round_to_bf16(float* x, std::size_t n) noexcept {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
  for (std::size_t i = 0; i < n; i += 16) {
    const __m512i bits = _mm512_loadu_si512(x + i);
    const __mmask16 number = _mm512_cmple_epu32_mask(_mm512_and_si512(bits, magnitude), infinity);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    _mm512_storeu_si512(x + i,
                        _mm512_mask_and_epi32(bits, number, up, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
}

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
