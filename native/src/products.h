// Rows of activations times 32 columns of weights ("project" in numerics.h), written once over a set of vector operations
// V and a way to multiply M, and compiled once for each instruction set. Internal linkage.
//
// A k-step (layout.h) is 16 words of 64 bytes in each of two tiles; a word holds four inputs (of bfloat16 two) of each
// column, INT4 twice as many: the low nibbles, then the high ones. A vector takes a word of V::kLanes columns, so that its
// sums are columns. Sums of a k-step stay in registers and then go to memory: the same code serves one row and many, and
// is as long in coming back to a sum as adders need.
//
// A way to multiply has
//   V, Sum, kPlanes       its registers, and how many a row needs for V::kLanes columns
//   kLayout, kHalves      which weights; nibbles in a byte
//   kRowBytes, kSumWords  bytes of a row (rows.h) for a word; words after which sums must be taken out of the registers
//   kOffset               what was added to the weights' levels
//   kMaxRows              rows that its registers have room for
//   weights<half>(bytes)  a word of weights, unpacked
//   multiply(sums, weights, row)   adds one row's products with kVectors vectors of weights
// and, for whole numbers, kParts (the dot product is parts[0], or 256 * parts[0] + parts[1]), add_to(parts, sums), and
// whole(sums), the dot product of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktplan/kernels.h"
#include "rows.h"
#include "unrolled.h"

namespace ktplan {
namespace {

constexpr int kNibbleOffset = 8;             // makes nibbles unsigned
constexpr std::size_t kWords = 16;           // in a k-step
constexpr std::size_t kLookAhead = 8192;     // bytes; 6 to 16 KB are equally good, 4 KB and less are not

template <std::size_t kBits>
constexpr Layout kWholeLayout = kBits == 8 ? kInt8Layout : kInt4Layout;

// Both operands widened to int16: any level times any level, exactly. A sum of 16-bit levels is split in two before it
// could overflow.
template <class Vector, std::size_t kBits, int kActivationBits, int kRoom>
struct Pairs {
  using V = Vector;
  using Sum = typename V::I;
  static constexpr Layout kLayout = kWholeLayout<kBits>;
  static constexpr int kPlanes = 1, kParts = kActivationBits / 8, kHalves = 8 / kBits, kMaxRows = kRoom, kOffset = 0;
  static constexpr std::size_t kRowBytes = 8, kSumWords = kWords;
  struct Weights {
    Sum even, odd;
  };
  static Sum nothing() { return V::set32(0); }

  template <int kHalf>
  [[gnu::always_inline]] static inline Weights weights(const std::uint8_t* from) {
    const Sum bytes = V::load_bytes(from);
    if constexpr (kBits == 8) {
      return {V::template shift_right16<8>(V::template shift_left16<8>(bytes)), V::template shift_right16<8>(bytes)};
    } else if constexpr (kHalf == 0) {
      return {V::template shift_right16<12>(V::template shift_left16<12>(bytes)),
              V::template shift_right16<12>(V::template shift_left16<4>(bytes))};
    } else {
      return {V::template shift_right16<12>(V::template shift_left16<8>(bytes)), V::template shift_right16<12>(bytes)};
    }
  }

  template <int kVectors>
  [[gnu::always_inline]] static inline void multiply(Sum (&sums)[1][kVectors], const Weights (&w)[kVectors],
                                                     const std::uint8_t* row) {
    const Sum even = V::broadcast(row), odd = V::broadcast(row + 4);
    each<kVectors>([&](auto v) INLINE {
      sums[0][v] = V::add32(sums[0][v], V::products_of_pairs(w[v].even, even));
      sums[0][v] = V::add32(sums[0][v], V::products_of_pairs(w[v].odd, odd));
    });
  }

