// Executes AMX (TILE, INT8, BF16) and AVX-VNNI instructions on processors that lack them, for tests.
//
// An instruction that the processor does not know raises SIGILL; the handler here decodes it, does what Intel's manual
// says on a tile file of the thread's own (or on the saved vector registers), and continues behind it. So the machine
// code under test runs as it is. Illegal uses are reported on stderr and die of SIGILL, as on the hardware.
//
// Load it after faulthandler (dlopen with RTLD_GLOBAL, then amx_trap_install), or preload it: then it installs itself and
// keeps the first place among the handlers of SIGILL. AMX_TRAP_DISABLE=1 keeps a preloaded one quiet.

#include <cpuid.h>
#include <dlfcn.h>
#include <immintrin.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" int __sigaction(int, const struct sigaction*, struct sigaction*);

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kRowBytes = 64;

struct alignas(64) Config {  // as LDTILECFG reads it
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t colsb[16];
  std::uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tile {
  alignas(64) std::uint8_t row[kMaxRows][kRowBytes];
};

struct Thread {
  Config config;  // palette 0: not configured
  Tile tile[kTiles];
  bool unused[kTiles];  // loaded, and not yet an operand
  bool kept[kTiles];    // what was loaded lay in the watch, unchanged
  std::uint64_t source[kTiles];
};

enum Op {
  kLdtilecfg, kSttilecfg, kTileloadd, kTileloaddt1, kTilestored, kTilezero, kTilerelease,
  kTdpbssd, kTdpbsud, kTdpbusd, kTdpbuud, kTdpbf16ps,
  kVpdpbusd, kVpdpbusds, kVpdpwssd, kVpdpwssds,
  kOps, kNone = kOps,
  kLoadForA = kOps, kLoadForB, kLoadForC,  // loads by what the tile was first used as
  kWrittenB,                               // loads for B of memory that was written since the load before
  kCounts,
};  // clang-format off
constexpr const char* kNames[kCounts] = {
  "ldtilecfg", "sttilecfg", "tileloadd", "tileloaddt1", "tilestored", "tilezero", "tilerelease",
  "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud", "tdpbf16ps",
  "vpdpbusd", "vpdpbusds", "vpdpwssd", "vpdpwssds",
  "load for a", "load for b", "load for c", "written b",
};  // clang-format on

std::atomic<std::uint64_t> counts[kCounts];
std::atomic<std::uint64_t> traps;
std::atomic<int> active;
std::atomic<bool> preloaded;
struct sigaction next_handler;  // who had SIGILL before
bool has_fma;
unsigned zmm_high_offset;  // of the upper halves of zmm0-15 in the signal frame

// One word of static TLS, so that the library may be dlopened late; the tiles are mapped at first use.
[[gnu::tls_model("initial-exec")]] thread_local Thread* own;

Thread& thread_state() {
  if (own == nullptr) {
    void* at = mmap(nullptr, sizeof(Thread), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) abort();
    own = static_cast<Thread*>(at);
  }
  return *own;
}

// Watching, for one thread: memory that a B tile was loaded from is kept aside and overwritten with a pattern. A later load
// that finds the pattern gets what was kept: nobody wrote there in between. Results stay the same; the memory does not.
struct Watched {
  std::uint64_t address;
  std::uint8_t bytes[kMaxRows * kRowBytes];
};
constexpr std::size_t kWatched = 4096, kPattern = 0xa5;
Watched watched[kWatched];
bool watching;

Watched& watched_at(std::uint64_t address) {
  std::size_t at = address / 64 % kWatched;
  for (std::size_t tries = 0; watched[at].address != address && watched[at].address != 0; at = (at + 1) % kWatched) {
    if (++tries == kWatched) abort();
  }
  return watched[at];
}

bool is_pattern(const std::uint8_t* bytes, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    if (bytes[i] != kPattern) return false;
  }
  return true;
}

// An instruction, decoded.
struct Instruction {
  Op op = kNone;
  int length = 0;
  int reg = 0, rm = 0, vvvv = 0;  // operands; reg and rm with their extension bits
  bool memory = false, wide = false;  // wide: VEX.L
  bool no_vvvv = false;               // vvvv must be 1111b
  std::uint64_t address = 0;
  std::uint64_t stride = 0;  // the index register, scaled: what tile loads step by
  std::uint64_t base = 0;    // without the index
  const char* fault = nullptr;
};

