// AVX2 kernels: 8- or 16-bit activations, int8 or int4 weights.
//
//   vpmaddubsw saturates, so both operands are widened to int16 and vpmaddwd adds pairs into 32 bits, exactly. Widening
//   the weights is shared by the rows, and 16-bit activations then cost no more than 8-bit ones. Their pair sums are
//   below 2 * 32639 * 128, so 256 of them fit an int32; then they move to doubles, which hold any sum here exactly.
//
// A quantized row: one int16 level an input. Read with layout.h and numerics.h.

#include <immintrin.h>

#include "ktplan/kernels.h"
#include "ktplan/numerics.h"
#include "activation.h"
#include "ktplan/tables.h"

namespace ktplan::avx2 {
namespace {

using namespace numerics;

constexpr int kMaxRows = 4;
constexpr std::size_t kLookAhead = 8192;  // bytes; reading in turns from two tiles defeats the hardware's prefetching
constexpr std::size_t kWordsExact = 256;  // four-input words whose sums of 16-bit levels fit an int32

std::size_t row_bytes(std::size_t k, int) noexcept { return 2 * k; }

[[gnu::always_inline]] inline unsigned largest_magnitude(const float* x, std::size_t k) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < k; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, mask));
  }
  alignas(32) int lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
  int top = 0;
  for (const int lane : lanes) top = lane > top ? lane : top;
  return static_cast<unsigned>(top);
}

Row quantize(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
  Row row{.bytes = bytes, .scale = 0.0f, .sums = {0, 0}};
  const unsigned top = largest_magnitude(x, k);
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(top))));
  float inverse = 0.0f;
  if (top >= 0x7f800000u) {
    row.scale = __builtin_nanf("");
  } else if (amax >= kTiny) {
    const float limit = bits == 8 ? kLimit8 : kLimit16;
    row.scale = numerics == Numerics::kUpstream ? amax * kReciprocal127 : amax / limit;
    inverse = numerics == Numerics::kUpstream ? 1.0f / row.scale : limit / amax;
  }
  const __m256 factor = _mm256_set1_ps(inverse);
  const __m256i keep = _mm256_set1_epi32(inverse == 0.0f ? 0 : -1);
  for (std::size_t i = 0; i < k; i += 16) {
    const __m256i a = _mm256_and_si256(keep, _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor)));
    const __m256i b = _mm256_and_si256(keep, _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factor)));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 2 * i), both);
  }
  return row;
}

void levels(const Row& row, std::size_t k, int, std::int32_t* out) noexcept {
  for (std::size_t i = 0; i < k; ++i) {
    std::int16_t level;
    __builtin_memcpy(&level, row.bytes + 2 * i, 2);
    out[i] = level;
  }
}

[[gnu::always_inline]] inline __m256i broadcast(const std::uint8_t* four_levels) {
  long long value;
  __builtin_memcpy(&value, four_levels, 8);
  return _mm256_set1_epi64x(value);
}

// Into the second-level cache.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

// Adds four inputs of four columns (16 bytes) for every row.
template <int kRows, int kQuads>
[[gnu::always_inline]] inline void multiply(__m256i (&sums)[kRows][kQuads], int quad, __m128i bytes,
                                            const __m256i (&a)[kRows]) {
  const __m256i w = _mm256_cvtepi8_epi16(bytes);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sums[r][quad] = _mm256_add_epi32(sums[r][quad], _mm256_madd_epi16(w, a[r]));
}

// Adds the 32-bit sums of column pairs to the totals and clears them.
template <int kRows, int kQuads>
[[gnu::always_inline]] inline void flush(__m256i (&sums)[kRows][kQuads], double* totals) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      const __m256d a = _mm256_cvtepi32_pd(_mm256_castsi256_si128(sums[r][q]));
      const __m256d b = _mm256_cvtepi32_pd(_mm256_extracti128_si256(sums[r][q], 1));
      const __m256d columns = _mm256_permute4x64_pd(_mm256_hadd_pd(a, b), 0xd8);
      double* to = totals + r * kStepRows + 4 * q;
      _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), columns));
      sums[r][q] = _mm256_setzero_si256();
    }
  }
}

// totals[row][column] for 4 * kQuads columns from `first_quad` on. Every loop that indexes `sums` is unrolled, or the
// compiler would keep them in memory.
template <std::size_t kBits, int kRows, int kQuads>
[[gnu::noinline]] void dot_columns(const WeightStep& step, const Row* const* rows, int first_quad, double* totals) {
  constexpr Layout layout = kBits == 8 ? kInt8Layout : kInt4Layout;
  constexpr std::size_t words = kBits == 8 ? 16 : 32;
  constexpr std::size_t until_flush = kWordsExact / words;
  const __m128i upper = _mm_set1_epi8(static_cast<char>(0xf0));
  const std::uint8_t* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = rows[r]->bytes;
  __m256i sums[kRows][kQuads] = {};
  std::size_t at = 0, since_flush = 0;
  for (std::size_t kb = 0; kb * layout.block_bytes < step.row_bytes; ++kb) {
    const Segment segment = segment_at(step, layout.block_bytes, kb);
    const std::uint8_t* w = segment.bytes + first_quad / 4 * kTileBytes + first_quad % 4 * 16;
    const std::uint8_t* const end = w + segment.row_bytes * kStepRows;
    for (; w != end; w += 2 * kTileBytes) {
      for (int word = 0; word < 16; ++word) {
        if (first_quad == 0) {
          prefetch(w + kLookAhead + word * 128);
          prefetch(w + kLookAhead + word * 128 + 64);
        }
        __m256i a[kRows], b[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          a[r] = broadcast(row[r] + at + 8 * word);
          if constexpr (kBits == 4) b[r] = broadcast(row[r] + at + 8 * (16 + word));
        }
#pragma GCC unroll 8
        for (int q = 0; q < kQuads; ++q) {
          const auto* from = w + word * 64 + (q / 4) * kTileBytes + (q % 4) * 16;
          const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
          if constexpr (kBits == 8) {
            multiply<kRows, kQuads>(sums, q, bytes, a);
          } else {
            multiply<kRows, kQuads>(sums, q, _mm_and_si128(_mm_slli_epi16(bytes, 4), upper), a);
            multiply<kRows, kQuads>(sums, q, _mm_and_si128(bytes, upper), b);
          }
        }
      }
      at += 2 * kStepBytes * 8 / kBits;
      if (++since_flush == until_flush) {
        flush<kRows, kQuads>(sums, totals + 4 * first_quad);
        since_flush = 0;
      }
    }
  }
  flush<kRows, kQuads>(sums, totals + 4 * first_quad);
}

