// The list of kernel tables, best first, each with what this machine lacks for it.

#include "ktplan/isa.h"
#include "ktplan/tables.h"

namespace ktplan {
namespace {

#if defined(__x86_64__)
// "" or a sentence part: "the processor has no avx512_vnni, avx512bw"
std::string lacking(std::initializer_list<std::pair<bool, const char*>> needed, bool os, const char* registers) {
  std::string missing;
  for (const auto& [has, name] : needed) {
    if (has) continue;
    missing += missing.empty() ? "the processor has no " : ", ";
    missing += name;
  }
  if (missing.empty() && !os)
    missing = std::string("the operating system does not save the ") + registers + " registers";
  return missing;
}

std::string lacking_avx512_vnni(const CpuFeatures& f) {
  return lacking({{f.avx512f, "avx512f"},
                  {f.avx512bw, "avx512bw"},
                  {f.avx512dq, "avx512dq"},
                  {f.avx512vl, "avx512vl"},
                  {f.avx512vnni, "avx512_vnni"},
                  {f.fma, "fma"}},
                 f.os_zmm, "512-bit");
}

std::string lacking_avx512(const CpuFeatures& f) {
  return lacking({{f.avx512f, "avx512f"},
                  {f.avx512bw, "avx512bw"},
                  {f.avx512dq, "avx512dq"},
                  {f.avx512vl, "avx512vl"},
                  {f.fma, "fma"}},
                 f.os_zmm, "512-bit");
}

std::string lacking_avx2(const CpuFeatures& f) {
  return lacking({{f.avx2, "avx2"}, {f.fma, "fma"}}, f.os_ymm, "256-bit");
}

// Put together here, where no code is compiled for more than the platform: it runs on every machine.
KernelTable avx512_vnni_table(const CpuFeatures& features) {
  KernelTable table = avx512_vnni::kTable;
  table.int4_g32 = avx512_vnni::kGroups32;
  table.int4_g64 = avx512_vnni::kGroups64;
  table.int4_g128 = avx512_vnni::kGroups128;
  table.bf16 = features.avx512bf16 ? avx512::kBf16Pairs : avx512::kBf16;
  if (features.avx512bf16) table.bf16_words = "AVX-512 BF16";
  return table;
}

KernelTable avx512_table() {
  KernelTable table = avx512::kTable;
  table.bf16 = avx512::kBf16;
  return table;
}

// The AVX-512 VNNI table, with blocks of rows multiplied by tiles. The emulator has all of AMX.
Candidate amx_int8(const KernelTable& vnni, const CpuFeatures& f) {
  static const KernelTable table = [&] {
    KernelTable t = vnni;
    t.name = "amx-int8";
    t.words = "AMX";
    const auto add = [](FormatKernels& format, const BlockKernels (&blocks)[2]) {
      format.blocks8 = blocks[0];
      format.blocks16 = blocks[1];
    };
    add(t.int8, amx::kInt8.int8);
    add(t.int4, amx::kInt8.int4);
    add(t.int4_g32, amx::kInt8.int4_g32);
    add(t.int4_g64, amx::kInt8.int4_g64);
    add(t.int4_g128, amx::kInt8.int4_g128);
    if (f.avx512bf16 && (f.amx_bf16 || !f.amx_tile)) {
      add(t.bf16, amx::kBf16);
      t.bf16_words = "AMX BF16";
    }
    return t;
  }();
  Candidate candidate{&table, lacking_avx512_vnni(f)};
  if (!candidate.missing.empty() || tile_state().permitted) return candidate;
  candidate.emulated = trap_executes();
  if (!candidate.emulated) candidate.missing = tile_state().why;
  return candidate;
}

Candidate avx_vnni_dots(const CpuFeatures& f) {
  Candidate candidate{&avx_vnni::kTable, lacking_avx2(f)};
  if (!candidate.missing.empty() || f.avx_vnni) return candidate;
  candidate.emulated = trap_executes();
  if (!candidate.emulated) candidate.missing = "the processor has no avx_vnni";
  return candidate;
}
#endif

}  // namespace

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
#if defined(__x86_64__)
  static const CpuFeatures features = CpuFeatures::detect();
  static const KernelTable vnni = avx512_vnni_table(features), no_vnni = avx512_table();
  all.push_back(amx_int8(vnni, features));
  all.push_back({&vnni, lacking_avx512_vnni(features)});
  // No processor has these two and not avx512_vnni. Where that is masked, 256-bit vpdpbusd still beats 512-bit vpmaddwd:
  // 1.2 times with 16-bit activations, 1.3 to 2.2 with 8-bit ones (Zen 4).
  all.push_back(avx_vnni_dots(features));
  all.push_back({&no_vnni, lacking_avx512(features)});
  all.push_back({&avx2::kTable, lacking_avx2(features)});
#endif
  all.push_back({&scalar::kTable, ""});
  return all;
}

Candidate find_candidate(std::string_view name) {
  for (const Candidate& candidate : candidates()) {
    if (candidate.table->name == name) return candidate;
  }
  return {nullptr, "", false};
}

}  // namespace ktplan
