// ktplan._native: the kernels for Python. Arrays come in through DLPack or the buffer protocol and are not copied;
// every argument is checked here, and nothing below throws.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>

#include "ktplan/isa.h"
#include "ktplan/limits.h"
#include "ktplan/moe.h"
#include "ktplan/placing.h"
#include "ktplan/quantize.h"
#include "ktplan/threads.h"

namespace nb = nanobind;
using nb::dlpack::dtype_code;

namespace ktplan {
namespace {

using Array = nb::ndarray<nb::ro>;
using WritableArray = nb::ndarray<>;

std::string kind_of(nb::handle h) { return nb::cast<std::string>(nb::handle(h.type()).attr("__name__")); }

std::string words(nb::dlpack::dtype t) {
  const char* kind = t.code == static_cast<std::uint8_t>(dtype_code::Float)    ? "float"
                     : t.code == static_cast<std::uint8_t>(dtype_code::Bfloat) ? "bfloat"
                     : t.code == static_cast<std::uint8_t>(dtype_code::Int)    ? "int"
                     : t.code == static_cast<std::uint8_t>(dtype_code::UInt)   ? "uint"
                                                                               : "type of bits: ";
  return kind + std::to_string(t.bits);
}

bool is_type(nb::dlpack::dtype t, dtype_code code, int bits) {
  return t.code == static_cast<std::uint8_t>(code) && t.bits == bits && t.lanes == 1;
}

template <typename Any>
std::string shape_of(const Any& array) {
  std::string out = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i) out += (i ? ", " : "") + std::to_string(array.shape(i));
  return out + "]";
}

[[noreturn]] void wrong(const std::string& name, const std::string& expected, const std::string& got) {
  throw nb::value_error((name + ": expected " + expected + ", got " + got).c_str());
}

// An array in C order on the CPU, of any type and shape; `name` is for the message.
template <typename Any>
Any array_from(nb::handle h, const std::string& name) {
  Any array;
  if (!nb::try_cast<Any>(h, array)) {
    const std::string message =
        name + ": expected an array (numpy, or one with __dlpack__ such as a torch tensor without gradient), got " +
        kind_of(h) + (std::is_same_v<Any, WritableArray> ? " or a read-only array" : "");
    throw nb::type_error(message.c_str());
  }
  if (array.device_type() != nb::device::cpu::value) wrong(name, "an array in CPU memory", "one on another device");
  std::int64_t stride = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != stride && array.size() != 0)
      wrong(name, "an array in C order (contiguous)", "one with gaps or another order");
    stride *= static_cast<std::int64_t>(array.shape(i));
  }
  const std::size_t unit = std::max<std::size_t>(1, array.itemsize());
  if (array.size() != 0 && reinterpret_cast<std::uintptr_t>(array.data()) % unit != 0) {
    wrong(name, "an array that begins at a multiple of " + std::to_string(unit) + " bytes", "one that begins in between");
  }
  return array;
}

