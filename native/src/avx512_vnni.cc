// AVX-512 VNNI kernels: 8- or 16-bit activations, int8 or int4 weights.
//
//   vpdpbusd takes unsigned times signed bytes, four products a lane. The signed operand may be a dword broadcast from
//   memory, so that one is the activations; the weights get 128 added (one exclusive or a load, nothing for int4), and
//   128 * sum(activations), known once a row, is taken off at the end. Nothing about the weights has to be precomputed.
//
//   A 16-bit level is 256 * high + low with both bytes signed: two rows of 8 bits to the inner loop. The 32-bit sums
//   are exact; 256 * high + low is formed in double, exactly, and rounded once.
//
// Rows are the bytes of rows.h. Read with layout.h and numerics.h.

#include "activation.h"
#include "avx512.h"
#include "elementwise.h"
#include "ktplan/kernels.h"
#include "ktplan/tables.h"
#include "rows.h"

namespace ktplan::avx512_vnni {
namespace {

// Rows of a call: 6 x 2 planes x 2 tiles of sums, 2 weights, the rest for broadcasts. With one plane each further row
// costs a pointer, and the compiler runs out of those above 7.
template <int kPlanes>
constexpr int kMaxRows = kPlanes == 1 ? 7 : 6;

// Rows times planes up to which the weights are read strictly in order; measured on Zen 4.
template <std::size_t kBits>
constexpr int kInOrderRows = kBits == 8 ? 2 : 1;
constexpr std::size_t kLookAhead = 8192;  // bytes; 6 to 16 KB are equally good, 4 KB and less are not

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
          const __m512i a = Vectors512::broadcast(row[r] + at + 4 * (kPlanes * (16 * half + word) + p));
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
        const __m512i a = Vectors512::broadcast(row[r] + at + 4 * (kPlanes * (16 * half + word) + p));
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

template <int kRows, int kPlanes, std::size_t kBits>
[[gnu::noinline]] void project_rows(const WeightStep& step, const Row* const* rows, const Ahead& ahead, float* out,
                                    std::size_t stride) {
  Sums<kRows, kPlanes> sums;
  dot_rows<kRows, kPlanes, kBits>(step, rows, ahead, sums);
  each<2>([&](auto tile) INLINE {
    const __m512 column = _mm512_loadu_ps(step.scale + 16 * tile);
    each<kRows>([&](auto r) INLINE {
      const __m512 dot =
          kPlanes == 1 ? _mm512_cvtepi32_ps(sums[r][0][tile]) : Vectors512::combined(sums[r][0][tile], sums[r][kPlanes - 1][tile]);
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

template <int kPlanes, std::size_t kBits>
constexpr ProjectKernels kKernels{
    .project = project<kPlanes, kBits>, .dots = dots<kPlanes, kBits>, .max_rows = kMaxRows<kPlanes>};

template <std::size_t kBits>
constexpr FormatKernels kRows{
    .row_bytes = Rows<Vectors512>::plain_bytes<0>, .quantize = Rows<Vectors512>::plain<0, 128>,
    .a8 = kKernels<1, kBits>, .a16 = kKernels<2, kBits>};

}  // namespace

constinit const KernelTable kTable{
    .name = "avx512-vnni",
    .words = "AVX-512 VNNI",
    .bf16_words = "AVX-512",
    .int8 = kRows<8>,
    .int4 = kRows<4>,
    .int4_g32 = {},  // from other files, in dispatch.cc: copying them here would be code of this file that runs at load
    .int4_g64 = {},
    .int4_g128 = {},
    .bf16 = {},
    .levels = Rows<Vectors512>::levels_of_bytes,
    .activate = Activating<Vectors512>::activate,
    .round_bf16 = Elementwise<Vectors512>::round_bf16,
    .widen_bf16 = Elementwise<Vectors512>::widen_bf16,
    .accumulate = Elementwise<Vectors512>::accumulate,
    .add = Elementwise<Vectors512>::add,
    .read = Elementwise<Vectors512>::read,
};

}  // namespace ktplan::avx512_vnni
