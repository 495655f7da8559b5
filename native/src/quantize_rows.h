// The quantizer, written once over a set of vector operations V and compiled once for each instruction set.
//
// V works on 16 floats (F), on 32 16-bit numbers (U) and on 32-bit sums (I). Everything here has internal linkage, so that no
// function compiled for one machine is ever taken for another.
#pragma once

#include <cstring>

#include "ktplan/layout.h"
#include "ktplan/quantize.h"

namespace ktplan {
namespace {

constexpr std::size_t kSumChunk = 4096;  // columns whose products an int32 lane holds: 128 pairs of 2 * 127 * 32767
constexpr float kUnits = 32767.0f;
constexpr float kNormal = 0x1p-126f;
constexpr float kBf16Max = 0x1.fep127f;

inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline std::size_t round_up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Parts of one thread's scratch memory.
struct RowScratch {
  std::uint8_t* step_rows;  // [32][row bytes]
  std::int8_t* levels;      // [columns]
  std::uint16_t* units;     // [columns]; also rows rounded to bfloat16
  float* magnitude;         // [columns]
};

inline RowScratch lay_out(std::uint8_t* scratch, std::size_t columns) {
  const std::size_t wide = round_up(columns, 64);
  RowScratch s;
  s.step_rows = scratch;
  s.magnitude = reinterpret_cast<float*>(scratch + kStepRows * wide);
  s.units = reinterpret_cast<std::uint16_t*>(scratch + kStepRows * wide + 4 * wide);
  s.levels = reinterpret_cast<std::int8_t*>(scratch + kStepRows * wide + 6 * wide);
  return s;
}

struct Moments {
  std::int64_t product, square;
  double gain() const { return square == 0 ? 0.0 : static_cast<double>(product) * static_cast<double>(product) / static_cast<double>(square); }
};

template <class V>
struct Quantizer {
  using F = typename V::F;
  using U = typename V::U;
  using I = typename V::I;

  // The largest magnitude's bits; not finite from 0x7f80 (or 0x7f800000) on.
  static std::uint32_t largest(const std::uint16_t* x, std::size_t k) { return static_cast<std::uint32_t>(V::max_magnitude(x, k)) << 16; }
  static std::uint32_t largest(const float* x, std::size_t k) { return V::max_magnitude(x, k); }

  // --- kt-kernel's rule ---

  // Nearest bfloat16, ties to even; what would become an infinity becomes the largest value.
  static void to_bf16(const float* x, std::size_t k, std::uint16_t* out) {
    for (std::size_t i = 0; i < k; ++i) {
      const std::uint32_t bits = bits_of(x[i]);
      const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      out[i] = static_cast<std::uint16_t>((rounded & 0x7fffu) > 0x7f7fu ? (rounded & 0x8000u) | 0x7f7fu : rounded);
    }
  }

  static void flush(std::uint16_t* x, std::size_t k) {
    for (std::size_t i = 0; i < k; ++i) {
      if ((x[i] & 0x7f80u) == 0) x[i] = 0;
    }
  }

  static const std::uint16_t* bf16_row(const std::uint16_t* x, std::size_t, std::uint16_t*) { return x; }
  static const std::uint16_t* bf16_row(const float* x, std::size_t k, std::uint16_t* scratch) {
    to_bf16(x, k, scratch);
    return scratch;
  }

