// Blocks of activations times one step of weights on AMX tiles: the loops, for every kind of product.
//
//   A tile of weights (B) as the store holds it is the operand that the instructions want: 16 columns, 64 bytes of inputs.
//   A tile of activations (A) is 16 rows of the same 64 bytes. 16-bit activations have two tiles, upper and lower bytes,
//   and two sums: to the loops they are two blocks.
//
//   The eight tiles: 2 A x 2 B with 4 sums (one load a product, each B tile serves two products). Three blocks take turns
//   in one A tile (6 sums, each B tile serves three), so that an odd count leaves no single block behind. A single block
//   of 8-bit rows takes the B tiles of two steps at a time (4 sums): 0.8 products a load.
//
//   Weights go by chunks of kChunkSteps k-steps of 64 bytes, 28 KB of B, which stay in the first-level cache while the
//   blocks pass by. With several groups of blocks the sums wait in memory meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "amx.h"
#include "avx512.h"
#include "ktplan/kernels.h"

namespace ktplan {
namespace {

constexpr std::size_t kChunkSteps = 14;  // a quarter of the layout's k-block
constexpr std::size_t kStepTiles = 2 * kTileBytes;  // bytes of one k-step of B
constexpr std::size_t kBlockLookAhead = 8192;       // bytes of weights

struct alignas(64) SumTile {
  std::int32_t line[kBlockRows][16];  // or floats
};

// The sums of all blocks with one step of weights: [block][plane][16 columns].
template <int kPlanes>
struct BlockSums {
  SumTile tile[kMaxBlocks][kPlanes][2];
};

enum class Shape { kOne, kTwo, kThree };  // A tiles that share a B tile's load

struct TileGroup {
  Shape shape;
  const std::uint8_t* a;
  std::size_t next;  // bytes from one A tile to the other
  std::size_t step;  // bytes from one k-step to the next
  std::uint8_t rows[2];
  SumTile* sums;  // two for each A tile
};

struct TileGroups {
  TileGroup group[kMaxBlocks];
  std::size_t count = 0;
};

template <int kPlanes>
TileGroups groups_of(const BlockedRows& rows, BlockSums<kPlanes>& sums) {
  TileGroups out;
  const std::size_t blocks = (rows.count + kBlockRows - 1) / kBlockRows;
  const auto size = [&](std::size_t block) {
    const std::size_t rest = rows.count - block * kBlockRows;
    return static_cast<std::uint8_t>(rest < kBlockRows ? rest : kBlockRows);
  };
  for (std::size_t block = 0; block < blocks;) {
    TileGroup& group = out.group[out.count++];
    group.a = rows.blocks + block * rows.block_bytes;
    group.sums = sums.tile[block][0];
    group.step = kPlanes * kTileBytes;
    group.rows[0] = group.rows[1] = size(block);
    if (kPlanes == 2) {
      group.shape = Shape::kTwo;
      group.next = kTileBytes;
      block += 1;
      continue;
    }
    group.next = rows.block_bytes;
    const std::size_t left = blocks - block;
    if (left == 1) {
      group.shape = Shape::kOne;
      block += 1;
    } else if (left == 3) {  // one A tile for all: they have all 16 rows, and those behind the last are never looked at
      group.shape = Shape::kThree;
      group.rows[0] = kBlockRows;
      block += 3;
    } else {
      group.shape = Shape::kTwo;
      group.rows[1] = size(block + 1);
      block += 2;
    }
  }
  return out;
}

// Tiles 0-3 (0-5) are sums, the others operands. `line`: bytes of a row of A.
inline TileConfig config_for(const TileGroup& group, std::size_t line) {
  TileConfig config;
  const auto shape = [&config](int tile, std::size_t rows, std::size_t bytes) {
    config.rows[tile] = static_cast<std::uint8_t>(rows);
    config.line_bytes[tile] = static_cast<std::uint16_t>(bytes);
  };
  const bool three = group.shape == Shape::kThree;
  for (int tile = 0; tile < (three ? 6 : 4); ++tile) {
    shape(tile, group.rows[group.shape == Shape::kTwo && tile >= 2], kTileLine);
  }
  if (three) {
    shape(6, kBlockRows, line);
  } else {
    shape(4, group.rows[0], line);
    shape(5, group.shape == Shape::kTwo ? group.rows[1] : line / 4, group.shape == Shape::kTwo ? line : kTileLine);
    shape(6, line / 4, kTileLine);
  }
  shape(7, line / 4, kTileLine);
  return config;
}

// A configuration is loaded again only where the shape changes; what the thread had before does not count.
struct Configured {
  Shape shape{};
  std::uint8_t rows[2] = {};
  bool any = false;

