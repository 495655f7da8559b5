#include "ktplan/threads.h"

#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ktplan {
namespace {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Floats must round and keep denormals in the same way on every thread, whatever another library set.
class DefaultFloats {
 public:
#if defined(__x86_64__)
  DefaultFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Waits until `ready(word)`; spins first, then sleeps until the word changes.
template <typename Ready>
void wait_until(const std::atomic<std::uint32_t>& word, int spin_us, Ready ready) {
  std::uint32_t value = word.load(std::memory_order_acquire);
  if (ready(value)) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < 32; ++i) {
      pause();
      value = word.load(std::memory_order_acquire);
      if (ready(value)) return;
    }
  } while (std::chrono::steady_clock::now() < end);
  while (!ready(value)) {
    word.wait(value, std::memory_order_acquire);
    value = word.load(std::memory_order_acquire);
  }
}

constexpr std::uint64_t kOpen = 1ull << 31;   // threads may join the job
constexpr std::uint64_t kInside = kOpen - 1;  // how many have

}  // namespace

Scratch::~Scratch() { trim(0); }

std::uint8_t* Scratch::take(std::size_t bytes) {
  if (bytes > size_) {
    trim(0);
    constexpr std::size_t kHuge = std::size_t{1} << 21;
    const std::size_t size =
        bytes < kHuge ? (bytes + 4095) / 4096 * 4096 : (bytes + bytes / 4 + kHuge - 1) / kHuge * kHuge;
    bytes_ = static_cast<std::uint8_t*>(::operator new(size, std::align_val_t{size < kHuge ? 4096 : kHuge}));
    size_ = size;
    if (size >= kHuge) madvise(bytes_, size, MADV_HUGEPAGE);
  }
  return bytes_;
}

void Scratch::trim(std::size_t keep) {
  if (size_ <= keep) return;
  ::operator delete(bytes_, std::align_val_t{size_ < (std::size_t{1} << 21) ? 4096 : std::size_t{1} << 21});
  bytes_ = nullptr;
  size_ = 0;
}

struct Pool::State {
  explicit State(int threads, int spin_us) : threads(threads), spin_us(spin_us) {}

  const int threads, spin_us;
  std::mutex turn;  // one job at a time
  Scratch scratch;

  // The job now open. entry = generation << 32 | kOpen | threads inside.
  Phase* phases = nullptr;
  std::size_t count = 0;
  alignas(64) std::atomic<std::uint64_t> entry{0};
  alignas(64) std::atomic<std::uint32_t> generation{0};
  alignas(64) std::atomic<std::uint32_t> left{0};  // changes whenever a thread leaves a closed job
  std::atomic<bool> stop{false};
  std::vector<std::thread> workers;

  std::mutex queue_lock;
  std::condition_variable queue_filled;
  std::deque<std::function<void()>> queue;
  std::thread dispatcher;
  bool stop_dispatcher = false;

  void start();
  void shut_down();
  void work() noexcept;
  void worker();
  void dispatch();
};

// Takes items, phase after phase, until the job is done.
void Pool::State::work() noexcept {
  const DefaultFloats floats;
  for (std::size_t i = 0; i < count; ++i) {
    Phase& phase = phases[i];
    std::uint32_t item;
    while ((item = phase.next.fetch_add(1, std::memory_order_relaxed)) < phase.items) {
      phase.run(phase.context, item);
      if (phase.done.fetch_add(1, std::memory_order_acq_rel) + 1 == phase.items) phase.done.notify_all();
    }
    const std::uint32_t items = phase.items;
    wait_until(phase.done, spin_us, [items](std::uint32_t done) { return done >= items; });
  }
}

