// AMX-INT8 for blocks of rows: int8 and int4 weights, also int4 with scales for groups of inputs. Few rows are multiplied
// by the AVX-512 VNNI functions of the same table, which also quantize the rows that are copied into blocks here.
//
//   tdpbssd multiplies signed bytes and adds 32-bit sums exactly; an int4 level counts as 16 n, as everywhere. The planes
//   of 16-bit levels are joined as in avx512_vnni.cc.

#include "amx_blocks.h"
#include "ktplan/kernels.h"
#include "ktplan/tables.h"

namespace ktplan::amx {
namespace {

// Below it weights are what costs, and reading them in order is what counts. Derived, not measured: a k-step of 32
// columns takes the VNNI functions 16 cycles a row and plane, tiles 32 (one plane) or 64, and a core that shares the
// memory some hundred.
constexpr std::size_t kMinRows = 5;

using Int8Weights = PlainWeights<kInt8Layout.block_bytes>;

template <std::size_t kBits>
using WeightsOf = std::conditional_t<kBits == 8, Int8Weights, NibbleWeights>;

template <int kPlanes>
void scale_sums(const BlockSums<kPlanes>& sums, const WeightStep& step, const BlockedRows& rows, float* out,
                std::size_t stride) {
  const __m512 columns[2] = {_mm512_loadu_ps(step.scale), _mm512_loadu_ps(step.scale + 16)};
  for (std::size_t r = 0; r < rows.count; ++r) {
    const auto& block = sums.tile[r / kBlockRows];
    const __m512 scale = _mm512_set1_ps(rows.rows[r]->scale);
    for (int tile = 0; tile < 2; ++tile) {
      const __m512i high = _mm512_load_si512(block[0][tile].line[r % kBlockRows]);
      const __m512i low = _mm512_load_si512(block[kPlanes - 1][tile].line[r % kBlockRows]);
      const __m512 dot = kPlanes == 1 ? _mm512_cvtepi32_ps(low) : Vectors512::combined(high, low);
      _mm512_storeu_ps(out + r * stride + 16 * tile, _mm512_mul_ps(_mm512_mul_ps(scale, columns[tile]), dot));
    }
  }
}

template <int kPlanes, std::size_t kBits>
void project(const WeightStep* steps, std::size_t count, const BlockedRows& rows, float* const* out,
             std::size_t stride) noexcept {
  sum_blocks<ByteProducts, WeightsOf<kBits>, kPlanes>(
      steps, count, rows, [&](const BlockSums<kPlanes>& sums, std::size_t s) INLINE {
        scale_sums<kPlanes>(sums, steps[s], rows, out[s], stride);
      });
}

template <int kPlanes, std::size_t kBits>
void dots(const WeightStep& step, const BlockedRows& rows, std::int64_t* out) noexcept {
  sum_blocks<ByteProducts, WeightsOf<kBits>, kPlanes>(
      &step, 1, rows, [&](const BlockSums<kPlanes>& sums, std::size_t) INLINE {
        for (std::size_t i = 0; i < rows.count * kStepRows; ++i) {
          const std::size_t r = i / kStepRows, tile = i % kStepRows / 16, c = i % 16;
          const auto& block = sums.tile[r / kBlockRows];
          const std::int64_t low = block[kPlanes - 1][tile].line[r % kBlockRows][c];
          out[i] = kPlanes == 1 ? low : 256 * std::int64_t{block[0][tile].line[r % kBlockRows][c]} + low;
        }
      });
}

// --- Groups of inputs with scales of their own ---

// Adds a group's sums, times its scales, to the totals of the blocks' rows: [block][row][32 columns].
template <int kPlanes>
void add_scaled(const SumTile* sums, const std::uint16_t* scale, std::size_t rows,
                float* totals) {
  __m512 widths[2];
  for (int tile = 0; tile < 2; ++tile) {
    const __m512i bits =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scale + 16 * tile)));
    widths[tile] = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), _mm512_set1_ps(0.0625f));
  }
  for (std::size_t r = 0; r < rows; ++r, totals += kStepRows) {
    const SumTile* const block = sums + r / kBlockRows * 2;  // of two planes there is one block
    for (int tile = 0; tile < 2; ++tile) {
      __m512i dot = _mm512_load_si512(block[tile].line[r % kBlockRows]);
      if constexpr (kPlanes == 2) {
        dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 8), _mm512_load_si512(block[2 + tile].line[r % kBlockRows]));
      }
      float* total = totals + 16 * tile;
      _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), widths[tile], _mm512_load_ps(total)));
    }
  }
}

