// Where each byte lies, against the closed formula of the format.

#include <algorithm>

#include "check.h"
#include "ktplan/layout.h"

using namespace ktplan;

namespace {

// Byte x of row r: the format's offset, written out with remainders instead of nested blocks.
std::size_t offset(const Layout& layout, std::size_t n, std::size_t k, std::size_t r, std::size_t x) {
  const std::size_t bytes = layout.row_bytes(k);
  const std::size_t block = r / layout.block_rows * layout.block_rows, rows = std::min(layout.block_rows, n - block);
  const std::size_t part = x / layout.block_bytes * layout.block_bytes, wide = std::min(layout.block_bytes, bytes - part);
  return block * bytes + part * rows + (r - block) / 32 * 32 * wide + (x - part) / 64 * 64 * 32 + r % 32 / 16 * 1024 +
         (x - part) % 64 / 4 * 64 + r % 16 * 4 + x % 4;
}

std::size_t offset_by_steps(const Layout& layout, std::size_t n, std::size_t k, std::size_t r, std::size_t x) {
  static const std::vector<std::uint8_t> memory(1 << 22);
  const std::uint8_t* const base = memory.data();
  const std::size_t bytes = layout.row_bytes(k), kb = x / layout.block_bytes, at = x % layout.block_bytes;
  const WeightStep step = step_at(layout, base, nullptr, n, bytes, r / kStepRows);
  const Segment segment = segment_at(step, layout.block_bytes, kb);
  CHECK_WHERE(at < segment.row_bytes, r, x);
  return static_cast<std::size_t>(segment.bytes - base) + at / kStepBytes * 2 * kTileBytes + r % 32 / 16 * kTileBytes +
         at % 64 / 4 * 64 + r % 16 * 4 + x % 4;
}

void compare(const Layout& layout, std::size_t n, std::size_t k) {
  std::vector<bool> seen(layout.packed_bytes(n, k));
  for (std::size_t r = 0; r < n; ++r) {
    for (std::size_t x = 0; x < layout.row_bytes(k); ++x) {
      const std::size_t at = offset(layout, n, k, r, x);
      CHECK_WHERE(at < seen.size() && !seen[at], r, x);
      seen[at] = true;
      CHECK_WHERE(offset_by_steps(layout, n, k, r, x) == at, r, x);
    }
  }
}

}  // namespace

TEST(every_byte_has_a_place_of_its_own) {
  for (const std::size_t n : {32, 64, 96, 128, 160, 288}) {
    compare(kInt8Layout, n, 64);
    compare(kInt8Layout, n, 3584 + 128);
    compare(kInt4Layout, n, 128);
    compare(kInt4Layout, n, 3584 + 256);
    compare(kBf16Layout, n, 32);
    compare(kBf16Layout, n, 1792 + 96);
  }
}

TEST(scales_follow_rows_or_groups) {
  const std::vector<std::uint8_t> packed(96 * 512);
  std::vector<float> rows(96);
  CHECK(step_at(kInt8Layout, packed.data(), rows.data(), 96, 128, 2).scale == rows.data() + 64);
  for (const std::size_t group : {32, 64, 128}) {
    const Layout layout = grouped(group);
    std::vector<std::uint16_t> groups(96 * 512 / group);
    const WeightStep step = step_at(layout, packed.data(), groups.data(), 96, layout.row_bytes(512), 2);
    CHECK_WHERE(step.scale == nullptr && step.group_scale == groups.data() + 64 * 512 / group, group);
  }
  const WeightStep plain = step_at(kBf16Layout, packed.data(), nullptr, 96, 64, 1);
  CHECK(plain.scale == nullptr && plain.group_scale == nullptr);
}
