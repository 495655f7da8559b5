// The AMX instructions, one function each. Not the compiler's own: GCC 12's hide from it what memory they read, and it
// then drops the stores that fill a configuration or a buffer. Here every access to memory says so.
//
// Tiles and their configuration belong to the thread and survive nothing: configure, use and release within one function,
// and call no one else in between.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktplan {
namespace {

constexpr std::size_t kTileLine = 64;  // bytes of a tile's row, and from one row to the next in memory

struct alignas(64) TileConfig {  // as the processor reads it
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t line_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

[[gnu::always_inline]] inline void tiles_configure(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

[[gnu::always_inline]] inline void tiles_release() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
[[gnu::always_inline]] inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
[[gnu::always_inline]] inline void tile_load(const void* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(kTileLine), "i"(kTile) : "memory");
}

template <int kTile>
[[gnu::always_inline]] inline void tile_store(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(kTileLine), "i"(kTile) : "memory");
}

// C += A * B, signed bytes, 32-bit sums.
struct ByteProducts {
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] static inline void multiply() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

// C += A * B, bfloat16, float32 sums.
struct HalfProducts {
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] static inline void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace ktplan
