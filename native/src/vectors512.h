// The vector operations of activation.h, elementwise.h, rows.h and products.h on 512-bit registers: AVX-512 F, BW, DQ.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace ktplan {
namespace {

struct Vectors512 {
  using F = __m512;
  using I = __m512i;
  static constexpr std::size_t kLanes = 16;

  // floats; see activation.h
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
  static F power(F t) { return from_bits(shift_left<23>(add32(bits(t), set32(127)))); }

  // whole numbers
  static I load_bytes(const void* p) { return _mm512_loadu_si512(p); }
  static void store_bytes(void* p, I x) { _mm512_storeu_si512(p, x); }
  static I broadcast(const std::uint8_t* four) {
    int value;
    __builtin_memcpy(&value, four, 4);
    return _mm512_set1_epi32(value);
  }
  static I set8(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static I set16(int x) { return _mm512_set1_epi16(static_cast<short>(x)); }
  static I set32(int x) { return _mm512_set1_epi32(x); }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  static I differ(I a, I b) { return _mm512_xor_si512(a, b); }
  static I both_differ(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0x6a); }  // (a & b) ^ c
  static I add16(I a, I b) { return _mm512_add_epi16(a, b); }
  static I add32(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub32(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I max_unsigned32(I a, I b) { return _mm512_max_epu32(a, b); }
  template <int n> static I shift_left16(I x) { return _mm512_slli_epi16(x, n); }
  template <int n> static I shift_right16(I x) { return _mm512_srai_epi16(x, n); }  // keeps the sign
  template <int n> static I shift_in_zeros16(I x) { return _mm512_srli_epi16(x, n); }
  template <int n> static I shift_left(I x) { return _mm512_slli_epi32(x, n); }
  template <int n> static I shift_right(I x) { return _mm512_srai_epi32(x, n); }
  static I products_of_pairs(I a, I b) { return _mm512_madd_epi16(a, b); }         // int16: a0 b0 + a1 b1 ...
  static I products_of_bytes(I u, I s) { return _mm512_maddubs_epi16(u, s); }  // the same, unsigned times signed bytes
  static std::int32_t sum32(I x) { return _mm512_reduce_add_epi32(x); }

  // from one to the other
  static I bits(F x) { return _mm512_castps_si512(x); }
  static F from_bits(I x) { return _mm512_castsi512_ps(x); }
  static I rounded(F x) { return _mm512_cvtps_epi32(x); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static F from_bf16(const std::uint16_t* p) {
    return from_bits(shift_left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
  }
  // The exact integer 256 * high + low, rounded once.
  static F combined(I high, I low) {
    const __m512d k256 = _mm512_set1_pd(256.0);
    const __m512d first = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(high)), k256,
                                          _mm512_cvtepi32_pd(_mm512_castsi512_si256(low)));
    const __m512d second = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(high, 1)), k256,
                                           _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(low, 1)));
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(first)), _mm512_cvtpd_ps(second), 1);
  }
  // Bit patterns rounded to bfloat16, ties to even; NaN stays.
  static I nearest_bf16(I x) {
    const __mmask16 number = _mm512_cmple_epu32_mask(both(x, set32(0x7fffffff)), set32(0x7f800000));
    const I odd = both(_mm512_srli_epi32(x, 16), set32(1));
    const I up = add32(add32(x, set32(0x7fff)), odd);
    return _mm512_mask_and_epi32(x, number, up, set32(static_cast<int>(0xffff0000u)));
  }

  // Sixteen levels of four inputs each as rows.h keeps them.
  static void store_pairs(std::uint8_t* to, I x) {
    const __m256i levels = _mm512_cvtepi32_epi16(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(levels, 0xd8), 0xd8));
  }
  static void store_low_bytes(std::uint8_t* to, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
  }
  static void store_planes(std::uint8_t* to, I high, I low) {
    const __m128i high_bytes = _mm512_cvtepi32_epi8(high), low_bytes = _mm512_cvtepi32_epi8(low);
    auto* at = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(at, _mm_unpacklo_epi32(high_bytes, low_bytes));
    _mm_storeu_si128(at + 1, _mm_unpackhi_epi32(high_bytes, low_bytes));
  }
};

}  // namespace
}  // namespace ktplan
