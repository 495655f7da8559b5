// The float arithmetic that every table repeats, operation by operation. Constants only: the operations are spelled out
// in each table with its own registers, in this order, with a fused multiply-add exactly where `fma` stands.
//
//   quantize   bits = the largest |x| as an integer pattern (NaN and infinity are above every finite value)
//              not finite:          scale = NaN, all levels 0
//              below kTiny:         scale = 0, all levels 0
//              kKtplan:             scale = amax / limit; level = round_even(x * (limit / amax))
//              kUpstream:           scale = amax * (1 / 127); level = round_even(x * (1 / scale))
//   level      = 256 * high + low, both signed bytes: low = level's low byte as signed, high = (level + 128) >> 8
//   dot        = the exact integer, rounded once to float32
//   project    = (row scale * column scale) * dot
//   exp(x)     x = max(kExpLow, min(kExpHigh, x));  t = fma(x, kLog2e, kMagic);  n = t - kMagic
//              r = fma(n, -kLn2High, x);  r = fma(n, -kLn2Low, r)
//              p = kP0;  p = fma(p, r, kP1) ... fma(p, r, kP5);  p = fma(p, r * r, r);  p = p + 1
//              exp = p * 2^n
//   silu(g)    = g / (1 + exp(-g))
//   swiglu     = silu(gate) * up
#pragma once

namespace ktplan::numerics {

inline constexpr float kLimit8 = 127.0f;
inline constexpr float kLimit16 = 32639.0f;  // the largest level whose bytes are both in -127..127
inline constexpr float kReciprocal127 = 1.0f / 127.0f;
inline constexpr float kTiny = 0x1p-100f;  // rows smaller than this count as zero: their reciprocal could overflow

inline constexpr float kExpLow = -87.0f;  // so that 2^n stays a normal number
inline constexpr float kExpHigh = 88.0f;
inline constexpr float kLog2e = 0x1.715476p+0f;
inline constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
inline constexpr float kLn2High = 0x1.62e4p-1f;
inline constexpr float kLn2Low = 0x1.7f7d1cp-20f;
inline constexpr float kP0 = 1.9875691500e-4f;  // Cephes' expf
inline constexpr float kP1 = 1.3981999507e-3f;
inline constexpr float kP2 = 8.3334519073e-3f;
inline constexpr float kP3 = 4.1665795894e-2f;
inline constexpr float kP4 = 1.6666665459e-1f;
inline constexpr float kP5 = 5.0000001201e-1f;

}  // namespace ktplan::numerics
