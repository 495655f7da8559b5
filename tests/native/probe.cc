// Single AMX and AVX-VNNI instructions, as the assembler encodes them, to be called from the tests.

#include <immintrin.h>

#include <cstdint>
#include <thread>
#include <vector>

#define EXPORT extern "C" [[gnu::visibility("default")]]

namespace {

struct alignas(64) Config {
  std::uint8_t bytes[64];
};

void configure(const void* config) {
  Config copy;
  for (int i = 0; i < 64; ++i) copy.bytes[i] = static_cast<const std::uint8_t*>(config)[i];
  asm volatile("ldtilecfg %0" ::"m"(copy) : "memory");
}

}  // namespace

// What a tile product is made of: C in tile 0, A in tile 1, B in tile 2; strides in bytes.
struct Product {
  const void* config;
  void* c;
  std::int64_t c_stride;
  const void* a;
  std::int64_t a_stride;
  const void* b;
  std::int64_t b_stride;
};

#define PRODUCT(NAME)                                                              \
  EXPORT void NAME(const Product* p) {                                             \
    configure(p->config);                                                          \
    asm volatile(                                                                  \
        "tileloadd (%0,%1,1), %%tmm0\n\ttileloadd (%2,%3,1), %%tmm1\n\t"            \
        "tileloaddt1 (%4,%5,1), %%tmm2\n\t" #NAME                                   \
        " %%tmm2, %%tmm1, %%tmm0\n\ttilestored %%tmm0, (%0,%1,1)\n\ttilerelease"     \
        ::"r"(p->c), "r"(p->c_stride), "r"(p->a), "r"(p->a_stride), "r"(p->b),     \
        "r"(p->b_stride) : "memory");                                              \
  }
PRODUCT(tdpbssd)
PRODUCT(tdpbsud)
PRODUCT(tdpbusd)
PRODUCT(tdpbuud)
PRODUCT(tdpbf16ps)

// The same product `times` over, to wrap or to exhaust the accumulators.
EXPORT void repeat_tdpbssd(const Product* p, std::int64_t times) {
  configure(p->config);
  asm volatile("tileloadd (%0,%1,1), %%tmm1\n\ttileloadd (%2,%3,1), %%tmm2\n\ttilezero %%tmm0" ::"r"(p->a), "r"(p->a_stride),
               "r"(p->b), "r"(p->b_stride) : "memory");
  for (std::int64_t i = 0; i < times; ++i) asm volatile("tdpbssd %%tmm2, %%tmm1, %%tmm0" :::);
  asm volatile("tilestored %%tmm0, (%0,%1,1)\n\ttilerelease" ::"r"(p->c), "r"(p->c_stride) : "memory");
}

// Every tile number in every role: C, A, B = t, t+1, t+2 modulo 8, for all t.
EXPORT void every_tile(const Product* p) {
  configure(p->config);
#define ONE(C, A, B, I)                                                                                            \
  asm volatile("tilezero %%tmm" #C "\n\ttileloadd (%2,%3,1), %%tmm" #A "\n\ttileloadd (%4,%5,1), %%tmm" #B            \
               "\n\ttdpbssd %%tmm" #B ", %%tmm" #A ", %%tmm" #C "\n\ttilestored %%tmm" #C ", (%0,%1,1)"              \
               ::"r"(static_cast<char*>(p->c) + 1024 * I), "r"(p->c_stride), "r"(p->a), "r"(p->a_stride), "r"(p->b),  \
               "r"(p->b_stride) : "memory")
  ONE(0, 1, 2, 0); ONE(1, 2, 3, 1); ONE(2, 3, 4, 2); ONE(3, 4, 5, 3);
  ONE(4, 5, 6, 4); ONE(5, 6, 7, 5); ONE(6, 7, 0, 6); ONE(7, 0, 1, 7);
  asm volatile("tilerelease");
}