  [[gnu::always_inline]] static inline void add_to(Sum* const (&parts)[kParts], const Sum (&sums)[1]) {
    if constexpr (kParts == 1) {
      *parts[0] = V::add32(*parts[0], sums[0]);
    } else {
      *parts[0] = V::add32(*parts[0], V::template shift_right<8>(sums[0]));
      *parts[1] = V::add32(*parts[1], V::both(sums[0], V::set32(255)));
    }
  }
  [[gnu::always_inline]] static inline Sum whole(const Sum (&sums)[1]) { return sums[0]; }
};

// Nibbles as unsigned bytes, level + 8.
template <class V, int kHalf>
[[gnu::always_inline]] inline typename V::I unsigned_nibbles(const std::uint8_t* from) {
  typename V::I bytes = V::load_bytes(from);
  if constexpr (kHalf == 1) bytes = V::template shift_in_zeros16<4>(bytes);
  return V::both_differ(bytes, V::set8(15), V::set8(kNibbleOffset));
}

// vpmaddubsw: 8-bit activations times nibbles. Of its products, at most 15 * 127, sixteen fit in 16 bits.
template <class Vector, int kRoom>
struct Nibbles {
  using V = Vector;
  using Sum = typename V::I;
  using Weights = Sum;
  static constexpr Layout kLayout = kInt4Layout;
  static constexpr int kPlanes = 1, kParts = 1, kHalves = 2, kMaxRows = kRoom, kOffset = kNibbleOffset;
  static constexpr std::size_t kRowBytes = 4, kSumWords = 8;
  static Sum nothing() { return V::set32(0); }

  template <int kHalf>
  [[gnu::always_inline]] static inline Weights weights(const std::uint8_t* from) {
    return unsigned_nibbles<V, kHalf>(from);
  }

  template <int kVectors>
  [[gnu::always_inline]] static inline void multiply(Sum (&sums)[1][kVectors], const Weights (&w)[kVectors],
                                                     const std::uint8_t* row) {
    const Sum four = V::broadcast(row);
    each<kVectors>([&](auto v) INLINE { sums[0][v] = V::add16(sums[0][v], V::products_of_bytes(w[v], four)); });
  }

  [[gnu::always_inline]] static inline void add_to(Sum* const (&parts)[1], const Sum (&sums)[1]) {
    *parts[0] = V::add32(*parts[0], whole(sums));
  }
  [[gnu::always_inline]] static inline Sum whole(const Sum (&sums)[1]) {
    return V::products_of_pairs(sums[0], V::set16(1));
  }
};

// vpdpbusd: weights as unsigned bytes times one or two planes of signed ones.
template <class Vector, std::size_t kBits, int kActivationBits, int kRoom>
struct Bytes {
  using V = Vector;
  using Sum = typename V::I;
  using Weights = Sum;
  static constexpr Layout kLayout = kWholeLayout<kBits>;
  static constexpr int kPlanes = kActivationBits / 8, kParts = kPlanes, kHalves = 8 / kBits, kMaxRows = kRoom;
  static constexpr int kOffset = kBits == 8 ? 128 : kNibbleOffset;
  static constexpr std::size_t kRowBytes = 4 * kPlanes, kSumWords = kWords;
  static Sum nothing() { return V::set32(0); }

  template <int kHalf>
  [[gnu::always_inline]] static inline Weights weights(const std::uint8_t* from) {
    if constexpr (kBits == 8) {
      return V::differ(V::load_bytes(from), V::set8(128));
    } else {
      return unsigned_nibbles<V, kHalf>(from);
    }
  }

  template <int kVectors>
  [[gnu::always_inline]] static inline void multiply(Sum (&sums)[kPlanes][kVectors], const Weights (&w)[kVectors],
                                                     const std::uint8_t* row) {
    each<kPlanes>([&](auto p) INLINE {
      const Sum four = V::broadcast(row + 4 * p);
      each<kVectors>([&](auto v) INLINE { sums[p][v] = V::add_products_of_bytes(sums[p][v], w[v], four); });
    });
  }