  void want(const TileGroup& group, std::size_t line) {
    if (any && shape == group.shape && rows[0] == group.rows[0] && rows[1] == group.rows[1]) return;
    tiles_configure(config_for(group, line));
    shape = group.shape;
    rows[0] = group.rows[0];
    rows[1] = group.rows[1];
    any = true;
  }
};

// --- `steps` k-steps of a group; before(s) runs ahead of each. Sums stay in the tiles. ---

template <class Products, typename Before>
[[gnu::always_inline]] inline void multiply_two(const std::uint8_t* a, const TileGroup& group, const std::uint8_t* b,
                                                std::size_t steps, Before before) {
  for (std::size_t s = 0; s < steps; ++s, a += group.step, b += kStepTiles) {
    before(s);
    tile_load<4>(a);
    tile_load<6>(b);
    Products::template multiply<0, 4, 6>();
    tile_load<7>(b + kTileBytes);
    Products::template multiply<1, 4, 7>();
    tile_load<5>(a + group.next);
    Products::template multiply<2, 5, 6>();
    Products::template multiply<3, 5, 7>();
  }
}

template <class Products, typename Before>
[[gnu::always_inline]] inline void multiply_three(const std::uint8_t* a, const TileGroup& group, const std::uint8_t* b,
                                                  std::size_t steps, Before before) {
  for (std::size_t s = 0; s < steps; ++s, a += group.step, b += kStepTiles) {
    before(s);
    tile_load<7>(b);
    tile_load<6>(a);
    Products::template multiply<0, 6, 7>();
    tile_load<6>(a + group.next);
    Products::template multiply<2, 6, 7>();
    tile_load<6>(a + 2 * group.next);
    Products::template multiply<4, 6, 7>();
    tile_load<7>(b + kTileBytes);
    Products::template multiply<5, 6, 7>();
    tile_load<6>(a + group.next);
    Products::template multiply<3, 6, 7>();
    tile_load<6>(a);
    Products::template multiply<1, 6, 7>();
  }
}

template <class Products, typename Before>
[[gnu::always_inline]] inline void multiply_one(const std::uint8_t* a, const TileGroup& group, const std::uint8_t* b,
                                                std::size_t steps, Before before) {
  for (std::size_t s = 0; s < steps; ++s, a += group.step, b += kStepTiles) {
    before(s);
    tile_load<4>(a);
    tile_load<6>(b);
    Products::template multiply<0, 4, 6>();
    tile_load<7>(b + kTileBytes);
    Products::template multiply<1, 4, 7>();
  }
}

// One block with two steps of weights.
template <class Products, typename Before>
[[gnu::always_inline]] inline void multiply_wide(const std::uint8_t* a, const TileGroup& group, const std::uint8_t* b,
                                                 const std::uint8_t* other, std::size_t steps, Before before) {
  for (std::size_t s = 0; s < steps; ++s, a += group.step, b += kStepTiles, other += kStepTiles) {
    before(s);
    tile_load<4>(a);
    tile_load<6>(b);
    Products::template multiply<0, 4, 6>();
    tile_load<7>(b + kTileBytes);
    Products::template multiply<1, 4, 7>();
    tile_load<5>(other);
    Products::template multiply<2, 4, 5>();
    tile_load<6>(other + kTileBytes);
    Products::template multiply<3, 4, 6>();
  }
}

template <class Products, typename Before>
[[gnu::always_inline]] inline void multiply_group(const std::uint8_t* a, const TileGroup& group, const std::uint8_t* b,
                                                  std::size_t steps, Before before) {
  if (group.shape == Shape::kTwo) {
    multiply_two<Products>(a, group, b, steps, before);
  } else if (group.shape == Shape::kThree) {
    multiply_three<Products>(a, group, b, steps, before);
  } else {
    multiply_one<Products>(a, group, b, steps, before);
  }
}

enum class Start { kZero, kLoad, kKeep };

template <int kCount>
[[gnu::always_inline]] inline void begin_sums(Start start, const SumTile* sums) {
  if (start == Start::kZero) each<kCount>([](auto t) INLINE { tile_zero<t>(); });
  if (start == Start::kLoad) each<kCount>([sums](auto t) INLINE { tile_load<t>(sums + t); });
}

inline void begin_group(Start start, const TileGroup& group) {
  if (group.shape == Shape::kOne) begin_sums<2>(start, group.sums);
  if (group.shape == Shape::kTwo) begin_sums<4>(start, group.sums);
  if (group.shape == Shape::kThree) begin_sums<6>(start, group.sums);
}

inline void store_group(const TileGroup& group, SumTile* to) {
  each<2>([to](auto t) INLINE { tile_store<t>(to + t); });
  if (group.shape == Shape::kOne) return;
  each<2>([to](auto t) INLINE { tile_store<2 + t>(to + 2 + t); });
  if (group.shape == Shape::kTwo) return;
  each<2>([to](auto t) INLINE { tile_store<4 + t>(to + 4 + t); });
}

// --- Where the weights are ---

// Some k-steps of one step of weights: `first`, counted in 64 bytes of activations.
struct Chunk {
  const std::uint8_t* packed;
  std::size_t first, steps;
};

// Weights that are multiplied as they lie.
template <std::size_t kBlockBytes>
struct PlainWeights {
  explicit PlainWeights(const WeightStep& step) : step_(step), total_(step.row_bytes / kStepBytes) {}