template <std::size_t kGroup>
constexpr std::size_t kGroupSteps = kGroup == 128 ? 2 : 1;  // k-steps of a group
template <std::size_t kGroup>
constexpr std::size_t kPieces = kGroup == 32 ? 2 : 1;  // groups of a k-step: half a row of A each, half the rows of B
template <std::size_t kGroup>
constexpr std::size_t kGroupLine = kGroup == 32 ? 32 : kTileLine;

// All groups of inputs in a chunk: multiply(k-step, piece) leaves a group's sums in the tiles, store(where) puts them
// away, add(where, group) scales and adds them while the next group is multiplied.
template <std::size_t kGroup, typename Multiply, typename Store, typename Add>
[[gnu::always_inline]] inline void each_group(const Chunk& chunk, Multiply multiply, Store store, Add add) {
  SumTile sums[2][6];
  std::size_t done = 0;
  for (std::size_t s = 0; s < chunk.steps; s += kGroupSteps<kGroup>) {
    for (std::size_t piece = 0; piece < kPieces<kGroup>; ++piece, ++done) {
      multiply(s, piece);
      if (done != 0) add(sums[(done - 1) % 2], done - 1);
      store(sums[done % 2]);
    }
  }
  add(sums[(done - 1) % 2], done - 1);
}

template <std::size_t kGroup>
const std::uint16_t* scales_at(const WeightStep& step, const Chunk& chunk) {
  return step.group_scale + chunk.first * 64 / kGroup * kStepRows;
}

inline void clear(float* totals, std::size_t rows) {
  for (std::size_t i = 0; i < rows * kStepRows; i += 16) _mm512_store_ps(totals + i, _mm512_setzero_ps());
}

inline void scale_rows(const float* totals, const BlockedRows& rows, float* out, std::size_t stride) {
  for (std::size_t r = 0; r < rows.count; ++r) {
    const __m512 row = _mm512_set1_ps(rows.rows[r]->scale);
    for (std::size_t c = 0; c < kStepRows; c += 16) {
      _mm512_storeu_ps(out + r * stride + c, _mm512_mul_ps(row, _mm512_load_ps(totals + r * kStepRows + c)));
    }
  }
}

// A chunk of one step for one group of blocks; before(k-step) runs ahead of each.
template <int kPlanes, std::size_t kGroup, typename Before>
[[gnu::always_inline]] inline void scale_chunk(const TileGroup& group, const Chunk& chunk, const std::uint8_t* b,
                                               const std::uint16_t* scale, std::size_t rows, float* totals,
                                               Before before) {
  const std::uint8_t* const a = group.a + chunk.first * group.step;
  each_group<kGroup>(
      chunk,
      [&](std::size_t s, std::size_t piece) INLINE {
        begin_group(Start::kZero, group);
        multiply_group<ByteProducts>(a + s * group.step + 32 * piece, group,
                                     b + s * kStepTiles + kTileBytes / 2 * piece, kGroupSteps<kGroup>,
                                     [&](std::size_t i) INLINE { if (piece == 0) before(s + i); });
      },
      [&](SumTile* sums) INLINE { store_group(group, sums); },
      [&](const SumTile* sums, std::size_t index) INLINE {
        add_scaled<kPlanes>(sums, scale + index * kStepRows, rows, totals);
      });
}

template <int kPlanes, std::size_t kGroup>
void project_groups_step(const WeightStep& step, const BlockedRows& rows, float* out, std::size_t stride) {
  BlockSums<kPlanes> unused;
  const TileGroups groups = groups_of<kPlanes>(rows, unused);
  alignas(64) float totals[kMaxBlocks * kBlockRows * kStepRows];
  clear(totals, rows.count);
  NibbleWeights weights(step);
  Configured configured;
  weights.begin();
  for (std::size_t i = 0; i < weights.chunks(); ++i) {
    const Chunk chunk = weights.chunk(i);
    const std::uint8_t* const b = weights.tiles(i, chunk);
    const std::uint16_t* const scale = scales_at<kGroup>(step, chunk);
    std::size_t first = 0;  // row
    for (std::size_t g = 0; g < groups.count; ++g) {
      const TileGroup& group = groups.group[g];
      const std::size_t blocks = kPlanes == 2 || group.shape == Shape::kOne ? 1 : group.shape == Shape::kTwo ? 2 : 3;
      const std::size_t rest = rows.count - first, count = rest < blocks * kBlockRows ? rest : blocks * kBlockRows;
      configured.want(group, kGroupLine<kGroup>);
      float* const to = totals + first * kStepRows;
      if (g == 0) {
        scale_chunk<kPlanes, kGroup>(group, chunk, b, scale, count, to,
                                     [&](std::size_t s) INLINE { weights.before(i, chunk, s); });
      } else {
        scale_chunk<kPlanes, kGroup>(group, chunk, b, scale, count, to, [](std::size_t) INLINE {});
      }
      first += count;
    }
  }
  tiles_release();
  scale_rows(totals, rows, out, stride);
}

