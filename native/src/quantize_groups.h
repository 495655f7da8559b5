// Groups of 32, 64 or 128 inputs to 4-bit levels and a bfloat16 scale, and rows to bfloat16, over the vector operations V of
// quantize_rows.h. The specification is ktplan/quant/groups.py.
//
// A vector holds the same input of 16 rows, so that every lane is a group of its own: nothing is ever summed across lanes, and
// all sums run in the order of the inputs.
#pragma once

#include <limits>

#include "quantize_rows.h"

namespace ktplan {
namespace {

constexpr std::size_t kChunk = 128;  // inputs handled at a time: 64 bytes of a row, one tile of 16 rows
constexpr std::uint32_t kSmallestGroup = 7u << 23;
constexpr float kNearTop = 0.498046875f, kNearTopShifted = 0.4375f;  // the largest scales next to float32's end
constexpr float kFurthest = 1.5f;  // steps by which offsets move the range of levels

template <class V>
struct GroupQuantizer {
  using F = typename V::F;
  using Rows = Quantizer<V>;

  // Where the tile of 16 rows (half 0 or 1 of a step) begins that holds bytes `byte` .. `byte` + 63 of each row.
  static std::uint8_t* tile_at(const QuantizeTask& task, const Layout& layout, std::size_t step, std::size_t half, std::size_t byte) {
    const std::size_t n = task.in.rows, row_bytes = layout.row_bytes(task.in.columns);
    const std::size_t first = step * kStepRows / layout.block_rows * layout.block_rows;
    const std::size_t block_rows = n - first < layout.block_rows ? n - first : layout.block_rows;
    const std::size_t index = (step * kStepRows - first) / kStepRows;
    const std::size_t start = byte / layout.block_bytes * layout.block_bytes;
    const std::size_t width = row_bytes - start < layout.block_bytes ? row_bytes - start : layout.block_bytes;
    return task.packed + first * row_bytes + start * block_rows + index * kStepRows * width + (byte - start) / kStepBytes * kTileBytes * 2 +
           half * kTileBytes;
  }

  // What is known of 16 groups, one a lane.
  struct Search {
    F scale, code, gain, product, square;
  };

  // Where 16 groups' weights lie: the middle and half of their range, the largest magnitude, its side, the largest scale.
  struct Range {
    F middle, half, peak, sign, cap;
  };

  // What a scale with these last bits adds to levels.
  template <bool kShifted>
  static F offset_of(F code) {
    return kShifted ? V::add(V::mul(code, V::set(0.5f)), V::set(0.5f)) : V::set(0.0f);
  }

  // Sums of x * value and x^2, x = level + offset, for `count` scales at once, so that their chains of additions overlap.
  template <bool kShifted, int count>
  static void moments(const float* values, std::size_t group, const F* inverse, const F* offset, F* product, F* square) {
    const F low = V::set(-8.0f), high = V::set(7.0f);
    F by[count], plus[count], products[count], squares[count];  // copies of its own: the compiler keeps them in registers
    for (int c = 0; c < count; ++c) {
      by[c] = inverse[c], plus[c] = offset[c];
      products[c] = squares[c] = V::set(0.0f);
    }
    for (std::size_t j = 0; j < group; ++j) {
      const F value = V::load(values + 16 * j);
#pragma GCC unroll 4
      for (int c = 0; c < count; ++c) {
        const F exact = V::mul(value, by[c]);
        F level = V::min(V::max(V::rint(kShifted ? V::sub(exact, plus[c]) : exact), low), high);
        if constexpr (kShifted) level = V::add(level, plus[c]);
        products[c] = V::add(products[c], V::mul(level, value));
        squares[c] = V::add(squares[c], V::mul(level, level));
      }
    }
    for (int c = 0; c < count; ++c) product[c] = products[c], square[c] = squares[c];
  }