std::uint64_t register_at(const ucontext_t& context, int number) {
  static constexpr int kWhere[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<std::uint64_t>(context.uc_mcontext.gregs[kWhere[number]]);
}

Op op_of(std::uint8_t opcode, int prefix, bool memory) {  // prefix: VEX.pp = none, 66, F3, F2
  switch (opcode) {
    case 0x49:
      if (memory) return prefix == 0 ? kLdtilecfg : prefix == 1 ? kSttilecfg : kNone;
      return prefix == 0 ? kTilerelease : prefix == 3 ? kTilezero : kNone;
    case 0x4b:
      if (!memory) return kNone;
      return prefix == 3 ? kTileloadd : prefix == 1 ? kTileloaddt1 : prefix == 2 ? kTilestored : kNone;
    case 0x5e: {
      constexpr Op kSigns[4] = {kTdpbuud, kTdpbusd, kTdpbsud, kTdpbssd};
      return memory ? kNone : kSigns[prefix];
    }
    case 0x5c:
      return !memory && prefix == 2 ? kTdpbf16ps : kNone;
    case 0x50:
    case 0x51:
    case 0x52:
    case 0x53:
      return prefix == 1 ? static_cast<Op>(kVpdpbusd + (opcode - 0x50)) : kNone;
    default:
      return kNone;
  }
}

// The memory operand behind `at`, the byte after ModRM; returns its length.
int decode_address(const std::uint8_t* at, std::uint8_t modrm, bool x, bool b, std::uint64_t begin, int before,
                   const ucontext_t& context, Instruction& out) {
  const int mod = modrm >> 6, rm = modrm & 7;
  int used = 0, displacement_bytes = mod == 1 ? 1 : mod == 2 ? 4 : 0;
  std::uint64_t base = 0, index = 0;
  bool from_ip = false;
  if (rm == 4) {
    const std::uint8_t sib = at[used++];
    const int index_number = (sib >> 3 & 7) + (x ? 8 : 0), base_number = (sib & 7) + (b ? 8 : 0);
    if (index_number != 4) index = register_at(context, index_number) << (sib >> 6);
    if ((sib & 7) == 5 && mod == 0) {
      displacement_bytes = 4;
    } else {
      base = register_at(context, base_number);
    }
  } else if (rm == 5 && mod == 0) {
    displacement_bytes = 4;
    from_ip = true;
  } else {
    base = register_at(context, rm + (b ? 8 : 0));
  }
  if (displacement_bytes == 1) {
    base += static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<std::int8_t>(at[used])));
  } else if (displacement_bytes == 4) {
    std::int32_t displacement;
    std::memcpy(&displacement, at + used, 4);
    base += static_cast<std::uint64_t>(static_cast<std::int64_t>(displacement));
  }
  used += displacement_bytes;
  if (from_ip) base += begin + static_cast<std::uint64_t>(before + used);
  out.base = base;
  out.stride = index;
  out.address = base + index;
  return used;
}

Instruction decode(const ucontext_t& context) {
  Instruction out;
  const auto begin = static_cast<std::uint64_t>(context.uc_mcontext.gregs[REG_RIP]);
  const auto* code = reinterpret_cast<const std::uint8_t*>(begin);
  // byte by byte: what follows another instruction may be the last of a page
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x80) != 0) return out;
  const bool r = (code[1] & 0x80) == 0, x = (code[1] & 0x40) == 0, b = (code[1] & 0x20) == 0;
  const std::uint8_t modrm = code[4];
  out.memory = modrm >> 6 != 3;
  out.op = op_of(code[3], code[2] & 3, out.memory);
  if (out.op == kNone) return out;
  out.wide = (code[2] & 4) != 0;
  out.vvvv = ~(code[2] >> 3) & 15;
  out.reg = (modrm >> 3 & 7) + (r ? 8 : 0);
  out.rm = (modrm & 7) + (b ? 8 : 0);
  out.length = 5;
  if (out.memory) out.length += decode_address(code + 5, modrm, x, b, begin, 5, context, out);
  if (out.op >= kVpdpbusd) return out;
  if (out.wide) out.fault = "VEX.L is set";
  if (out.op <= kTilerelease && out.vvvv != 0) out.fault = "VEX.vvvv names an operand that is not there";
  const bool tile_memory = out.op == kTileloadd || out.op == kTileloaddt1 || out.op == kTilestored;
  if (tile_memory && (modrm & 7) != 4) out.fault = "a tile load or store without SIB byte";
  if (out.op <= kSttilecfg && (modrm >> 3 & 7) != 0) out.op = kNone;
  if (out.op == kTilerelease && modrm != 0xc0) out.op = kNone;
  if (out.op == kTilezero && (modrm & 7) != 0) out.op = kNone;
  if ((out.op != kTilerelease && out.op > kSttilecfg) && out.reg > 7) out.fault = "tile number above 7";
  if (out.op >= kTdpbssd && out.op <= kTdpbf16ps && (out.rm > 7 || out.vvvv > 7)) out.fault = "tile number above 7";
  return out;
}

