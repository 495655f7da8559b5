// bfloat16 weights with vdpbf16ps: two inputs a lane.
//
// A row: one dword for two inputs, rounded to bfloat16; with 16 bits the dword of what is nearest to the values and then
// that of what is nearest to the rest, x = high + low to 16 bits.

#include "avx512_bf16.h"
#include "ktplan/tables.h"

namespace ktplan::avx512 {
namespace {

[[gnu::always_inline]] inline __m512 product(__m512 sum, __m512i line, const std::uint8_t* row) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(line), reinterpret_cast<__m512bh>(Vectors512::broadcast(row)));
}

// Two sums a column, so that products need not wait for each other: of the planes, or of every second line.
template <int kPlanes>
struct Pairs {
  static constexpr int kSums = 2, kMaxRows = 6;
  static constexpr std::size_t kBytes = 4 * kPlanes;

  [[gnu::always_inline]] static inline void add(__m512 (&sums)[kSums], __m512i line, const std::uint8_t* row, auto odd) {
    if constexpr (kPlanes == 1) {
      sums[odd] = product(sums[odd], line, row);
    } else {
      each<kPlanes>([&](auto p) INLINE { sums[p] = product(sums[p], line, row + 4 * p); });
    }
  }
};

std::size_t row_bytes(std::size_t k, int bits) noexcept { return bits == 8 ? 2 * k : 4 * k; }

Row encode(const float* x, std::size_t k, int bits, Numerics, std::uint8_t* bytes) noexcept {
  for (std::size_t i = 0; i < k; i += 16) {
    const __m512 value = _mm512_loadu_ps(x + i);
    const __m256i high = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value));
    if (bits == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 2 * i), high);
      continue;
    }
    const __m512 rest = _mm512_sub_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
    const __m256i low = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(rest));
    const __m256i first = _mm256_unpacklo_epi32(high, low), second = _mm256_unpackhi_epi32(high, low);
    auto* to = reinterpret_cast<__m256i*>(bytes + 4 * i);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(first, second, 0x31));
  }
  return Row{.bytes = bytes, .scale = scale_of(x, k), .sums = {0, 0}};
}

}  // namespace

constinit const FormatKernels kBf16Pairs{
    .row_bytes = row_bytes, .quantize = encode, .a8 = kBf16Kernels<Pairs<1>>, .a16 = kBf16Kernels<Pairs<2>>};

}  // namespace ktplan::avx512
