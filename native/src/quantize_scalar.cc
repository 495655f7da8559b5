// The quantizer in plain C++: what the other tables must equal.

#include <cmath>

#include "quantize_groups.h"

namespace ktplan {
namespace {

struct Scalar {
  struct F { float v[16]; };
  struct U { std::uint16_t v[32]; };
  struct I { std::int32_t v[16]; };

  template <class Op>
  static F each(Op op) {
    F out;
    for (int i = 0; i < 16; ++i) out.v[i] = op(i);
    return out;
  }
  template <class Op>
  static U each_u(Op op) {
    U out;
    for (int i = 0; i < 32; ++i) out.v[i] = static_cast<std::uint16_t>(op(i));
    return out;
  }

  static std::uint16_t max_magnitude(const std::uint16_t* x, std::size_t k) {
    std::uint16_t most = 0;
    for (std::size_t i = 0; i < k; ++i) {
      const std::uint16_t m = x[i] & 0x7fffu;
      if (m > most) most = m;
    }
    return most;
  }
  static std::uint32_t max_magnitude(const float* x, std::size_t k) {
    std::uint32_t most = 0;
    for (std::size_t i = 0; i < k; ++i) {
      const std::uint32_t m = bits_of(x[i]) & 0x7fffffffu;
      if (m > most) most = m;
    }
    return most;
  }

  static F set(float x) { return each([&](int) { return x; }); }
  static F load(const float* x) { return each([&](int i) { return x[i]; }); }
  static F load(const std::uint16_t* x) { return each([&](int i) { return float_of(static_cast<std::uint32_t>(x[i]) << 16); }); }
  static F widen(const std::uint16_t* x) { return each([&](int i) { return static_cast<float>(x[i]); }); }
  static F load_levels(const std::int8_t* x) { return each([&](int i) { return static_cast<float>(x[i]); }); }
  static void store(const F& x, float* out) { std::memcpy(out, x.v, sizeof x.v); }
  static void store_levels(const F& x, std::int8_t* out) {
    for (int i = 0; i < 16; ++i) out[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(x.v[i]));
  }
  // Four bytes of 16 rows from their low and high levels, [4][16] each.
  static void pack_nibbles(const float* low, const float* high, std::uint8_t* out) {
    for (int b = 0; b < 4; ++b) {
      for (int r = 0; r < 16; ++r) {
        const auto down = static_cast<unsigned>(static_cast<int>(low[16 * b + r])) & 15u;
        out[4 * r + b] = static_cast<std::uint8_t>(down | (static_cast<unsigned>(static_cast<int>(high[16 * b + r])) & 15u) << 4);
      }
    }
  }
  static F add(const F& a, const F& b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
  static F sub(const F& a, const F& b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
  static F mul(const F& a, const F& b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
  static F min(const F& a, const F& b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  static F max(const F& a, const F& b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  static F div(const F& a, const F& b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
  static F greater(const F& a, const F& b, const F& yes, const F& no) { return each([&](int i) { return a.v[i] > b.v[i] ? yes.v[i] : no.v[i]; }); }
  static F round_bf16(const F& a) { return each([&](int i) { return float_of((bits_of(a.v[i]) + 0x7fffu + (bits_of(a.v[i]) >> 16 & 1u)) & 0xffff0000u); }); }
  static F abs(const F& a) { return each([&](int i) { return float_of(bits_of(a.v[i]) & 0x7fffffffu); }); }
  static F rint(const F& a) { return each([&](int i) { return std::nearbyintf(a.v[i]); }); }
  static F floor(const F& a) { return each([&](int i) { return std::floor(a.v[i]); }); }
  static F with_sign(const F& a, const F& sign) { return each([&](int i) { return float_of(bits_of(a.v[i]) | (bits_of(sign.v[i]) & 0x80000000u)); }); }

  static U set_u(std::uint16_t x) { return each_u([&](int) { return x; }); }
  static U load_u(const std::uint16_t* x) { return each_u([&](int i) { return x[i]; }); }
  static void store_u(const U& x, std::uint16_t* out) { std::memcpy(out, x.v, sizeof x.v); }
  static U narrow(const F& low, const F& high) { return each_u([&](int i) { return static_cast<std::int32_t>(i < 16 ? low.v[i] : high.v[i - 16]); }); }
  static U mulhrs(const U& a, const U& b) { return each_u([&](int i) { return (static_cast<std::int32_t>(a.v[i]) * b.v[i] + 0x4000) >> 15; }); }
  static U min_u(const U& a, const U& b) { return each_u([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  static U add_u(const U& a, const U& b) { return each_u([&](int i) { return a.v[i] + b.v[i]; }); }
  static U shift4(const U& a) { return each_u([&](int i) { return a.v[i] >> 4; }); }
  static I zero() { return I{}; }
  static I madd(I sum, const U& a, const U& b) {
    for (int i = 0; i < 16; ++i) sum.v[i] += static_cast<std::int32_t>(a.v[2 * i]) * b.v[2 * i] + static_cast<std::int32_t>(a.v[2 * i + 1]) * b.v[2 * i + 1];
    return sum;
  }
  static std::int64_t sum(const I& x) {
    std::int64_t total = 0;
    for (int i = 0; i < 16; ++i) total += x.v[i];
    return total;
  }

  static void tile(const std::uint8_t* from, std::size_t stride, std::uint8_t* to) {
    for (std::size_t word = 0; word < 16; ++word) {
      for (std::size_t row = 0; row < kTileRows; ++row) std::memcpy(to + word * 64 + row * 4, from + row * stride + word * 4, 4);
    }
  }
};

}  // namespace

namespace scalar {
extern const QuantizeTable kQuantize;
const QuantizeTable kQuantize{&GroupQuantizer<Scalar>::step};
}  // namespace scalar
}  // namespace ktplan