  template <bool kShifted, int count>
  static void attempt(const float* values, std::size_t group, const F* wanted, const F* code, F cap, Search& best) {
    F scale[count], inverse[count], offset[count], product[count], square[count];
    const F bottom = V::sub(V::set(0.0f), cap), one = V::set(1.0f);
    for (int c = 0; c < count; ++c) {
      const F bounded = V::max(V::min(wanted[c], cap), bottom);
      scale[c] = kShifted ? V::coded_bf16(bounded, code[c]) : V::round_bf16(bounded);
      inverse[c] = V::div(one, scale[c]);
      offset[c] = offset_of<kShifted>(code[c]);
    }
    moments<kShifted, count>(values, group, inverse, offset, product, square);
    for (int c = 0; c < count; ++c) {
      const F gain = V::mul(scale[c], V::sub(V::add(product[c], product[c]), V::mul(scale[c], square[c])));
      best.scale = V::greater(gain, best.gain, scale[c], best.scale);
      if constexpr (kShifted) best.code = V::greater(gain, best.gain, code[c], best.code);
      best.product = V::greater(gain, best.gain, product[c], best.product);
      best.square = V::greater(gain, best.gain, square[c], best.square);
      best.gain = V::greater(gain, best.gain, gain, best.gain);
    }
  }

  static void attempt_plain(const float* values, std::size_t group, const Range& range, const QuantizeRule& rule, Search& best) {
    const F peak = V::mul(range.peak, range.sign), codes[4] = {best.code, best.code, best.code, best.code};
    std::size_t i = 0;
    for (; i + 4 <= rule.try_count; i += 4) {
      const F wanted[4] = {V::mul(peak, V::set(rule.tries[i])), V::mul(peak, V::set(rule.tries[i + 1])),
                           V::mul(peak, V::set(rule.tries[i + 2])), V::mul(peak, V::set(rule.tries[i + 3]))};
      attempt<false, 4>(values, group, wanted, codes, range.cap, best);
    }
    for (; i < rule.try_count; ++i) {
      const F wanted[1] = {V::mul(peak, V::set(rule.tries[i]))};
      attempt<false, 1>(values, group, wanted, codes, range.cap, best);
    }
  }

  static void attempt_shifted(const float* values, std::size_t group, const Range& range, const QuantizeRule& rule, Search& best) {
    const F one = V::set(1.0f), twice = V::add(range.middle, range.middle);
    for (std::size_t i = 0; i < rule.try_count; ++i) {
      const float reach = rule.tries[i];
      const F widest = V::max(V::mul(range.half, V::set(1.0f / reach)), V::mul(range.peak, V::set(1.0f / (reach + kFurthest))));
      const F scale = V::mul(widest, range.sign), nearest = V::rint(V::mul(twice, V::div(one, scale)));
      const F code = V::min(V::max(nearest, one), V::set(2.0f));
      const F wanted[3] = {scale, scale, scale}, codes[3] = {V::sub(code, one), code, V::add(code, one)};
      attempt<true, 3>(values, group, wanted, codes, range.cap, best);
    }
  }

  template <bool kShifted>
  static Search search(const float* values, std::size_t group, const Range& range, const QuantizeRule& rule) {
    const F zero = V::set(0.0f);
    Search best{zero, zero, V::set(-std::numeric_limits<float>::infinity()), zero, zero};
    if constexpr (kShifted) {
      attempt_shifted(values, group, range, rule, best);
    } else {
      attempt_plain(values, group, range, rule, best);
    }
    for (int refit = 0; refit < 2; ++refit) {
      // 0 / 0 in a group of zeros: its gain is NaN and never taken
      const F wanted[1] = {V::div(best.product, best.square)}, codes[1] = {best.code};
      attempt<kShifted, 1>(values, group, wanted, codes, range.cap, best);
    }
    return best;
  }

