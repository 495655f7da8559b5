// bfloat16 weights without vdpbf16ps: both inputs of a line widened to float32.
//
// Rows are the floats of rows.h.

#include "avx512_bf16.h"
#include "ktplan/tables.h"
#include "rows.h"

namespace ktplan::avx512 {
namespace {

struct Widened {
  static constexpr int kSums = 2, kMaxRows = 6;
  static constexpr std::size_t kBytes = 8;

  [[gnu::always_inline]] static inline void add(__m512 (&sums)[kSums], __m512i line, const std::uint8_t* row, auto) {
    float x[2];
    __builtin_memcpy(x, row, sizeof x);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    sums[0] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[0]), sums[0]);
    sums[1] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[1]), sums[1]);
  }
};

}  // namespace

constinit const FormatKernels kBf16{
    .row_bytes = Rows<Vectors512>::floats_bytes, .quantize = Rows<Vectors512>::floats,
    .a8 = kBf16Kernels<Widened>, .a16 = kBf16Kernels<Widened>};

}  // namespace ktplan::avx512
