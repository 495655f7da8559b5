// The vector operations of activation.h, elementwise.h, rows.h and products.h on 256-bit registers: AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace ktplan {
namespace {

struct Vectors256 {
  using F = __m256;
  using I = __m256i;
  static constexpr std::size_t kLanes = 8;

  // floats; see activation.h
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F negate(F x) { return _mm256_xor_ps(x, set(-0.0f)); }
  static F magnitude(F x) { return _mm256_andnot_ps(set(-0.0f), x); }
  static F negative_or(F x, F a, F b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
  }
  static F power(F t) { return from_bits(shift_left<23>(add32(bits(t), set32(127)))); }

  // whole numbers
  static I load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_bytes(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static I broadcast(const std::uint8_t* four) {
    int value;
    __builtin_memcpy(&value, four, 4);
    return _mm256_set1_epi32(value);
  }
  static I set8(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static I set16(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
  static I set32(int x) { return _mm256_set1_epi32(x); }
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  static I differ(I a, I b) { return _mm256_xor_si256(a, b); }
  static I both_differ(I a, I b, I c) { return differ(both(a, b), c); }  // (a & b) ^ c
  static I add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static I add32(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub32(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I max_unsigned32(I a, I b) { return _mm256_max_epu32(a, b); }
  template <int n> static I shift_left16(I x) { return _mm256_slli_epi16(x, n); }
  template <int n> static I shift_right16(I x) { return _mm256_srai_epi16(x, n); }  // keeps the sign
  template <int n> static I shift_in_zeros16(I x) { return _mm256_srli_epi16(x, n); }
  template <int n> static I shift_left(I x) { return _mm256_slli_epi32(x, n); }
  template <int n> static I shift_right(I x) { return _mm256_srai_epi32(x, n); }
  static I products_of_pairs(I a, I b) { return _mm256_madd_epi16(a, b); }         // int16: a0 b0 + a1 b1 ...
  static I products_of_bytes(I u, I s) { return _mm256_maddubs_epi16(u, s); }  // the same, unsigned times signed bytes
  static std::int32_t sum32(I x) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
  }

  // from one to the other
  static I bits(F x) { return _mm256_castps_si256(x); }
  static F from_bits(I x) { return _mm256_castsi256_ps(x); }
  static I rounded(F x) { return _mm256_cvtps_epi32(x); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static F from_bf16(const std::uint16_t* p) {
    return from_bits(shift_left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
  }
  // The exact integer 256 * high + low, rounded once.
  static F combined(I high, I low) {
    const __m256d k256 = _mm256_set1_pd(256.0);
    const __m256d first = _mm256_fmadd_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(high)), k256,
                                          _mm256_cvtepi32_pd(_mm256_castsi256_si128(low)));
    const __m256d second = _mm256_fmadd_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(high, 1)), k256,
                                           _mm256_cvtepi32_pd(_mm256_extracti128_si256(low, 1)));
    return _mm256_set_m128(_mm256_cvtpd_ps(second), _mm256_cvtpd_ps(first));
  }
  // Bit patterns rounded to bfloat16, ties to even; NaN stays.
  static I nearest_bf16(I x) {
    const I nan = _mm256_cmpgt_epi32(both(x, set32(0x7fffffff)), set32(0x7f800000));
    const I odd = both(_mm256_srli_epi32(x, 16), set32(1));
    const I up = add32(add32(x, set32(0x7fff)), odd);
    return _mm256_blendv_epi8(both(up, set32(static_cast<int>(0xffff0000u))), x, nan);
  }

  // Eight levels of four inputs each as rows.h keeps them.
  static void store_pairs(std::uint8_t* to, I x) {
    const __m128i levels = narrow(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shufflehi_epi16(_mm_shufflelo_epi16(levels, 0xd8), 0xd8));
  }
  static void store_low_bytes(std::uint8_t* to, I x) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), low_bytes(x));
  }
  static void store_planes(std::uint8_t* to, I high, I low) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi32(low_bytes(high), low_bytes(low)));
  }

 private:
  static __m128i narrow(I x) { return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
  static __m128i low_bytes(I x) {  // of each number, as a signed byte
    const __m128i levels = narrow(_mm256_srai_epi32(_mm256_slli_epi32(x, 24), 24));
    return _mm_packs_epi16(levels, levels);
  }
};

}  // namespace
}  // namespace ktplan