  [[gnu::always_inline]] static inline void add_to(Sum* const (&parts)[kPlanes], const Sum (&sums)[kPlanes]) {
    each<kPlanes>([&](auto p) INLINE { *parts[p] = V::add32(*parts[p], sums[p]); });
  }
  [[gnu::always_inline]] static inline Sum whole(const Sum (&sums)[kPlanes]) {
    return kPlanes == 1 ? sums[0] : V::add32(V::template shift_left<8>(sums[0]), sums[kPlanes - 1]);
  }
};

// bfloat16 weights as float32.
template <class Vector, int kRoom>
struct Bf16 {
  using V = Vector;
  using Sum = typename V::F;
  static constexpr Layout kLayout = kBf16Layout;
  static constexpr int kPlanes = 1, kHalves = 1, kMaxRows = kRoom;
  static constexpr std::size_t kRowBytes = 8, kSumWords = kWords;
  struct Weights {
    Sum even, odd;
  };
  static Sum nothing() { return V::set(0.0f); }

  template <int kHalf>
  [[gnu::always_inline]] static inline Weights weights(const std::uint8_t* from) {
    const auto both = V::load_bytes(from);
    return {V::from_bits(V::template shift_left<16>(both)),
            V::from_bits(V::both(both, V::set32(static_cast<int>(0xffff0000u))))};
  }

  template <int kVectors>
  [[gnu::always_inline]] static inline void multiply(Sum (&sums)[1][kVectors], const Weights (&w)[kVectors],
                                                     const std::uint8_t* row) {
    const Sum even = V::from_bits(V::broadcast(row)), odd = V::from_bits(V::broadcast(row + 4));
    each<kVectors>([&](auto v) INLINE {
      sums[0][v] = V::fma(w[v].even, even, sums[0][v]);
      sums[0][v] = V::fma(w[v].odd, odd, sums[0][v]);
    });
  }
};

template <class M, int kRows>
struct Products {
  using V = typename M::V;
  using F = typename V::F;
  using I = typename V::I;
  using Sum = typename M::Sum;
  static constexpr int kVectors = kStepRows / V::kLanes;  // of a step's columns
  static constexpr int kTileVectors = kTileRows / V::kLanes;
  // Vectors multiplied at a time. Where a vector is a whole tile, two, so that a broadcast serves two products; but not
  // with few rows, when it is memory that limits: it likes to be read strictly in order.
  static constexpr int kTogether = kTileVectors == 2 || kRows * M::kPlanes > 2 ? 2 : 1;
  static constexpr bool kInOrder = kTogether <= kTileVectors;

  using Sums = Sum[kRows][M::kPlanes][kTogether];

  // Where vector v of a word begins.
  static constexpr std::size_t place(int v) {
    return static_cast<std::size_t>(v / kTileVectors) * kTileBytes + static_cast<std::size_t>(v % kTileVectors) * 4 * V::kLanes;
  }

  // sums = the products of words [first, first + words) of one half; w and row at the k-step's beginning.
  template <int kHalf>
  [[gnu::always_inline]] static inline void multiply(Sums& sums, const std::uint8_t* w, int vector,
                                                     const std::uint8_t* const (&row)[kRows], std::size_t at,
                                                     std::size_t first, std::size_t words) {
    // unrolled further, broadcasts would be kept for the next vectors, in memory
#pragma GCC unroll 2
    for (std::size_t word = first; word < first + words; ++word) {
      typename M::Weights weights[kTogether];
      each<kTogether>([&](auto v) INLINE {
        weights[v] = M::template weights<kHalf>(w + place(vector + v) + 64 * word);
      });
      if constexpr (!kInOrder && kHalf == 0) {  // reading in turns defeats the hardware's prefetching
        prefetch(w + kLookAhead + word * 128);
        prefetch(w + kLookAhead + word * 128 + 64);
      }
      each<kRows>([&](auto r) INLINE {
        M::template multiply<kTogether>(sums[r], weights, row[r] + at + M::kRowBytes * (kWords * kHalf + word));
      });
    }
  }

  [[gnu::always_inline]] static inline void clear(Sums& sums) {
    each<kRows>([&](auto r) INLINE {
      each<M::kPlanes>([&](auto p) INLINE { each<kTogether>([&](auto v) INLINE { sums[r][p][v] = M::nothing(); }); });
    });
  }