bool any(const std::uint8_t* bytes, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    if (bytes[i] != 0) return true;
  }
  return false;
}

const char* load_config(Thread& thread, const void* from) {
  Config config;
  std::memcpy(&config, from, sizeof config);
  if (config.palette > 1) return "palette above 1";
  if (config.palette == 0) {
    std::memset(static_cast<void*>(&thread), 0, sizeof thread);
    return nullptr;
  }
  if (any(config.reserved, sizeof config.reserved)) return "reserved bytes 2-15 are not zero";
  if (any(reinterpret_cast<const std::uint8_t*>(config.colsb + kTiles), 16)) return "reserved bytes 32-47 are not zero";
  if (any(config.rows + kTiles, 8)) return "reserved bytes 56-63 are not zero";
  for (int t = 0; t < kTiles; ++t) {
    if (config.colsb[t] > kRowBytes) return "colsb above 64";
    if (config.rows[t] > kMaxRows) return "rows above 16";
    if ((config.colsb[t] == 0) != (config.rows[t] == 0)) return "one of rows and colsb is zero, the other is not";
  }
  std::memset(static_cast<void*>(&thread), 0, sizeof thread);
  thread.config = config;
  return nullptr;
}

// The products of one row of A with B, added to one row of C; wraps.
template <typename A, typename B>
[[gnu::target_clones("avx2", "default")]] void multiply_integers(Tile& c, const Tile& a, const Tile& b, int rows, int words, int columns) {
  for (int m = 0; m < rows; ++m) {
    std::uint32_t sums[16];
    std::memcpy(sums, c.row[m], sizeof sums);
    for (int k = 0; k < words; ++k) {
      A left[4];
      std::memcpy(left, a.row[m] + 4 * k, 4);
      const std::int32_t l0 = left[0], l1 = left[1], l2 = left[2], l3 = left[3];
      std::uint32_t right[16];
      std::memcpy(right, b.row[k], sizeof right);
      for (int n = 0; n < 16; ++n) {
        const std::int32_t r0 = static_cast<B>(right[n]), r1 = static_cast<B>(right[n] >> 8);
        const std::int32_t r2 = static_cast<B>(right[n] >> 16), r3 = static_cast<B>(right[n] >> 24);
        sums[n] += static_cast<std::uint32_t>(l0 * r0 + l1 * r1) + static_cast<std::uint32_t>(l2 * r2 + l3 * r3);
      }
    }
    std::memset(c.row[m], 0, sizeof c.row[m]);
    std::memcpy(c.row[m], sums, static_cast<std::size_t>(columns) * 4);
  }
}

// Even and odd products apart, from zero, by fused multiply-add; even + odd; then to C.
[[gnu::noinline, gnu::target("avx2,fma")]] void multiply_bf16(Tile& c, const Tile& a, const Tile& b, int rows, int words, int columns) {
  for (int m = 0; m < rows; ++m) {
    __m256 even[2] = {}, odd[2] = {};
    for (int k = 0; k < words; ++k) {
      std::uint32_t pair;
      std::memcpy(&pair, a.row[m] + 4 * k, 4);
      const __m256 left_even = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(pair << 16)));
      const __m256 left_odd = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(pair & 0xffff0000u)));
      for (int half = 0; half < 2; ++half) {
        const __m256i right = _mm256_load_si256(reinterpret_cast<const __m256i*>(b.row[k]) + half);
        even[half] = _mm256_fmadd_ps(left_even, _mm256_castsi256_ps(_mm256_slli_epi32(right, 16)), even[half]);
        odd[half] = _mm256_fmadd_ps(
            left_odd, _mm256_castsi256_ps(_mm256_and_si256(right, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))), odd[half]);
      }
    }
    alignas(32) float sums[16];
    for (int half = 0; half < 2; ++half) {
      const __m256 old = _mm256_load_ps(reinterpret_cast<const float*>(c.row[m]) + 8 * half);
      _mm256_store_ps(sums + 8 * half, _mm256_add_ps(old, _mm256_add_ps(even[half], odd[half])));
    }
    std::memset(c.row[m], 0, sizeof c.row[m]);
    std::memcpy(c.row[m], sums, static_cast<std::size_t>(columns) * 4);
  }
}

