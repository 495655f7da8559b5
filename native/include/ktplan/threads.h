// Persistent threads that run phases of independent items, in groups: one group a NUMA node.
//
// A job is a list of phases. The items of a phase may run in any order on any thread; a phase starts when all items of
// the one before are done. Items may have a home group: its threads take them first, and the others only when their own
// are all taken. The calling thread works too, and alone finishes the job if the others are late: nothing waits for a
// thread to wake up, only for items that were taken. Callers take turns. Threads wait by spinning for a bounded time and
// then sleep.
//
// Threads of the pool may be pinned and may prefer a node's memory; the calling thread's settings are never touched.
// After fork() the child gets new threads at its first job; the parent's are untouched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace ktplan {

inline constexpr std::size_t kMaxGroups = 16;

struct alignas(64) Phase {
  struct alignas(64) Queue {
    std::atomic<std::uint32_t> next{0};
    std::uint32_t end = 0;
  };

  void (*run)(void* context, std::uint32_t item) noexcept = nullptr;
  void* context = nullptr;
  std::uint32_t items = 0;
  // Where the items of each group end, group after group; nullptr: a share for each, as large as its threads are many.
  const std::uint32_t* ends = nullptr;

  // The pool's own.
  Queue queues[kMaxGroups];
  alignas(64) std::atomic<std::uint32_t> done{0};
};

// Memory that a job uses and the next one finds again; grows, and shrinks to nothing when it was very large.
class Scratch {
 public:
  ~Scratch();
  // 64-byte aligned; what it held before is lost.
  std::uint8_t* take(std::size_t bytes);
  void trim(std::size_t keep);

 private:
  std::uint8_t* bytes_ = nullptr;
  std::size_t size_ = 0;
};

// Where one thread belongs.
struct Place {
  std::size_t group = 0;
  std::vector<int> cpus;  // processors it may run on; none: wherever the system likes
  int node = -1;          // whose memory it prefers for pages it touches first; below 0: no preference
};

// What a thread has taken since the pool began.
struct Taken {
  std::uint64_t own = 0, stolen = 0;  // items of its group's, and of the others'
};

class Pool {
 public:
  // One place a thread; the first is the calling thread's, which only says to which group it counts and which processor
  // is left to it. `spin_us`: how long a thread spins for its job to go on before it sleeps; idle threads spin no longer
  // than that either, and together for less than a millisecond.
  // Throws std::invalid_argument for no place or a group from kMaxGroups on.
  Pool(std::vector<Place> places, int spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(places_.size()); }
  std::size_t groups() const { return groups_; }
  // The node whose memory a group prefers; below 0: none.
  int node_of(std::size_t group) const;
  int spin_us() const { return spin_us_; }

  // Takes the pool for one job after the other; hold it around scratch() and run(). Throws std::runtime_error where the
  // system gives no thread.
  std::unique_lock<std::mutex> lock();
  Scratch& scratch();
  // `alone`: not worth waking anyone; the calling thread does all of it.
  void run(Phase* phases, std::size_t count, bool alone = false) noexcept;

  // Runs `job` on a thread of the pool, after those submitted before it. The job must not throw.
  void submit(std::function<void()> job);

  // By thread, as in the constructor.
  std::vector<Taken> taken() const;
  // Processors that each thread may run on as the system has it; empty where it has not started.
  std::vector<std::vector<int>> affinity() const;
  // errno of the last attempt to pin a thread, and to set its memory policy, that failed; 0: none.
  int pin_error() const;
  int policy_error() const;

  // In an item: which thread runs it, as an index into the constructor's places.
  static std::size_t current_thread() noexcept;

  struct State;  // everything that does not survive fork()

 private:
  friend void renew_after_fork();
  const std::vector<Place> places_;
  const std::size_t groups_;
  const int spin_us_;
  std::unique_ptr<State> state_;
  Pool* next_pool_ = nullptr;  // list of all pools, for fork()
};

}  // namespace ktplan