template <typename Any>
void check(const Any& array, const std::string& name, dtype_code code, int bits,
           std::initializer_list<std::size_t> shape) {
  std::string want = "[";
  bool same = array.ndim() == shape.size();
  std::size_t i = 0;
  for (const std::size_t size : shape) {
    want += (i ? ", " : "") + std::to_string(size);
    same = same && array.shape(i) == size;
    ++i;
  }
  const nb::dlpack::dtype type{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  if (array.dtype() != type) wrong(name, words(type), words(array.dtype()));
  if (!same) wrong(name, "shape " + want + "]", shape_of(array));
}

const KernelTable& table_named(const std::string& isa) {
  const Candidate candidate = find_candidate(isa);
  if (candidate.table == nullptr) wrong("isa", "the name of a set of kernels in this build", "'" + isa + "'");
  if (!candidate.missing.empty())
    throw nb::value_error(("isa: " + isa + " cannot run here: " + candidate.missing).c_str());
  return *candidate.table;
}

Numerics numerics_named(const std::string& name) {
  if (name == "ktplan") return Numerics::kKtplan;
  if (name == "upstream") return Numerics::kUpstream;
  wrong("numerics", "'ktplan' or 'upstream'", "'" + name + "'");
}

// `group`: inputs that share a scale, 0 where a row does (and for bfloat16, which has none).
Layout layout_for(std::size_t bits, std::size_t group) {
  if (group != 0 && (bits != 4 || (group != 32 && group != 64 && group != 128))) {
    wrong("group", bits == 4 ? "0, 32, 64 or 128" : "0 with " + std::to_string(bits) + " bits", std::to_string(group));
  }
  if (bits == 8) return kInt8Layout;
  if (bits == 4) return group == 0 ? kInt4Layout : grouped(group);
  if (bits == 16) return kBf16Layout;
  wrong("bits", "16, 8 or 4", std::to_string(bits));
}

Activation activation_named(const std::string& name, float alpha, float limit) {
  Activation activation;
  using Kind = Activation::Kind;
  if (name == "silu") activation.kind = Kind::kSilu;
  else if (name == "gelu") activation.kind = Kind::kGelu;
  else if (name == "gelu-tanh") activation.kind = Kind::kGeluTanh;
  else if (name == "swiglu-oai") activation.kind = Kind::kSwigluOai;
  else wrong("activation", "'silu', 'gelu', 'gelu-tanh' or 'swiglu-oai'", "'" + name + "'");
  if (!(limit > 0.0f)) wrong("limit", "a number above 0", std::to_string(limit));
  activation.alpha = alpha;
  activation.limit = limit;
  return activation;
}

int checked_activation_bits(int bits) {
  if (bits != 8 && bits != 16) wrong("activation_bits", "8 or 16", std::to_string(bits));
  return bits;
}

// A forward pass with its arguments checked and kept alive.
struct PreparedCall {
  Array hidden, ids, weights;
  WritableArray out;
  Call call;
};

class LayerHandle {
 public:
  LayerHandle(const nb::list& parts, std::size_t hidden, std::size_t bits, std::size_t group,
              std::shared_ptr<Pool> pool, const std::string& isa, int activation_bits, const std::string& numerics,
              const std::string& activation, float alpha, float limit)
      : pool_(std::move(pool)) {
    layer_.kernels = &table_named(isa);
    layer_.layout = layout_for(bits, group);
    layer_.activation = activation_named(activation, alpha, limit);
    layer_.hidden = hidden;
    layer_.activation_bits = checked_activation_bits(activation_bits);
    layer_.numerics = numerics_named(numerics);
    if (layer_.numerics == Numerics::kUpstream && activation_bits != 8)
      wrong("activation_bits", "8 with numerics 'upstream'", "16");
    if (layer_.kernels->format(layer_.layout).projections(activation_bits).project == nullptr)
      wrong("isa", "kernels for weights of this format", isa + ", which has none");
    check_width("hidden", hidden);
    if (parts.size() == 0) wrong("parts", "at least one part", "none");
    for (std::size_t p = 0; p < parts.size(); ++p) add_part(nb::cast<nb::list>(parts[p]), p);
  }

  LayerHandle(const LayerHandle&) = delete;  // vectors of owners claim to be copyable
  LayerHandle& operator=(const LayerHandle&) = delete;

  PreparedCall prepare(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out) const {
    PreparedCall p{array_from<Array>(hidden, "hidden"),
                   array_from<Array>(ids, "top_k_index"),
                   array_from<Array>(weights, "top_k_weights"),
                   array_from<WritableArray>(out, "out"),
                   {}};
    const nb::dlpack::dtype type = p.hidden.dtype();
    const bool bfloat16 = is_type(type, dtype_code::Bfloat, 16) || is_type(type, dtype_code::UInt, 16);
    if (!bfloat16 && !is_type(type, dtype_code::Float, 32)) {
      wrong("hidden", "float32 or bfloat16 (uint16 in numpy)", words(type));
    }
    if (p.hidden.ndim() != 2 || p.hidden.shape(1) != layer_.hidden) {
      wrong("hidden", "shape [tokens, " + std::to_string(layer_.hidden) + "]", shape_of(p.hidden));
    }
    const std::size_t tokens = p.hidden.shape(0);
    if (p.ids.ndim() != 2) wrong("top_k_index", "shape [tokens, choices]", shape_of(p.ids));
    const std::size_t choices = p.ids.shape(1);
    check(p.ids, "top_k_index", dtype_code::Int, 64, {tokens, choices});
    check(p.weights, "top_k_weights", dtype_code::Float, 32, {tokens, choices});
    check(p.out, "out", dtype_code::Float, 32, {tokens, layer_.hidden});
    if (tokens * choices >= (std::size_t{1} << 31)) wrong("top_k_index", "fewer than 2^31 entries", shape_of(p.ids));
    p.call = Call{.hidden = p.hidden.data(),
                  .bfloat16 = bfloat16,
                  .ids = static_cast<const std::int64_t*>(p.ids.data()),
                  .weights = static_cast<const float*>(p.weights.data()),
                  .tokens = tokens,
                  .choices = choices,
                  .out = static_cast<float*>(p.out.data())};
    return p;
  }

  void run(nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out) const {
    const PreparedCall prepared = prepare(hidden, ids, weights, out);
    const nb::gil_scoped_release unlocked;
    forward(layer_, *pool_, prepared.call);
  }

  std::size_t read() {
    const nb::gil_scoped_release unlocked;
    return read_weights(layer_, *pool_);
  }

  // Moves the weights to the nodes of the threads that use them; the errno of a failure.
  int move() {
    const nb::gil_scoped_release unlocked;
    return move_weights(layer_, *pool_);
  }

  // Goes on with copies there; returns their bytes.
  std::size_t copy() {
    {
      const nb::gil_scoped_release unlocked;
      auto copies = copy_weights(layer_, *pool_);
      copies_.swap(copies);
    }
    std::size_t bytes = 0;
    for (const auto& memory : copies_) bytes += memory->bytes();
    return bytes;
  }

  std::pair<std::map<int, std::size_t>, int> nodes() {
    std::map<int, std::size_t> found;
    const int error = weight_nodes(layer_, found);
    return {found, error};
  }

  const Layer& layer() const { return layer_; }
  Pool& pool() const { return *pool_; }
  std::string isa() const { return layer_.kernels->name; }

 private:
  void check_width(const std::string& name, std::size_t k) const {
    const std::size_t multiple = layer_.layout.k_multiple;
    if (k == 0 || k % multiple != 0) wrong(name, "a multiple of " + std::to_string(multiple), std::to_string(k));
    if (k > kMaxInputs) wrong(name, "at most " + std::to_string(kMaxInputs), std::to_string(k));
  }

  void add_part(const nb::list& experts, std::size_t p) {
    if (p == 0) layer_.experts = experts.size();
    if (experts.size() != layer_.experts) {
      wrong("parts[" + std::to_string(p) + "]", std::to_string(layer_.experts) + " experts",
            std::to_string(experts.size()));
    }
    layer_.intermediate.push_back(0);
    for (std::size_t e = 0; e < experts.size(); ++e) add_expert(experts[e], p, e);
    if (layer_.intermediate[p] == 0)
      layer_.intermediate[p] = layer_.layout.k_multiple;  // no expert here: any width does
  }

  void add_expert(nb::handle packed, std::size_t p, std::size_t e) {
    Expert expert;
    if (!packed.is_none()) {
      const std::string where = "parts[" + std::to_string(p) + "][" + std::to_string(e) + "].";
      const auto nine = nb::cast<nb::tuple>(packed);
      if (nine.size() != 9) wrong(where, "nine arrays or None", std::to_string(nine.size()));
      std::size_t& intermediate = layer_.intermediate[p];
      if (intermediate == 0) {
        intermediate = array_from<Array>(nine[0], where + "gate").size() / layer_.layout.row_bytes(layer_.hidden);
        check_width(where + "gate: the intermediate width", intermediate);
      }
      expert.gate = projection(nine[0], nine[1], nine[6], where + "gate", intermediate, layer_.hidden);
      expert.up = projection(nine[2], nine[3], nine[7], where + "up", intermediate, layer_.hidden);
      expert.down = projection(nine[4], nine[5], nine[8], where + "down", layer_.hidden, intermediate);
    }
    if (p != 0 && expert.present() != layer_.at(0, e).present()) {
      wrong("parts[" + std::to_string(p) + "][" + std::to_string(e) + "]", "an expert in every part or in none",
            "one in some");
    }
    layer_.weights.push_back(expert);
  }

  Projection projection(nb::handle bytes, nb::handle scale, nb::handle bias, const std::string& name, std::size_t n,
                        std::size_t k) {
    const Layout& layout = layer_.layout;
    Array packed = array_from<Array>(bytes, name);
    if (packed.dtype().bits != 8) wrong(name, "int8 or uint8", words(packed.dtype()));
    if (packed.ndim() != 1 || packed.size() != layout.packed_bytes(n, k)) {
      wrong(name,
            "shape [" + std::to_string(layout.packed_bytes(n, k)) + "] (" + std::to_string(n) + " rows of " +
                std::to_string(k) + " inputs)",
            shape_of(packed));
    }
    Projection p{static_cast<const std::uint8_t*>(packed.data()), nullptr, nullptr};
    kept_.push_back(std::move(packed));
    if (layout.bits != 16) {
      Array scales = array_from<Array>(scale, name + "_scale");
      if (layout.group == 0) {
        check(scales, name + "_scale", dtype_code::Float, 32, {n});
      } else {
        check(scales, name + "_scale", dtype_code::UInt, 16, {n / kStepRows, k / layout.group, kStepRows});
      }
      p.scale = scales.data();
      kept_.push_back(std::move(scales));
    } else if (!scale.is_none()) {
      wrong(name + "_scale", "None with bfloat16 weights", kind_of(scale));
    }
    if (!bias.is_none()) {
      Array biases = array_from<Array>(bias, name + "_bias");
      check(biases, name + "_bias", dtype_code::Float, 32, {n});
      p.bias = static_cast<const float*>(biases.data());
      kept_.push_back(std::move(biases));
    }
    return p;
  }

  Layer layer_{};
  std::shared_ptr<Pool> pool_;
  std::vector<Array> kept_;
  std::vector<std::unique_ptr<NodeMemory>> copies_;
};

// A forward pass that runs on the pool's own threads. It keeps its arrays and its layer until it is done.
class Job {
 public:
  Job(nb::object layer, PreparedCall prepared) : layer_(std::move(layer)), prepared_(std::move(prepared)) {
    const auto& handle = nb::cast<const LayerHandle&>(layer_);
    handle.pool().submit([this, &handle] {
      try {
        forward(handle.layer(), handle.pool(), prepared_.call);
      } catch (...) {
        error_ = std::current_exception();
      }
      done_.store(1, std::memory_order_release);
      done_.notify_all();
    });
  }

  ~Job() {
    if (process_ != getpid()) return;  // the thread that would finish it stayed with the parent of fork()
    const nb::gil_scoped_release unlocked;
    await();
  }

  void wait() {
    if (process_ != getpid()) throw std::runtime_error("this work was submitted before fork(), in another process");
    {
      const nb::gil_scoped_release unlocked;
      await();
    }
    if (error_) std::rethrow_exception(error_);
  }

  bool done() const { return done_.load(std::memory_order_acquire) != 0; }

 private:
  void await() const { done_.wait(0, std::memory_order_acquire); }

  nb::object layer_;
  PreparedCall prepared_;
  std::exception_ptr error_;
  std::atomic<int> done_{0};
  const pid_t process_ = getpid();
};

// --- For tests: single steps of one set of kernels ---

template <typename T>
nb::ndarray<nb::numpy, T> new_array(std::vector<T>&& values, std::vector<std::size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape.size(), shape.data(), owner);
}

