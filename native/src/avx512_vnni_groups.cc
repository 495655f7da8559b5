// AVX-512 VNNI kernels for INT4 weights whose groups of 32, 64 or 128 inputs have scales of their own.
//
//   Rows and products are those of avx512_vnni.cc. What the weights' offset of 128 adds, 128 * the sum of a group's
//   levels, is known once a row and kept behind its levels. A group's sum of 16-bit levels fits an int32 (128 inputs *
//   128 * 32639), so the planes are joined as integers.
//
// Rows are the bytes of rows.h.

#include "avx512.h"
#include "ktplan/kernels.h"
#include "ktplan/tables.h"
#include "rows.h"

namespace ktplan::avx512_vnni {
namespace {

constexpr Layout kLayout = kInt4Layout;
constexpr std::size_t kStepInputs = 128;  // inputs of a k-step
// In bytes; measured on Zen 4 with weights in memory: half of either costs a tenth.
constexpr std::size_t kLookAhead = 16384, kScaleLookAhead = 4096;

template <int kPlanes>
constexpr int kMaxRows = kPlanes == 1 ? 7 : 6;

// The 16 columns' scales of one group, for levels of 16 n.
[[gnu::always_inline]] inline __m512 widths(const std::uint16_t* scale) {
  return _mm512_mul_ps(Vectors512::from_bf16(scale), _mm512_set1_ps(0.0625f));
}

// The group's exact sums as floats.
template <int kPlanes>
[[gnu::always_inline]] inline __m512 joined(__m512i high, __m512i low, const std::uint8_t* correction) {
  const __m512i sum = kPlanes == 1 ? low : _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(sum, Vectors512::broadcast(correction)));
}

// One group of both tiles of a k-step: words [kFirst, kFirst + kWords) of one or both halves.
template <int kRows, int kPlanes, std::size_t kGroup, int kIndex>
[[gnu::always_inline]] inline void multiply_group(float (&totals)[kRows][kStepRows], const std::uint8_t* w,
                                                  const std::uint16_t* scale, const std::uint8_t* const (&row)[kRows],
                                                  std::size_t at, std::size_t corrections) {
  constexpr int kWords = kGroup == 32 ? 8 : 16, kFirst = kGroup == 32 ? kIndex % 2 * 8 : 0;
  constexpr int kHalf = kGroup == 128 ? 0 : kIndex * static_cast<int>(kGroup) / 64, kHalves = kGroup == 128 ? 2 : 1;
  __m512i sums[kRows][kPlanes][2];
  each<kRows>([&](auto r) INLINE {
    each<kPlanes>([&](auto p) INLINE {
      sums[r][p][0] = sums[r][p][1] = _mm512_setzero_si512();
    });
  });
  for (int word = kFirst; word < kFirst + kWords; ++word) {
    const Levels<4> first = load<4>(w + word * 64), second = load<4>(w + kTileBytes + word * 64);
    // the k-step's 32 lines, spread over its words
    each<kHalves>([&](auto h) INLINE {
      prefetch(w + kLookAhead + 64 * (kHalves * (kIndex * kWords + word - kFirst) + h));
    });
    each<kHalves>([&](auto h) INLINE {
      constexpr int half = kHalf + h;
      each<kRows * kPlanes>([&](auto i) INLINE {
        constexpr int r = i / kPlanes, p = i % kPlanes;
        const __m512i a = Vectors512::broadcast(row[r] + at + 4 * (kPlanes * (16 * half + word) + p));
        sums[r][p][0] = _mm512_dpbusd_epi32(sums[r][p][0], first.of[half], a);
        sums[r][p][1] = _mm512_dpbusd_epi32(sums[r][p][1], second.of[half], a);
      });
    });
    // without this GCC 12 also writes every sum to memory in every round
    each<kRows * kPlanes>([&](auto i) INLINE {
      each<2>([&](auto tile) INLINE { asm("" : "+v"(sums[i / kPlanes][i % kPlanes][tile])); });
    });
  }
  each<2>([&](auto tile) INLINE {
    const __m512 width = widths(scale + kIndex * kStepRows + 16 * tile);
    each<kRows>([&](auto r) INLINE {
      float* total = totals[r] + 16 * tile;
      const __m512 dot =
          joined<kPlanes>(sums[r][0][tile], sums[r][kPlanes - 1][tile], row[r] + corrections + 4 * kIndex);
      _mm512_store_ps(total, _mm512_fmadd_ps(dot, width, _mm512_load_ps(total)));
    });
  });
}

template <int kRows, int kPlanes, std::size_t kGroup>
[[gnu::noinline]] void project_rows(const WeightStep& step, const Row* const* rows, const Ahead& ahead, float* out,
                                    std::size_t stride) {
  constexpr std::size_t kGroups = kStepInputs / kGroup;
  const std::uint8_t* row[kRows];
  each<kRows>([&](auto r) INLINE { row[r] = rows[r]->bytes; });
  alignas(64) float totals[kRows][kStepRows] = {};
  const std::uint16_t* scale = step.group_scale;
  std::size_t at = 0, corrections = step.row_bytes * 2 * kPlanes;  // where the rows' levels and corrections are read
  for (std::size_t kb = 0; kb * kLayout.block_bytes < step.row_bytes; ++kb) {
    const Segment segment = segment_at(step, kLayout.block_bytes, kb);
    const std::uint8_t* w = segment.bytes;
    const std::uint8_t* const end = w + segment.row_bytes * kStepRows;
    const std::ptrdiff_t to_next =
        ahead.next == nullptr ? 0 : segment_at(*ahead.next, kLayout.block_bytes, kb).bytes - w;
    for (; w != end; w += 2 * kTileBytes) {
      for (std::size_t line = ahead.first_line; line < ahead.last_line; ++line) prefetch(w + to_next + 64 * line);
      each<static_cast<int>(kGroups)>([&](auto group) INLINE {
        prefetch(reinterpret_cast<const std::uint8_t*>(scale) + kScaleLookAhead + group * 64);
      });
      each<static_cast<int>(kGroups)>([&](auto group) INLINE {
        multiply_group<kRows, kPlanes, kGroup, group>(totals, w, scale, row, at, corrections);
      });
      at += kPlanes * kStepInputs;
      scale += kGroups * kStepRows;
      corrections += sizeof(std::int32_t) * kGroups;
    }
  }
  each<2>([&](auto tile) INLINE {
    each<kRows>([&](auto r) INLINE {
      const __m512 total = _mm512_load_ps(totals[r] + 16 * tile);
      _mm512_storeu_ps(out + r * stride + 16 * tile, _mm512_mul_ps(_mm512_set1_ps(rows[r]->scale), total));
    });
  });
}

// From a number of rows known only now to one known when compiling.
template <int kPlanes, std::size_t kGroup, int kRows = kMaxRows<kPlanes>>
void project(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead, float* out,
             std::size_t stride) noexcept {
  if (count == kRows) {
    project_rows<kRows, kPlanes, kGroup>(step, rows, ahead, out, stride);
  } else if constexpr (kRows > 1) {
    project<kPlanes, kGroup, kRows - 1>(step, rows, count, ahead, out, stride);
  }
}

template <int kPlanes, std::size_t kGroup>
constexpr ProjectKernels kKernels{.project = project<kPlanes, kGroup>, .dots = nullptr, .max_rows = kMaxRows<kPlanes>};

template <std::size_t kGroup>
constexpr FormatKernels kGroups{
    .row_bytes = Rows<Vectors512>::plain_bytes<kGroup>, .quantize = Rows<Vectors512>::plain<kGroup, 128>,
    .a8 = kKernels<1, kGroup>, .a16 = kKernels<2, kGroup>};

}  // namespace

constinit const FormatKernels kGroups32 = kGroups<32>;
constinit const FormatKernels kGroups64 = kGroups<64>;
constinit const FormatKernels kGroups128 = kGroups<128>;

}  // namespace ktplan::avx512_vnni
