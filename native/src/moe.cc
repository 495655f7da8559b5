#include "ktplan/moe.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

namespace ktplan {
namespace {

constexpr std::size_t kChunkRows = kMaxBlocks * kBlockRows;  // rows that share one visit of a step's weights
constexpr std::size_t kMaxBlockRows = 16;        // no table takes more rows in a call
constexpr std::size_t kReducePiece = 512;        // columns added at a time where there are several parts
constexpr std::size_t kColumnBytes = 8u << 20;   // results of the down projection kept at a time, about
constexpr std::size_t kBatchBytes = 192u << 20;  // everything kept for the tokens of one batch, about
constexpr std::size_t kLeastCycles = 10000;      // of an item; see Pass::cut
constexpr std::size_t kMostCycles = 1u << 20;
constexpr std::size_t kAloneCycles = 20000;  // for less than that no other thread is woken up
constexpr std::size_t kKeepScratch = 256u << 20;

constexpr std::uint32_t kNoBlock = UINT32_MAX;

// The tokens of one expert in one part: routes[first] .. routes[first + count - 1]. `block`: where the rows go by blocks,
// the first of the expert's.
struct Group {
  std::uint32_t part, expert, first, count, block;
};

// Some of a group's rows times some steps (32 columns each) of its weights.
struct Item {
  std::uint32_t group, step_begin, step_end, row_begin, row_end;
};

struct Range {
  std::uint32_t begin, end;
};

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// `total` in `pieces` ranges of nearly equal size: the i-th.
Range share(std::size_t total, std::size_t pieces, std::size_t i) {
  return {static_cast<std::uint32_t>(total * i / pieces), static_cast<std::uint32_t>(total * (i + 1) / pieces)};
}

// What block b of `pieces` prefetches: its share of the next step. A single block reads each byte once and leaves it to
// the hardware and to the kernel's own short look-ahead.
Ahead ahead(const WeightStep* next, std::size_t pieces, std::size_t b) {
  if (next == nullptr || pieces < 2) return {};
  const Range lines = share(2 * kTileBytes / 64, pieces, b);
  return {next, lines.begin, lines.end};
}

// Items in the order of their home groups, and where each group's end.
struct Items {
  std::vector<Item> all;
  std::vector<std::uint32_t> ends;
  std::size_t cycles = 0;  // what they cost together, about
};

// One forward pass over a batch of tokens.
class Pass {
 public:
  Pass(const Layer& layer, const Call& call, const Pool& pool)
      : layer_(layer),
        call_(call),
        threads_(static_cast<std::size_t>(pool.threads())),
        homes_(pool.groups()),
        format_(layer.kernels->format(layer.layout)),
        kernels_(format_.projections(layer.activation_bits)),
        blocks_(format_.blocks(layer.activation_bits)),
        upstream_(layer.numerics == Numerics::kUpstream) {
    group_routes();
  }

  std::size_t routes() const { return routes_.size(); }
  std::size_t scratch_bytes();
  void place(std::uint8_t* scratch);
  void run(Pool& pool);

 private:
  // What a phase of the down projection covers: columns [begin, end).
  struct Columns {
    Pass* pass;
    std::size_t begin, end;
    Items items;
  };

  void group_routes();
  Items cut(bool down, std::size_t step_begin, std::size_t step_end) const;
  std::size_t step_count(const Group& group, bool down) const;
  std::size_t inputs(const Group& group, bool down) const;

  void quantize_tokens(std::uint32_t item) noexcept;
  void add_bias(const Projection& projection, std::size_t step, float* rows, std::size_t stride,
                std::size_t count) const noexcept;
  void place_token(std::size_t token) noexcept;
  void finish_products(const Group& group, std::size_t step, std::size_t first, std::size_t count, float* gate,
                       float* up) const noexcept;
  void gate_up(const Item& item) noexcept;
  void gate_up_blocks(const Item& item) noexcept;
  void quantize_products(std::uint32_t item) noexcept;
  void down(const Columns& columns, const Item& item) noexcept;
  void down_blocks(const Columns& columns, const Item& item) noexcept;
  void reduce(const Columns& columns, std::uint32_t item) noexcept;

