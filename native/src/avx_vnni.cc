// AVX-VNNI kernels: vpdpbusd on 256-bit registers, which multiplies unsigned by signed bytes. The weights are the unsigned
// ones, their levels plus 128 (or 8); what that adds, known once a row or group, is taken off.

#include "elementwise.h"
#include "products.h"
#include "vectors256.h"

#include "ktplan/tables.h"

namespace ktplan {
namespace {

struct VectorsVnni : Vectors256 {
  static I add_products_of_bytes(I sums, I u, I s) { return _mm256_dpbusd_avx_epi32(sums, u, s); }
};

// 6 rows x 2 vectors of sums, 2 of weights, a broadcast: 15 of the 16 registers; with two planes 3 rows.
template <std::size_t kBits, std::size_t kGroup>
constexpr FormatKernels kFormat{.row_bytes = Rows<VectorsVnni>::plain_bytes<kGroup>,
                                .quantize = Rows<VectorsVnni>::plain<kGroup, kNibbleOffset>,
                                .a8 = products_of<Bytes<VectorsVnni, kBits, 8, 6>, kGroup>(),
                                .a16 = products_of<Bytes<VectorsVnni, kBits, 16, 3>, kGroup>()};

constexpr KernelTable table() {
  KernelTable table{};
  table.name = "avx-vnni";
  table.words = "AVX-VNNI";
  table.bf16_words = "AVX2";
  table.int8 = kFormat<8, 0>;
  table.int4 = kFormat<4, 0>;
  table.int4_g32 = kFormat<4, 32>;
  table.int4_g64 = kFormat<4, 64>;
  table.int4_g128 = kFormat<4, 128>;
  table.bf16 = kBf16Format<VectorsVnni, 4>;
  table.levels = Rows<VectorsVnni>::levels_of_bytes;
  return with_elementwise<VectorsVnni>(table);
}

}  // namespace

namespace avx_vnni {
constinit const KernelTable kTable = table();
}  // namespace avx_vnni
}  // namespace ktplan
