// The loops are written in assembly, so that this file needs no compile flags of its own and the compiler cannot improve
// what is measured. Twelve sums at a time hide the latency of every instruction measured here.

#include "ktplan/limits.h"

#include <memory>
#include <string_view>

#include "ktplan/isa.h"

namespace ktplan {
namespace {

#if defined(__x86_64__)

#define REGISTERS                                                                                                      \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14", "xmm15", "cc", "memory"

// `twelve` is the body for each sum \i; sources are xmm12 to xmm14, all bits one (`ones`) or zero.
#define LOOP(name, ones, twelve)                           \
  void name(std::uint64_t rounds) noexcept {               \
    asm volatile(                                          \
        "vpxor %%xmm12, %%xmm12, %%xmm12\n\t" ones         \
        "vmovdqa %%ymm12, %%ymm13\n\t"                     \
        "vmovdqa %%ymm12, %%ymm14\n\t"                     \
        ".irp i,0,1,2,3,4,5,6,7,8,9,10,11\n\t"             \
        "vpxor %%xmm\\i, %%xmm\\i, %%xmm\\i\n\t"           \
        ".endr\n\t"                                        \
        "1:\n\t"                                           \
        ".irp i,0,1,2,3,4,5,6,7,8,9,10,11\n\t" twelve      \
        ".endr\n\t"                                        \
        "dec %0\n\t"                                       \
        "jnz 1b\n\t"                                       \
        "vzeroupper"                                       \
        : "+r"(rounds)                                     \
        :                                                  \
        : REGISTERS);                                      \
  }

#define ONES "vpcmpeqd %%ymm12, %%ymm12, %%ymm12\n\t"

LOOP(int8_zmm, ONES, "vpdpbusd %%zmm12, %%zmm13, %%zmm\\i\n\t")
LOOP(int8_ymm, ONES, "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm\\i\n\t")
LOOP(int8_avx2, ONES,
     "vpmaddubsw %%ymm12, %%ymm13, %%ymm15\n\t"
     "vpmaddwd %%ymm15, %%ymm14, %%ymm15\n\t"
     "vpaddd %%ymm15, %%ymm\\i, %%ymm\\i\n\t")
LOOP(bf16_zmm, "", "vdpbf16ps %%zmm12, %%zmm13, %%zmm\\i\n\t")
LOOP(fp32_zmm, "", "vfmadd231ps %%zmm12, %%zmm13, %%zmm\\i\n\t")
LOOP(fp32_ymm, "", "vfmadd231ps %%ymm12, %%ymm13, %%ymm\\i\n\t")

// Four sums and four operands are all the tiles there are.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#define TILE_LOOP(name, instruction)                       \
  void name(std::uint64_t rounds) noexcept {               \
    const TileConfig config;                               \
    asm volatile(                                          \
        "ldtilecfg %1\n\t"                                 \
        ".irp i,0,1,2,3,4,5,6,7\n\t"                       \
        "tilezero %%tmm\\i\n\t"                            \
        ".endr\n\t"                                        \
        "1:\n\t" instruction " %%tmm6, %%tmm4, %%tmm0\n\t" \
        instruction " %%tmm7, %%tmm4, %%tmm1\n\t"          \
        instruction " %%tmm6, %%tmm5, %%tmm2\n\t"          \
        instruction " %%tmm7, %%tmm5, %%tmm3\n\t"          \
        "dec %0\n\t"                                       \
        "jnz 1b\n\t"                                       \
        "tilerelease"                                      \
        : "+r"(rounds)                                     \
        : "m"(config)                                      \
        : "cc", "memory");                                 \
  }

TILE_LOOP(int8_tiles, "tdpbssd")
TILE_LOOP(bf16_tiles, "tdpbf16ps")

std::string unless(bool there, const char* what) { return there ? "" : std::string("this machine has no ") + what; }

// Tiles need the operating system's permission, which whoever chooses kernels has asked for.
std::string without_tiles() {
  for (const Candidate& candidate : candidates()) {
    if (std::string_view(candidate.table->name) != "amx-int8") continue;
    return candidate.emulated ? "tiles are only emulated here" : candidate.missing;
  }
  return "this build has no kernels for tiles";
}

#endif

std::vector<Limit> list() {
  std::vector<Limit> all;
#if defined(__x86_64__)
  const CpuFeatures f = CpuFeatures::detect();
  const bool zmm = f.os_zmm && f.avx512f, ymm = f.os_ymm && f.avx2;
  all.push_back({"tdpbssd", "int8", without_tiles(), &int8_tiles, 4ull * 2 * 16 * 16 * 64});
  all.push_back({"vpdpbusd zmm", "int8", unless(zmm && f.avx512vnni, "avx512_vnni"), &int8_zmm, 12ull * 2 * 64});
  all.push_back({"vpdpbusd ymm", "int8", unless(ymm && f.avx_vnni, "avx_vnni"), &int8_ymm, 12ull * 2 * 32});
  all.push_back({"vpmaddubsw ymm", "int8", unless(ymm, "avx2"), &int8_avx2, 12ull * 2 * 32});
  all.push_back({"tdpbf16ps", "bf16", without_tiles(), &bf16_tiles, 4ull * 2 * 16 * 16 * 32});
  all.push_back({"vdpbf16ps zmm", "bf16", unless(zmm && f.avx512bf16, "avx512_bf16"), &bf16_zmm, 12ull * 2 * 32});
  all.push_back({"vfmadd231ps zmm", "fp32", unless(zmm, "avx512f"), &fp32_zmm, 12ull * 2 * 16});
  all.push_back({"vfmadd231ps ymm", "fp32", unless(ymm && f.fma, "fma"), &fp32_ymm, 12ull * 2 * 8});
#endif
  return all;
}

struct Rounds {
  const Limit* limit;
  std::uint64_t each;
};

}  // namespace

const std::vector<Limit>& limits() {
  static const std::vector<Limit> all = list();
  return all;
}

std::uint64_t run_limit(const Limit& limit, std::uint64_t rounds, Pool& pool) {
  const std::uint64_t pieces = 16ull * static_cast<std::uint64_t>(pool.threads());
  Rounds context{&limit, rounds / pieces + 1};
  const auto phase = std::make_unique<Phase>();
  phase->context = &context;
  phase->items = static_cast<std::uint32_t>(pieces);
  phase->run = [](void* at, std::uint32_t) noexcept {
    const auto* r = static_cast<const Rounds*>(at);
    r->limit->run(r->each);
  };
  const auto turn = pool.lock();
  pool.run(phase.get(), 1);
  return pieces * context.each * limit.operations;
}

}  // namespace ktplan
