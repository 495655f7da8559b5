// AVX-512 kernels for processors without VNNI: widening.h on 512-bit registers. dispatch.cc adds those for bfloat16.

#include "elementwise.h"
#include "vectors512.h"
#include "widening.h"

#include "ktplan/tables.h"

namespace ktplan::avx512 {

// 4 to 8 rows are equally good on Zen 4.
constinit const KernelTable kTable = Widening<Vectors512, 6, 6>::table("avx512", "AVX-512");

}  // namespace ktplan::avx512