  float* product(std::size_t part, std::size_t route) const {
    return products_[part] + route * layer_.intermediate[part];
  }
  // Where a route's row goes, `stride` bytes a block.
  std::uint8_t* block_at(std::uint8_t* blocks, std::size_t stride, std::size_t route) const {
    return blocks + place_of_[route] / kBlockRows * stride;
  }
  // The rows of an item, for BlockKernels.
  BlockedRows blocked(const Item& item, std::uint8_t* blocks, std::size_t stride, const Row* const* rows) const {
    const std::size_t block = groups_[item.group].block + item.row_begin / kBlockRows;
    return {blocks + block * stride, stride, rows, item.row_end - item.row_begin};
  }
  // Blocks of at most max_rows rows, of nearly equal size.
  std::size_t blocks(std::size_t rows) const { return (rows + kernels_.max_rows - 1) / kernels_.max_rows; }

  const Layer& layer_;
  const Call call_;
  const std::size_t threads_, homes_;
  const FormatKernels& format_;
  const ProjectKernels& kernels_;
  const BlockKernels& blocks_;
  const bool upstream_;

  std::vector<Group> groups_;           // largest first
  std::vector<std::uint32_t> routes_;   // token of each route, by expert
  std::vector<std::int32_t> route_of_;  // [token, choice] -> route, or -1
  std::vector<std::uint32_t> place_of_;  // route -> kBlockRows * block + row in it, or kNoBlock; empty without blocks
  std::size_t block_count_ = 0;
  Items gate_up_items_;
  std::vector<Columns> columns_;
  std::size_t column_width_ = 0, token_pieces_ = 0, route_pieces_ = 0;
  std::size_t token_stride_ = 0;
  std::vector<std::size_t> product_stride_;
  std::size_t token_block_ = 0;  // bytes of a block of tokens
  std::vector<std::size_t> product_block_;

