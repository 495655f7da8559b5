// Weights to packed bytes: every table writes the scalar one's, whatever the alignment, and tells what is not finite.

#include "check.h"
#include "ktplan/isa.h"
#include "ktplan/layout.h"
#include "ktplan/quantize.h"

using namespace ktplan;
using check::Exactly;

namespace {

const std::uint16_t kGrid[] = {1700, 1800, 1900, 2032, 2100};
const std::uint16_t kGrid4[] = {80, 90, 100, 112, 120};

struct Result {
  Exactly<std::uint8_t> packed;
  Exactly<float> scale;
  Exactly<RowError> errors;
  bool finite = false;

  Result(const char* table, const WeightMatrix& in, RowRule rule, int bits)
      : packed((bits == 8 ? kInt8Layout : kInt4Layout).packed_bytes(in.rows, in.columns), 1),
        scale(in.rows, 4),
        errors(in.rows) {
    Pool pool(std::vector<Place>(2), 0);
    const QuantizeTask task{in, packed.data(), scale.data(), errors.data()};
    const QuantizeRule how{rule, bits, bits == 8 ? kGrid : kGrid4, 5};
    quantize_all(*find_quantize_table(table), how, &task, 1, &finite, pool);
  }
};

std::vector<const char*> table_names() {
  std::vector<const char*> found;
  for (const Candidate& candidate : candidates()) {
    if (candidate.missing.empty() && find_quantize_table(candidate.table->name) != nullptr) found.push_back(candidate.table->name);
  }
  return found;
}

}  // namespace

TEST(every_table_writes_the_same_bytes) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  CHECK(!table_names().empty());
  for (const bool bfloat16 : {false, true}) {
    for (const std::size_t rows : {32, 96}) {
      for (const std::size_t columns : {128, 640}) {
        const std::size_t stride = columns + 5, values = (rows - 1) * stride + columns;
        const Exactly<float> wide(values, 4);
        const Exactly<std::uint16_t> narrow(values, 2);
        for (std::size_t i = 0; i < values; ++i) {
          wide[i] = normal(random);
          std::uint32_t bits;
          std::memcpy(&bits, &wide[i], 4);
          narrow[i] = static_cast<std::uint16_t>(bits >> 16);
        }
        for (std::size_t c = 0; c < columns; ++c) (wide[stride + c] = 0), narrow[stride + c] = 0;  // a row of zeros
        const void* data = bfloat16 ? static_cast<const void*>(narrow.data()) : wide.data();
        const WeightMatrix in{.data = data, .bfloat16 = bfloat16, .rows = rows, .columns = columns, .stride = stride};
        for (const RowRule rule : {RowRule::kKt, RowRule::kSearch}) {
          for (const int bits : {8, 4}) {
            const Result expected("scalar", in, rule, bits);
            CHECK(expected.finite && expected.scale[1] == 0);
            for (const char* name : table_names()) {
              const Result ours(name, in, rule, bits);
              CHECK(ours.finite);
              CHECK_WHERE(std::memcmp(ours.packed.data(), expected.packed.data(), ours.packed.size()) == 0, rows, columns, bits);
              CHECK_WHERE(std::memcmp(ours.scale.data(), expected.scale.data(), 4 * rows) == 0, rows, columns, bits);
            }
          }
        }
      }
    }
  }
}

TEST(what_is_not_finite_is_told) {
  for (const float poison : {__builtin_nanf(""), __builtin_inff()}) {
    for (const char* name : table_names()) {
      const Exactly<float> values(64 * 128, 4);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1.0f;
      values[64 * 128 - 1] = poison;
      const WeightMatrix in{.data = values.data(), .bfloat16 = false, .rows = 64, .columns = 128, .stride = 128};
      for (const int bits : {8, 4}) CHECK(!Result(name, in, RowRule::kSearch, bits).finite);
    }
  }
}