  // 16 groups of 16 rows: replaces the values by levels, writes the scales, adds to the rows' errors.
  template <bool kShifted>
  static void group(float* values, std::size_t size, const QuantizeRule& rule, std::uint16_t* scales, RowError* errors) {
    F most = V::load(values), least = most;
    for (std::size_t j = 1; j < size; ++j) {
      const F value = V::load(values + 16 * j);
      most = V::max(most, value);
      least = V::min(least, value);
    }
    float high[16], low[16], factor[16], back[16], middle[16], half[16], peak[16], sign[16], cap[16];
    V::store(most, high);
    V::store(least, low);
    for (int r = 0; r < 16; ++r) {
      const float largest = high[r] > -low[r] ? high[r] : low[r];
      const std::uint32_t bits = bits_of(largest) & 0x7fffffffu, top = bits >> 23;
      const bool alive = bits >= kSmallestGroup;
      const std::uint32_t field = !alive ? 127 : top < 253 ? top : 253;
      factor[r] = alive ? float_of((254 - field) << 23) : 0.0f;
      back[r] = alive ? float_of(field << 23) : 0.0f;
      // plain levels reach further down, shifted ones up; where both ends are as far, the negative one counts
      const float up = alive ? high[r] * factor[r] : kShifted ? 1.0f : 0.0f;
      const float down = alive ? low[r] * factor[r] : kShifted ? 0.0f : -1.0f;
      middle[r] = (up + down) * 0.5f;
      half[r] = (up - down) * 0.5f;
      peak[r] = up > -down ? up : -down;
      sign[r] = up > -down ? 1.0f : -1.0f;
      cap[r] = top != 254 ? 4.0f : kShifted ? kNearTopShifted : kNearTop;
    }
    const F power = V::load(factor);
    for (std::size_t j = 0; j < size; ++j) V::store(V::mul(V::load(values + 16 * j), power), values + 16 * j);
    const Range range{V::load(middle), V::load(half), V::load(peak), V::load(sign), V::load(cap)};
    const Search best = search<kShifted>(values, size, range, rule);
    const F scale = best.scale, offset = offset_of<kShifted>(best.code);
    const F inverse = V::div(V::set(1.0f), scale), bottom = V::set(-8.0f), top = V::set(7.0f);
    F error = V::set(0.0f), energy = V::set(0.0f);
    for (std::size_t j = 0; j < size; ++j) {
      const F value = V::load(values + 16 * j);
      const F level = V::min(V::max(V::rint(V::sub(V::mul(value, inverse), offset)), bottom), top);
      const F rest = V::sub(value, V::mul(V::add(level, offset), scale));
      error = V::add(error, V::mul(rest, rest));
      energy = V::add(energy, V::mul(value, value));
      V::store(level, values + 16 * j);
    }
    float found[16], wrong[16], whole[16];
    V::store(scale, found);
    V::store(error, wrong);
    V::store(energy, whole);
    for (int r = 0; r < 16; ++r) {
      const double square = static_cast<double>(back[r]) * static_cast<double>(back[r]);
      scales[r] = static_cast<std::uint16_t>(bits_of(found[r] * back[r]) >> 16);
      errors[r].error += static_cast<double>(wrong[r]) * square;
      errors[r].energy += static_cast<double>(whole[r]) * square;
    }
  }

  // `values`: a chunk of 128 inputs, 16 rows each, in float32. `wide`: room for 16 rows of 16 values.
  template <class T>
  static void load_chunk(const T* x, std::size_t stride, float* values, float* wide) {
    for (std::size_t j = 0; j < kChunk; j += 16) {
      for (std::size_t r = 0; r < kTileRows; ++r) V::store(V::load(x + r * stride + j), wide + 16 * r);
      V::tile(reinterpret_cast<const std::uint8_t*>(wide), 64, reinterpret_cast<std::uint8_t*>(values + 16 * j));
    }
  }

