// Which NUMA node memory lies on: the kernel's calls without a library. All of them are refused in some containers, so
// each returns 0 or an errno and nobody depends on success.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace ktplan {

// Pages that this thread touches first from now on come from `node` while it has any.
int prefer_node(int node) noexcept;

// Moves the pages of [data, data + bytes) that are mapped by this process alone to `node`, and prefers it for those to come.
int move_to_node(const void* data, std::size_t bytes, int node) noexcept;

// Pages of [data, data + bytes) by node; -1: not in memory, or shared with another process. At most about 4096 pages,
// spread evenly, are looked at.
int count_pages(const void* data, std::size_t bytes, std::map<int, std::size_t>& found);

// Anonymous memory of its own, in huge pages where the system has them, preferably on `node` (below 0: anywhere).
class NodeMemory {
 public:
  NodeMemory(std::size_t bytes, int node);  // throws std::bad_alloc
  ~NodeMemory();
  NodeMemory(const NodeMemory&) = delete;
  NodeMemory& operator=(const NodeMemory&) = delete;

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(data_); }
  std::size_t bytes() const { return bytes_; }
  int error() const { return error_; }  // of binding it to the node

 private:
  void* data_;
  std::size_t bytes_;
  int error_ = 0;
};

}  // namespace ktplan