  template <class T>
  static float kt_row(const T* given, std::size_t k, int bits, const RowScratch& s) {
    const std::uint16_t* x = bf16_row(given, k, s.units);
    float most = float_of(largest(x, k));
    if (most < 0x1p-100f) {  // only here do denormals make a difference
      if (x != s.units) std::memcpy(s.units, x, 2 * k);
      flush(s.units, k);
      x = s.units;
      most = float_of(largest(x, k));
    }
    float scale = bits == 8 ? most * (1.0f / 127.0f) : static_cast<float>(static_cast<double>(most) / 112.0);
    if (scale < kNormal) scale = 0.0f;
    const F inverse = V::set(scale == 0.0f ? 0.0f : 1.0f / scale);
    if (bits == 8) {
      for (std::size_t i = 0; i < k; i += 16) V::store_levels(V::rint(V::mul(V::load(x + i), inverse)), s.levels + i);
    } else {
      const F eight = V::set(8.0f), sixteenth = V::set(0.0625f);
      for (std::size_t i = 0; i < k; i += 16) {
        const F value = V::load(x + i);
        const F rounded = V::rint(V::mul(V::abs(value), inverse));
        V::store_levels(V::with_sign(V::floor(V::mul(V::add(rounded, eight), sixteenth)), value), s.levels + i);
      }
    }
    return scale;
  }

  // --- the searched scale ---

  // Sums of level * unit and level^2 for levels = round(unit * multiplier / 2^19).
  static Moments on_grid(const std::uint16_t* units, std::size_t k, std::uint16_t multiplier, int top) {
    const U factor = V::set_u(multiplier), most = V::set_u(static_cast<std::uint16_t>(16 * top)), half = V::set_u(8);
    Moments m{0, 0};
    for (std::size_t start = 0; start < k; start += kSumChunk) {
      const std::size_t end = start + kSumChunk < k ? start + kSumChunk : k;
      I product = V::zero(), square = V::zero();
      for (std::size_t i = start; i < end; i += 32) {
        const U unit = V::load_u(units + i);
        const U level = V::shift4(V::add_u(V::min_u(V::mulhrs(unit, factor), most), half));
        product = V::madd(product, level, unit);
        square = V::madd(square, level, level);
      }
      m.product += V::sum(product);
      m.square += V::sum(square);
    }
    return m;
  }

  // The same for levels = round(unit * inverse).
  static Moments at_step(const std::uint16_t* units, std::size_t k, float inverse, int top) {
    const F factor = V::set(inverse), most = V::set(static_cast<float>(top));
    Moments m{0, 0};
    for (std::size_t start = 0; start < k; start += kSumChunk) {
      const std::size_t end = start + kSumChunk < k ? start + kSumChunk : k;
      I product = V::zero(), square = V::zero();
      for (std::size_t i = start; i < end; i += 32) {
        const F low = V::min(V::rint(V::mul(V::widen(units + i), factor)), most);
        const F high = V::min(V::rint(V::mul(V::widen(units + i + 16), factor)), most);
        const U level = V::narrow(low, high);
        product = V::madd(product, level, V::load_u(units + i));
        square = V::madd(square, level, level);
      }
      m.product += V::sum(product);
      m.square += V::sum(square);
    }
    return m;
  }

  // Least-squares step for round(magnitude * inverse).
  static double refit(const float* magnitude, std::size_t k, float inverse, int top, double step) {
    const F factor = V::set(inverse), most = V::set(static_cast<float>(top));
    F product = V::set(0.0f), square = V::set(0.0f);
    for (std::size_t i = 0; i < k; i += 16) {
      const F m = V::load(magnitude + i);
      const F level = V::min(V::rint(V::mul(m, factor)), most);
      product = V::add(product, V::mul(level, m));
      square = V::add(square, V::mul(level, level));
    }
    const double below = lanes(square);
    return below > 0 ? lanes(product) / below : step;
  }

  static double error_at(const float* magnitude, std::size_t k, double step, int top) {
    const F factor = V::set(static_cast<float>(1.0 / step)), most = V::set(static_cast<float>(top)), width = V::set(static_cast<float>(step));
    F error = V::set(0.0f);
    for (std::size_t i = 0; i < k; i += 16) {
      const F m = V::load(magnitude + i);
      const F rest = V::sub(m, V::mul(V::min(V::rint(V::mul(m, factor)), most), width));
      error = V::add(error, V::mul(rest, rest));
    }
    return lanes(error);
  }