Array float_matrix(nb::handle h, const char* name, std::size_t multiple) {
  Array x = array_from<Array>(h, name);
  if (x.ndim() != 2 || x.shape(1) % multiple != 0)
    wrong(name, "shape [rows, a multiple of " + std::to_string(multiple) + "]", shape_of(x));
  check(x, name, dtype_code::Float, 32, {x.shape(0), x.shape(1)});
  return x;
}

struct QuantizedRows {
  std::vector<std::uint8_t> bytes;
  std::vector<Row> rows;
};

QuantizedRows quantized(const FormatKernels& format, const Array& x, int bits, Numerics numerics) {
  const std::size_t k = x.shape(1), stride = format.row_bytes(k, bits);
  QuantizedRows out{std::vector<std::uint8_t>(stride * x.shape(0)), {}};
  for (std::size_t r = 0; r < x.shape(0); ++r) {
    out.rows.push_back(
        format.quantize(static_cast<const float*>(x.data()) + r * k, k, bits, numerics, out.bytes.data() + r * stride));
  }
  return out;
}

nb::tuple quantize(const std::string& isa, nb::handle array, int bits, const std::string& numerics) {
  const KernelTable& table = table_named(isa);
  const Array x = float_matrix(array, "x", 64);
  const QuantizedRows q = quantized(table.int8, x, checked_activation_bits(bits), numerics_named(numerics));
  std::vector<std::int32_t> levels(x.shape(0) * x.shape(1));
  std::vector<float> scales;
  for (std::size_t r = 0; r < q.rows.size(); ++r) {
    table.levels(q.rows[r], x.shape(1), bits, levels.data() + r * x.shape(1));
    scales.push_back(q.rows[r].scale);
  }
  return nb::make_tuple(new_array(std::move(levels), {x.shape(0), x.shape(1)}),
                        new_array(std::move(scales), {x.shape(0)}));
}