  [[gnu::always_inline]] static inline void sums_of(const Sums& sums, int r, int v, Sum (&out)[M::kPlanes]) {
    each<M::kPlanes>([&](auto p) INLINE { out[p] = sums[r][p][v]; });
  }

  // use(weights of a k-step, where its inputs lie in the rows), in order.
  template <typename Use>
  [[gnu::always_inline]] static inline void each_step(const WeightStep& step, const Ahead& ahead, Use use) {
    std::size_t at = 0;
    for (std::size_t kb = 0; kb * M::kLayout.block_bytes < step.row_bytes; ++kb) {
      const Segment segment = segment_at(step, M::kLayout.block_bytes, kb);
      const std::uint8_t* w = segment.bytes;
      const std::uint8_t* const end = w + segment.row_bytes * kStepRows;
      const std::ptrdiff_t to_next =
          ahead.next == nullptr ? 0 : segment_at(*ahead.next, M::kLayout.block_bytes, kb).bytes - w;
      for (; w != end; w += 2 * kTileBytes, at += M::kRowBytes * kWords * M::kHalves) {
        for (std::size_t line = ahead.first_line; line < ahead.last_line; ++line) prefetch(w + to_next + 64 * line);
        use(w, at);
      }
    }
  }

  // --- rows have scales ---

  static constexpr int parts() {
    if constexpr (requires { M::kParts; }) return M::kParts;
    return 1;
  }
  using Parts = I[kRows][parts()][kVectors];

  // parts = the exact dot products, levels of int4 as they are.
  [[gnu::always_inline]] static inline void dot(const WeightStep& step, const Row* const* rows, const Ahead& ahead,
                                                Parts& parts) {
    const std::uint8_t* row[kRows];
    each<kRows>([&](auto r) INLINE {
      row[r] = rows[r]->bytes;
      for (int p = 0; p < M::kParts; ++p) {
        for (I& part : parts[r][p]) part = V::set32(rows[r]->sums[p] * -M::kOffset);
      }
    });
    each_step(step, ahead, [&](const std::uint8_t* w, std::size_t at) INLINE {
      for (int vector = 0; vector < kVectors; vector += kTogether) {
        Sums sums;
        clear(sums);
        each<M::kHalves>([&](auto half) INLINE {
          for (std::size_t word = 0; word < kWords; word += M::kSumWords) {
            multiply<half>(sums, w, vector, row, at, word, M::kSumWords);
            if (M::kSumWords < kWords || half == M::kHalves - 1) {
              add(sums, vector, parts);
              if constexpr (M::kSumWords < kWords) clear(sums);
            }
          }
        });
      }
    });
  }

  [[gnu::always_inline]] static inline void add(const Sums& sums, int vector, Parts& parts) {
    each<kRows>([&](auto r) INLINE {
      each<kTogether>([&](auto v) INLINE {
        Sum some[M::kPlanes];
        sums_of(sums, r, v, some);
        I* to[M::kParts];
        each<M::kParts>([&](auto p) INLINE { to[p] = &parts[r][p][vector + v]; });
        M::add_to(to, some);
      });
    });
  }

  [[gnu::noinline]] static void project(const WeightStep& step, const Row* const* rows, const Ahead& ahead, float* out,
                                        std::size_t stride) {
    Parts parts;
    dot(step, rows, ahead, parts);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        F dot = M::kParts == 1 ? V::to_float(parts[r][0][v]) : V::combined(parts[r][0][v], parts[r][M::kParts - 1][v]);
        if constexpr (M::kHalves == 2) dot = V::mul(dot, V::set(16.0f));  // exactly
        const F scale = V::mul(V::set(rows[r]->scale), V::load(step.scale + v * V::kLanes));
        V::store(out + r * stride + v * V::kLanes, V::mul(scale, dot));
      }
    }
  }

