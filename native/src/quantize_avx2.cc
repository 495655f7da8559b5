// The quantizer with 256-bit registers.

#include <immintrin.h>

#include "quantize_groups.h"

namespace ktplan {
namespace {

struct Avx2 {
  struct F { __m256 a, b; };
  struct U { __m256i a, b; };
  struct I { __m256i a, b; };

  static std::uint16_t max_magnitude(const std::uint16_t* x, std::size_t k) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_setzero_si256();
    for (std::size_t i = 0; i < k; i += 16) most = _mm256_max_epu16(most, _mm256_and_si256(load_si(x + i), mask));
    alignas(32) std::uint16_t lane[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), most);
    std::uint16_t best = 0;
    for (const std::uint16_t m : lane) best = m > best ? m : best;
    return best;
  }
  static std::uint32_t max_magnitude(const float* x, std::size_t k) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (std::size_t i = 0; i < k; i += 8) most = _mm256_max_epu32(most, _mm256_and_si256(load_si(x + i), mask));
    alignas(32) std::uint32_t lane[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), most);
    std::uint32_t best = 0;
    for (const std::uint32_t m : lane) best = m > best ? m : best;
    return best;
  }

  static __m256i load_si(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
  static __m256 bf16(const std::uint16_t* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
  }
  static __m256 u16(const std::uint16_t* x) { return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))); }
  static __m256 i8(const std::int8_t* x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)))); }

  static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
  static F load(const std::uint16_t* x) { return {bf16(x), bf16(x + 8)}; }
  static F widen(const std::uint16_t* x) { return {u16(x), u16(x + 8)}; }
  static F load_levels(const std::int8_t* x) { return {i8(x), i8(x + 8)}; }
  static void store(F x, float* out) {
    _mm256_storeu_ps(out, x.a);
    _mm256_storeu_ps(out + 8, x.b);
  }
  static void store_levels(F x, std::int8_t* out) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(bytes));
  }
  static __m256i nibble(const float* level, int shift) {
    return _mm256_slli_epi32(_mm256_and_si256(_mm256_cvtps_epi32(_mm256_loadu_ps(level)), _mm256_set1_epi32(15)), shift);
  }
  // Four bytes of 16 rows from their low and high levels, [4][16] each.
  static void pack_nibbles(const float* low, const float* high, std::uint8_t* out) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int i = 0; i < 4; ++i) {
      a = _mm256_or_si256(a, _mm256_or_si256(nibble(low + 16 * i, 8 * i), nibble(high + 16 * i, 8 * i + 4)));
      b = _mm256_or_si256(b, _mm256_or_si256(nibble(low + 16 * i + 8, 8 * i), nibble(high + 16 * i + 8, 8 * i + 4)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), b);
  }
  static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F greater(F x, F y, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)), _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
  }
  static __m256 nearest_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static F round_bf16(F x) { return {nearest_bf16(x.a), nearest_bf16(x.b)}; }
  static F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  static F rint(F x) { return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static F floor(F x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
  static F with_sign(F x, F y) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(x.a, _mm256_and_ps(sign, y.a)), _mm256_or_ps(x.b, _mm256_and_ps(sign, y.b))};
  }

  static U set_u(std::uint16_t x) { return {_mm256_set1_epi16(static_cast<short>(x)), _mm256_set1_epi16(static_cast<short>(x))}; }
  static U load_u(const std::uint16_t* x) { return {load_si(x), load_si(x + 16)}; }
  static void store_u(U x, std::uint16_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), x.b);
  }
  static __m256i pack(F x) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8); }
  static U narrow(F low, F high) { return {pack(low), pack(high)}; }
  static U mulhrs(U x, U y) { return {_mm256_mulhrs_epi16(x.a, y.a), _mm256_mulhrs_epi16(x.b, y.b)}; }
  static U min_u(U x, U y) { return {_mm256_min_epi16(x.a, y.a), _mm256_min_epi16(x.b, y.b)}; }
  static U add_u(U x, U y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
  static U shift4(U x) { return {_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}; }
  static I zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I madd(I sum, U x, U y) { return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))}; }
  static std::int64_t sum(I x) {
    alignas(32) std::int32_t lane[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), x.a);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane + 8), x.b);
    std::int64_t total = 0;
    for (const std::int32_t n : lane) total += n;
    return total;
  }

  // A quarter of a tile: 8 rows of 8 words, transposed.
  static void words8(const std::uint8_t* from, std::size_t stride, std::uint8_t* to) {
    __m256i r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = load_si(from + static_cast<std::size_t>(i) * stride);
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * 64), _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (i + 4) * 64), _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
    }
  }
  static void tile(const std::uint8_t* from, std::size_t stride, std::uint8_t* to) {
    words8(from, stride, to);
    words8(from + 8 * stride, stride, to + 32);
    words8(from + 32, stride, to + 512);
    words8(from + 8 * stride + 32, stride, to + 512 + 32);
  }
};

}  // namespace

namespace avx2 {
extern const QuantizeTable kQuantize;
const QuantizeTable kQuantize{&GroupQuantizer<Avx2>::step};
}  // namespace avx2
}  // namespace ktplan