// One block of 8-bit rows with two steps.
template <std::size_t kGroup>
void project_groups_wide(const WeightStep* steps, const BlockedRows& rows, float* const* out, std::size_t stride) {
  BlockSums<1> unused;
  const TileGroup group = groups_of<1>(rows, unused).group[0];
  alignas(64) float totals[2][kBlockRows * kStepRows];
  for (float* const some : totals) clear(some, rows.count);
  NibbleWeights first(steps[0]), second(steps[1]);
  tiles_configure(config_for(group, kGroupLine<kGroup>));
  first.begin();
  second.begin();
  for (std::size_t i = 0; i < first.chunks(); ++i) {
    const Chunk chunk = first.chunk(i), other = second.chunk(i);
    const std::uint8_t* const a = group.a + chunk.first * group.step;
    each_group<kGroup>(
        chunk,
        [&](std::size_t s, std::size_t piece) INLINE {
          begin_sums<4>(Start::kZero, nullptr);
          const std::size_t at = s * kStepTiles + kTileBytes / 2 * piece;
          multiply_wide<ByteProducts>(a + s * group.step + 32 * piece, group, first.tiles(i, chunk) + at,
                                      second.tiles(i, other) + at, kGroupSteps<kGroup>, [&](std::size_t k) INLINE {
                                        if (piece != 0) return;
                                        first.before(i, chunk, s + k);
                                        second.before(i, other, s + k);
                                      });
        },
        [](SumTile* sums) INLINE { each<4>([sums](auto t) INLINE { tile_store<t>(sums + t); }); },
        [&](const SumTile* sums, std::size_t index) INLINE {
          for (std::size_t s = 0; s < 2; ++s) {
            const std::uint16_t* const scale = scales_at<kGroup>(steps[s], chunk) + index * kStepRows;
            add_scaled<1>(sums + 2 * s, scale, rows.count, totals[s]);
          }
        });
  }
  tiles_release();
  for (std::size_t s = 0; s < 2; ++s) scale_rows(totals[s], rows, out[s], stride);
}

template <int kPlanes, std::size_t kGroup>
void project_groups(const WeightStep* steps, std::size_t count, const BlockedRows& rows, float* const* out,
                    std::size_t stride) noexcept {
  if (kPlanes == 1 && count == 2 && rows.count <= kBlockRows) {
    project_groups_wide<kGroup>(steps, rows, out, stride);
    return;
  }
  for (std::size_t s = 0; s < count; ++s) project_groups_step<kPlanes, kGroup>(steps[s], rows, out[s], stride);
}

template <int kPlanes, std::size_t kBits>
constexpr BlockKernels kRows{.min_rows = kMinRows,
                             .block_bytes = bytes_of_block<kPlanes, 1>,
                             .place = place_in_block<kPlanes, 1>,
                             .project = project<kPlanes, kBits>,
                             .dots = dots<kPlanes, kBits>};

template <int kPlanes, std::size_t kGroup>
constexpr BlockKernels kGroups{.min_rows = kMinRows,
                               .block_bytes = bytes_of_block<kPlanes, 1>,
                               .place = place_in_block<kPlanes, 1>,
                               .project = project_groups<kPlanes, kGroup>,
                               .dots = nullptr};

}  // namespace

constinit const AmxKernels kInt8{
    .int8 = {kRows<1, 8>, kRows<2, 8>},
    .int4 = {kRows<1, 4>, kRows<2, 4>},
    .int4_g32 = {kGroups<1, 32>, kGroups<2, 32>},
    .int4_g64 = {kGroups<1, 64>, kGroups<2, 64>},
    .int4_g128 = {kGroups<1, 128>, kGroups<2, 128>},
};

}  // namespace ktplan::amx