  std::size_t chunks() const { return (total_ + kChunkSteps - 1) / kChunkSteps; }
  Chunk chunk(std::size_t i) const {
    constexpr std::size_t kBlockSteps = kBlockBytes / kStepBytes;
    static_assert(kBlockSteps % kChunkSteps == 0);
    const std::size_t first = i * kChunkSteps, rest = total_ - first;
    const Segment segment = segment_at(step_, kBlockBytes, first / kBlockSteps);
    return {segment.bytes + first % kBlockSteps * kStepTiles, first, rest < kChunkSteps ? rest : kChunkSteps};
  }
  const std::uint8_t* begin() { return nullptr; }
  const std::uint8_t* tiles(std::size_t, const Chunk& chunk) const { return chunk.packed; }
  void before(std::size_t, const Chunk& chunk, std::size_t s) const {
    const std::uint8_t* w = chunk.packed + s * kStepTiles + kBlockLookAhead;
    for (std::size_t line = 0; line < kStepTiles; line += 64) prefetch(w + line);
  }

 private:
  const WeightStep& step_;
  const std::size_t total_;
};

// INT4: expanded to bytes of 16 n, once, a k-step of 128 inputs before it is needed, into two buffers in turns.
class NibbleWeights {
 public:
  explicit NibbleWeights(const WeightStep& step) : step_(step), total_(step.row_bytes / kStepBytes) {}

  std::size_t chunks() const { return (total_ + kPacked - 1) / kPacked; }
  Chunk chunk(std::size_t i) const {
    constexpr std::size_t kBlockSteps = kInt4Layout.block_bytes / kStepBytes;
    static_assert(kBlockSteps % kPacked == 0);
    const std::size_t first = i * kPacked, rest = total_ - first;
    const Segment segment = segment_at(step_, kInt4Layout.block_bytes, first / kBlockSteps);
    return {segment.bytes + first % kBlockSteps * kStepTiles, 2 * first, 2 * (rest < kPacked ? rest : kPacked)};
  }
  void begin() { expand(chunk(0).packed, buffer_[0]); }
  const std::uint8_t* tiles(std::size_t i, const Chunk&) const { return buffer_[i % 2]; }
  // Expands what comes after the two k-steps that begin at s.
  void before(std::size_t i, const Chunk& now, std::size_t s) {
    if (s % 2 != 0) return;
    const std::uint8_t* w = now.packed + s / 2 * kStepTiles + kBlockLookAhead;
    for (std::size_t line = 0; line < kStepTiles; line += 64) prefetch(w + line);
    if (s + 2 < now.steps) {
      expand(now.packed + (s / 2 + 1) * kStepTiles, buffer_[i % 2] + (s + 2) * kStepTiles);
    } else if (i + 1 < chunks()) {
      expand(chunk(i + 1).packed, buffer_[(i + 1) % 2]);
    }
  }

 private:
  static constexpr std::size_t kPacked = kChunkSteps / 2;

  // 32 rows of 128 inputs to two k-steps: the low nibbles', then the high ones'.
  static void expand(const std::uint8_t* packed, std::uint8_t* out) {
    const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0));
    for (std::size_t at = 0; at < kStepTiles; at += 64) {
      const __m512i bytes = _mm512_loadu_si512(packed + at);
      _mm512_store_si512(out + at, _mm512_and_si512(_mm512_slli_epi16(bytes, 4), upper));
      _mm512_store_si512(out + kStepTiles + at, _mm512_and_si512(bytes, upper));
    }
  }

  const WeightStep& step_;
  const std::size_t total_;
  alignas(64) std::uint8_t buffer_[2][kChunkSteps * kStepTiles];
};

