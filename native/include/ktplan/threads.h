// Persistent threads that run phases of independent items.
//
// A job is a list of phases. The items of a phase may run in any order on any thread; a phase starts when all items of
// the one before are done. The calling thread works too, and alone finishes the job if the others are late: nothing
// waits for a thread to wake up, only for items that were taken. Callers take turns. Threads wait by spinning for a
// bounded time and then sleep.
//
// After fork() the child gets new threads at its first job; the parent's are untouched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace ktplan {

struct alignas(64) Phase {
  void (*run)(void* context, std::uint32_t item) noexcept = nullptr;
  void* context = nullptr;
  std::uint32_t items = 0;
  alignas(64) std::atomic<std::uint32_t> next{0};
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

class Pool {
 public:
  // `threads` counts the caller. `spin_us`: how long an idle thread spins before it sleeps.
  Pool(int threads, int spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  int spin_us() const { return spin_us_; }

  // Takes the pool for one job after the other; hold it around scratch() and run().
  std::unique_lock<std::mutex> lock();
  Scratch& scratch();
  void run(Phase* phases, std::size_t count) noexcept;

  // Runs `job` on a thread of the pool, after those submitted before it. The job must not throw.
  void submit(std::function<void()> job);

  struct State;  // everything that does not survive fork()

 private:
  friend void renew_after_fork();
  const int threads_;
  const int spin_us_;
  std::unique_ptr<State> state_;
  Pool* next_pool_ = nullptr;  // list of all pools, for fork()
};

}  // namespace ktplan
