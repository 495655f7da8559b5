// What the processor can do, and which kernels to take because of it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ktplan/kernels.h"

namespace ktplan {

// Features the kernels ask for, as CPUID reports them *and* the operating system allows (XCR0).
struct CpuFeatures {
  bool avx2 = false, fma = false;                                                                  // 256-bit registers
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false;  // 512-bit registers
  bool avx512vnni = false, avx512bf16 = false;
  bool avx_vnni = false;  // 256-bit dot products
  bool amx_tile = false, amx_int8 = false, amx_bf16 = false;
  bool amx_palette = false;  // of 8 tiles of 1 KB; some virtual machines show amx_tile without it
  bool os_ymm = false, os_zmm = false, os_tiles = false;

  static CpuFeatures detect();
  std::vector<std::string> names() const;  // those that are there, for people
};

// Whether this process may use tiles. The operating system is asked once, at the first call, and only where the
// processor has them: they need its permission, for all threads of the process together.
struct TileState {
  bool detected = false;   // by the processor, with a palette, and saved by the operating system
  bool permitted = false;  // by the operating system
  std::string why;         // what is missing; empty if nothing is
};
const TileState& tile_state();

// Whether a trap handler of the tests executes AMX and AVX-VNNI instructions: it says so itself (amx_trap_active), or the
// environment does (KTPLAN_AMX_EMULATED=1). May change while the process runs.
bool trap_executes();

// A set of kernels, whether this machine can run it, and why not.
struct Candidate {
  const KernelTable* table;
  std::string missing;    // empty: it runs here
  bool emulated = false;  // it runs, but only through a trap handler: never by default
};

// Every set of kernels in this build, best first; the scalar one is last and always runs.
std::vector<Candidate> candidates();

// The set of that name; its table is null where this build has none.
Candidate find_candidate(std::string_view name);

}  // namespace ktplan
