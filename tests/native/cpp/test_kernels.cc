// Every table that runs here against plain arithmetic and against the scalar one, over memory of exactly the right size.

#include <algorithm>

#include "check.h"
#include "ktplan/isa.h"
#include "ktplan/kernels.h"
#include "ktplan/layout.h"

using namespace ktplan;
using check::Exactly;

namespace {

std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> found;
  for (const Candidate& candidate : candidates()) {
    if (candidate.missing.empty()) found.push_back(candidate.table);
  }
  return found;
}

const KernelTable& scalar_table() { return *candidates().back().table; }

// A projection with random bytes, and its levels (int4: times 16) or values.
struct Weights {
  Layout layout;
  std::size_t n, k;
  Exactly<std::uint8_t> bytes;
  Exactly<float> scale;                 // a row
  Exactly<std::uint16_t> group_scale;  // bfloat16

  Weights(const Layout& l, std::size_t rows, std::size_t columns, std::mt19937& random, std::size_t shift)
      : layout(l),
        n(rows),
        k(columns),
        bytes(l.packed_bytes(rows, columns), shift),
        scale(rows, 4),
        group_scale(l.group == 0 ? 0 : rows * columns / l.group, 2) {
    if (layout.bits == 16) {  // small numbers
      for (std::size_t i = 0; i < bytes.size(); i += 2) {
        bytes[i] = static_cast<std::uint8_t>(random());
        bytes[i + 1] = static_cast<std::uint8_t>(0x3c + random() % 3 + (random() % 2 << 7));
      }
    } else {
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    }
    for (float& s : scale) s = 0x1p-7f * static_cast<float>(1 + random() % 200);
    for (std::uint16_t& s : group_scale) s = static_cast<std::uint16_t>(0x3c00 + random() % 128);
  }

  const void* scales() const {
    return layout.bits == 16 ? nullptr : layout.group != 0 ? static_cast<const void*>(group_scale.data()) : scale.data();
  }
  WeightStep step(std::size_t s) const { return step_at(layout, bytes.data(), scales(), n, layout.row_bytes(k), s); }

  // Byte x of row r.
  std::uint8_t byte(std::size_t r, std::size_t x) const {
    const WeightStep s = step(r / kStepRows);
    const Segment segment = segment_at(s, layout.block_bytes, x / layout.block_bytes);
    const std::size_t at = x % layout.block_bytes;
    return segment.bytes[at / 64 * 2048 + r % 32 / 16 * 1024 + at % 64 / 4 * 64 + r % 16 * 4 + x % 4];
  }
  std::int64_t level(std::size_t r, std::size_t c) const {
    if (layout.bits == 8) return static_cast<std::int8_t>(byte(r, c));
    const std::uint8_t both = byte(r, c / 128 * 64 + c % 64);
    return static_cast<std::int8_t>(c % 128 < 64 ? both << 4 : both & 0xf0);
  }
};

struct Rows {
  Exactly<std::uint8_t> bytes;
  std::vector<Row> rows;
  std::vector<const Row*> pointers;

  Rows(const FormatKernels& format, const Exactly<float>& x, std::size_t count, std::size_t k, int bits)
      : bytes(count * format.row_bytes(k, bits)) {
    for (std::size_t r = 0; r < count; ++r) {
      rows.push_back(format.quantize(x.data() + r * k, k, bits, Numerics::kKtplan, bytes.data() + r * format.row_bytes(k, bits)));
    }
    for (const Row& row : rows) pointers.push_back(&row);
  }
};

void fill(const Exactly<float>& x, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
}

const std::vector<std::pair<std::size_t, std::size_t>> kShapes = {{32, 128}, {96, 256}, {160, 3584 + 128}, {64, 7168}};

}  // namespace

