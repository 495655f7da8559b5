// The formats of a processor that multiplies bytes only by vpmaddubsw, which saturates: int8 weights, and activations of
// 16 bits, are widened to int16; nibbles times 8-bit activations are not. Over a set of vector operations V. Internal linkage.
#pragma once

#include "products.h"

namespace ktplan {
namespace {

// kRoom, kNibbleRoom: rows whose sums fit in the registers.
template <class V, int kRoom, int kNibbleRoom>
struct Widening {
  static constexpr FormatKernels int8{.row_bytes = Rows<V>::pairs_bytes,
                                      .quantize = Rows<V>::pairs,
                                      .a8 = products_of<Pairs<V, 8, 8, kRoom>>(),
                                      .a16 = products_of<Pairs<V, 8, 16, kRoom>>()};

  template <std::size_t kGroup>
  static std::size_t row_bytes(std::size_t k, int bits) noexcept {
    return bits == 8 ? Rows<V>::template plain_bytes<kGroup>(k, bits) : Rows<V>::pairs_bytes(k, bits);
  }

  template <std::size_t kGroup>
  static Row quantize(const float* x, std::size_t k, int bits, Numerics numerics, std::uint8_t* bytes) noexcept {
    return bits == 8 ? Rows<V>::template plain<kGroup, kNibbleOffset>(x, k, bits, numerics, bytes)
                     : Rows<V>::pairs(x, k, bits, numerics, bytes);
  }

  template <std::size_t kGroup>
  static constexpr FormatKernels int4{.row_bytes = row_bytes<kGroup>,
                                      .quantize = quantize<kGroup>,
                                      .a8 = products_of<Nibbles<V, kNibbleRoom>, kGroup>(),
                                      .a16 = products_of<Pairs<V, 4, 16, kRoom>, kGroup>()};

  static constexpr KernelTable table(const char* name, const char* words) {
    KernelTable table{};
    table.name = name;
    table.words = table.bf16_words = words;
    table.int8 = int8;
    table.int4 = int4<0>;
    table.int4_g32 = int4<32>;
    table.int4_g64 = int4<64>;
    table.int4_g128 = int4<128>;
    table.levels = Rows<V>::levels_of_pairs;
    return with_elementwise<V>(table);
  }
};

}  // namespace
}  // namespace ktplan
