// The experts of one layer and their forward pass.
//
//   for each token t, in the order of its choices j:  y[t] += weight[t, j] * down(activate(gate(x), up(x)))  of expert
//   id[t, j]
//
// Tokens are grouped by expert. A token is quantized once; gate and up of the same columns are computed together; the
// product row is quantized again, once. Where experts are split into parts (NUMA), each part's rows are quantized by
// themselves, and the parts' results are added in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ktplan/kernels.h"
#include "ktplan/threads.h"

namespace ktplan {

struct Projection {
  const std::uint8_t* bytes = nullptr;
  const void* scale = nullptr;   // float32 or bfloat16, see layout.h; null for bfloat16 weights
  const float* bias = nullptr;   // one a row, or null
};

struct Expert {
  Projection gate, up, down;
  bool present() const { return gate.bytes != nullptr; }
};

struct Layer {
  const KernelTable* kernels;
  Layout layout;
  std::size_t hidden;
  std::vector<std::size_t> intermediate;  // of each part
  std::size_t experts;
  std::vector<Expert> weights;  // [part][expert]
  int activation_bits;
  Numerics numerics;
  Activation activation;

  const Expert& at(std::size_t part, std::size_t expert) const { return weights[part * experts + expert]; }
};

struct Call {
  const void* hidden;  // [tokens, hidden]
  bool bfloat16;       // of `hidden`; otherwise float32
  const std::int64_t*
      ids;  // [tokens, choices]; below 0, at or above the expert count, or an absent expert: no contribution
  const float* weights;  // [tokens, choices]
  std::size_t tokens, choices;
  float* out;  // [tokens, hidden]
};

// Throws std::bad_alloc only, before anything runs.
void forward(const Layer& layer, Pool& pool, const Call& call);

// The group of threads that takes this expert's part first: parts belong to groups, or experts where there is one part.
std::size_t home_group(const Layer& layer, std::size_t part, std::size_t expert, std::size_t groups);

struct WeightPiece {
  Projection* projection;
  std::size_t bytes;  // at projection->bytes
  std::size_t home;
};

// The weights of every expert that is there, in the order of their home groups.
std::vector<WeightPiece> weight_pieces(Layer& layer, std::size_t groups);

// Runs `run(context, i)` for every piece on all threads, each on its home group's while that has time.
void for_each_piece(const std::vector<WeightPiece>& pieces, Pool& pool, void (*run)(void*, std::uint32_t) noexcept, void* context);

// Reads every byte of the weights once, on all threads; returns how many bytes. What memory alone costs.
std::size_t read_weights(Layer& layer, Pool& pool);

}  // namespace ktplan
