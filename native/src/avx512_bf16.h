// bfloat16 weights on 512-bit registers, over the way M of multiplying one line (two inputs of 16 columns) with a row:
// M::add(sums, line, row, odd) adds to kSums sums, `odd` for every second line; kBytes bytes of the row hold the two
// inputs. Internal linkage.
#pragma once

#include "avx512.h"
#include "ktplan/kernels.h"

namespace ktplan {
namespace {

constexpr std::size_t kBf16LookAhead = 8192;  // bytes

template <int kOdd>
using Odd = std::integral_constant<int, kOdd>;

template <class M, int kRows>
using Bf16Sums = __m512[kRows][2][M::kSums];

template <class M, int kRows>
[[gnu::noinline]] void project_bf16_rows(const WeightStep& step, const Row* const* rows, const Ahead& ahead, float* out,
                                         std::size_t stride) {
  const std::uint8_t* row[kRows];
  Bf16Sums<M, kRows> sums;
  each<kRows>([&](auto r) INLINE {
    row[r] = rows[r]->bytes;
    each<2 * M::kSums>([&](auto i) INLINE { sums[r][i / M::kSums][i % M::kSums] = _mm512_setzero_ps(); });
  });
  std::size_t at = 0;  // bytes of the rows consumed
  for (std::size_t kb = 0; kb * kBf16Layout.block_bytes < step.row_bytes; ++kb) {
    const Segment segment = segment_at(step, kBf16Layout.block_bytes, kb);
    const std::uint8_t* w = segment.bytes;
    const std::uint8_t* const end = w + segment.row_bytes * kStepRows;
    const std::ptrdiff_t to_next =
        ahead.next == nullptr ? 0 : segment_at(*ahead.next, kBf16Layout.block_bytes, kb).bytes - w;
    for (; w != end; w += 2 * kTileBytes) {
      for (std::size_t line = ahead.first_line; line < ahead.last_line; ++line) prefetch(w + to_next + 64 * line);
      for (int pair = 0; pair < 16; pair += 2) {
        each<2>([&](auto odd) INLINE {
          const int word = pair + odd;
          const __m512i first = _mm512_loadu_si512(w + word * 64);
          const __m512i second = _mm512_loadu_si512(w + kTileBytes + word * 64);
          prefetch(w + kBf16LookAhead + word * 128);
          prefetch(w + kBf16LookAhead + word * 128 + 64);
          each<kRows>([&](auto r) INLINE {
            M::add(sums[r][0], first, row[r] + at + word * M::kBytes, Odd<odd>{});
            M::add(sums[r][1], second, row[r] + at + word * M::kBytes, Odd<odd>{});
          });
        });
      }
      at += 16 * M::kBytes;
    }
  }
  each<2>([&](auto tile) INLINE {
    each<kRows>([&](auto r) INLINE {
      __m512 sum = sums[r][tile][0];
      if constexpr (M::kSums == 2) sum = _mm512_add_ps(sum, sums[r][tile][1]);
      _mm512_storeu_ps(out + r * stride + 16 * tile, _mm512_mul_ps(_mm512_set1_ps(rows[r]->scale), sum));
    });
  });
}

// From a number of rows known only now to one known when compiling.
template <class M, int kRows = M::kMaxRows>
void project_bf16(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead, float* out,
                  std::size_t stride) noexcept {
  if (count == kRows) {
    project_bf16_rows<M, kRows>(step, rows, ahead, out, stride);
  } else if constexpr (kRows > 1) {
    project_bf16<M, kRows - 1>(step, rows, count, ahead, out, stride);
  }
}

template <class M>
constexpr ProjectKernels kBf16Kernels{.project = project_bf16<M>, .dots = nullptr, .max_rows = M::kMaxRows};

// 1, or NaN where a value is not finite.
inline float scale_of(const float* x, std::size_t k) {
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  __mmask16 bad = 0;
  for (std::size_t i = 0; i < k; i += 16) {
    const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), exponent);
    bad |= _mm512_cmpeq_epi32_mask(bits, exponent);
  }
  return bad == 0 ? 1.0f : __builtin_nanf("");
}

}  // namespace
}  // namespace ktplan
