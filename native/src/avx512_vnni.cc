// AVX-512 VNNI kernels: 8- or 16-bit activations, int8 or int4 weights.
//
//   vpdpbusd takes unsigned times signed bytes, four products a lane. The signed operand may be a dword broadcast from
//   memory, so that one is the activations; the weights get 128 added (one exclusive or a load, nothing for int4), and
//   128 * sum(activations), known once a row, is taken off at the end. Nothing about the weights has to be precomputed.
//
//   A 16-bit level is 256 * high + low with both bytes signed: two rows of 8 bits to the inner loop. The 32-bit sums
//   are exact; 256 * high + low is formed in double, exactly, and rounded once.
//
// A quantized row: for each four inputs one dword (8 bits), or the dword of high bytes and then that of low bytes (16
// bits). Read with layout.h and numerics.h.

#include <immintrin.h>

#include "ktplan/kernels.h"
#include "ktplan/numerics.h"
#include "activation.h"
#include "avx512.h"
#include "ktplan/tables.h"

namespace ktplan::avx512_vnni {
namespace {

using namespace numerics;

// Rows of a call: 6 x 2 planes x 2 tiles of sums, 2 weights, the rest for broadcasts. With one plane each further row
// costs a pointer, and the compiler runs out of those above 7.
template <int kPlanes>
constexpr int kMaxRows = kPlanes == 1 ? 7 : 6;

// Rows times planes up to which the weights are read strictly in order; measured on Zen 4.
template <std::size_t kBits>
constexpr int kInOrderRows = kBits == 8 ? 2 : 1;
constexpr std::size_t kLookAhead = 8192;  // bytes; 6 to 16 KB are equally good, 4 KB and less are not

std::size_t row_bytes(std::size_t k, int bits) noexcept { return bits == 8 ? k : 2 * k; }

Row quantize(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
  Row row{.bytes = bytes, .scale = 0.0f, .sums = {0, 0}};
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (std::size_t i = 0; i < k; i += 16) {
    largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  }
  const auto top = static_cast<unsigned>(_mm512_reduce_max_epu32(largest));
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(top))));
  float inverse = 0.0f;
  if (top >= 0x7f800000u) {
    row.scale = __builtin_nanf("");
  } else if (amax >= kTiny) {
    const float limit = bits == 8 ? kLimit8 : kLimit16;
    row.scale = numerics == Numerics::kUpstream ? amax * kReciprocal127 : amax / limit;
    inverse = numerics == Numerics::kUpstream ? 1.0f / row.scale : limit / amax;
  }
  // an inverse of zero must clear what is not finite too: the mask does it
  const __m512 factor = _mm512_set1_ps(inverse);
  const __mmask16 keep = inverse == 0.0f ? 0 : 0xffff;
  __m512i sum_high = _mm512_setzero_si512(), sum_low = _mm512_setzero_si512();
  if (bits == 8) {
    for (std::size_t i = 0; i < k; i += 16) {
      const __m512i level = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
      sum_high = _mm512_add_epi32(sum_high, level);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), _mm512_cvtepi32_epi8(level));
    }
  } else {
    const __m512i half = _mm512_set1_epi32(128);
    for (std::size_t i = 0; i < k; i += 16) {
      const __m512i level = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(level, half), 8);
      sum_high = _mm512_add_epi32(sum_high, high);
      sum_low = _mm512_add_epi32(sum_low, _mm512_sub_epi32(level, _mm512_slli_epi32(high, 8)));
      const __m128i high_bytes = _mm512_cvtepi32_epi8(high), low_bytes = _mm512_cvtepi32_epi8(level);
      auto* to = reinterpret_cast<__m128i*>(bytes + 2 * i);
      _mm_storeu_si128(to, _mm_unpacklo_epi32(high_bytes, low_bytes));
      _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(high_bytes, low_bytes));
    }
  }
  row.sums[0] = _mm512_reduce_add_epi32(sum_high);
  row.sums[1] = _mm512_reduce_add_epi32(sum_low);
  return row;
}

void levels(const Row& row, std::size_t k, int bits, std::int32_t* out) noexcept {
  const auto* bytes = reinterpret_cast<const std::int8_t*>(row.bytes);
  for (std::size_t i = 0; i < k; ++i) {
    if (bits == 8) {
      out[i] = bytes[i];
    } else {
      const std::int8_t* four = bytes + i / 4 * 8 + i % 4;
      out[i] = 256 * four[0] + four[4];
    }
  }
}

template <int kRows, int kPlanes>
using Sums = __m512i[kRows][kPlanes][2];

