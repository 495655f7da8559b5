// AVX2 kernels: widening.h on 256-bit registers.

#include "elementwise.h"
#include "vectors256.h"
#include "widening.h"

#include "ktplan/tables.h"

namespace ktplan {
namespace {

// 4 rows x 2 vectors of sums, 2 x 2 of weights, two broadcasts: 14 of the 16 registers, and one for a product. Nibbles need
// two constants as well: with 4 rows the compiler keeps sums in memory, which costs a quarter of the speed.
constexpr KernelTable table() {
  KernelTable table = Widening<Vectors256, 4, 3>::table("avx2", "AVX2");
  table.bf16 = kBf16Format<Vectors256, 4>;
  return table;
}

}  // namespace

namespace avx2 {
constinit const KernelTable kTable = table();
}  // namespace avx2
}  // namespace ktplan