  float* widened_ = nullptr;
  Row* token_rows_ = nullptr;
  std::uint8_t* token_bytes_ = nullptr;
  std::uint8_t* token_blocks_ = nullptr;
  std::vector<std::uint8_t*> product_blocks_;
  std::vector<float*> products_;
  std::vector<Row*> product_rows_;
  std::vector<std::uint8_t*> product_bytes_;
  float* results_ = nullptr;  // [part][route][column_width]
};

// A counting sort of the (token, choice) pairs by expert.
void Pass::group_routes() {
  const std::size_t pairs = call_.tokens * call_.choices;
  std::vector<std::uint32_t> at(layer_.experts + 1, 0);
  const auto valid = [this](std::int64_t id) {
    return id >= 0 && id < static_cast<std::int64_t>(layer_.experts) &&
           layer_.at(0, static_cast<std::size_t>(id)).present();
  };
  for (std::size_t i = 0; i < pairs; ++i) {
    if (valid(call_.ids[i])) ++at[static_cast<std::size_t>(call_.ids[i]) + 1];
  }
  for (std::size_t e = 0; e < layer_.experts; ++e) {
    const std::uint32_t count = at[e + 1];
    at[e + 1] += at[e];
    if (count == 0) continue;
    std::uint32_t block = kNoBlock;
    if (blocks_.take(count)) {
      block = static_cast<std::uint32_t>(block_count_);
      block_count_ += (count + kBlockRows - 1) / kBlockRows;
    }
    for (std::size_t part = 0; part < layer_.intermediate.size(); ++part) {
      groups_.push_back({static_cast<std::uint32_t>(part), static_cast<std::uint32_t>(e), at[e], count, block});
    }
  }
  routes_.resize(at[layer_.experts]);
  route_of_.assign(pairs, -1);
  for (std::size_t i = 0; i < pairs; ++i) {
    if (!valid(call_.ids[i])) continue;
    const std::uint32_t route = at[static_cast<std::size_t>(call_.ids[i])]++;
    routes_[route] = static_cast<std::uint32_t>(i / call_.choices);
    route_of_[i] = static_cast<std::int32_t>(route);
  }
  if (block_count_ != 0) {
    place_of_.assign(routes_.size(), kNoBlock);
    for (const Group& group : groups_) {
      for (std::uint32_t i = 0; group.block != kNoBlock && i < group.count; ++i) {
        place_of_[group.first + i] = static_cast<std::uint32_t>(group.block * kBlockRows) + i;
      }
    }
  }
  std::stable_sort(groups_.begin(), groups_.end(), [](const Group& a, const Group& b) { return a.count > b.count; });
}

std::size_t Pass::inputs(const Group& group, bool down) const {
  return down ? layer_.intermediate[group.part] : layer_.hidden;
}

std::size_t Pass::step_count(const Group& group, bool down) const {
  return (down ? layer_.hidden : layer_.intermediate[group.part]) / kStepRows;
}

// Cuts the groups' work into items of about equal cost, a dozen a thread; more where they would be long, since the last
// one taken is what the others wait for. The cost is in cycles: what a core takes to read the weights (4 bytes a cycle)
// or to multiply (32 columns x 4 inputs in 2 instructions, a level byte at a time; tiles are 8 times as fast). Blocks are
// cut in pairs, which share the reading of weights, and so are steps of down for them.
Items Pass::cut(bool down, std::size_t step_begin, std::size_t step_end) const {
  const std::size_t planes = layer_.activation_bits / 8, matrices = down ? 1 : 2;
  const std::size_t slowness = layer_.layout.bits == 16 ? 2 : 1;  // an instruction takes half as many bfloat16 inputs
  const auto cost = [&](const Group& group, std::size_t rows) {
    const std::size_t k = inputs(group, down);
    const std::size_t speed = group.block == kNoBlock ? 2 : 16;
    return matrices * std::max(layer_.layout.row_bytes(k) * kStepRows / 4, rows * planes * k * slowness / speed) + 200;
  };
  const auto chunks = [](const Group& group) { return (group.count + kChunkRows - 1) / kChunkRows; };
  std::size_t total = 0;
  for (const Group& group : groups_) {
    total += chunks(group) * (std::min(step_end, step_count(group, down)) - step_begin) *
             cost(group, group.count / chunks(group));
  }
  const std::size_t target = std::clamp<std::size_t>(total / (threads_ * 12), kLeastCycles, kMostCycles);
  Items items;
  items.cycles = total;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::size_t pieces = chunks(groups_[g]), end = std::min(step_end, step_count(groups_[g], down));
    const std::size_t steps = std::max<std::size_t>(1, target / cost(groups_[g], groups_[g].count / pieces));
    const std::size_t runs = (end - step_begin + steps - 1) / steps;
    for (std::size_t run = 0; run < runs; ++run) {
      Range range = share(end - step_begin, runs, run);
      if (down && groups_[g].block != kNoBlock) range = {range.begin / 2 * 2, run + 1 < runs ? range.end / 2 * 2 : range.end};
      if (range.begin == range.end) continue;
      for (std::size_t piece = 0; piece < pieces; ++piece) {
        Range rows = share(groups_[g].count, pieces, piece);
        if (groups_[g].block != kNoBlock) {
          constexpr std::uint32_t kPair = 2 * kBlockRows;
          rows = share((groups_[g].count + kPair - 1) / kPair, pieces, piece);
          rows = {rows.begin * kPair, std::min(rows.end * kPair, groups_[g].count)};
        }
        items.all.push_back({static_cast<std::uint32_t>(g), static_cast<std::uint32_t>(step_begin) + range.begin,
                             static_cast<std::uint32_t>(step_begin) + range.end, rows.begin, rows.end});
      }
    }
  }
  const auto home = [this](const Item& item) {
    return home_group(layer_, groups_[item.group].part, groups_[item.group].expert, homes_);
  };
  std::stable_sort(items.all.begin(), items.all.end(),
                   [&](const Item& a, const Item& b) { return home(a) < home(b); });
  items.ends.assign(homes_, 0);
  for (const Item& item : items.all) ++items.ends[home(item)];
  std::partial_sum(items.ends.begin(), items.ends.end(), items.ends.begin());
  return items;
}

// Plans the pass; the sum of what place() hands out.
std::size_t Pass::scratch_bytes() {
  const std::size_t parts = layer_.intermediate.size();
  token_pieces_ = std::min(call_.tokens, threads_ * 4);
  route_pieces_ = std::min(routes(), threads_ * 4);
  // rows at multiples of 4 KB would share the same few cache sets
  token_stride_ = aligned(format_.row_bytes(layer_.hidden, layer_.activation_bits)) + 64;
  std::size_t bytes = aligned(call_.tokens * sizeof(Row)) + call_.tokens * token_stride_;
  if (call_.bfloat16) bytes += aligned(token_pieces_ * layer_.hidden * sizeof(float));
  for (std::size_t part = 0; part < parts; ++part) {
    product_stride_.push_back(aligned(format_.row_bytes(layer_.intermediate[part], layer_.activation_bits)) +
                              64);
    bytes += aligned(routes() * sizeof(Row)) + routes() * product_stride_[part];
    bytes += aligned(routes() * layer_.intermediate[part] * sizeof(float));
    if (block_count_ == 0) continue;
    product_block_.push_back(blocks_.block_bytes(layer_.intermediate[part]) + 64);
    bytes += block_count_ * product_block_[part];
  }
  if (block_count_ != 0) {
    token_block_ = blocks_.block_bytes(layer_.hidden) + 64;
    bytes += block_count_ * token_block_;
  }
  const std::size_t columns = kColumnBytes / (routes() * parts * sizeof(float)) / 128 * 128;
  column_width_ = std::min(layer_.hidden, std::max<std::size_t>(columns, 128));
  return bytes + parts * routes() * column_width_ * sizeof(float);
}

void Pass::place(std::uint8_t* scratch) {
  const std::size_t parts = layer_.intermediate.size();
  const auto take = [&scratch](std::size_t bytes) {
    std::uint8_t* at = scratch;
    scratch += aligned(bytes);
    return at;
  };
  token_rows_ = reinterpret_cast<Row*>(take(call_.tokens * sizeof(Row)));
  token_bytes_ = take(call_.tokens * token_stride_);
  if (call_.bfloat16) widened_ = reinterpret_cast<float*>(take(token_pieces_ * layer_.hidden * sizeof(float)));
  for (std::size_t part = 0; part < parts; ++part) {
    product_rows_.push_back(reinterpret_cast<Row*>(take(routes() * sizeof(Row))));
    product_bytes_.push_back(take(routes() * product_stride_[part]));
    products_.push_back(reinterpret_cast<float*>(take(routes() * layer_.intermediate[part] * sizeof(float))));
    if (block_count_ != 0) product_blocks_.push_back(take(block_count_ * product_block_[part]));
  }
  if (block_count_ != 0) token_blocks_ = take(block_count_ * token_block_);
  results_ = reinterpret_cast<float*>(scratch);
  gate_up_items_ = cut(false, 0, SIZE_MAX);
  for (std::size_t begin = 0; begin < layer_.hidden; begin += column_width_) {
    const std::size_t end = std::min(begin + column_width_, layer_.hidden);
    columns_.push_back({this, begin, end, cut(true, begin / kStepRows, end / kStepRows)});
  }
}

void Pass::quantize_tokens(std::uint32_t item) noexcept {
  const Range range = share(call_.tokens, token_pieces_, item);
  for (std::size_t t = range.begin; t < range.end; ++t) {
    const float* x = static_cast<const float*>(call_.hidden) + t * layer_.hidden;
    if (call_.bfloat16) {
      float* wide = widened_ + item * layer_.hidden;
      layer_.kernels->widen_bf16(static_cast<const std::uint16_t*>(call_.hidden) + t * layer_.hidden, wide,
                                 layer_.hidden);
      x = wide;
    }
    token_rows_[t] = format_.quantize(x, layer_.hidden, layer_.activation_bits, layer_.numerics,
                                              token_bytes_ + t * token_stride_);
    if (block_count_ != 0) place_token(t);
  }
}

// Into the blocks of the experts that it chose.
void Pass::place_token(std::size_t token) noexcept {
  for (std::size_t j = 0; j < call_.choices; ++j) {
    const std::int32_t route = route_of_[token * call_.choices + j];
    if (route < 0 || place_of_[static_cast<std::size_t>(route)] == kNoBlock) continue;
    const auto at = static_cast<std::size_t>(route);
    blocks_.place(token_rows_[token], layer_.hidden, block_at(token_blocks_, token_block_, at), place_of_[at] % kBlockRows);
  }
}

void Pass::add_bias(const Projection& projection, std::size_t step, float* rows, std::size_t stride,
                    std::size_t count) const noexcept {
  if (projection.bias == nullptr) return;
  for (std::size_t r = 0; r < count; ++r) {
    layer_.kernels->add(rows + r * stride, projection.bias + step * kStepRows, kStepRows);
  }
}

// From the results of gate and up for a step's columns of `count` routes to their products; both are overwritten.
void Pass::finish_products(const Group& group, std::size_t step, std::size_t first, std::size_t count, float* gate,
                           float* up) const noexcept {
  const Expert& expert = layer_.at(group.part, group.expert);
  const KernelTable& table = *layer_.kernels;
  const std::size_t values = count * kStepRows;
  add_bias(expert.gate, step, gate, kStepRows, count);
  add_bias(expert.up, step, up, kStepRows, count);
  if (upstream_) {
    table.round_bf16(gate, values);
    table.round_bf16(up, values);
  }
  table.activate(layer_.activation, gate, up, up, values);
  if (upstream_) table.round_bf16(up, values);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(product(group.part, first + i) + step * kStepRows, up + i * kStepRows, kStepRows * sizeof(float));
  }
}

