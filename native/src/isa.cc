// CPUID and XCR0: what the processor has, and what the operating system lets a program use.

#include "ktplan/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ktplan {

#if defined(__x86_64__)
namespace {

std::uint64_t read_xcr0() {
  std::uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

}  // namespace

CpuFeatures CpuFeatures::detect() {
  CpuFeatures f;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const bool xsave = (c >> 27 & 1) != 0;  // OSXSAVE: XCR0 can be read
  f.fma = (c >> 12 & 1) != 0;
  if (xsave) {
    const std::uint64_t xcr0 = read_xcr0();
    f.os_ymm = (xcr0 & 0x6) == 0x6;
    f.os_zmm = (xcr0 & 0xe6) == 0xe6;
    f.os_tiles = (xcr0 & 0x60000) == 0x60000;
  }
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    f.avx2 = (b >> 5 & 1) != 0;
    f.avx512f = (b >> 16 & 1) != 0;
    f.avx512dq = (b >> 17 & 1) != 0;
    f.avx512bw = (b >> 30 & 1) != 0;
    f.avx512vl = (b >> 31 & 1) != 0;
    f.avx512vnni = (c >> 11 & 1) != 0;
    f.amx_tile = (d >> 24 & 1) != 0;
    f.amx_int8 = (d >> 25 & 1) != 0;
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    f.avx_vnni = (a >> 4 & 1) != 0;
    f.avx512bf16 = (a >> 5 & 1) != 0;
  }
  return f;
}
#else
CpuFeatures CpuFeatures::detect() { return {}; }
#endif

std::vector<std::string> CpuFeatures::names() const {
  std::vector<std::string> out;
  const auto note = [&out](bool has, const char* name) {
    if (has) out.emplace_back(name);
  };
  note(avx2 && os_ymm, "avx2");
  note(fma && os_ymm, "fma");
  note(avx_vnni && os_ymm, "avx_vnni");
  note(avx512f && os_zmm, "avx512f");
  note(avx512bw && os_zmm, "avx512bw");
  note(avx512dq && os_zmm, "avx512dq");
  note(avx512vl && os_zmm, "avx512vl");
  note(avx512vnni && os_zmm, "avx512_vnni");
  note(avx512bf16 && os_zmm, "avx512_bf16");
  note(amx_tile && os_tiles, "amx_tile");
  note(amx_int8 && os_tiles, "amx_int8");
  return out;
}

}  // namespace ktplan