// All 32 columns of `count` rows: as many columns at a time as the 16 registers hold sums for.
template <std::size_t kBits>
void dot_rows(const WeightStep& step, const Row* const* rows, std::size_t count, double* totals) {
  for (std::size_t i = 0; i < count * kStepRows; ++i) totals[i] = 0.0;
  switch (count) {
    case 1:
      dot_columns<kBits, 1, 8>(step, rows, 0, totals);
      break;
    case 2:
      for (int q = 0; q < 8; q += 4) dot_columns<kBits, 2, 4>(step, rows, q, totals);
      break;
    case 3:
      for (int q = 0; q < 8; q += 2) dot_columns<kBits, 3, 2>(step, rows, q, totals);
      break;
    case 4:
      for (int q = 0; q < 8; q += 2) dot_columns<kBits, 4, 2>(step, rows, q, totals);
      break;
    default:
      break;
  }
}

template <std::size_t kBits>
void project(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead&, float* out,
             std::size_t stride) noexcept {
  double totals[kMaxRows * kStepRows];
  dot_rows<kBits>(step, rows, count, totals);
  for (std::size_t r = 0; r < count; ++r) {
    const __m256 row_scale = _mm256_set1_ps(rows[r]->scale);
    for (std::size_t c = 0; c < kStepRows; c += 8) {
      const double* from = totals + r * kStepRows + c;
      const __m256 dot =
          _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(from + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(from)));
      const __m256 scale = _mm256_mul_ps(row_scale, _mm256_loadu_ps(step.scale + c));
      _mm256_storeu_ps(out + r * stride + c, _mm256_mul_ps(scale, dot));
    }
  }
}

template <std::size_t kBits>
void dots(const WeightStep& step, const Row* const* rows, std::size_t count, std::int64_t* out) noexcept {
  double totals[kMaxRows * kStepRows];
  dot_rows<kBits>(step, rows, count, totals);
  for (std::size_t i = 0; i < count * kStepRows; ++i) out[i] = static_cast<std::int64_t>(totals[i]);
}

struct Floats {
  using F = __m256;
  static constexpr std::size_t kLanes = 8;
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
  static F negative_or(F x, F a, F b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ)); }
  static F power(F t) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23));
  }
};

void round_bf16(float* x, std::size_t n) noexcept {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), infinity = _mm256_set1_epi32(0x7f800000);
  for (std::size_t i = 0; i < n; i += 8) {
    auto* at = reinterpret_cast<__m256i*>(x + i);
    const __m256i bits = _mm256_loadu_si256(at);
    const __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), infinity);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i rounded = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    _mm256_storeu_si256(at, _mm256_blendv_epi8(rounded, bits, nan));
  }
}

void widen_bf16(const std::uint16_t* x, float* out, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
}

void accumulate(float* acc, const float* y, float weight, std::size_t n) noexcept {
  const __m256 w = _mm256_set1_ps(weight);
  for (std::size_t i = 0; i < n; i += 8) {
    _mm256_storeu_ps(acc + i, _mm256_fmadd_ps(w, _mm256_loadu_ps(y + i), _mm256_loadu_ps(acc + i)));
  }
}

void add(float* acc, const float* y, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; i += 8) {
    _mm256_storeu_ps(acc + i, _mm256_add_ps(_mm256_loadu_ps(acc + i), _mm256_loadu_ps(y + i)));
  }
}

std::uint64_t read(const void* bytes, std::size_t n) noexcept {
  const auto* p = static_cast<const std::uint8_t*>(bytes);
  __m256i all = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) all = _mm256_xor_si256(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)));
  alignas(32) std::uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), all);
  std::uint64_t result = words[0] ^ words[1] ^ words[2] ^ words[3];
  for (; i + 8 <= n; i += 8) {
    std::uint64_t word;
    __builtin_memcpy(&word, p + i, 8);
    result ^= word;
  }
  return result;
}

template <std::size_t kBits>
constexpr FormatKernels kRows{.row_bytes = row_bytes,
                              .quantize = quantize,
                              .a8 = {.project = project<kBits>, .dots = dots<kBits>, .max_rows = kMaxRows},
                              .a16 = {.project = project<kBits>, .dots = dots<kBits>, .max_rows = kMaxRows}};

}  // namespace

const KernelTable kTable{
    .name = "avx2",
    .words = "AVX2",
    .bf16_words = "AVX2",
    .int8 = kRows<8>,
    .int4 = kRows<4>,
    .int4_g32 = {},
    .int4_g64 = {},
    .int4_g128 = {},
    .bf16 = {},
    .levels = levels,
    .activate = Activating<Floats>::activate,
    .round_bf16 = round_bf16,
    .widen_bf16 = widen_bf16,
    .accumulate = accumulate,
    .add = add,
    .read = read,
};

}  // namespace ktplan::avx2
