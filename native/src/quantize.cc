// All projections of an expert on all threads: which table, and who takes which rows.

#include "ktplan/quantize.h"

#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "ktplan/layout.h"

namespace ktplan {

namespace scalar {
extern const QuantizeTable kQuantize;
}
#if defined(__x86_64__)
namespace avx2 {
extern const QuantizeTable kQuantize;
}
namespace avx512 {
extern const QuantizeTable kQuantize;
}
#endif

const QuantizeTable* find_quantize_table(const char* name) {
  struct Entry {
    const char* kernels;
    const QuantizeTable* table;
  };
  static constexpr Entry entries[] = {
#if defined(__x86_64__)
      {"amx-int8", &avx512::kQuantize},    {"avx512-vnni", &avx512::kQuantize}, {"avx-vnni", &avx2::kQuantize},
      {"avx512", &avx512::kQuantize},      {"avx2", &avx2::kQuantize},
#endif
      {"scalar", &scalar::kQuantize},
  };
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.kernels, name) == 0) return entry.table;
  }
  return nullptr;
}

std::size_t quantize_scratch(std::size_t columns) {
  const std::size_t wide = (columns + 63) / 64 * 64, group = 16 * (128 + 16) * sizeof(float);
  const std::size_t row = (kStepRows + 4 + 2 + 1) * wide;  // also 16 rows of bfloat16
  return row > group ? row : group;
}

namespace {

struct Context {
  const QuantizeTable& table;
  const QuantizeRule& rule;
  const QuantizeTask* tasks;
  std::vector<std::size_t> first;  // item where each task begins; one more at the end
  std::unique_ptr<std::atomic<bool>[]> broken;
  std::uint8_t* scratch;
  std::size_t scratch_each;
  std::size_t slots;
  std::unique_ptr<std::atomic<bool>[]> busy;  // who has which piece of scratch

  std::size_t take() noexcept {
    for (std::size_t slot = 0;; slot = (slot + 1) % slots) {
      if (!busy[slot].exchange(true, std::memory_order_acquire)) return slot;
    }
  }
};

void run_item(void* pointer, std::uint32_t item) noexcept {
  auto& context = *static_cast<Context*>(pointer);
  std::size_t task = 0;
  while (context.first[task + 1] <= item) ++task;
  if (context.broken[task].load(std::memory_order_relaxed)) return;
  const std::size_t slot = context.take();
  if (!context.table.step(context.tasks[task], context.rule, item - context.first[task], context.scratch + slot * context.scratch_each)) {
    context.broken[task].store(true, std::memory_order_relaxed);
  }
  context.busy[slot].store(false, std::memory_order_release);
}

}  // namespace

void quantize_all(const QuantizeTable& table, const QuantizeRule& rule, const QuantizeTask* tasks, std::size_t count, bool* finite,
                  Pool& pool) {
  std::size_t widest = 0;
  Context context{table, rule, tasks, {0}, std::make_unique<std::atomic<bool>[]>(count), nullptr, 0, static_cast<std::size_t>(pool.threads()),
                  std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(pool.threads()))};
  for (std::size_t i = 0; i < count; ++i) {
    context.first.push_back(context.first.back() + tasks[i].in.rows / kStepRows);
    if (tasks[i].in.columns > widest) widest = tasks[i].in.columns;
  }
  context.scratch_each = (quantize_scratch(widest) + 4095) / 4096 * 4096;
  Phase phase;
  phase.run = &run_item;
  phase.context = &context;
  phase.items = static_cast<std::uint32_t>(context.first.back());
  {
    const auto turn = pool.lock();
    context.scratch = pool.scratch().take(context.scratch_each * context.slots);
    pool.run(&phase, 1);
  }
  for (std::size_t i = 0; i < count; ++i) finite[i] = !context.broken[i].load();
}

}  // namespace ktplan
