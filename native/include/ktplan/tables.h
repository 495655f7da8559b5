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
}
namespace ktplan::avx_vnni {
extern const KernelTable kTable;
}
namespace ktplan::avx512_vnni {
extern const KernelTable kTable;
}
#endif