TEST(dot_products_are_the_exact_integers) {
  std::mt19937 random(1);
  for (const Layout& layout : {kInt8Layout, kInt4Layout}) {
    for (const auto& [n, k] : kShapes) {
      const Weights weights(layout, n, k, random, 1);
      const std::size_t s = random() % (n / kStepRows);
      for (const KernelTable* table : tables()) {
        const FormatKernels& format = table->format(layout);
        for (const int bits : {8, 16}) {
          const ProjectKernels& kernels = format.projections(bits);
          for (std::size_t count = 1; count <= kernels.max_rows; ++count) {
            const Exactly<float> x(count * k, 4);
            fill(x, random);
            const Rows rows(format, x, count, k, bits);
            const Rows plain(table->int8, x, count, k, bits);
            std::vector<std::int32_t> levels(count * k);
            for (std::size_t r = 0; r < count; ++r) table->levels(plain.rows[r], k, bits, levels.data() + r * k);
            const Exactly<std::int64_t> out(count * kStepRows);
            kernels.dots(weights.step(s), rows.pointers.data(), count, out.data());
            for (std::size_t r = 0; r < count; r += std::max<std::size_t>(1, count - 1)) {
              for (std::size_t c = 0; c < kStepRows; c += 5) {
                std::int64_t exact = 0;
                for (std::size_t i = 0; i < k; ++i) exact += levels[r * k + i] * weights.level(s * kStepRows + c, i);
                CHECK_WHERE(out[r * kStepRows + c] == exact, n, k, bits, count, r, c);
              }
            }
          }
        }
      }
    }
  }
}

TEST(projections_are_the_same_bits_as_the_scalar_ones_and_stay_inside_their_memory) {
  std::mt19937 random(2);
  for (const Layout& layout : {kInt8Layout, kInt4Layout, grouped(32), grouped(64), grouped(128), grouped(32, true), grouped(64, true),
                               grouped(128, true)}) {
    for (const auto& [n, k] : kShapes) {
      const Weights weights(layout, n, k, random, random() % 2 * 3);
      const std::size_t s = random() % (n / kStepRows), stride = kStepRows + 16 * (random() % 2);
      for (const int bits : {8, 16}) {
        for (const KernelTable* table : tables()) {
          const FormatKernels& format = table->format(layout);
          const ProjectKernels& kernels = format.projections(bits);
          for (std::size_t count = 1; count <= kernels.max_rows; ++count) {
            const Exactly<float> x(count * k, 4);
            fill(x, random);
            if (count == 2) x[k] = __builtin_inff();
            const Rows rows(format, x, count, k, bits);
            const Exactly<float> out((count - 1) * stride + kStepRows, 4);
            const WeightStep next = weights.step(s);
            kernels.project(weights.step(s), rows.pointers.data(), count, Ahead{&next, 3, 17}, out.data(), stride);
            const FormatKernels& plain = scalar_table().format(layout);
            const Rows again(plain, x, count, k, bits);
            for (std::size_t r = 0; r < count; ++r) {
              float expected[kStepRows];
              plain.projections(bits).project(weights.step(s), &again.pointers[r], 1, Ahead{}, expected, kStepRows);
              for (std::size_t c = 0; c < kStepRows; ++c) {
                CHECK_WHERE(check::same_bits(out[r * stride + c], expected[c]), n, k, bits, count, r, c);
                CHECK_WHERE((count == 2 && r == 1) == (expected[c] != expected[c]), count, r, c);
              }
            }
          }
        }
      }
    }
  }
}

TEST(bfloat16_weights_give_the_products_of_their_values) {
  std::mt19937 random(3);
  for (const auto& [n, k] : kShapes) {
    const Weights weights(kBf16Layout, n, k, random, 2);
    const std::size_t s = random() % (n / kStepRows);
    for (const KernelTable* table : tables()) {
      const FormatKernels& format = table->format(kBf16Layout);
      for (const int bits : {8, 16}) {
        const ProjectKernels& kernels = format.projections(bits);
        for (std::size_t count = 1; count <= kernels.max_rows; ++count) {
          const Exactly<float> x(count * k, 4);
          fill(x, random);
          const Rows rows(format, x, count, k, bits);
          const Exactly<float> out(count * kStepRows, 4);
          kernels.project(weights.step(s), rows.pointers.data(), count, Ahead{}, out.data(), kStepRows);
          for (std::size_t c = 0; c < kStepRows; c += 7) {
            double exact = 0, size = 0;
            for (std::size_t i = 0; i < k; ++i) {
              const std::uint32_t word = (weights.byte(s * 32 + c, 2 * i) | weights.byte(s * 32 + c, 2 * i + 1) << 8) << 16;
              float w;
              std::memcpy(&w, &word, sizeof w);
              exact += double{w} * x[(count - 1) * k + i];
              size += std::abs(double{w} * x[(count - 1) * k + i]);
            }
            const double error = std::abs(out[(count - 1) * kStepRows + c] - exact) / size;
            CHECK_WHERE(error < (bits == 8 ? 4e-3 : 3e-5), n, k, bits, count, c);
          }
        }
      }
    }
  }
}

