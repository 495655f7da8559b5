// Where a layer's weights lie: as they were mapped, moved to the nodes of the threads that use them, or copied there.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "ktplan/moe.h"
#include "ktplan/numa.h"

namespace ktplan {

// Moves the pages that hold the weights to their home groups' nodes; returns 0 or the errno of a move that failed.
// Groups without a node leave theirs where they are.
int move_weights(Layer& layer, Pool& pool);

// Copies the weights into memory of their home groups' nodes and makes the layer use that; throws std::bad_alloc before
// the layer changes.
std::vector<std::unique_ptr<NodeMemory>> copy_weights(Layer& layer, Pool& pool);

// How many pages of the weights lie on which node, of those looked at; returns 0 or an errno.
int weight_nodes(Layer& layer, std::map<int, std::size_t>& found);

}  // namespace ktplan