// --- Whole rows: sums over all inputs ---

template <class Products, class Weights>
void sum_step(const WeightStep& step, const TileGroups& groups) {
  Weights weights(step);
  Configured configured;
  weights.begin();
  const std::size_t chunks = weights.chunks();
  const bool alone = groups.count == 1;
  for (std::size_t i = 0; i < chunks; ++i) {
    const Chunk chunk = weights.chunk(i);
    const std::uint8_t* const b = weights.tiles(i, chunk);
    for (std::size_t g = 0; g < groups.count; ++g) {
      const TileGroup& group = groups.group[g];
      configured.want(group, kTileLine);
      begin_group(i == 0 ? Start::kZero : alone ? Start::kKeep : Start::kLoad, group);
      const std::uint8_t* const a = group.a + chunk.first * group.step;
      if (g == 0) {
        multiply_group<Products>(a, group, b, chunk.steps, [&](std::size_t s) INLINE { weights.before(i, chunk, s); });
      } else {
        multiply_group<Products>(a, group, b, chunk.steps, [](std::size_t) INLINE {});
      }
      if (!alone || i + 1 == chunks) store_group(group, group.sums);
    }
  }
  tiles_release();
}

// One block of 8-bit rows with two steps.
template <class Products, class Weights>
void sum_two_steps(const WeightStep* steps, const TileGroup& group, SumTile* other_sums) {
  Weights first(steps[0]), second(steps[1]);
  tiles_configure(config_for(group, kTileLine));
  first.begin();
  second.begin();
  begin_sums<4>(Start::kZero, nullptr);
  for (std::size_t i = 0; i < first.chunks(); ++i) {
    const Chunk chunk = first.chunk(i), other = second.chunk(i);
    multiply_wide<Products>(group.a + chunk.first * group.step, group, first.tiles(i, chunk), second.tiles(i, other),
                            chunk.steps, [&](std::size_t s) INLINE {
                              first.before(i, chunk, s);
                              second.before(i, other, s);
                            });
  }
  each<2>([&](auto t) INLINE { tile_store<t>(group.sums + t); });
  each<2>([&](auto t) INLINE { tile_store<2 + t>(other_sums + t); });
  tiles_release();
}

// finish(sums, step's index) is called for each of one or two steps.
template <class Products, class Weights, int kPlanes, typename Finish>
[[gnu::always_inline]] inline void sum_blocks(const WeightStep* steps, std::size_t count, const BlockedRows& rows,
                                              Finish finish) {
  BlockSums<kPlanes> sums;
  const TileGroups groups = groups_of<kPlanes>(rows, sums);
  if (count == 2 && groups.group[0].shape == Shape::kOne) {
    BlockSums<kPlanes> others;
    sum_two_steps<Products, Weights>(steps, groups.group[0], others.tile[0][0]);
    finish(sums, 0);
    finish(others, 1);
    return;
  }
  for (std::size_t s = 0; s < count; ++s) {
    sum_step<Products, Weights>(steps[s], groups);
    finish(sums, s);
  }
}

// --- How rows get into blocks: a k-step's 64 bytes (of each plane) behind those of the row before ---

template <int kPlanes>
void place_row(const std::uint8_t* from, std::size_t steps, std::uint8_t* block, std::size_t index) {
  std::uint8_t* to = block + index * kTileLine;
  if constexpr (kPlanes == 1) {
    for (std::size_t s = 0; s < steps; ++s, to += kTileBytes) _mm512_store_si512(to, _mm512_loadu_si512(from + 64 * s));
  } else {  // dwords of the planes in turns
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (std::size_t s = 0; s < steps; ++s, to += 2 * kTileBytes) {
      const __m512i a = _mm512_loadu_si512(from + 128 * s), b = _mm512_loadu_si512(from + 128 * s + 64);
      _mm512_store_si512(to, _mm512_permutex2var_epi32(a, even, b));
      _mm512_store_si512(to + kTileBytes, _mm512_permutex2var_epi32(a, odd, b));
    }
  }
}

// Inputs of 8 bits (or their two planes) take kInputBytes = 1, bfloat16 ones 2.
template <int kPlanes, std::size_t kInputBytes>
void place_in_block(const Row& row, std::size_t k, std::uint8_t* block, std::size_t index) noexcept {
  place_row<kPlanes>(row.bytes, k * kInputBytes / kStepBytes, block, index);
}

template <int kPlanes, std::size_t kInputBytes>
std::size_t bytes_of_block(std::size_t k) noexcept {
  return kBlockRows * k * kInputBytes * kPlanes;
}

}  // namespace
}  // namespace ktplan
