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
  bool amx_tile = false, amx_int8 = false;
  bool os_ymm = false, os_zmm = false, os_tiles = false;

  static CpuFeatures detect();
  std::vector<std::string> names() const;  // those that are there, for people
};

// A set of kernels, whether this machine can run it, and why not.
struct Candidate {
  const KernelTable* table;
  std::string missing;  // empty: it runs here
};

// Every set of kernels in this build, best first; the scalar one is last and always runs.
const std::vector<Candidate>& candidates();

// The table of that name, or nullptr where this build has none.
const Candidate* find_candidate(std::string_view name);

}  // namespace ktplan