// Some quantized rows and a step of weights, multiplied as a layer would that has all these rows for one expert.
struct RowsTimesStep {
  const ProjectKernels& kernels;
  const BlockKernels* blocks;  // null: row by row
  const WeightStep& weights;
  const BlockedRows& rows;
  std::size_t first, step;  // row, step

  void dots(std::int64_t* out) const {
    if (blocks != nullptr) blocks->dots(weights, rows, out);
    else kernels.dots(weights, rows.rows, rows.count, out);
  }
  void project(float* out, std::size_t stride) const {
    if (blocks != nullptr) blocks->project(&weights, 1, rows, &out, stride);
    else kernels.project(weights, rows.rows, rows.count, Ahead{}, out, stride);
  }
};

// Quantized rows of x times a packed projection of n columns, some rows and a step's columns at a time.
template <typename Use>
void each_product(const KernelTable& table, const Layout& layout, const Array& x, const Array& packed, const void* scale,
                  std::size_t n, int activation_bits, Use use) {
  const std::size_t k = x.shape(1);
  if (n % kStepRows != 0) wrong("n", "a multiple of 32", std::to_string(n));
  if (packed.size() != layout.packed_bytes(n, k) || packed.dtype().bits != 8) {
    wrong("packed", std::to_string(layout.packed_bytes(n, k)) + " bytes",
          shape_of(packed) + " of " + words(packed.dtype()));
  }
  const FormatKernels& format = table.format(layout);
  const QuantizedRows q = quantized(format, x, checked_activation_bits(activation_bits), Numerics::kKtplan);
  const ProjectKernels& kernels = format.projections(activation_bits);
  const BlockKernels& blocks = format.blocks(activation_bits);
  const bool in_blocks = blocks.take(q.rows.size());
  const std::size_t most = in_blocks ? kMaxBlocks * kBlockRows : kernels.max_rows;
  std::vector<std::uint8_t> memory(in_blocks ? kMaxBlocks * blocks.block_bytes(k) + 64 : 0);
  for (std::size_t first = 0; first < q.rows.size(); first += most) {
    std::vector<const Row*> pointers;
    for (std::size_t r = first; r < std::min(first + most, q.rows.size()); ++r) pointers.push_back(&q.rows[r]);
    BlockedRows rows{nullptr, 0, pointers.data(), pointers.size()};
    if (in_blocks) {
      auto* begin = reinterpret_cast<std::uint8_t*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
      rows.blocks = begin;
      rows.block_bytes = blocks.block_bytes(k);
      for (std::size_t r = 0; r < rows.count; ++r) {
        blocks.place(*pointers[r], k, begin + r / kBlockRows * rows.block_bytes, r % kBlockRows);
      }
    }
    for (std::size_t step = 0; step < n / kStepRows; ++step) {
      const WeightStep weights =
          step_at(layout, static_cast<const std::uint8_t*>(packed.data()), scale, n, layout.row_bytes(k), step);
      use(RowsTimesStep{kernels, in_blocks ? &blocks : nullptr, weights, rows, first, step});
    }
  }
}