void Pass::gate_up_blocks(const Item& item) noexcept {
  const Group& group = groups_[item.group];
  const Expert& expert = layer_.at(group.part, group.expert);
  const std::size_t n = layer_.intermediate[group.part], row_bytes = layer_.layout.row_bytes(layer_.hidden);
  const std::size_t first = group.first + item.row_begin;
  const Row* pointers[kChunkRows];
  const BlockedRows rows = blocked(item, token_blocks_, token_block_, pointers);
  for (std::size_t i = 0; i < rows.count; ++i) pointers[i] = token_rows_ + routes_[first + i];
  alignas(64) float results[2][kChunkRows * kStepRows];
  float* const out[2] = {results[0], results[1]};
  for (std::size_t step = item.step_begin; step < item.step_end; ++step) {
    const WeightStep both[2] = {step_at(layer_.layout, expert.gate.bytes, expert.gate.scale, n, row_bytes, step),
                                step_at(layer_.layout, expert.up.bytes, expert.up.scale, n, row_bytes, step)};
    blocks_.project(both, 2, rows, out, kStepRows);
    finish_products(group, step, first, rows.count, out[0], out[1]);
  }
}

void Pass::gate_up(const Item& item) noexcept {
  const Group& group = groups_[item.group];
  if (group.block != kNoBlock) return gate_up_blocks(item);
  const Expert& expert = layer_.at(group.part, group.expert);
  const std::size_t n = layer_.intermediate[group.part], row_bytes = layer_.layout.row_bytes(layer_.hidden);
  const std::size_t count = item.row_end - item.row_begin, first = group.first + item.row_begin, pieces = blocks(count);
  const Row* rows[kChunkRows];
  for (std::size_t i = 0; i < count; ++i) rows[i] = token_rows_ + routes_[first + i];
  alignas(64) float gate[kChunkRows * kStepRows];
  alignas(64) float up[kMaxBlockRows * kStepRows];
  for (std::size_t step = item.step_begin; step < item.step_end; ++step) {
    const WeightStep gates = step_at(layer_.layout, expert.gate.bytes, expert.gate.scale, n, row_bytes, step);
    const WeightStep ups = step_at(layer_.layout, expert.up.bytes, expert.up.scale, n, row_bytes, step);
    const WeightStep next = step_at(layer_.layout, expert.gate.bytes, expert.gate.scale, n, row_bytes, step + 1);
    const WeightStep* const after_ups = step + 1 < item.step_end ? &next : nullptr;
    for (std::size_t b = 0; b < pieces; ++b) {
      const Range range = share(count, pieces, b);
      kernels_.project(gates, rows + range.begin, range.end - range.begin, ahead(&ups, pieces, b),
                       gate + range.begin * kStepRows, kStepRows);
    }
    for (std::size_t b = 0; b < pieces; ++b) {
      const Range range = share(count, pieces, b);
      kernels_.project(ups, rows + range.begin, range.end - range.begin, ahead(after_ups, pieces, b), up, kStepRows);
      finish_products(group, step, first + range.begin, range.end - range.begin, gate + range.begin * kStepRows, up);
    }
  }
}