const char* multiply(Thread& thread, const Instruction& in) {
  const Config& config = thread.config;
  const int c = in.reg, a = in.rm, b = in.vvvv;
  if (c == a || c == b || a == b) return "two operands are the same tile";
  for (const int t : {c, a, b}) {
    if (config.rows[t] == 0) return "an operand has no shape";
    if (config.colsb[t] % 4 != 0) return "colsb is no multiple of 4";
  }
  if (config.rows[c] != config.rows[a]) return "C.rows != A.rows";
  if (config.colsb[c] != config.colsb[b]) return "C.colsb != B.colsb";
  if (config.colsb[a] / 4 != config.rows[b]) return "A.colsb / 4 != B.rows";
  const auto used = [&thread](int tile, Op as) {
    if (thread.unused[tile]) counts[as].fetch_add(1, std::memory_order_relaxed);
    thread.unused[tile] = false;
  };
  if (watching && thread.unused[b] && !thread.kept[b]) {
    counts[kWrittenB].fetch_add(1, std::memory_order_relaxed);
    Watched& keep = watched_at(thread.source[b]);
    keep.address = thread.source[b];
    const std::size_t bytes = std::size_t{config.rows[b]} * kRowBytes;
    auto* memory = reinterpret_cast<std::uint8_t*>(keep.address);
    std::memcpy(keep.bytes, memory, bytes);
    std::memset(memory, kPattern, bytes);
  }
  used(a, kLoadForA);
  used(b, kLoadForB);
  used(c, kLoadForC);
  Tile &to = thread.tile[c], &left = thread.tile[a], &right = thread.tile[b];
  const int rows = config.rows[c], words = config.colsb[a] / 4, columns = config.colsb[c] / 4;
  using S = std::int8_t;
  using U = std::uint8_t;
  switch (in.op) {
    case kTdpbssd: multiply_integers<S, S>(to, left, right, rows, words, columns); break;
    case kTdpbsud: multiply_integers<S, U>(to, left, right, rows, words, columns); break;
    case kTdpbusd: multiply_integers<U, S>(to, left, right, rows, words, columns); break;
    case kTdpbuud: multiply_integers<U, U>(to, left, right, rows, words, columns); break;
    default: {
      if (!has_fma) return "the emulator needs a processor with fused multiply-add";
      const unsigned saved = _mm_getcsr();
      _mm_setcsr(0x9fc0);  // nearest even, denormals are zero in and out, nothing raised
      multiply_bf16(to, left, right, rows, words, columns);
      _mm_setcsr(saved);
    }
  }
  for (int m = rows; m < kMaxRows; ++m) std::memset(to.row[m], 0, kRowBytes);
  thread.config.start_row = 0;
  return nullptr;
}

const char* move_tile(Thread& thread, const Instruction& in) {
  const int rows = thread.config.rows[in.reg];
  const std::size_t bytes = thread.config.colsb[in.reg];
  if (rows == 0) return "the tile has no shape";
  if (thread.config.start_row >= rows) return "start_row is not below the tile's rows";
  Tile& tile = thread.tile[in.reg];
  for (int m = thread.config.start_row; m < rows; ++m) {
    auto* memory = reinterpret_cast<std::uint8_t*>(in.base + static_cast<std::uint64_t>(m) * in.stride);
    if (in.op == kTilestored) {
      std::memcpy(memory, tile.row[m], bytes);
    } else {
      std::memset(tile.row[m], 0, kRowBytes);
      std::memcpy(tile.row[m], memory, bytes);
    }
  }
  if (in.op != kTilestored) {
    thread.unused[in.reg] = true;
    thread.source[in.reg] = in.base;
    thread.kept[in.reg] = false;
    if (watching && in.stride == kRowBytes && bytes == kRowBytes && watched_at(in.base).address != 0 &&
        is_pattern(tile.row[0], static_cast<std::size_t>(rows) * kRowBytes)) {
      std::memcpy(tile.row[0], watched_at(in.base).bytes, static_cast<std::size_t>(rows) * kRowBytes);
      thread.kept[in.reg] = true;
    }
    for (int m = rows; m < kMaxRows; ++m) std::memset(tile.row[m], 0, kRowBytes);
  }
  thread.config.start_row = 0;
  return nullptr;
}

