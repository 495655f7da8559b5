// Steps that take one value at a time, over a set of vector operations V (vectors256.h, vectors512.h): what KernelTable
// asks for beside products and activations. Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activation.h"

namespace ktplan {
namespace {

template <class V>
struct Elementwise {
  static void round_bf16(float* x, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; i += V::kLanes) V::store_bytes(x + i, V::nearest_bf16(V::load_bytes(x + i)));
  }

  static void widen_bf16(const std::uint16_t* x, float* out, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; i += V::kLanes) V::store(out + i, V::from_bf16(x + i));
  }

  static void accumulate(float* acc, const float* y, float weight, std::size_t n) noexcept {
    const auto w = V::set(weight);
    for (std::size_t i = 0; i < n; i += V::kLanes) V::store(acc + i, V::fma(w, V::load(y + i), V::load(acc + i)));
  }

  static void add(float* acc, const float* y, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; i += V::kLanes) V::store(acc + i, V::add(V::load(acc + i), V::load(y + i)));
  }

  static std::uint64_t read(const void* bytes, std::size_t n) noexcept {
    constexpr std::size_t wide = 4 * V::kLanes;
    const auto* p = static_cast<const std::uint8_t*>(bytes);
    typename V::I all[4] = {V::set32(0), V::set32(0), V::set32(0), V::set32(0)};
    std::size_t i = 0;
    for (; i + 4 * wide <= n; i += 4 * wide) {
      for (std::size_t j = 0; j < 4; ++j) all[j] = V::differ(all[j], V::load_bytes(p + i + wide * j));
    }
    for (; i + wide <= n; i += wide) all[0] = V::differ(all[0], V::load_bytes(p + i));
    all[0] = V::differ(V::differ(all[0], all[1]), V::differ(all[2], all[3]));
    std::uint64_t words[wide / 8], result = 0;
    V::store_bytes(words, all[0]);
    for (const std::uint64_t word : words) result ^= word;
    for (; i + 8 <= n; i += 8) {
      std::uint64_t word;
      __builtin_memcpy(&word, p + i, 8);
      result ^= word;
    }
    return result;
  }
};

// A table of these kernels: formats given, the rest over V.
template <class V>
constexpr KernelTable with_elementwise(KernelTable table) {
  table.activate = Activating<V>::activate;
  table.round_bf16 = Elementwise<V>::round_bf16;
  table.widen_bf16 = Elementwise<V>::widen_bf16;
  table.accumulate = Elementwise<V>::accumulate;
  table.add = Elementwise<V>::add;
  table.read = Elementwise<V>::read;
  return table;
}

}  // namespace
}  // namespace ktplan
