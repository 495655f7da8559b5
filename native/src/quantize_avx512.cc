// The quantizer with 512-bit registers.

#include <immintrin.h>

#include "quantize_groups.h"

namespace ktplan {
namespace {

struct Avx512 {
  using F = __m512;
  using U = __m512i;
  using I = __m512i;

  static std::uint16_t max_magnitude(const std::uint16_t* x, std::size_t k) {
    const __m512i mask = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (std::size_t i = 0; i < k; i += 32) most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + i), mask));
    alignas(64) std::uint16_t lane[32];
    _mm512_store_si512(lane, most);
    std::uint16_t best = 0;
    for (const std::uint16_t m : lane) best = m > best ? m : best;
    return best;
  }
  static std::uint32_t max_magnitude(const float* x, std::size_t k) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (std::size_t i = 0; i < k; i += 16) most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), mask));
    return _mm512_reduce_max_epu32(most);
  }

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* x) { return _mm512_loadu_ps(x); }
  static F load(const std::uint16_t* x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16)); }
  static F widen(const std::uint16_t* x) { return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))); }
  static F load_levels(const std::int8_t* x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))); }
  static void store(F x, float* out) { _mm512_storeu_ps(out, x); }
  static void store_levels(F x, std::int8_t* out) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
  static __m512i nibble(const float* level, unsigned shift) {
    return _mm512_slli_epi32(_mm512_and_si512(_mm512_cvtps_epi32(_mm512_loadu_ps(level)), _mm512_set1_epi32(15)), shift);
  }
  // Four bytes of 16 rows from their low and high levels, [4][16] each.
  static void pack_nibbles(const float* low, const float* high, std::uint8_t* out) {
    __m512i bytes = _mm512_setzero_si512();
    for (unsigned i = 0; i < 4; ++i) bytes = _mm512_or_si512(bytes, _mm512_or_si512(nibble(low + 16 * i, 8 * i), nibble(high + 16 * i, 8 * i + 4)));
    _mm512_storeu_si512(out, bytes);
  }
  static F add(F x, F y) { return _mm512_add_ps(x, y); }
  static F sub(F x, F y) { return _mm512_sub_ps(x, y); }
  static F mul(F x, F y) { return _mm512_mul_ps(x, y); }
  static F min(F x, F y) { return _mm512_min_ps(x, y); }
  static F max(F x, F y) { return _mm512_max_ps(x, y); }
  static F div(F x, F y) { return _mm512_div_ps(x, y); }
  static F greater(F x, F y, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), no, yes); }
  static F round_bf16(F x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static F abs(F x) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff))); }
  static F rint(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F floor(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static F with_sign(F x, F y) {
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(static_cast<int>(0x80000000u)))));
  }

  static U set_u(std::uint16_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }
  static U load_u(const std::uint16_t* x) { return _mm512_loadu_si512(x); }
  static void store_u(U x, std::uint16_t* out) { _mm512_storeu_si512(out, x); }
  static U narrow(F low, F high) {
    const __m256i a = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(low)), b = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(high));
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
  }
  static U mulhrs(U x, U y) { return _mm512_mulhrs_epi16(x, y); }
  static U min_u(U x, U y) { return _mm512_min_epi16(x, y); }
  static U add_u(U x, U y) { return _mm512_add_epi16(x, y); }
  static U shift4(U x) { return _mm512_srli_epi16(x, 4); }
  static I zero() { return _mm512_setzero_si512(); }
  static I madd(I sum, U x, U y) { return _mm512_add_epi32(sum, _mm512_madd_epi16(x, y)); }
  static std::int64_t sum(I x) {
    alignas(64) std::int32_t lane[16];
    _mm512_store_si512(lane, x);
    std::int64_t total = 0;
    for (const std::int32_t n : lane) total += n;
    return total;
  }

  // 16 x 16 words transposed: pairs, quads, then 128-bit quarters.
  static void tile(const std::uint8_t* from, std::size_t stride, std::uint8_t* to) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + static_cast<std::size_t>(i) * stride);
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 g + c], quarter q: word 4 q + c of rows 4 g .. 4 g + 3
    for (int c = 0; c < 4; ++c) {
      const __m512i low = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88), high = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
      const __m512i low2 = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xdd), high2 = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xdd);
      _mm512_storeu_si512(to + (0 + c) * 64, _mm512_shuffle_i32x4(low, high, 0x88));
      _mm512_storeu_si512(to + (8 + c) * 64, _mm512_shuffle_i32x4(low, high, 0xdd));
      _mm512_storeu_si512(to + (4 + c) * 64, _mm512_shuffle_i32x4(low2, high2, 0x88));
      _mm512_storeu_si512(to + (12 + c) * 64, _mm512_shuffle_i32x4(low2, high2, 0xdd));
    }
  }
};

}  // namespace

namespace avx512 {
extern const QuantizeTable kQuantize;
const QuantizeTable kQuantize{&GroupQuantizer<Avx512>::step};
}  // namespace avx512
}  // namespace ktplan