// One k-step (2 KB of weights) for few rows: tile after tile, so that memory is read strictly in order; the hardware's
// prefetching then needs no help. `at`: where the rows' inputs of this k-step begin.
template <int kRows, int kPlanes, std::size_t kBits>
[[gnu::always_inline]] inline void step_in_order(Sums<kRows, kPlanes>& sums, const std::uint8_t* w,
                                                 const std::uint8_t* const (&row)[kRows], std::size_t at) {
  each<2>([&](auto tile) INLINE {
    each<16>([&](auto word) INLINE {
      const Levels<kBits> levels = load<kBits>(w + tile * kTileBytes + word * 64);
      each<8 / kBits>([&](auto half) INLINE {
        each<kRows * kPlanes>([&](auto i) INLINE {
          constexpr int r = i / kPlanes, p = i % kPlanes;
          const __m512i a = broadcast(row[r] + at + 4 * (kPlanes * (16 * half + word) + p));
          sums[r][p][tile] = _mm512_dpbusd_epi32(sums[r][p][tile], levels.of[half], a);
        });
      });
    });
  });
}

// One k-step for many rows: both tiles at once, so that a broadcast serves two products. Reading in turns from two
// places defeats the hardware's prefetching, so lines are asked for here, in order.
template <int kRows, int kPlanes, std::size_t kBits>
[[gnu::always_inline]] inline void step_in_pairs(Sums<kRows, kPlanes>& sums, const std::uint8_t* w,
                                                 const std::uint8_t* const (&row)[kRows], std::size_t at) {
  for (int word = 0; word < 16; ++word) {
    const Levels<kBits> first = load<kBits>(w + word * 64), second = load<kBits>(w + kTileBytes + word * 64);
    prefetch(w + kLookAhead + word * 128);
    prefetch(w + kLookAhead + word * 128 + 64);
    each<8 / kBits>([&](auto half) INLINE {
      each<kRows * kPlanes>([&](auto i) INLINE {
        constexpr int r = i / kPlanes, p = i % kPlanes;
        const __m512i a = broadcast(row[r] + at + 4 * (kPlanes * (16 * half + word) + p));
        sums[r][p][0] = _mm512_dpbusd_epi32(sums[r][p][0], first.of[half], a);
        sums[r][p][1] = _mm512_dpbusd_epi32(sums[r][p][1], second.of[half], a);
      });
    });
  }
}

// sums[row][plane][tile] = the dot products, exact, the offset of the weights taken off.
template <int kRows, int kPlanes, std::size_t kBits>
[[gnu::always_inline]] inline void dot_rows(const WeightStep& step, const Row* const* rows, const Ahead& ahead,
                                            Sums<kRows, kPlanes>& sums) {
  constexpr Layout layout = kBits == 8 ? kInt8Layout : kInt4Layout;
  const std::uint8_t* row[kRows];
  each<kRows>([&](auto r) INLINE {
    row[r] = rows[r]->bytes;
    each<kPlanes>([&](auto p) INLINE { sums[r][p][0] = sums[r][p][1] = _mm512_set1_epi32(rows[r]->sums[p] * -128); });
  });
  std::size_t at = 0;  // bytes of the rows consumed
  for (std::size_t kb = 0; kb * layout.block_bytes < step.row_bytes; ++kb) {
    const Segment segment = segment_at(step, layout.block_bytes, kb);
    const std::uint8_t* w = segment.bytes;
    const std::uint8_t* const end = w + segment.row_bytes * kStepRows;
    const std::ptrdiff_t to_next =
        ahead.next == nullptr ? 0 : segment_at(*ahead.next, layout.block_bytes, kb).bytes - w;
    for (; w != end; w += 2 * kTileBytes) {
      for (std::size_t line = ahead.first_line; line < ahead.last_line; ++line) prefetch(w + to_next + 64 * line);
      if constexpr (kRows * kPlanes <= kInOrderRows<kBits>) {
        step_in_order<kRows, kPlanes, kBits>(sums, w, row, at);
      } else {
        step_in_pairs<kRows, kPlanes, kBits>(sums, w, row, at);
      }
      at += kPlanes * kStepBytes * 8 / kBits;
    }
  }
}

// The exact integer 256 * high + low, rounded once to float.
[[gnu::always_inline]] inline __m512 combine(__m512i high, __m512i low) {
  const __m512d k256 = _mm512_set1_pd(256.0);
  const __m512d first = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(high)), k256,
                                        _mm512_cvtepi32_pd(_mm512_castsi512_si256(low)));
  const __m512d second = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(high, 1)), k256,
                                         _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(low, 1)));
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(first)), _mm512_cvtpd_ps(second), 1);
}

template <int kRows, int kPlanes, std::size_t kBits>
[[gnu::noinline]] void project_rows(const WeightStep& step, const Row* const* rows, const Ahead& ahead, float* out,
                                    std::size_t stride) {
  Sums<kRows, kPlanes> sums;
  dot_rows<kRows, kPlanes, kBits>(step, rows, ahead, sums);
  each<2>([&](auto tile) INLINE {
    const __m512 column = _mm512_loadu_ps(step.scale + 16 * tile);
    each<kRows>([&](auto r) INLINE {
      const __m512 dot =
          kPlanes == 1 ? _mm512_cvtepi32_ps(sums[r][0][tile]) : combine(sums[r][0][tile], sums[r][kPlanes - 1][tile]);
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(rows[r]->scale), column);
      _mm512_storeu_ps(out + r * stride + 16 * tile, _mm512_mul_ps(scale, dot));
    });
  });
}

