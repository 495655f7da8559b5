// What stands between gate, up and down, written once over a set of vector operations V and compiled once for each
// instruction set: "exp" and "activate" in numerics.h. Everything has internal linkage, so that no function compiled for
// one machine is ever taken for another.
//
// V: F is kLanes floats; load, store, set, add, sub, mul, div, fma(a, b, c) = a * b + c in one rounding; min and max
// return the second operand when one is NaN; negative_or(x, a, b): a where x < 0, b elsewhere; power(t): 2^n for
// t = n + kMagic; negate flips the sign, magnitude clears it.
#pragma once

#include <cstddef>
#include <limits>

#include "ktplan/kernels.h"
#include "ktplan/numerics.h"

namespace ktplan {
namespace {

template <class V>
struct Activating {
  using F = typename V::F;

  [[gnu::always_inline]] static inline F exponential(F x) {
    using namespace numerics;
    x = V::min(V::set(kExpHigh), x);
    x = V::max(V::set(kExpLow), x);
    const F magic = V::set(kMagic);
    const F t = V::fma(x, V::set(kLog2e), magic);
    const F n = V::sub(t, magic);
    F r = V::fma(n, V::set(-kLn2High), x);
    r = V::fma(n, V::set(-kLn2Low), r);
    F p = V::set(kP0);
    p = V::fma(p, r, V::set(kP1));
    p = V::fma(p, r, V::set(kP2));
    p = V::fma(p, r, V::set(kP3));
    p = V::fma(p, r, V::set(kP4));
    p = V::fma(p, r, V::set(kP5));
    p = V::fma(p, V::mul(r, r), r);
    p = V::add(p, V::set(1.0f));
    return V::mul(p, V::power(t));
  }

  // gate / (1 + exp(-slope))
  [[gnu::always_inline]] static inline F gated(F gate, F slope) {
    return V::div(gate, V::add(V::set(1.0f), exponential(V::negate(slope))));
  }

  [[gnu::always_inline]] static inline F gelu(F gate) {
    using namespace numerics;
    const F one = V::set(1.0f), z = V::mul(V::magnitude(gate), V::set(kSqrtHalf));
    const F t = V::div(one, V::fma(z, V::set(kErfT), one));
    F p = V::fma(t, V::set(kE5), V::set(kE4));
    p = V::fma(t, p, V::set(kE3));
    p = V::fma(t, p, V::set(kE2));
    p = V::fma(t, p, V::set(kE1));
    p = V::mul(t, p);
    const F q = V::mul(V::mul(p, V::set(0.5f)), exponential(V::negate(V::mul(z, z))));
    return V::mul(gate, V::negative_or(gate, q, V::sub(one, q)));
  }

  template <typename Function>
  static void over(const Activation& activation, const float* gate, const float* up, float* out, std::size_t n,
                   Function function) {
    const F most = V::set(activation.limit), least = V::set(-activation.limit);
    for (std::size_t i = 0; i < n; i += V::kLanes) {
      const F g = V::min(most, V::load(gate + i)), u = V::max(least, V::min(most, V::load(up + i)));
      V::store(out + i, function(g, u));
    }
  }

  static void activate(const Activation& activation, const float* gate, const float* up, float* out,
                       std::size_t n) noexcept {
    using namespace numerics;
    switch (activation.kind) {
      case Activation::Kind::kSilu:
        return over(activation, gate, up, out, n, [](F g, F u) { return V::mul(gated(g, g), u); });
      case Activation::Kind::kGeluTanh:
        return over(activation, gate, up, out, n, [](F g, F u) {
          const F inner = V::add(V::set(kGelu1), V::mul(V::set(kGelu3), V::mul(g, g)));
          return V::mul(gated(g, V::mul(g, inner)), u);
        });
      case Activation::Kind::kGelu:
        return over(activation, gate, up, out, n, [](F g, F u) { return V::mul(gelu(g), u); });
      case Activation::Kind::kSwigluOai: {
        const F alpha = V::set(activation.alpha);
        return over(activation, gate, up, out, n,
                    [alpha](F g, F u) { return V::mul(gated(g, V::mul(g, alpha)), V::add(u, V::set(1.0f))); });
      }
    }
  }
};

}  // namespace
}  // namespace ktplan