void Pool::State::worker() {
  std::uint32_t seen = 0;
  for (;;) {
    wait_until(generation, spin_us, [seen](std::uint32_t now) { return now != seen; });
    if (stop.load(std::memory_order_acquire)) return;
    seen = generation.load(std::memory_order_acquire);
    std::uint64_t now = entry.load(std::memory_order_acquire);
    bool inside = false;
    while (!inside && now >> 32 == seen && (now & kOpen) != 0) {
      inside = entry.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire);
    }
    if (!inside) continue;
    work();
    if ((entry.fetch_sub(1, std::memory_order_acq_rel) & (kOpen | kInside)) == 1) {  // closed, and the last to leave
      left.fetch_add(1, std::memory_order_release);
      left.notify_all();
    }
  }
}

void Pool::State::start() {
  while (static_cast<int>(workers.size()) < threads - 1) workers.emplace_back([this] { worker(); });
}

void Pool::State::shut_down() {
  {
    const std::lock_guard<std::mutex> guard(queue_lock);
    stop_dispatcher = true;
  }
  queue_filled.notify_all();
  if (dispatcher.joinable()) dispatcher.join();
  stop.store(true, std::memory_order_release);
  generation.fetch_add(1, std::memory_order_release);
  generation.notify_all();
  for (std::thread& thread : workers) thread.join();
}

void Pool::State::dispatch() {
  for (;;) {
    std::function<void()> job;
    {
      std::unique_lock<std::mutex> guard(queue_lock);
      queue_filled.wait(guard, [this] { return stop_dispatcher || !queue.empty(); });
      if (queue.empty()) return;
      job = std::move(queue.front());
      queue.pop_front();
    }
    job();
  }
}

namespace {

std::mutex pools_lock;
Pool* all_pools = nullptr;

}  // namespace

// In the child of fork() the threads are gone and locks may be held by nobody: leave the old state and begin anew.
void renew_after_fork() {
  for (Pool* pool = all_pools; pool != nullptr; pool = pool->next_pool_) {
    static_cast<void>(pool->state_.release());
    pool->state_ = std::make_unique<Pool::State>(pool->threads_, pool->spin_us_);
  }
  pools_lock.unlock();
}

Pool::Pool(int threads, int spin_us)
    : threads_(threads), spin_us_(spin_us), state_(std::make_unique<State>(threads, spin_us)) {
  static const int registered =
      pthread_atfork([] { pools_lock.lock(); }, [] { pools_lock.unlock(); }, renew_after_fork);
  if (registered != 0) throw std::runtime_error("pthread_atfork failed: no memory");
  const std::lock_guard<std::mutex> guard(pools_lock);
  next_pool_ = all_pools;
  all_pools = this;
}

Pool::~Pool() {
  {
    const std::lock_guard<std::mutex> guard(pools_lock);
    for (Pool** at = &all_pools; *at != nullptr; at = &(*at)->next_pool_) {
      if (*at != this) continue;
      *at = next_pool_;
      break;
    }
  }
  state_->shut_down();
}

std::unique_lock<std::mutex> Pool::lock() {
  std::unique_lock<std::mutex> turn(state_->turn);
  state_->start();
  return turn;
}

Scratch& Pool::scratch() { return state_->scratch; }

void Pool::run(Phase* phases, std::size_t count) noexcept {
  State& s = *state_;
  s.phases = phases;
  s.count = count;
  const std::uint32_t generation = s.generation.load(std::memory_order_relaxed) + 1;
  s.entry.store(std::uint64_t{generation} << 32 | kOpen, std::memory_order_release);
  s.generation.store(generation, std::memory_order_release);
  s.generation.notify_all();
  s.work();
  const std::uint32_t left = s.left.load(std::memory_order_acquire);
  if ((s.entry.fetch_and(~kOpen, std::memory_order_acq_rel) & kInside) != 0) {
    wait_until(s.left, s.spin_us, [left](std::uint32_t now) { return now != left; });
  }
}

void Pool::submit(std::function<void()> job) {
  State& s = *state_;
  {
    const std::lock_guard<std::mutex> guard(s.queue_lock);
    s.queue.push_back(std::move(job));
    if (!s.dispatcher.joinable()) s.dispatcher = std::thread([&s] { s.dispatch(); });
  }
  s.queue_filled.notify_one();
}

}  // namespace ktplan