template <int kRows, int kPlanes, std::size_t kBits>
void dots_rows(const WeightStep& step, const Row* const* rows, std::int64_t* out) {
  Sums<kRows, kPlanes> sums;
  dot_rows<kRows, kPlanes, kBits>(step, rows, Ahead{}, sums);
  each<kRows>([&](auto r) INLINE {
    each<2>([&](auto tile) INLINE {
      alignas(64) std::int32_t high[16], low[16];
      _mm512_store_si512(high, sums[r][0][tile]);
      _mm512_store_si512(low, sums[r][kPlanes - 1][tile]);
      for (int c = 0; c < 16; ++c) {
        out[r * kStepRows + 16 * tile + c] = kPlanes == 1 ? high[c] : std::int64_t{256} * high[c] + low[c];
      }
    });
  });
}

// From a number of rows known only now to one known when compiling.
template <int kPlanes, std::size_t kBits, int kRows = kMaxRows<kPlanes>>
void project(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead, float* out,
             std::size_t stride) noexcept {
  if (count == kRows) {
    project_rows<kRows, kPlanes, kBits>(step, rows, ahead, out, stride);
  } else if constexpr (kRows > 1) {
    project<kPlanes, kBits, kRows - 1>(step, rows, count, ahead, out, stride);
  }
}

template <int kPlanes, std::size_t kBits, int kRows = kMaxRows<kPlanes>>
void dots(const WeightStep& step, const Row* const* rows, std::size_t count, std::int64_t* out) noexcept {
  if (count == kRows) {
    dots_rows<kRows, kPlanes, kBits>(step, rows, out);
  } else if constexpr (kRows > 1) {
    dots<kPlanes, kBits, kRows - 1>(step, rows, count, out);
  }
}

void widen_bf16(const std::uint16_t* x, float* out, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    _mm512_storeu_si512(out + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
}

void accumulate(float* acc, const float* y, float weight, std::size_t n) noexcept {
  const __m512 w = _mm512_set1_ps(weight);
  for (std::size_t i = 0; i < n; i += 16) {
    _mm512_storeu_ps(acc + i, _mm512_fmadd_ps(w, _mm512_loadu_ps(y + i), _mm512_loadu_ps(acc + i)));
  }
}

void add(float* acc, const float* y, std::size_t n) noexcept {
  for (std::size_t i = 0; i < n; i += 16) {
    _mm512_storeu_ps(acc + i, _mm512_add_ps(_mm512_loadu_ps(acc + i), _mm512_loadu_ps(y + i)));
  }
}

std::uint64_t read(const void* bytes, std::size_t n) noexcept {
  const auto* p = static_cast<const std::uint8_t*>(bytes);
  __m512i all[4] = {};
  std::size_t i = 0;
  for (; i + 256 <= n; i += 256) {
    for (int j = 0; j < 4; ++j) all[j] = _mm512_xor_si512(all[j], _mm512_loadu_si512(p + i + 64 * j));
  }
  for (; i + 64 <= n; i += 64) all[0] = _mm512_xor_si512(all[0], _mm512_loadu_si512(p + i));
  all[0] = _mm512_xor_si512(_mm512_xor_si512(all[0], all[1]), _mm512_xor_si512(all[2], all[3]));
  alignas(64) std::uint64_t words[8];
  _mm512_store_si512(words, all[0]);
  std::uint64_t result = 0;
  for (const std::uint64_t word : words) result ^= word;
  for (; i + 8 <= n; i += 8) {
    std::uint64_t word;
    __builtin_memcpy(&word, p + i, 8);
    result ^= word;
  }
  return result;
}

template <int kPlanes, std::size_t kBits>
constexpr ProjectKernels kKernels{
    .project = project<kPlanes, kBits>, .dots = dots<kPlanes, kBits>, .max_rows = kMaxRows<kPlanes>};

template <std::size_t kBits>
constexpr FormatKernels kRows{
    .row_bytes = row_bytes, .quantize = quantize, .a8 = kKernels<1, kBits>, .a16 = kKernels<2, kBits>};

}  // namespace

const KernelTable kTable{
    .name = "avx512-vnni",
    .words = "AVX-512 VNNI",
    .bf16_words = "AVX-512",
    .int8 = kRows<8>,
    .int4 = kRows<4>,
    .int4_g32 = kGroups32,
    .int4_g64 = kGroups64,
    .int4_g128 = kGroups128,
    .bf16 = avx512::kBf16,
    .levels = levels,
    .activate = Activating<Floats>::activate,
    .round_bf16 = round_to_bf16,
    .widen_bf16 = widen_bf16,
    .accumulate = accumulate,
    .add = add,
    .read = read,
};

}  // namespace ktplan::avx512_vnni