// The exact integer products of the quantized rows of x with all n columns of a packed projection.
nb::ndarray<nb::numpy, std::int64_t> dots(const std::string& isa, nb::handle array, nb::handle packed_array,
                                          std::size_t n, std::size_t bits, int activation_bits) {
  if (bits == 16) wrong("bits", "8 or 4", "16");
  const Layout layout = layout_for(bits, 0);
  const Array x = float_matrix(array, "x", layout.k_multiple);
  const Array packed = array_from<Array>(packed_array, "packed");
  const std::vector<float> scale(n, 1.0f);
  std::vector<std::int64_t> out(x.shape(0) * n);
  each_product(table_named(isa), layout, x, packed, scale.data(), n, activation_bits, [&](const RowsTimesStep& product) {
    std::vector<std::int64_t> some(product.rows.count * kStepRows);
    product.dots(some.data());
    for (std::size_t r = 0; r < product.rows.count; ++r) {
      std::copy_n(some.data() + r * kStepRows, kStepRows, out.data() + (product.first + r) * n + product.step * kStepRows);
    }
  });
  return new_array(std::move(out), {x.shape(0), n});
}

// x times a packed projection of n columns, as the layer computes it.
nb::ndarray<nb::numpy, float> project(const std::string& isa, nb::handle array, nb::handle packed_array,
                                      nb::handle scale_array, std::size_t n, std::size_t bits, std::size_t group,
                                      int activation_bits) {
  const Layout layout = layout_for(bits, group);
  const Array x = float_matrix(array, "x", layout.k_multiple);
  const Array packed = array_from<Array>(packed_array, "packed");
  Array scale;
  if (bits != 16) {
    scale = array_from<Array>(scale_array, "scale");
    if (group == 0) check(scale, "scale", dtype_code::Float, 32, {n});
    else check(scale, "scale", dtype_code::UInt, 16, {n / kStepRows, x.shape(1) / group, kStepRows});
  }
  std::vector<float> out(x.shape(0) * n);
  each_product(table_named(isa), layout, x, packed, bits == 16 ? nullptr : scale.data(), n, activation_bits,
               [&](const RowsTimesStep& product) {
                 product.project(out.data() + product.first * n + product.step * kStepRows, n);
               });
  return new_array(std::move(out), {x.shape(0), n});
}