void Pass::quantize_products(std::uint32_t item) noexcept {
  const Range range = share(routes(), route_pieces_, item);
  for (std::size_t part = 0; part < products_.size(); ++part) {
    for (std::size_t route = range.begin; route < range.end; ++route) {
      product_rows_[part][route] =
          format_.quantize(product(part, route), layer_.intermediate[part], layer_.activation_bits,
                                   layer_.numerics, product_bytes_[part] + route * product_stride_[part]);
      if (block_count_ == 0 || place_of_[route] == kNoBlock) continue;
      blocks_.place(product_rows_[part][route], layer_.intermediate[part],
                    block_at(product_blocks_[part], product_block_[part], route), place_of_[route] % kBlockRows);
    }
  }
}

void Pass::down_blocks(const Columns& columns, const Item& item) noexcept {
  const Group& group = groups_[item.group];
  const Expert& expert = layer_.at(group.part, group.expert);
  const std::size_t row_bytes = layer_.layout.row_bytes(layer_.intermediate[group.part]);
  const std::size_t first = group.first + item.row_begin;
  const Row* pointers[kChunkRows];
  const BlockedRows rows = blocked(item, product_blocks_[group.part], product_block_[group.part], pointers);
  for (std::size_t i = 0; i < rows.count; ++i) pointers[i] = product_rows_[group.part] + first + i;
  for (std::size_t step = item.step_begin; step < item.step_end; step += 2) {
    const std::size_t count = std::min<std::size_t>(2, item.step_end - step);
    WeightStep weights[2];
    float* out[2];
    for (std::size_t s = 0; s < count; ++s) {
      weights[s] = step_at(layer_.layout, expert.down.bytes, expert.down.scale, layer_.hidden, row_bytes, step + s);
      out[s] = results_ + (group.part * routes() + first) * column_width_ + (step + s) * kStepRows - columns.begin;
    }
    blocks_.project(weights, count, rows, out, column_width_);
    for (std::size_t s = 0; s < count; ++s) {
      add_bias(expert.down, step + s, out[s], column_width_, rows.count);
      for (std::size_t i = 0; upstream_ && i < rows.count; ++i) {
        layer_.kernels->round_bf16(out[s] + i * column_width_, kStepRows);
      }
    }
  }
}