  static void dots(const WeightStep& step, const Row* const* rows, std::int64_t* out) {
    Parts parts;
    dot(step, rows, Ahead{}, parts);
    for (std::size_t r = 0; r < kRows; ++r) {
      for (std::size_t c = 0; c < kStepRows; ++c) {
        std::int64_t dot = 0;
        for (int p = 0; p < M::kParts; ++p) {
          std::int32_t part;
          std::memcpy(&part, reinterpret_cast<const std::uint8_t*>(parts[r][p]) + 4 * c, 4);
          dot = 256 * dot + part;
        }
        out[r * kStepRows + c] = dot * (M::kHalves == 2 ? 16 : 1);
      }
    }
  }

  // --- groups have scales ---

  // totals += dot * scale for one group, of kHalf (or both) from a word on.
  template <std::size_t kGroup, int kFirstHalf>
  [[gnu::always_inline]] static inline void add_group(const std::uint8_t* w, int vector,
                                                      const std::uint8_t* const (&row)[kRows], std::size_t at,
                                                      std::size_t first, const std::uint16_t* scale,
                                                      const std::uint8_t* const (&excess)[kRows],
                                                      F (&totals)[kRows][kVectors]) {
    constexpr int halves = kGroup == 128 ? 2 : 1;
    constexpr std::size_t words = kGroup == 32 ? 8 : 16;
    constexpr bool pieces = M::kSumWords < words;  // sums leave the registers within a group
    I dots[kRows][kTogether];
    Sums sums;
    clear(sums);
    each<halves>([&](auto half) INLINE {
      each<pieces ? words / M::kSumWords : 1>([&](auto piece) INLINE {
        constexpr std::size_t length = pieces ? M::kSumWords : words;
        multiply<kFirstHalf + half>(sums, w, vector, row, at, first + piece * length, length);
        if constexpr (pieces || half == halves - 1) {
          each<kRows>([&](auto r) INLINE {
            each<kTogether>([&](auto v) INLINE {
              Sum some[M::kPlanes];
              sums_of(sums, r, v, some);
              constexpr bool only = half == 0 && piece == 0 ? true : !pieces;
              dots[r][v] = only ? M::whole(some) : V::add32(dots[r][v], M::whole(some));
            });
          });
          if constexpr (pieces) clear(sums);
        }
      });
    });
    F scales[kTogether];
    each<kTogether>([&](auto v) INLINE { scales[v] = V::from_bf16(scale + (vector + v) * V::kLanes); });
    each<kRows>([&](auto r) INLINE {
      const I too_much = M::kOffset == 0 ? V::set32(0) : V::broadcast(excess[r]);
      each<kTogether>([&](auto v) INLINE {
        const I dot = M::kOffset == 0 ? dots[r][v] : V::add32(dots[r][v], too_much);
        F& total = totals[r][vector + v];
        // (16 dot) * (scale / 16), as both steps of 16 are exact
        total = V::fma(V::to_float(dot), scales[v], total);
      });
    });
  }

  template <std::size_t kGroup>
  [[gnu::noinline]] static void project_groups(const WeightStep& step, const Row* const* rows, const Ahead& ahead,
                                               float* out, std::size_t stride) {
    F totals[kRows][kVectors];
    const std::uint8_t *row[kRows], *excess[kRows];
    each<kRows>([&](auto r) INLINE {
      row[r] = rows[r]->bytes;
      excess[r] = row[r] + step.row_bytes / 2 * M::kRowBytes;  // row_bytes / 64 k-steps of 32 words
      for (F& total : totals[r]) total = V::set(0.0f);
    });
    const std::uint16_t* scale = step.group_scale;
    each_step(step, ahead, [&](const std::uint8_t* w, std::size_t at) INLINE {
      for (int vector = 0; vector < kVectors; vector += kTogether) {
        each<128 / kGroup>([&](auto group) INLINE {
          constexpr int half = group * kGroup / 64;
          const std::uint8_t* own[kRows];
          each<kRows>([&](auto r) INLINE { own[r] = excess[r] + 4 * group; });
          add_group<kGroup, half>(w, vector, row, at, group * kGroup % 64 / 4, scale + kStepRows * group, own, totals);
        });
      }
      scale += kStepRows * (128 / kGroup);
      each<kRows>([&](auto r) INLINE { excess[r] += 4 * (128 / kGroup); });
    });
    store(rows, totals, out, stride);
  }