const char* run_tile(const Instruction& in) {
  Thread& thread = thread_state();
  if (in.op == kLdtilecfg) return load_config(thread, reinterpret_cast<const void*>(in.address));
  if (in.op == kSttilecfg) {
    std::memcpy(reinterpret_cast<void*>(in.address), &thread.config, sizeof thread.config);
    return nullptr;
  }
  if (in.op == kTilerelease) {
    std::memset(static_cast<void*>(&thread), 0, sizeof thread);
    return nullptr;
  }
  if (thread.config.palette == 0) return "the tiles are not configured";
  if (in.op >= kTdpbssd) return multiply(thread, in);
  if (in.op == kTilezero) {
    if (thread.config.rows[in.reg] == 0) return "the tile has no shape";
    std::memset(thread.tile[in.reg].row, 0, sizeof(Tile));
    thread.unused[in.reg] = false;
    thread.config.start_row = 0;
    return nullptr;
  }
  return move_tile(thread, in);
}

// --- AVX-VNNI: the vector registers are in the signal frame, as XSAVE writes them. ---

struct VectorFrame {
  std::uint8_t* area;

  explicit VectorFrame(const ucontext_t& context) : area(reinterpret_cast<std::uint8_t*>(context.uc_mcontext.fpregs)) {}
  std::uint8_t* low(int number) const { return area + 160 + 16 * number; }
  std::uint8_t* high(int number) const { return area + 576 + 16 * number; }
  std::uint64_t& present() const { return *reinterpret_cast<std::uint64_t*>(area + 512); }
  bool extended() const {
    std::uint32_t magic;
    std::memcpy(&magic, area + 464, 4);
    return magic == 0x46505853u;  // FP_XSTATE_MAGIC1
  }
  // A component that is not present has its first state, zero; write that out before using it.
  void make_present(int bit, std::uint8_t* at, std::size_t bytes) const {
    if ((present() >> bit & 1) != 0) return;
    std::memset(at, 0, bytes);
    present() |= std::uint64_t{1} << bit;
  }
};

std::int32_t saturated(std::int64_t sum) {
  return static_cast<std::int32_t>(sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum);
}

const char* run_vnni(const Instruction& in, const ucontext_t& context) {
  const VectorFrame frame(context);
  if (!frame.extended()) return "the signal frame holds no vector registers";
  frame.make_present(1, frame.low(0), 256);
  frame.make_present(2, frame.high(0), 256);
  const std::size_t bytes = in.wide ? 32 : 16;
  const auto read = [&](int number, std::uint8_t* to) {
    std::memcpy(to, frame.low(number), 16);
    std::memcpy(to + 16, frame.high(number), 16);
  };
  alignas(32) std::uint8_t c[32], a[32], b[32] = {};
  read(in.reg, c);
  read(in.vvvv, a);
  if (in.memory) {
    std::memcpy(b, reinterpret_cast<const void*>(in.address), bytes);
  } else {
    read(in.rm, b);
  }
  for (std::size_t at = 0; at < bytes; at += 4) {
    std::int32_t old;
    std::memcpy(&old, c + at, 4);
    std::int64_t sum = old;
    if (in.op == kVpdpbusd || in.op == kVpdpbusds) {
      for (int i = 0; i < 4; ++i) sum += a[at + i] * static_cast<std::int8_t>(b[at + i]);
    } else {
      std::int16_t left[2], right[2];
      std::memcpy(left, a + at, 4);
      std::memcpy(right, b + at, 4);
      for (int i = 0; i < 2; ++i) sum += std::int64_t{left[i]} * right[i];
    }
    const bool saturates = in.op == kVpdpbusds || in.op == kVpdpwssds;
    const std::int32_t result = saturates ? saturated(sum) : static_cast<std::int32_t>(static_cast<std::uint32_t>(sum));
    std::memcpy(c + at, &result, 4);
  }
  if (!in.wide) std::memset(c + 16, 0, 16);  // VEX clears what is above
  std::memcpy(frame.low(in.reg), c, 16);
  std::memcpy(frame.high(in.reg), c + 16, 16);
  if ((frame.present() >> 6 & 1) != 0) std::memset(frame.area + zmm_high_offset + 32 * in.reg, 0, 32);
  return nullptr;
}

// --- The signal ---

