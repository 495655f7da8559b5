// CPUID and XCR0: what the processor has, and what the operating system lets a program use.

#include "ktplan/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
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
    f.amx_bf16 = (d >> 22 & 1) != 0;
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    f.avx_vnni = (a >> 4 & 1) != 0;
    f.avx512bf16 = (a >> 5 & 1) != 0;
  }
  if (f.amx_tile && __get_cpuid_count(0x1d, 0, &a, &b, &c, &d) && a >= 1 &&
      __get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) {
    f.amx_palette = a >> 16 == 1024 && (b & 0xffff) == 64 && b >> 16 >= 8 && (c & 0xffff) == 16;
  }
  return f;
}

namespace {

constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl

TileState find_tile_state() {
  TileState state;
  const CpuFeatures f = CpuFeatures::detect();
  if (!f.amx_tile || !f.amx_int8) {
    state.why = f.amx_tile ? "the processor has no amx_int8" : "the processor has no amx_tile";
  } else if (!f.amx_palette) {
    state.why = "the processor shows amx_tile without tiles of 16 rows (a virtual machine does that)";
  } else if (!f.os_tiles) {
    state.why = "the operating system does not save the tiles";
  } else {
    state.detected = true;
    std::uint64_t permitted = 0;
    const long asked = syscall(SYS_arch_prctl, kRequestPermission, kTileData);
    const int fault = errno;
    state.permitted = asked == 0 && syscall(SYS_arch_prctl, kGetPermission, &permitted) == 0 &&
                      (permitted >> kTileData & 1) != 0;
    if (!state.permitted) {
      state.why = "the operating system refuses tiles to this process";
      if (asked != 0) state.why += std::string(" (arch_prctl: ") + std::strerror(fault) + ")";
    }
  }
  return state;
}

}  // namespace

const TileState& tile_state() {
  static const TileState state = find_tile_state();
  return state;
}

bool trap_executes() {
  const char* set = std::getenv("KTPLAN_AMX_EMULATED");
  if (set != nullptr && std::strcmp(set, "1") == 0) return true;
  void* const active = dlsym(RTLD_DEFAULT, "amx_trap_active");
  return active != nullptr && reinterpret_cast<int (*)()>(active)() == 1;
}
#else
CpuFeatures CpuFeatures::detect() { return {}; }

const TileState& tile_state() {
  static const TileState state{.detected = false, .permitted = false, .why = "the processor has no amx_tile"};
  return state;
}

bool trap_executes() { return false; }
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
  note(amx_bf16 && os_tiles, "amx_bf16");
  return out;
}

}  // namespace ktplan