  [[gnu::always_inline]] static inline void store(const Row* const* rows, const F (&totals)[kRows][kVectors], float* out,
                                                  std::size_t stride) {
    for (int r = 0; r < kRows; ++r) {
      const F scale = V::set(rows[r]->scale);
      for (int v = 0; v < kVectors; ++v) {
        V::store(out + r * stride + v * V::kLanes, V::mul(scale, totals[r][v]));
      }
    }
  }

  // --- bfloat16 ---

  [[gnu::noinline]] static void project_floats(const WeightStep& step, const Row* const* rows, const Ahead& ahead,
                                               float* out, std::size_t stride) {
    F totals[kRows][kVectors];
    const std::uint8_t* row[kRows];
    each<kRows>([&](auto r) INLINE {
      row[r] = rows[r]->bytes;
      for (F& total : totals[r]) total = V::set(0.0f);
    });
    each_step(step, ahead, [&](const std::uint8_t* w, std::size_t at) INLINE {
      for (int vector = 0; vector < kVectors; vector += kTogether) {
        Sums sums;
        clear(sums);
        multiply<0>(sums, w, vector, row, at, 0, kWords);
        each<kRows>([&](auto r) INLINE {
          each<kTogether>([&](auto v) INLINE {
            totals[r][vector + v] = V::add(totals[r][vector + v], sums[r][0][v]);
          });
        });
      }
    });
    store(rows, totals, out, stride);
  }
};

// From a number of rows known only now to one known when compiling: how<number>() for the count at hand.
template <int kRows, typename How>
[[gnu::always_inline]] inline void with_rows(std::size_t count, How how) {
  if (count == kRows) {
    how(std::integral_constant<int, kRows>{});
  } else if constexpr (kRows > 1) {
    with_rows<kRows - 1>(count, how);
  }
}

template <class M>
void project_rows(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead, float* out,
                  std::size_t stride) noexcept {
  with_rows<M::kMaxRows>(count, [&](auto n) { Products<M, n>::project(step, rows, ahead, out, stride); });
}

template <class M>
void dot_rows(const WeightStep& step, const Row* const* rows, std::size_t count, std::int64_t* out) noexcept {
  with_rows<M::kMaxRows>(count, [&](auto n) { Products<M, n>::dots(step, rows, out); });
}

template <class M, std::size_t kGroup>
void project_groups(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead, float* out,
                    std::size_t stride) noexcept {
  with_rows<M::kMaxRows>(count,
                         [&](auto n) { Products<M, n>::template project_groups<kGroup>(step, rows, ahead, out, stride); });
}

template <class M>
void project_floats(const WeightStep& step, const Row* const* rows, std::size_t count, const Ahead& ahead, float* out,
                    std::size_t stride) noexcept {
  with_rows<M::kMaxRows>(count, [&](auto n) { Products<M, n>::project_floats(step, rows, ahead, out, stride); });
}

// kGroup 0: a row has a scale.
template <class M, std::size_t kGroup = 0>
constexpr ProjectKernels products_of() {
  if constexpr (kGroup == 0) {
    return {.project = project_rows<M>, .dots = dot_rows<M>, .max_rows = M::kMaxRows};
  } else {
    return {.project = project_groups<M, kGroup>, .dots = nullptr, .max_rows = M::kMaxRows};
  }
}

template <class V, int kRoom>
constexpr FormatKernels kBf16Format{.row_bytes = Rows<V>::floats_bytes,
                                    .quantize = Rows<V>::floats,
                                    .a8 = {project_floats<Bf16<V, kRoom>>, nullptr, kRoom},
                                    .a16 = {project_floats<Bf16<V, kRoom>>, nullptr, kRoom}};

}  // namespace
}  // namespace ktplan
