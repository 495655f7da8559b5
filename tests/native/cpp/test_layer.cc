// A whole layer on many threads and groups: the same bits as on one, whatever is asked of it.

#include <thread>

#include "check.h"
#include "ktplan/isa.h"
#include "ktplan/moe.h"
#include "ktplan/placing.h"

using namespace ktplan;
using check::Exactly;

namespace {

constexpr std::size_t kHidden = 256, kInner = 128, kExperts = 5, kChoices = 3;

// Random experts in memory of their own; the layer points into it.
struct Model {
  Layer layer{};
  std::vector<std::unique_ptr<Exactly<std::uint8_t>>> bytes;
  Exactly<float> scale{kHidden};

  Model(const KernelTable* table, const Layout& layout, std::size_t parts, int activation_bits) {
    std::mt19937 random(3);
    for (float& s : scale) s = 0.001f;
    layer.kernels = table;
    layer.layout = layout;
    layer.hidden = kHidden;
    layer.intermediate.assign(parts, kInner);
    layer.experts = kExperts;
    layer.activation_bits = activation_bits;
    layer.numerics = Numerics::kKtplan;
    for (std::size_t i = 0; i < parts * kExperts; ++i) {
      Expert expert;
      for (Projection* projection : {&expert.gate, &expert.up, &expert.down}) {
        bytes.push_back(std::make_unique<Exactly<std::uint8_t>>(layout.packed_bytes(kInner, kHidden), 1));
        for (std::uint8_t& byte : *bytes.back()) byte = static_cast<std::uint8_t>(random());
        projection->bytes = bytes.back()->data();
        projection->scale = scale.data();
      }
      layer.weights.push_back(i % kExperts == 3 ? Expert{} : expert);  // one is absent
    }
  }
};

struct Tokens {
  std::size_t count;
  Exactly<float> hidden, weights, out;
  Exactly<std::uint16_t> half;
  Exactly<std::int64_t> ids;

  explicit Tokens(std::size_t n)
      : count(n), hidden(n * kHidden, 4), weights(n * kChoices, 4), out(n * kHidden, 4), half(n * kHidden, 2), ids(n * kChoices, 8) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < hidden.size(); ++i) {
      hidden[i] = normal(random);
      std::uint32_t bits;
      std::memcpy(&bits, &hidden[i], 4);
      half[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    for (float& w : weights) w = 0.5f;
    for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random() % (kExperts + 2)) - 1;  // -1 and kExperts too
  }

  std::vector<float> run(const Layer& layer, Pool& pool, bool bfloat16 = false) {
    std::fill(out.begin(), out.end(), -1.0f);
    forward(layer, pool,
            Call{.hidden = bfloat16 ? static_cast<const void*>(half.data()) : hidden.data(),
                 .bfloat16 = bfloat16,
                 .ids = ids.data(),
                 .weights = weights.data(),
                 .tokens = count,
                 .choices = kChoices,
                 .out = out.data()});
    return {out.begin(), out.end()};
  }
};

std::vector<Place> places(std::initializer_list<std::size_t> groups) {
  std::vector<Place> all;
  for (const std::size_t group : groups) all.push_back(Place{.group = group, .cpus = {}, .node = -1});
  return all;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!check::same_bits(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

}  // namespace

TEST(threads_groups_and_tables_give_the_same_bits) {
  Pool one(places({0}), 0), two(places({0, 0}), 20), apart(places({0, 1, 1}), 20);
  const KernelTable* const scalar = candidates().back().table;
  for (const Layout& layout : {kInt8Layout, kInt4Layout}) {
    for (const std::size_t parts : {1, 2}) {
      for (const int bits : {8, 16}) {
        const Model reference(scalar, layout, parts, bits);
        for (const std::size_t count : {1, 7, 33}) {
          Tokens tokens(count);
          for (const bool half : {false, true}) {
            const std::vector<float> expected = tokens.run(reference.layer, one, half);
            for (const Candidate& candidate : candidates()) {
              if (!candidate.missing.empty() || (candidate.table == scalar && count > 7)) continue;
              const Model model(candidate.table, layout, parts, bits);
              for (Pool* pool : {&one, &two, &apart}) {
                CHECK_WHERE(same(tokens.run(model.layer, *pool, half), expected), layout.bits, parts, bits, count);
              }
            }
          }
        }
      }
    }
  }
}

TEST(what_is_not_finite_stays_in_its_token) {
  Pool pool(places({0, 0}), 20);
  for (const Candidate& candidate : candidates()) {
    if (!candidate.missing.empty()) continue;
    const Model model(candidate.table, kInt8Layout, 1, 16);
    Tokens tokens(6);
    for (std::int64_t& id : tokens.ids) id = 1;
    const std::vector<float> clean = tokens.run(model.layer, pool);
    tokens.hidden[2 * kHidden + 7] = __builtin_nanf("");
    const std::vector<float> broken = tokens.run(model.layer, pool);
    for (std::size_t i = 0; i < broken.size(); ++i) {
      const bool poisoned = i / kHidden == 2;
      CHECK_WHERE(poisoned ? broken[i] != broken[i] : check::same_bits(broken[i], clean[i]), i);
    }
  }
}

TEST(calls_without_work_give_zeros) {
  Pool pool(places({0, 0}), 20);
  const Model model(candidates().back().table, kInt8Layout, 2, 16);
  Tokens none(0), lost(4);
  CHECK(none.run(model.layer, pool).empty());
  for (std::int64_t& id : lost.ids) id = 3;  // the absent expert
  for (const float value : lost.run(model.layer, pool)) CHECK(value == 0);
}

TEST(layers_may_run_at_once_on_their_own_pools_and_on_a_common_one) {
  Pool mine(places({0, 0}), 20), common(places({0, 1}), 20);
  const KernelTable* best = nullptr;
  for (const Candidate& candidate : candidates()) {
    if (best == nullptr && candidate.missing.empty()) best = candidate.table;
  }
  const Model first(best, kInt8Layout, 1, 16), second(best, kInt4Layout, 2, 8);
  Tokens a(9), b(9);
  const std::vector<float> expected_a = a.run(first.layer, mine), expected_b = b.run(second.layer, mine);
  std::thread other([&] {
    for (int i = 0; i < 40; ++i) CHECK(same(b.run(second.layer, i % 2 == 0 ? common : mine), expected_b));
  });
  for (int i = 0; i < 40; ++i) CHECK(same(a.run(first.layer, i % 3 == 0 ? common : mine), expected_a));
  other.join();
}

TEST(weights_may_be_copied_and_are_read_whole) {
  Pool pool(places({0, 1, 0}), 20);
  for (const std::size_t parts : {1, 2}) {
    Model model(candidates().back().table, kInt8Layout, parts, 8);
    Tokens tokens(5);
    const std::vector<float> expected = tokens.run(model.layer, pool);
    const std::size_t bytes = parts * (kExperts - 1) * 3 * kHidden * kInner;
    CHECK(read_weights(model.layer, pool) == bytes);
    const auto copies = copy_weights(model.layer, pool);
    CHECK(copies.size() == 2);
    for (const auto& array : model.bytes) std::memset(array->data(), 0, array->size());
    CHECK(same(tokens.run(model.layer, pool), expected));
    CHECK(read_weights(model.layer, pool) == bytes);
  }
}
