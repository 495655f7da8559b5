// The kernel tables of this build, one for each source file of src/ that defines one.
#pragma once

#include "ktplan/kernels.h"

namespace ktplan::scalar {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace ktplan::avx2 {
extern const KernelTable kTable;
}
namespace ktplan::avx512 {
extern const FormatKernels kBf16;       // float32 arithmetic
extern const FormatKernels kBf16Pairs;  // vdpbf16ps; needs avx512_bf16
}
namespace ktplan::avx512_vnni {
extern const KernelTable kTable;
extern const FormatKernels kGroups32, kGroups64, kGroups128;
}
#endif
