// Tests without a framework: TEST(name) { ... CHECK(condition) ... }, all run by main(), the first failure ends it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace check {

using Test = std::pair<const char*, void (*)()>;

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().emplace_back(name, run); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::exit(1);
}

// Exactly so many elements at so much more than 64-byte alignment: a read or write beyond is an error that the address
// sanitizer sees.
template <typename T>
class Exactly {
 public:
  explicit Exactly(std::size_t size, std::size_t shift = 0)
      : size_(size), bytes_(static_cast<std::uint8_t*>(std::aligned_alloc(64, round(size * sizeof(T) + shift)))) {
    // the end is what must be exact: the elements are pushed to it
    const std::size_t room = round(size * sizeof(T) + shift);
    data_ = reinterpret_cast<T*>(bytes_ + (shift == 0 ? 0 : room - size * sizeof(T)));
  }
  ~Exactly() { std::free(bytes_); }
  Exactly(const Exactly&) = delete;
  Exactly& operator=(const Exactly&) = delete;

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  static std::size_t round(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::size_t size_;
  std::uint8_t* bytes_;
  T* data_;
};

template <typename... Values>
std::string words(Values... values) {
  std::string out;
  ((out += " " + std::to_string(static_cast<long long>(values))), ...);
  return out;
}

inline bool same_bits(float a, float b) {
  return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0;  // every NaN is like another
}

}  // namespace check

#define TEST(name)                                              \
  static void name();                                           \
  static const check::Register register_##name(#name, &name);   \
  static void name()

#define CHECK(condition) \
  if (!(condition)) check::fail(__FILE__, __LINE__, #condition)

#define CHECK_WHERE(condition, ...) \
  if (!(condition)) check::fail(__FILE__, __LINE__, std::string(#condition) + " at" + check::words(__VA_ARGS__))

int main() {
  for (const auto& [name, run] : check::tests()) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    run();
  }
  return check::tests().empty() ? 1 : 0;
}
