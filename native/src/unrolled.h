// Loops that the compiler must unroll, and prefetching. Internal linkage, as everything that kernels include: no function
// compiled for one machine may ever be taken for another.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <utility>

#define INLINE __attribute__((always_inline))  // also for lambdas, which take no other spelling

namespace ktplan {
namespace {

// f(0) ... f(kCount - 1), each index a constant: sums indexed by it stay in registers, which a loop does not promise.
template <int kCount, typename F>
[[gnu::always_inline]] inline void each(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>)
      INLINE { (f(std::integral_constant<int, i>{}), ...); }(std::make_integer_sequence<int, kCount>{});
}

// Into the second-level cache.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace
}  // namespace ktplan