void Pass::down(const Columns& columns, const Item& item) noexcept {
  const Group& group = groups_[item.group];
  if (group.block != kNoBlock) return down_blocks(columns, item);
  const Expert& expert = layer_.at(group.part, group.expert);
  const std::size_t row_bytes = layer_.layout.row_bytes(layer_.intermediate[group.part]);
  const std::size_t count = item.row_end - item.row_begin, first = group.first + item.row_begin, pieces = blocks(count);
  const Row* rows[kChunkRows];
  for (std::size_t i = 0; i < count; ++i) rows[i] = product_rows_[group.part] + first + i;
  for (std::size_t step = item.step_begin; step < item.step_end; ++step) {
    const WeightStep weights =
        step_at(layer_.layout, expert.down.bytes, expert.down.scale, layer_.hidden, row_bytes, step);
    const WeightStep next =
        step_at(layer_.layout, expert.down.bytes, expert.down.scale, layer_.hidden, row_bytes, step + 1);
    const WeightStep* const after = step + 1 < item.step_end ? &next : nullptr;
    float* out = results_ + (group.part * routes() + first) * column_width_ + step * kStepRows - columns.begin;
    for (std::size_t b = 0; b < pieces; ++b) {
      const Range range = share(count, pieces, b);
      kernels_.project(weights, rows + range.begin, range.end - range.begin, ahead(after, pieces, b),
                       out + range.begin * column_width_, column_width_);
      add_bias(expert.down, step, out + range.begin * column_width_, column_width_, range.end - range.begin);
      for (std::size_t i = range.begin; upstream_ && i < range.end; ++i) {
        layer_.kernels->round_bf16(out + i * column_width_, kStepRows);
      }
    }
  }
}

