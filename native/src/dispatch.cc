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

std::string lacking_avx2(const CpuFeatures& f) {
  return lacking({{f.avx2, "avx2"}, {f.fma, "fma"}}, f.os_ymm, "256-bit");
}
#endif

#if defined(__x86_64__)
// The table, with vdpbf16ps where the processor has it. The copy lives as long as the process.
const KernelTable* with_bf16(const KernelTable& table, const CpuFeatures& features) {
  if (!features.avx512bf16) return &table;
  auto* better = new KernelTable(table);
  better->bf16 = avx512::kBf16Pairs;
  better->bf16_words = "AVX-512 BF16";
  return better;
}
#endif

std::vector<Candidate> list() {
  std::vector<Candidate> all;
#if defined(__x86_64__)
  const CpuFeatures features = CpuFeatures::detect();
  // amx-int8 goes here: it also needs the kernel's permission for tile data (arch_prctl), asked once for the process
  all.push_back({with_bf16(avx512_vnni::kTable, features), lacking_avx512_vnni(features)});
  // avx512 (no VNNI) and avx-vnni go here
  all.push_back({&avx2::kTable, lacking_avx2(features)});
#endif
  all.push_back({&scalar::kTable, ""});
  return all;
}

}  // namespace

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = list();
  return all;
}

const Candidate* find_candidate(std::string_view name) {
  for (const Candidate& candidate : candidates()) {
    if (candidate.table->name == name) return &candidate;
  }
  return nullptr;
}

}  // namespace ktplan