  static double lanes(F sums) {
    float lane[16];
    V::store(sums, lane);
    double total = 0.0;
    for (int i = 0; i < 16; ++i) total += static_cast<double>(lane[i]);
    return total;
  }

  static float stored(double step, float unit, int tile_bits, int top) {
    const int sixteen = tile_bits == 4 ? 16 : 1;
    const double most = static_cast<double>(0x1.fffffep127f) / (top * sixteen * (1.0 + 0x1p-22));
    const double wanted = step * static_cast<double>(unit) / 32767.0 / sixteen;
    return static_cast<float>(wanted < most ? wanted : most);
  }

  // The best step in units of largest / 32767, by the grid, a finer grid around its best, and least squares.
  static double search(const std::uint16_t* units, std::size_t k, int top, const QuantizeRule& rule) {
    const int count = static_cast<int>(rule.multiplier_count);
    int coarse = 0;
    Moments best = on_grid(units, k, rule.multipliers[0], top);
    for (int i = 4; i < count; i += 4) {
      const Moments m = on_grid(units, k, rule.multipliers[i], top);
      if (m.gain() > best.gain()) best = m, coarse = i;
    }
    for (int offset = -3; offset <= 3; ++offset) {
      const int i = coarse + offset;
      if (offset == 0 || i < 0 || i >= count) continue;
      const Moments m = on_grid(units, k, rule.multipliers[i], top);
      if (m.gain() > best.gain()) best = m;
    }
    const Moments m = at_step(units, k, static_cast<float>(static_cast<double>(best.square) / static_cast<double>(best.product)), top);
    if (m.gain() > best.gain()) best = m;
    return static_cast<double>(best.product) / static_cast<double>(best.square);
  }

  template <class T>
  static float search_row(const T* x, std::size_t k, const QuantizeRule& rule, float most, const RowScratch& s) {
    const int tile_bits = rule.bits == 8 ? 8 : 4, top = rule.bits == 8 ? 127 : rule.bits == 4 ? 7 : 1;
    if (most < kNormal * static_cast<float>(top * (tile_bits == 4 ? 16 : 1))) {
      std::memset(s.levels, 0, k);
      return 0.0f;
    }
    const float lift = most < 0x1p-64f ? 0x1p64f : 1.0f;
    const F lifted = V::set(lift), factor = V::set(kUnits / (most * lift)), full = V::set(kUnits);
    for (std::size_t i = 0; i < k; i += 32) {
      const F low = V::mul(V::mul(V::abs(V::load(x + i)), lifted), factor);
      const F high = V::mul(V::mul(V::abs(V::load(x + i + 16)), lifted), factor);
      V::store(low, s.magnitude + i);
      V::store(high, s.magnitude + i + 16);
      V::store_u(V::narrow(V::min(V::rint(low), full), V::min(V::rint(high), full)), s.units + i);
    }
    double step = search(s.units, k, top, rule);
    step = refit(s.magnitude, k, static_cast<float>(1.0 / step), top, step);
    const double absmax = 32767.0 / top;
    float scale = stored(step, most, tile_bits, top);
    if (!(scale >= kNormal && error_at(s.magnitude, k, step, top) < error_at(s.magnitude, k, absmax, top))) {
      scale = stored(absmax, most, tile_bits, top);
    }
    const float width = tile_bits == 4 ? scale * 16.0f : scale;
    const F inverse = V::set(1.0f / width), limit = V::set(static_cast<float>(top));
    for (std::size_t i = 0; i < k; i += 16) {
      const F value = V::load(x + i);
      V::store_levels(V::with_sign(V::min(V::rint(V::mul(V::abs(value), inverse)), limit), value), s.levels + i);
    }
    return scale;
  }

  // --- both ---