// A tile loaded in each way that an address can be written; `out` gets the tile each time, 1 KB apart. Returns how many.
EXPORT int addressing(const void* config, std::uint8_t* memory, std::int64_t stride, std::uint8_t* out) {
  configure(config);
  int n = 0;
  const std::int64_t row = 64;
#define FORM(TEXT, BASE, INDEX)                                                                                    \
  do {                                                                                                             \
    register std::uint8_t* base asm(BASE) = memory;                                                                \
    register std::int64_t index asm(INDEX) = stride;                                                               \
    asm volatile("tileloadd " TEXT ", %%tmm0\n\ttilestored %%tmm0, (%2,%3,1)" ::"r"(base), "r"(index),              \
                 "r"(out + 1024 * n), "r"(row) : "memory");                                                        \
    ++n;                                                                                                           \
  } while (0)
  FORM("(%0,%1,1)", "rax", "rcx");
  FORM("(%0,%1,1)", "r12", "r13");
  FORM("(%0,%1,1)", "r13", "r8");
  FORM("64(%0,%1,1)", "rdx", "rsi");
  FORM("-64(%0,%1,1)", "r9", "r15");
  FORM("1024(%0,%1,1)", "rdi", "r10");
  FORM("-1024(%0,%1,1)", "r11", "r12");
  FORM("(%0,%1,2)", "rcx", "rdx");
  FORM("(%0,%1,4)", "r8", "r9");
  FORM("8(%0,%1,8)", "r14", "rax");
  FORM("(%0)", "r12", "rcx");       // no index: every row the same
  FORM("128(%0)", "rax", "rcx");
#undef FORM
  asm volatile("tilerelease");
  return n;
}

namespace {
alignas(64) Config constant_config = {{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 32, 0}};
}

// LDTILECFG from the program's own data (relative to the instruction), STTILECFG likewise, then from the stack.
EXPORT void configure_from_data(const std::uint8_t* config, std::uint8_t* stored, std::uint8_t* released) {
  for (int i = 0; i < 64; ++i) constant_config.bytes[i] = config[i];
  Config kept, after;
  asm volatile("ldtilecfg %0" ::"m"(constant_config) : "memory");
  asm volatile("sttilecfg %0" : "=m"(kept)::"memory");
  asm volatile("tilerelease\n\tsttilecfg %0" : "=m"(after)::"memory");
  for (int i = 0; i < 64; ++i) stored[i] = kept.bytes[i], released[i] = after.bytes[i];
}

// Whether this thread's tiles are as TILERELEASE leaves them.
EXPORT int tiles_are_released() {
  Config now;
  asm volatile("sttilecfg %0" : "=m"(now)::"memory");
  for (const std::uint8_t byte : now.bytes) {
    if (byte != 0) return 0;
  }
  return 1;
}

// Leaves a foreign configuration behind, as another library might.
EXPORT void leave_configured(const std::uint8_t* config) { configure(config); }

// Loads a tile of all its rows and stores it under another configuration of the same tile: what lies beyond is zero.
EXPORT void load_then_store(const void* config, const void* from, void* to) {
  const std::int64_t row = 64;
  configure(config);
  asm volatile("tileloadd (%0,%2,1), %%tmm3\n\ttilestored %%tmm3, (%1,%2,1)\n\ttilerelease" ::"r"(from), "r"(to), "r"(row) : "memory");
}

enum Illegal {
  kNotConfigured, kNoShape, kRowsDiffer, kColumnsDiffer, kDepthDiffers, kOddColumns, kSameTile, kConfig, kStartRow, kPlain,
};

// Does what must die. `config` is loaded first, except for kNotConfigured.
EXPORT void illegal(int which, const void* config) {
  alignas(64) std::uint8_t memory[1024] = {};
  const std::int64_t row = 64;
  if (which == kPlain) asm volatile("ud2");
  if (which != kNotConfigured) configure(config);
  if (which == kNoShape || which == kStartRow) {
    asm volatile("tileloadd (%0,%1,1), %%tmm5" ::"r"(memory), "r"(row) : "memory");
  } else if (which == kSameTile) {
    asm volatile(".byte 0xc4, 0xe2, 0x6b, 0x5e, 0xc0" :::);  // tdpbssd tmm0, tmm0, tmm2; the assembler refuses it
  } else if (which != kConfig) {
    asm volatile("tdpbssd %%tmm2, %%tmm1, %%tmm0" :::);
  }
}

