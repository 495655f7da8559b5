// The float arithmetic that every table repeats, operation by operation. Constants only: the operations are spelled out
// in each table with its own registers, in this order, with a fused multiply-add exactly where `fma` stands.
//
//   quantize   bits = the largest |x| as an integer pattern (NaN and infinity are above every finite value)
//              not finite:          scale = NaN, all levels 0
//              below kTiny:         scale = 0, all levels 0
//              kKtplan:             scale = amax / limit; level = round_even(x * (limit / amax))
//              kUpstream:           scale = amax * (1 / 127); level = round_even(x * (1 / scale))
//   level      = 256 * high + low, both signed bytes: low = level's low byte as signed, high = (level + 128) >> 8
//   dot        = the exact integer, rounded once to float32; an int4 level n counts as 16 n
//   project    rows have scales:    (row scale * column scale) * dot
//              groups have scales:  s = 0;  for each group in order:
//                                   d = fma(sum of the row's levels, 16 * offset, dot)   (offset 0: d = dot)
//                                   s = fma(d, group scale * 1/16, s)
//                                   row scale * s
//              bfloat16 weights:    row scale * sum; 8 bits: inputs rounded to bfloat16; 16 bits: inputs as two such
//                                   numbers, x = high + low, or as float32, whichever the table's instructions take
//   exp(x)     x = max(kExpLow, min(kExpHigh, x));  t = fma(x, kLog2e, kMagic);  n = t - kMagic
//              r = fma(n, -kLn2High, x);  r = fma(n, -kLn2Low, r)
//              p = kP0;  p = fma(p, r, kP1) ... fma(p, r, kP5);  p = fma(p, r * r, r);  p = p + 1
//              exp = p * 2^n
//   activate   gate = min(limit, gate), up = max(-limit, min(limit, up)) where there is a limit
//              kSilu:        (gate / (1 + exp(-gate))) * up
//              kGeluTanh:    z = gate * (kGelu1 + kGelu3 * (gate * gate));  (gate / (1 + exp(-z))) * up
//                            as 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y))
//              kGelu:        z = |gate| * kSqrtHalf;  t = 1 / fma(z, kErfT, 1);  p = t * (kE1 + t * (kE2 + ... kE5)), each
//                            step an fma;  q = (p * 0.5) * exp(-(z * z));  (gate * (gate < 0 ? q : 1 - q)) * up
//                            (Abramowitz and Stegun 7.1.26: within 1.5e-7)
//              kSwigluOai:   (gate / (1 + exp(-(gate * alpha)))) * (up + 1)
//   bias       is added to a projection's result
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

inline constexpr float kGelu1 = 1.5957691216f;  // 2 sqrt(2 / pi)
inline constexpr float kGelu3 = 7.1354816272e-2f;  // 0.044715 times that
inline constexpr float kSqrtHalf = 0.70710678119f;
inline constexpr float kErfT = 0.3275911f;
inline constexpr float kE1 = 0.254829592f;
inline constexpr float kE2 = -0.284496736f;
inline constexpr float kE3 = 1.421413741f;
inline constexpr float kE4 = -1.453152027f;
inline constexpr float kE5 = 1.061405429f;

}  // namespace ktplan::numerics