void report(const Instruction& in, const ucontext_t& context) {
  char line[160];
  const int n = std::snprintf(line, sizeof line, "amx_trap: illegal %s at %#llx: %s\n", kNames[in.op],
                              static_cast<unsigned long long>(context.uc_mcontext.gregs[REG_RIP]), in.fault);
  if (write(2, line, static_cast<std::size_t>(n)) < 0) abort();
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if ((next_handler.sa_flags & SA_SIGINFO) != 0 && next_handler.sa_sigaction != nullptr) {
    next_handler.sa_sigaction(signal, info, context);
  } else if (next_handler.sa_handler != SIG_DFL && next_handler.sa_handler != SIG_IGN) {
    next_handler.sa_handler(signal);
  } else {  // the instruction faults again and kills
    struct sigaction die = {};
    die.sa_handler = SIG_DFL;
    __sigaction(SIGILL, &die, nullptr);
  }
}

void on_illegal(int signal, siginfo_t* info, void* pointer) {
  auto& context = *static_cast<ucontext_t*>(pointer);
  bool first = true;
  for (;;) {  // returning costs far more than the next instruction
    Instruction in = decode(context);
    if (in.op == kNone) break;
    if (in.fault == nullptr) in.fault = in.op >= kVpdpbusd ? run_vnni(in, context) : run_tile(in);
    if (in.fault != nullptr) {
      report(in, context);
      first = true;
      break;
    }
    counts[in.op].fetch_add(1, std::memory_order_relaxed);
    context.uc_mcontext.gregs[REG_RIP] += in.length;
    first = false;
    if (in.op >= kVpdpbusd) break;
  }
  if (first) {
    pass_on(signal, info, pointer);
  } else {
    traps.fetch_add(1, std::memory_order_relaxed);
  }
}

bool names_this_library(const char* list) {
  Dl_info here;
  if (list == nullptr || dladdr(reinterpret_cast<void*>(&names_this_library), &here) == 0) return false;
  const char* slash = std::strrchr(here.dli_fname, '/');
  return std::strstr(list, slash != nullptr ? slash + 1 : here.dli_fname) != nullptr;
}

}  // namespace

#define EXPORT extern "C" [[gnu::visibility("default")]]

EXPORT int amx_trap_active() { return active.load(); }
EXPORT int avx_vnni_trap_active() { return active.load(); }

// Takes SIGILL; returns 0, or -1 where the system refuses. Doing it again takes back the first place.
EXPORT int amx_trap_install() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  has_fma = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
  if (__get_cpuid_count(13, 6, &a, &b, &c, &d)) zmm_high_offset = b;
  struct sigaction action = {}, before = {};
  action.sa_sigaction = on_illegal;
  action.sa_flags = SA_SIGINFO;
  if (__sigaction(SIGILL, &action, &before) != 0) return -1;
  if ((before.sa_flags & SA_SIGINFO) == 0 || before.sa_sigaction != on_illegal) next_handler = before;
  active.store(1);
  return 0;
}

// Gives SIGILL back to who had it.
EXPORT int amx_trap_remove() {
  if (active.exchange(0) == 0) return 0;
  return __sigaction(SIGILL, &next_handler, nullptr);
}

// How often an instruction was executed, by its lower-case name. "traps": signals taken. "load for a" (b, c): tiles loaded
// and then first used as that operand of a product. "written b": see amx_trap_watch. -1: no such name.
EXPORT std::int64_t amx_trap_count(const char* name) {
  if (std::strcmp(name, "traps") == 0) return static_cast<std::int64_t>(traps.load());
  for (int op = 0; op < kCounts; ++op) {
    if (std::strcmp(name, kNames[op]) == 0) return static_cast<std::int64_t>(counts[op].load());
  }
  return -1;
}

EXPORT void amx_trap_reset() {
  traps.store(0);
  for (auto& count : counts) count.store(0);
}

// Counts "written b", as long as one thread uses tiles and nobody else needs the memory that B tiles come from.
EXPORT void amx_trap_watch(int on) {
  watching = on != 0;
  std::memset(static_cast<void*>(watched), 0, sizeof watched);
}

// Preloaded, these come before libc's: others' handlers of SIGILL get what the trap passes on, and nobody blocks it.
EXPORT int sigaction(int signal, const struct sigaction* action, struct sigaction* old) {
  if (signal != SIGILL || !preloaded.load() || active.load() == 0) return __sigaction(signal, action, old);
  if (old != nullptr) *old = next_handler;
  if (action != nullptr) next_handler = *action;
  return 0;
}

[[gnu::constructor]] static void start() {
  if (!names_this_library(getenv("LD_PRELOAD")) || getenv("AMX_TRAP_DISABLE") != nullptr) return;
  preloaded.store(amx_trap_install() == 0);
}
