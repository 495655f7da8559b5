#include "ktplan/placing.h"

#include <cstring>

namespace ktplan {

int move_weights(Layer& layer, Pool& pool) {
  int error = 0;
  for (const WeightPiece& piece : weight_pieces(layer, pool.groups())) {
    const int node = pool.node_of(piece.home);
    if (node < 0) continue;
    if (const int failed = move_to_node(piece.projection->bytes, piece.bytes, node)) error = failed;
  }
  return error;
}

std::vector<std::unique_ptr<NodeMemory>> copy_weights(Layer& layer, Pool& pool) {
  struct Copying {
    std::vector<WeightPiece> pieces;
    std::vector<std::uint8_t*> to;
  } copying{weight_pieces(layer, pool.groups()), {}};
  const auto aligned = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
  std::vector<std::size_t> sizes(pool.groups(), 0);
  for (const WeightPiece& piece : copying.pieces) sizes[piece.home] += aligned(piece.bytes);
  std::vector<std::unique_ptr<NodeMemory>> memory;
  std::vector<std::uint8_t*> next(sizes.size(), nullptr);
  for (std::size_t group = 0; group < sizes.size(); ++group) {
    if (sizes[group] == 0) continue;
    memory.push_back(std::make_unique<NodeMemory>(sizes[group], pool.node_of(group)));
    next[group] = memory.back()->data();
  }
  for (const WeightPiece& piece : copying.pieces) {
    copying.to.push_back(next[piece.home]);
    next[piece.home] += aligned(piece.bytes);
  }
  for_each_piece(
      copying.pieces, pool,
      [](void* at, std::uint32_t i) noexcept {
        const auto* c = static_cast<Copying*>(at);
        std::memcpy(c->to[i], c->pieces[i].projection->bytes, c->pieces[i].bytes);
      },
      &copying);
  for (std::size_t i = 0; i < copying.pieces.size(); ++i) copying.pieces[i].projection->bytes = copying.to[i];
  return memory;
}

int weight_nodes(Layer& layer, std::map<int, std::size_t>& found) {
  for (const WeightPiece& piece : weight_pieces(layer, 1)) {
    if (const int error = count_pages(piece.projection->bytes, piece.bytes, found)) return error;
  }
  return 0;
}

}  // namespace ktplan
