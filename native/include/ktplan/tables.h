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
extern const KernelTable kTable;
extern const FormatKernels kBf16;       // float32 arithmetic
extern const FormatKernels kBf16Pairs;  // vdpbf16ps; needs avx512_bf16
}
namespace ktplan::avx_vnni {
extern const KernelTable kTable;
}
namespace ktplan::avx512_vnni {
extern const KernelTable kTable;
extern const FormatKernels kGroups32, kGroups64, kGroups128;
}
namespace ktplan::amx {
// For 8- and 16-bit activations; they go with the rows of avx512_vnni, and kBf16 with those of avx512_bf16.
struct AmxKernels {
  BlockKernels int8[2], int4[2], int4_g32[2], int4_g64[2], int4_g128[2];
};
extern const AmxKernels kInt8;
extern const BlockKernels kBf16[2];
}  // namespace ktplan::amx
#endif
