#include "ktplan/numa.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

namespace ktplan {
namespace {

// From <linux/mempolicy.h>, which not every system installs.
constexpr int kPreferred = 1;
constexpr unsigned kMove = 1u << 1;
constexpr int kMaxNodes = 1024;
constexpr std::size_t kWordBits = 8 * sizeof(unsigned long);
constexpr std::size_t kHuge = std::size_t{1} << 21;

struct NodeMask {
  unsigned long words[kMaxNodes / kWordBits] = {};
  explicit NodeMask(int node) {
    if (node >= 0 && node < kMaxNodes) words[node / kWordBits] = 1ul << node % kWordBits;
  }
};

int result(long answer) { return answer == 0 ? 0 : errno; }

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

int prefer_node(int node) noexcept {
  const NodeMask mask(node);
  return result(syscall(SYS_set_mempolicy, kPreferred, mask.words, kMaxNodes));
}

int move_to_node(const void* data, std::size_t bytes, int node) noexcept {
  const NodeMask mask(node);
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / page_size() * page_size();
  const std::size_t size = reinterpret_cast<std::uintptr_t>(data) + bytes - begin;
  return result(syscall(SYS_mbind, begin, size, kPreferred, mask.words, kMaxNodes, kMove));
}

int count_pages(const void* data, std::size_t bytes, std::map<int, std::size_t>& found) {
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(data) / page_size();
  const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(data) + bytes + page_size() - 1) / page_size();
  const std::size_t step = std::max<std::size_t>(1, (last - first) / 4096);
  std::vector<void*> pages;
  for (std::uintptr_t page = first; page < last; page += step) pages.push_back(reinterpret_cast<void*>(page * page_size()));
  std::vector<int> nodes(pages.size(), -1);
  const int error = result(syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0));
  if (error != 0) return error;
  for (const int node : nodes) ++found[node < 0 ? -1 : node];
  return 0;
}

NodeMemory::NodeMemory(std::size_t bytes, int node) : bytes_((bytes + kHuge - 1) / kHuge * kHuge) {
  // one huge page more, so that the part in use begins at one
  const std::size_t size = bytes_ + kHuge;
  void* const all = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  const auto begin = reinterpret_cast<std::uintptr_t>(all), used = (begin + kHuge - 1) / kHuge * kHuge;
  data_ = reinterpret_cast<void*>(used);
  if (used > begin) munmap(all, used - begin);
  if (begin + size > used + bytes_) munmap(reinterpret_cast<void*>(used + bytes_), begin + size - used - bytes_);
  madvise(data_, bytes_, MADV_HUGEPAGE);
  if (node >= 0) error_ = move_to_node(data_, bytes_, node);
}

NodeMemory::~NodeMemory() { munmap(data_, bytes_); }

}  // namespace ktplan