nb::ndarray<nb::numpy, float> activate(const std::string& isa, nb::handle gate_array, nb::handle up_array,
                                       const std::string& activation, float alpha, float limit) {
  const KernelTable& table = table_named(isa);
  const Array gate = float_matrix(gate_array, "gate", 16), up = float_matrix(up_array, "up", 16);
  check(up, "up", dtype_code::Float, 32, {gate.shape(0), gate.shape(1)});
  std::vector<float> out(gate.size());
  table.activate(activation_named(activation, alpha, limit), static_cast<const float*>(gate.data()),
                 static_cast<const float*>(up.data()), out.data(), out.size());
  return new_array(std::move(out), {gate.shape(0), gate.shape(1)});
}

nb::ndarray<nb::numpy, float> round_bf16(const std::string& isa, nb::handle array) {
  const KernelTable& table = table_named(isa);
  const Array x = float_matrix(array, "x", 16);
  const auto* from = static_cast<const float*>(x.data());
  std::vector<float> out(from, from + x.size());
  table.round_bf16(out.data(), out.size());
  return new_array(std::move(out), {x.shape(0), x.shape(1)});
}

std::vector<std::tuple<std::string, std::string, std::string, std::string, bool>> tables() {
  std::vector<std::tuple<std::string, std::string, std::string, std::string, bool>> out;
  for (const Candidate& c : candidates()) {
    out.emplace_back(c.table->name, c.table->words, c.missing, c.table->bf16_words, c.emulated);
  }
  return out;
}

// Whether tiles are there, permitted, and emulated; and what is missing.
std::tuple<bool, bool, bool, std::string> tiles() {
  const TileState& state = tile_state();
  return {state.detected, state.permitted, !state.permitted && trap_executes(), state.why};
}