// Products on `threads` threads at once, each with its own C behind the other (1 KB apart), `times` over.
EXPORT void on_threads(const Product* p, int threads, int times) {
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([=] {
      Product mine = *p;
      mine.c = static_cast<char*>(p->c) + 1024 * t;
      mine.a = static_cast<const char*>(p->a) + 1024 * t;
      for (int i = 0; i < times; ++i) tdpbssd(&mine);
    });
  }
  for (std::thread& thread : all) thread.join();
}

// --- AVX-VNNI. values: [c, a, b, out], 32 bytes each; out gets the whole register. ---

#define VNNI(NAME, OP)                                                                                       \
  EXPORT void NAME##_ymm(std::uint8_t* v) {                                                                  \
    asm volatile("vmovdqu (%0), %%ymm3\n\tvmovdqu 32(%0), %%ymm14\n\tvmovdqu 64(%0), %%ymm9\n\t%{vex%} " OP      \
                 " %%ymm9, %%ymm14, %%ymm3\n\tvmovdqu %%ymm3, 96(%0)" ::"r"(v) : "memory", "xmm3", "xmm14", "xmm9"); \
  }                                                                                                          \
  EXPORT void NAME##_ymm_memory(std::uint8_t* v, std::int64_t index) {                                       \
    asm volatile("vmovdqu (%0), %%ymm12\n\tvmovdqu 32(%0), %%ymm1\n\t%{vex%} " OP                                \
                 " 64(%0,%1,4), %%ymm1, %%ymm12\n\tvmovdqu %%ymm12, 96(%0)" ::"r"(v), "r"(index) : "memory", "xmm12", "xmm1"); \
  }                                                                                                          \
  EXPORT void NAME##_xmm(std::uint8_t* v) {                                                                  \
    asm volatile("vmovdqu (%0), %%ymm0\n\tvmovdqu 32(%0), %%ymm5\n\tvmovdqu 64(%0), %%ymm15\n\t%{vex%} " OP      \
                 " %%xmm15, %%xmm5, %%xmm0\n\tvmovdqu %%ymm0, 96(%0)" ::"r"(v) : "memory", "xmm0", "xmm5", "xmm15"); \
  }                                                                                                          \
  EXPORT void NAME##_xmm_memory(std::uint8_t* v) {                                                           \
    asm volatile("vmovdqu (%0), %%ymm8\n\tvmovdqu 32(%0), %%ymm7\n\t%{vex%} " OP                                 \
                 " 64(%0), %%xmm7, %%xmm8\n\tvmovdqu %%ymm8, 96(%0)" ::"r"(v) : "memory", "xmm8", "xmm7");     \
  }
VNNI(vpdpbusd, "vpdpbusd")
VNNI(vpdpbusds, "vpdpbusds")
VNNI(vpdpwssd, "vpdpwssd")
VNNI(vpdpwssds, "vpdpwssds")

// The upper half of zmm3 after a 256-bit VEX instruction wrote ymm3: zero, whatever was there.
EXPORT [[gnu::target("avx512f")]] void above_ymm(std::uint8_t* v) {
  asm volatile("vpternlogd $0xff, %%zmm3, %%zmm3, %%zmm3\n\tvmovdqu (%0), %%ymm4\n\t%{vex%} vpdpbusd %%ymm4, %%ymm4, %%ymm3\n\t"
               "vextracti64x4 $1, %%zmm3, %%ymm4\n\tvmovdqu %%ymm4, 96(%0)" ::"r"(v) : "memory", "xmm3", "xmm4");
}

// With every vector register as the processor starts: nothing saved in the frame.
EXPORT void from_first_state(std::uint8_t* v) {
  asm volatile("vzeroall\n\t%{vex%} vpdpbusd 64(%0), %%ymm1, %%ymm2\n\tvmovdqu %%ymm2, 96(%0)" ::"r"(v)
               : "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                 "xmm12", "xmm13", "xmm14", "xmm15");
}