TEST(levels_are_the_same_on_every_table) {
  std::mt19937 random(4);
  for (const std::size_t k : {128, 384, 3712}) {
    const Exactly<float> x(k, 4);
    for (int kind = 0; kind < 6; ++kind) {
      fill(x, random);
      if (kind == 1) x[k - 1] = __builtin_nanf("");
      if (kind == 2) x[0] = -__builtin_inff();
      if (kind == 3) std::fill(x.begin(), x.end(), -0.0f);
      if (kind == 4) std::fill(x.begin(), x.end(), 1e-40f);
      if (kind == 5) x[k / 2] = 3e38f;
      for (const int bits : {8, 16}) {
        std::vector<std::int32_t> first(k), other(k);
        const Rows expected(scalar_table().int8, x, 1, k, bits);
        scalar_table().levels(expected.rows[0], k, bits, first.data());
        for (const KernelTable* table : tables()) {
          const Rows rows(table->int8, x, 1, k, bits);
          table->levels(rows.rows[0], k, bits, other.data());
          CHECK_WHERE(check::same_bits(rows.rows[0].scale, expected.rows[0].scale), k, kind, bits);
          CHECK_WHERE(first == other, k, kind, bits);
        }
      }
    }
  }
}

TEST(steps_between_the_projections_are_the_same_bits) {
  std::mt19937 random(5);
  for (const std::size_t n : {16, 48, 512}) {
    const Exactly<float> gate(n, 4), up(n, 4);
    for (std::size_t i = 0; i < n; ++i) {
      const auto a = static_cast<std::uint32_t>(random()), b = static_cast<std::uint32_t>(random());
      std::memcpy(&gate[i], &a, 4);
      std::memcpy(&up[i], &b, 4);
    }
    for (const KernelTable* table : tables()) {
      for (const auto kind : {Activation::Kind::kSilu, Activation::Kind::kGelu, Activation::Kind::kGeluTanh, Activation::Kind::kSwigluOai}) {
        Activation activation{.kind = kind};
        if (kind == Activation::Kind::kSwigluOai) activation.limit = 7.0f;
        const Exactly<float> ours(n, 4), theirs(n, 4);
        table->activate(activation, gate.data(), up.data(), ours.data(), n);
        scalar_table().activate(activation, gate.data(), up.data(), theirs.data(), n);
        for (std::size_t i = 0; i < n; ++i) CHECK_WHERE(check::same_bits(ours[i], theirs[i]), n, i, kind);
      }
      const Exactly<float> a(n, 4), b(n, 4);
      std::copy(gate.begin(), gate.end(), a.begin());
      std::copy(gate.begin(), gate.end(), b.begin());
      table->round_bf16(a.data(), n);
      scalar_table().round_bf16(b.data(), n);
      for (std::size_t i = 0; i < n; ++i) CHECK_WHERE(check::same_bits(a[i], b[i]), n, i);
      table->accumulate(a.data(), up.data(), 0.75f, n);
      scalar_table().accumulate(b.data(), up.data(), 0.75f, n);
      table->add(a.data(), gate.data(), n);
      scalar_table().add(b.data(), gate.data(), n);
      for (std::size_t i = 0; i < n; ++i) CHECK_WHERE(check::same_bits(a[i], b[i]), n, i);
      const Exactly<std::uint16_t> halves(n, 2);
      for (std::uint16_t& half : halves) half = static_cast<std::uint16_t>(random());
      table->widen_bf16(halves.data(), a.data(), n);
      scalar_table().widen_bf16(halves.data(), b.data(), n);
      for (std::size_t i = 0; i < n; ++i) CHECK_WHERE(check::same_bits(a[i], b[i]), n, i);
    }
  }
}

TEST(reading_touches_every_byte_and_none_beyond) {
  std::mt19937 random(6);
  for (const std::size_t n : {8, 64, 200, 4096 + 72}) {
    const Exactly<std::uint8_t> bytes(n, 8);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    std::uint64_t expected = 0;
    for (std::size_t i = 0; i < n; i += 8) {
      std::uint64_t word;
      std::memcpy(&word, bytes.data() + i, 8);
      expected ^= word;
    }
    for (const KernelTable* table : tables()) CHECK_WHERE(table->read(bytes.data(), n) == expected, n);
  }
}