// Quantizes and packs; each task is (matrix [N, K] whose rows may lie apart, packed, scale). Returns for each whether all its
// values are finite, and the sums over its rows, in order, of squared errors and of squared weights.
std::vector<std::tuple<bool, double, double>> pack_weights(const std::string& isa, Pool& pool, const nb::list& tasks, int bits,
                                                           const std::string& rounding, nb::handle multipliers, std::size_t group,
                                                           nb::handle shares) {
  table_named(isa);
  const QuantizeTable* table = find_quantize_table(isa.c_str());
  if (table == nullptr) wrong("isa", "a set of kernels that quantizes", isa);
  if (bits != 16 && bits != 8 && bits != 4 && bits != 2) wrong("bits", "16, 8, 4 or 2", std::to_string(bits));
  if (group != 0 && (bits != 4 || (group != 32 && group != 64 && group != 128))) wrong("group", "32, 64 or 128 with 4 bits", std::to_string(group));
  if (rounding != "kt" && rounding != "mse") wrong("rounding", "'kt' or 'mse'", rounding);
  const Array grid = array_from<Array>(multipliers, "multipliers");
  check(grid, "multipliers", dtype_code::UInt, 16, {grid.size()});
  if (grid.size() == 0 && bits != 16 && group == 0) wrong("multipliers", "at least one", "none");
  const Array steps = array_from<Array>(shares, "shares");
  check(steps, "shares", dtype_code::Float, 32, {steps.size()});
  if (group != 0 && steps.size() == 0) wrong("shares", "at least one", "none");
  const Layout& layout = bits == 16 ? kBf16Layout : bits == 8 ? kInt8Layout : kInt4Layout;
  std::vector<Array> kept;
  std::vector<QuantizeTask> work;
  std::vector<std::vector<RowError>> errors;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const auto given = nb::cast<nb::tuple>(tasks[i]);
    if (given.size() != 3) wrong("tasks", "three arrays each", std::to_string(given.size()));
    Array matrix = nb::cast<Array>(given[0]);
    WritableArray packed = array_from<WritableArray>(given[1], "packed"), scale = array_from<WritableArray>(given[2], "scale");
    const bool bfloat16 = is_type(matrix.dtype(), dtype_code::UInt, 16);
    if (!bfloat16 && !is_type(matrix.dtype(), dtype_code::Float, 32)) wrong("matrix", "float32, or bfloat16 as uint16", words(matrix.dtype()));
    if (matrix.ndim() != 2 || matrix.stride(1) != 1 || matrix.stride(0) < static_cast<std::int64_t>(matrix.shape(1))) {
      wrong("matrix", "two dimensions, rows without gaps", shape_of(matrix));
    }
    const std::size_t n = matrix.shape(0), k = matrix.shape(1);
    if (n == 0 || n % kStepRows != 0 || k == 0 || k % layout.k_multiple != 0 || k > kMaxInputs) {
      wrong("matrix", "a multiple of 32 rows and of " + std::to_string(layout.k_multiple) + " columns", shape_of(matrix));
    }
    check(packed, "packed", dtype_code::UInt, 8, {layout.packed_bytes(n, k)});
    if (bits == 16) {
      check(scale, "scale", dtype_code::Float, 32, {0});
    } else if (group == 0) {
      check(scale, "scale", dtype_code::Float, 32, {n});
    } else {
      check(scale, "scale", dtype_code::UInt, 16, {n * (k / group)});
    }
    errors.emplace_back(n);
    work.push_back(QuantizeTask{WeightMatrix{matrix.data(), bfloat16, n, k, static_cast<std::size_t>(matrix.stride(0))},
                                static_cast<std::uint8_t*>(packed.data()), scale.data(), errors.back().data()});
    kept.push_back(std::move(matrix));
  }
  const QuantizeRule rule{rounding == "kt" ? RowRule::kKt : RowRule::kSearch, bits, static_cast<const std::uint16_t*>(grid.data()), grid.size(), group,
                          static_cast<const float*>(steps.data()), steps.size()};
  const auto finite = std::make_unique<bool[]>(work.size());
  {
    const nb::gil_scoped_release unlocked;
    quantize_all(*table, rule, work.data(), work.size(), finite.get(), pool);
  }
  std::vector<std::tuple<bool, double, double>> found;
  for (std::size_t i = 0; i < work.size(); ++i) {
    RowError total{0.0, 0.0};
    for (const RowError& row : errors[i]) total.error += row.error, total.energy += row.energy;
    found.emplace_back(finite[i], total.error, total.energy);
  }
  return found;
}

std::vector<std::tuple<std::string, std::string, std::string>> limit_names() {
  std::vector<std::tuple<std::string, std::string, std::string>> out;
  for (const Limit& limit : limits()) out.emplace_back(limit.name, limit.kind, limit.missing);
  return out;
}

std::uint64_t run_limit_named(const std::string& name, std::uint64_t rounds, Pool& pool) {
  for (const Limit& limit : limits()) {
    if (limit.name != name) continue;
    if (!limit.missing.empty()) wrong("name", "an instruction of this machine", limit.missing);
    const nb::gil_scoped_release unlocked;
    return run_limit(limit, rounds, pool);
  }
  wrong("name", "the name of a limit", "'" + name + "'");
}