  template <class T>
  static bool rows(const QuantizeTask& task, const QuantizeRule& rule, std::size_t step, std::uint8_t* scratch) {
    const std::size_t k = task.in.columns, stride = task.in.stride, groups = k / rule.group;
    float* values = reinterpret_cast<float*>(scratch);
    float* wide = values + 16 * kChunk;
    std::uint16_t* scales = static_cast<std::uint16_t*>(task.scale) + step * groups * kStepRows;
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t first = step * kStepRows + half * kTileRows;
      const T* x = static_cast<const T*>(task.in.data) + first * stride;
      for (std::size_t r = 0; r < kTileRows; ++r) {
        if (Rows::largest(x + r * stride, k) >= 0x7f800000u) return false;
        task.errors[first + r] = RowError{0.0, 0.0};
      }
      for (std::size_t j = 0; j < k; j += kChunk) {
        load_chunk(x + j, stride, values, wide);
        for (std::size_t g = 0; g < kChunk; g += rule.group) {
          std::uint16_t* const to = scales + (j + g) / rule.group * kStepRows + half * kTileRows;
          if (rule.offsets) {
            group<true>(values + 16 * g, rule.group, rule, to, task.errors + first);
          } else {
            group<false>(values + 16 * g, rule.group, rule, to, task.errors + first);
          }
        }
        std::uint8_t* to = tile_at(task, kInt4Layout, step, half, j / 2);
        for (std::size_t word = 0; word < 16; ++word) V::pack_nibbles(values + 64 * word, values + 64 * 16 + 64 * word, to + 64 * word);
      }
    }
    return true;
  }

  // --- bfloat16 ---

  static const std::uint16_t* bf16_of(const std::uint16_t* x, std::size_t, std::uint16_t*) { return x; }
  static const std::uint16_t* bf16_of(const float* x, std::size_t k, std::uint16_t* out) {
    Rows::to_bf16(x, k, out);
    return out;
  }

  // Squared differences and squares in units of a power of two.
  template <class T>
  static RowError bf16_error(const T* x, const std::uint16_t* stored, std::size_t k, std::uint32_t most) {
    std::uint32_t field = most >> 23;
    field = field < 253 ? field : 253;
    field = field > 7 ? field : 7;
    const F factor = V::set(float_of((254 - field) << 23));
    const double back = static_cast<double>(float_of(field << 23));
    F error = V::set(0.0f), energy = V::set(0.0f);
    for (std::size_t i = 0; i < k; i += 16) {
      const F value = V::mul(V::load(x + i), factor);
      const F rest = V::sub(value, V::mul(V::load(stored + i), factor));
      error = V::add(error, V::mul(rest, rest));
      energy = V::add(energy, V::mul(value, value));
    }
    return {Rows::lanes(error) * (back * back), Rows::lanes(energy) * (back * back)};
  }

  template <class T>
  static bool bf16_rows(const QuantizeTask& task, std::size_t step, std::uint8_t* scratch) {
    const std::size_t k = task.in.columns;
    std::uint16_t* rows = reinterpret_cast<std::uint16_t*>(scratch);
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t first = step * kStepRows + half * kTileRows;
      const T* x = static_cast<const T*>(task.in.data) + first * task.in.stride;
      const std::uint16_t* from = nullptr;
      std::size_t apart = 0;
      for (std::size_t r = 0; r < kTileRows; ++r) {
        const T* row = x + r * task.in.stride;
        const std::uint32_t most = Rows::largest(row, k);
        if (most >= 0x7f800000u) return false;
        const std::uint16_t* stored = bf16_of(row, k, rows + r * k);
        task.errors[first + r] = bf16_error(row, stored, k, most);
        if (r == 0) from = stored;
        if (r == 1) apart = static_cast<std::size_t>(reinterpret_cast<const std::uint8_t*>(stored) - reinterpret_cast<const std::uint8_t*>(from));
      }
      for (std::size_t byte = 0; byte < 2 * k; byte += kStepBytes) {
        V::tile(reinterpret_cast<const std::uint8_t*>(from) + byte, apart, tile_at(task, kBf16Layout, step, half, byte));
      }
    }
    return true;
  }

  static bool step(const QuantizeTask& task, const QuantizeRule& rule, std::size_t step, std::uint8_t* scratch) noexcept {
    if (rule.bits == 16) return task.in.bfloat16 ? bf16_rows<std::uint16_t>(task, step, scratch) : bf16_rows<float>(task, step, scratch);
    if (rule.group != 0) return task.in.bfloat16 ? rows<std::uint16_t>(task, rule, step, scratch) : rows<float>(task, rule, step, scratch);
    return Rows::step(task, rule, step, scratch);
  }
};

}  // namespace
}  // namespace ktplan