// Adds the experts' results of each token, in the order of its choices, then the parts.
void Pass::reduce(const Columns& columns, std::uint32_t item) noexcept {
  const Range range = share(call_.tokens, token_pieces_, item);
  const std::size_t parts = products_.size();
  alignas(64) float sum[kReducePiece];
  for (std::size_t t = range.begin; t < range.end; ++t) {
    for (std::size_t c = columns.begin; c < columns.end; c += kReducePiece) {
      const std::size_t n = std::min(kReducePiece, columns.end - c);
      float* out = call_.out + t * layer_.hidden + c;
      for (std::size_t part = 0; part < parts; ++part) {
        float* to = part == 0 ? out : sum;
        std::memset(to, 0, n * sizeof *to);
        for (std::size_t j = 0; j < call_.choices; ++j) {
          const std::int32_t route = route_of_[t * call_.choices + j];
          if (route < 0) continue;
          const float* y =
              results_ + (part * routes() + static_cast<std::size_t>(route)) * column_width_ + (c - columns.begin);
          layer_.kernels->accumulate(to, y, call_.weights[t * call_.choices + j], n);
        }
        if (part != 0) layer_.kernels->add(out, sum, n);
      }
    }
  }
}

void Pass::run(Pool& pool) {
  const std::size_t count = 3 + 2 * columns_.size();
  const auto phases = std::make_unique<Phase[]>(count);
  std::size_t p = 0;
  const auto add = [&](void (*run)(void*, std::uint32_t) noexcept, void* context, std::size_t items,
                       const std::uint32_t* ends = nullptr) {
    phases[p].run = run;
    phases[p].context = context;
    phases[p].items = static_cast<std::uint32_t>(items);
    phases[p].ends = ends;
    ++p;
  };
  add([](void* self, std::uint32_t i) noexcept { static_cast<Pass*>(self)->quantize_tokens(i); }, this, token_pieces_);
  add(
      [](void* self, std::uint32_t i) noexcept {
        auto* pass = static_cast<Pass*>(self);
        pass->gate_up(pass->gate_up_items_.all[i]);
      },
      this, gate_up_items_.all.size(), gate_up_items_.ends.data());
  add([](void* self, std::uint32_t i) noexcept { static_cast<Pass*>(self)->quantize_products(i); }, this,
      route_pieces_);
  for (Columns& columns : columns_) {
    add(
        [](void* at, std::uint32_t i) noexcept {
          const auto* c = static_cast<Columns*>(at);
          c->pass->down(*c, c->items.all[i]);
        },
        &columns, columns.items.all.size(), columns.items.ends.data());
    add(
        [](void* at, std::uint32_t i) noexcept {
          const auto* c = static_cast<Columns*>(at);
          c->pass->reduce(*c, i);
        },
        &columns, token_pieces_);
  }
  pool.run(phases.get(), count, gate_up_items_.cycles < kAloneCycles);
}