std::shared_ptr<Pool> new_pool(const std::vector<std::tuple<std::size_t, std::vector<int>, int>>& places, int spin_us) {
  if (places.empty() || places.size() > 1024) wrong("places", "1 to 1024 threads", std::to_string(places.size()));
  if (spin_us < 0 || spin_us > 1000000) wrong("spin_us", "0 to 1000000", std::to_string(spin_us));
  std::vector<Place> all;
  for (const auto& [group, cpus, node] : places) {
    if (group >= kMaxGroups) wrong("places", "groups 0 to " + std::to_string(kMaxGroups - 1), std::to_string(group));
    all.push_back(Place{.group = group, .cpus = cpus, .node = node});
  }
  return std::make_shared<Pool>(std::move(all), spin_us);
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> taken(const Pool& pool) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> out;
  for (const Taken& t : pool.taken()) out.emplace_back(t.own, t.stolen);
  return out;
}

}  // namespace
}  // namespace ktplan

NB_MODULE(_native, m) {
  using namespace ktplan;
  nb::set_leak_warnings(false);  // a pool that lives as long as the process is no leak
  m.def("tables", &tables);
  m.def("tiles", &tiles);
  m.def("cpu_features", [] { return CpuFeatures::detect().names(); });
  m.def("quantize", &quantize, nb::arg("isa"), nb::arg("x"), nb::arg("bits"), nb::arg("numerics"));
  m.def("dots", &dots, nb::arg("isa"), nb::arg("x"), nb::arg("packed"), nb::arg("n"), nb::arg("bits"),
        nb::arg("activation_bits"));
  m.def("project", &project, nb::arg("isa"), nb::arg("x"), nb::arg("packed"), nb::arg("scale").none(), nb::arg("n"),
        nb::arg("bits"), nb::arg("group"), nb::arg("activation_bits"));
  m.def("activate", &activate, nb::arg("isa"), nb::arg("gate"), nb::arg("up"), nb::arg("activation"), nb::arg("alpha"),
        nb::arg("limit"));
  m.def("pack_weights", &pack_weights, nb::arg("isa"), nb::arg("pool"), nb::arg("tasks"), nb::arg("bits"), nb::arg("rounding"),
        nb::arg("multipliers"), nb::arg("group"), nb::arg("shares"));
  m.def("round_bf16", &round_bf16, nb::arg("isa"), nb::arg("x"));

  nb::class_<Pool>(m, "Pool")
      .def(nb::new_(&new_pool), nb::arg("places"), nb::arg("spin_us"))
      .def_prop_ro("threads", &Pool::threads)
      .def_prop_ro("groups", &Pool::groups)
      .def_prop_ro("taken", &taken)
      .def_prop_ro("affinity", &Pool::affinity)
      .def_prop_ro("pin_error", &Pool::pin_error)
      .def_prop_ro("policy_error", &Pool::policy_error)
      .def_prop_ro("spin_us", &Pool::spin_us);

  m.def("limits", &limit_names);
  m.def("run_limit", &run_limit_named, nb::arg("name"), nb::arg("rounds"), nb::arg("pool"));

  nb::class_<Job>(m, "Job").def("wait", &Job::wait).def_prop_ro("done", &Job::done);

  nb::class_<LayerHandle>(m, "Layer")
      .def(nb::init<const nb::list&, std::size_t, std::size_t, std::size_t, std::shared_ptr<Pool>, const std::string&,
                    int, const std::string&, const std::string&, float, float>(),
           nb::arg("parts"), nb::arg("hidden"), nb::arg("bits"), nb::arg("group"), nb::arg("pool"), nb::arg("isa"),
           nb::arg("activation_bits"), nb::arg("numerics"), nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"))
      .def("forward", &LayerHandle::run, nb::arg("hidden").none(), nb::arg("top_k_index").none(), nb::arg("top_k_weights").none(),
           nb::arg("out").none())
      .def(
          "submit",
          [](nb::object self, nb::handle hidden, nb::handle ids, nb::handle weights, nb::handle out) {
            PreparedCall prepared = nb::cast<const LayerHandle&>(self).prepare(hidden, ids, weights, out);
            return std::make_unique<Job>(std::move(self), std::move(prepared));
          },
          nb::arg("hidden").none(), nb::arg("top_k_index").none(), nb::arg("top_k_weights").none(), nb::arg("out").none())
      .def("read", &LayerHandle::read)
      .def("move", &LayerHandle::move)
      .def("copy", &LayerHandle::copy)
      .def("nodes", &LayerHandle::nodes)
      .def_prop_ro("intermediate", [](const LayerHandle& self) { return self.layer().intermediate; })
      .def_prop_ro("isa", &LayerHandle::isa);
}