  // Squared differences from, and squares of, the given weights; 0 and 0 where the scale is 0.
  template <class T>
  static RowError row_error(const T* x, std::size_t k, float step, const std::int8_t* levels) {
    if (step == 0.0f) return {0.0, 0.0};
    const F inverse = V::set(1.0f / step);
    F error = V::set(0.0f), energy = V::set(0.0f);
    for (std::size_t i = 0; i < k; i += 16) {
      const F value = V::mul(V::load(x + i), inverse);
      const F rest = V::sub(value, V::load_levels(levels + i));
      error = V::add(error, V::mul(rest, rest));
      energy = V::add(energy, V::mul(value, value));
    }
    const double square = static_cast<double>(step) * static_cast<double>(step);
    return {lanes(error) * square, lanes(energy) * square};
  }

  static void nibbles(const std::int8_t* levels, std::size_t k, std::uint8_t* out) {
    for (std::size_t chunk = 0; chunk < k; chunk += 128, out += 64) {
      for (int j = 0; j < 64; ++j) {
        out[j] = static_cast<std::uint8_t>((static_cast<unsigned>(levels[chunk + j]) & 15u) | (static_cast<unsigned>(levels[chunk + 64 + j]) & 15u) << 4);
      }
    }
  }

  // 32 rows in natural order to their places in the packed projection.
  static void place(const std::uint8_t* rows, std::size_t wide, const QuantizeTask& task, const Layout& layout, std::size_t step) {
    const std::size_t n = task.in.rows, row_bytes = layout.row_bytes(task.in.columns);
    const std::size_t block = step * kStepRows / layout.block_rows, first = block * layout.block_rows;
    const std::size_t block_rows = n - first < layout.block_rows ? n - first : layout.block_rows;
    const std::size_t index = (step * kStepRows - first) / kStepRows;
    std::uint8_t* base = task.packed + first * row_bytes;
    for (std::size_t start = 0; start < row_bytes; start += layout.block_bytes) {
      const std::size_t width = row_bytes - start < layout.block_bytes ? row_bytes - start : layout.block_bytes;
      std::uint8_t* to = base + start * block_rows + index * kStepRows * width;
      for (std::size_t k = 0; k < width; k += kStepBytes) {
        for (std::size_t half = 0; half < 2; ++half, to += kTileBytes) V::tile(rows + half * kTileRows * wide + start + k, wide, to);
      }
    }
  }

  template <class T>
  static bool rows(const QuantizeTask& task, const QuantizeRule& rule, std::size_t step, std::uint8_t* scratch) {
    const std::size_t k = task.in.columns, wide = round_up(k, 64);
    const RowScratch s = lay_out(scratch, k);
    const Layout& layout = rule.bits == 8 ? kInt8Layout : kInt4Layout;
    for (std::size_t r = 0; r < kStepRows; ++r) {
      const std::size_t row = step * kStepRows + r;
      const T* x = static_cast<const T*>(task.in.data) + row * task.in.stride;
      const std::uint32_t most = largest(x, k);
      if (most >= 0x7f800000u) return false;
      const float scale = rule.rule == RowRule::kKt ? kt_row(x, k, rule.bits, s) : search_row(x, k, rule, float_of(most), s);
      static_cast<float*>(task.scale)[row] = scale;
      task.errors[row] = row_error(x, k, rule.bits == 8 ? scale : scale * 16.0f, s.levels);
      std::uint8_t* bytes = s.step_rows + r * wide;
      if (rule.bits == 8) {
        std::memcpy(bytes, s.levels, k);
      } else {
        nibbles(s.levels, k, bytes);
      }
    }
    place(s.step_rows, wide, task, layout, step);
    return true;
  }

  static bool step(const QuantizeTask& task, const QuantizeRule& rule, std::size_t step, std::uint8_t* scratch) noexcept {
    return task.in.bfloat16 ? rows<std::uint16_t>(task, rule, step, scratch) : rows<float>(task, rule, step, scratch);
  }
};

}  // namespace
}  // namespace ktplan