// How many tokens to take at a time, so that what is kept for them stays bounded.
std::size_t batch_tokens(const Layer& layer, const Call& call) {
  const BlockKernels& blocks = layer.kernels->format(layer.layout).blocks(layer.activation_bits);
  std::size_t route = 0;
  for (const std::size_t intermediate : layer.intermediate) {
    route += intermediate * sizeof(float) + layer.kernels->format(layer.layout).row_bytes(intermediate, layer.activation_bits) +
             128 * sizeof(float) + 128;
    if (blocks.block_bytes != nullptr) route += blocks.block_bytes(intermediate) / kBlockRows;
  }
  if (blocks.block_bytes != nullptr) route += blocks.block_bytes(layer.hidden) / kBlockRows;
  const std::size_t token = call.choices * route + 2 * layer.hidden + 128;
  return std::max<std::size_t>(64, kBatchBytes / token);
}

}  // namespace

void forward(const Layer& layer, Pool& pool, const Call& call) {
  const std::unique_lock<std::mutex> turn = pool.lock();
  const std::size_t batch = batch_tokens(layer, call);
  const std::size_t batches = (call.tokens + batch - 1) / batch;
  for (std::size_t b = 0; b < batches; ++b) {
    const Range range = share(call.tokens, batches, b);
    Call some = call;
    some.tokens = range.end - range.begin;
    some.hidden = static_cast<const std::uint8_t*>(call.hidden) + range.begin * layer.hidden * (call.bfloat16 ? 2 : 4);
    some.ids += range.begin * call.choices;
    some.weights += range.begin * call.choices;
    some.out += range.begin * layer.hidden;
    Pass pass(layer, some, pool);
    if (pass.routes() == 0) {
      std::memset(some.out, 0, some.tokens * layer.hidden * sizeof(float));
      continue;
    }
    pass.place(pool.scratch().take(pass.scratch_bytes()));
    pass.run(pool);
  }
  pool.scratch().trim(kKeepScratch);
}

std::size_t home_group(const Layer& layer, std::size_t part, std::size_t expert, std::size_t groups) {
  return (layer.intermediate.size() > 1 ? part : expert) % groups;
}

std::vector<WeightPiece> weight_pieces(Layer& layer, std::size_t groups) {
  std::vector<WeightPiece> pieces;
  for (std::size_t part = 0; part < layer.intermediate.size(); ++part) {
    const std::size_t size = layer.layout.packed_bytes(layer.intermediate[part], layer.hidden);
    for (std::size_t e = 0; e < layer.experts; ++e) {
      Expert& expert = layer.weights[part * layer.experts + e];
      if (!expert.present()) continue;
      for (Projection* projection : {&expert.gate, &expert.up, &expert.down}) {
        pieces.push_back({projection, size, home_group(layer, part, e, groups)});
      }
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const WeightPiece& a, const WeightPiece& b) { return a.home < b.home; });
  return pieces;
}

void for_each_piece(const std::vector<WeightPiece>& pieces, Pool& pool, void (*run)(void*, std::uint32_t) noexcept,
                    void* context) {
  std::vector<std::uint32_t> ends(pool.groups(), 0);
  for (const WeightPiece& piece : pieces) ++ends[piece.home];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  const auto phase = std::make_unique<Phase>();
  phase->run = run;
  phase->context = context;
  phase->items = static_cast<std::uint32_t>(pieces.size());
  phase->ends = ends.data();
  const std::unique_lock<std::mutex> turn = pool.lock();
  pool.run(phase.get(), 1);
}

std::size_t read_weights(Layer& layer, Pool& pool) {
  struct Reading {
    const KernelTable* kernels;
    std::vector<WeightPiece> pieces;
    std::atomic<std::uint64_t> all{0};
  } reading{layer.kernels, weight_pieces(layer, pool.groups())};
  for_each_piece(
      reading.pieces, pool,
      [](void* at, std::uint32_t i) noexcept {
        auto* r = static_cast<Reading*>(at);
        r->all.fetch_xor(r->kernels->read(r->pieces[i].projection->bytes, r->pieces[i].bytes), std::memory_order_relaxed);
      },
      &reading);
  std::size_t bytes = 0;
  for (const WeightPiece& piece : reading.pieces) bytes += piece.bytes;
  return bytes;
}

}  // namespace ktplan
