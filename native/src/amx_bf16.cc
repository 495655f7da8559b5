// AMX-BF16 for bfloat16 weights. All rows go by blocks, single ones too: the instruction's order of additions is its own,
// and a row's result must not depend on how many others there are.
//
//   Rows are those of avx512_bf16_pairs.cc: the values rounded to bfloat16, or two such numbers whose sum they are, each
//   multiplied apart; the two sums are added at the end.

#include "amx_blocks.h"
#include "ktplan/kernels.h"
#include "ktplan/tables.h"

namespace ktplan::amx {
namespace {

template <int kPlanes>
void project(const WeightStep* steps, std::size_t count, const BlockedRows& rows, float* const* out,
             std::size_t stride) noexcept {
  sum_blocks<HalfProducts, PlainWeights<kBf16Layout.block_bytes>, kPlanes>(
      steps, count, rows, [&](const BlockSums<kPlanes>& sums, std::size_t s) INLINE {
        for (std::size_t r = 0; r < rows.count; ++r) {
          const auto& block = sums.tile[r / kBlockRows];
          const __m512 scale = _mm512_set1_ps(rows.rows[r]->scale);
          for (int tile = 0; tile < 2; ++tile) {
            __m512 sum = _mm512_load_ps(block[0][tile].line[r % kBlockRows]);
            if constexpr (kPlanes == 2) {
              sum = _mm512_add_ps(sum, _mm512_load_ps(block[1][tile].line[r % kBlockRows]));
            }
            _mm512_storeu_ps(out[s] + r * stride + 16 * tile, _mm512_mul_ps(scale, sum));
          }
        }
      });
}

template <int kPlanes>
constexpr BlockKernels kRows{.min_rows = 1,
                             .block_bytes = bytes_of_block<kPlanes, 2>,
                             .place = place_in_block<kPlanes, 2>,
                             .project = project<kPlanes>,
                             .dots = nullptr};

}  // namespace

constinit const BlockKernels kBf16[2] = {kRows<1>, kRows<2>};

}  // namespace ktplan::amx
