#include "ktplan/threads.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ktplan/numa.h"

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

// Waits until `ready(word)`; spins first, then sleeps until the word changes. Tells whether it slept.
template <typename Ready>
bool wait_until(const std::atomic<std::uint32_t>& word, int spin_us, Ready ready) {
  std::uint32_t value = word.load(std::memory_order_acquire);
  if (ready(value)) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < 32; ++i) {
      pause();
      value = word.load(std::memory_order_acquire);
      if (ready(value)) return false;
    }
  } while (std::chrono::steady_clock::now() < end);
  while (!ready(value)) {
    word.wait(value, std::memory_order_acquire);
    value = word.load(std::memory_order_acquire);
  }
  return true;
}

std::int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Processor time that a thread has had.
std::int64_t processor_us(pthread_t thread) {
  clockid_t clock;
  timespec time{};
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &time) != 0) return now_us();
  return std::int64_t{time.tv_sec} * 1000000 + time.tv_nsec / 1000;
}

int pin(pthread_t thread, std::span<const int> cpus) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  return pthread_setaffinity_np(thread, sizeof set, &set);
}

constexpr std::int64_t kProbeUs = 20;    // a thread that has a processor uses it for most of that
constexpr std::int64_t kRestUs = 10000;  // a thread that lost its processor takes no part for so long
constexpr int kRescues = 8, kNaps = 40;
constexpr int kIdleSpinUs = 900;  // of all threads together, after a job
thread_local std::size_t this_thread = 0;

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
  State(const std::vector<Place>& places, std::size_t groups, int spin_us)
      : places(places),
        groups(groups),
        threads(places.size()),
        spin_us(spin_us),
        idle_us(std::min(spin_us, kIdleSpinUs / static_cast<int>(std::max<std::size_t>(1, threads - 1)))),
        counts(std::make_unique<Count[]>(threads)) {}

  // What others may know of a thread.
  struct alignas(64) Count {
    std::atomic<std::uint64_t> own{0}, stolen{0};
    std::atomic<bool> busy{false};            // may hold an item
    std::atomic<std::int64_t> rests_until{0};  // takes no part before
  };

  std::vector<Place> places;  // a worker and the caller may change places
  const std::size_t groups, threads;
  const int spin_us, idle_us;
  std::mutex turn;  // one job at a time
  Scratch scratch;
  std::unique_ptr<Count[]> counts;
  std::atomic<int> pin_error{0}, policy_error{0};

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
  void step_aside() noexcept;
  void settle(std::thread& thread, std::size_t index) noexcept;
  void share(Phase& phase) const noexcept;
  void wait_for(Phase& phase) noexcept;
  bool rescue() noexcept;
  void work(std::size_t thread) noexcept;
  void worker(std::size_t thread);
  void dispatch();
};

// Cuts a phase's items into a queue for each group.
void Pool::State::share(Phase& phase) const noexcept {
  std::size_t before[kMaxGroups + 1] = {};
  for (const Place& place : places) ++before[place.group + 1];
  std::uint32_t begin = 0;
  for (std::size_t group = 0; group < groups; ++group) {
    before[group + 1] += before[group];
    phase.queues[group].next.store(begin, std::memory_order_relaxed);
    begin = phase.ends != nullptr ? phase.ends[group]
                                  : static_cast<std::uint32_t>(std::uint64_t{phase.items} * before[group + 1] / threads);
    phase.queues[group].end = begin;
  }
}

// Takes items, phase after phase, until the job is done: its own group's first, then the next groups'.
void Pool::State::work(std::size_t thread) noexcept {
  const DefaultFloats floats;
  this_thread = thread;
  const std::size_t home = places[thread].group;
  std::uint64_t own = 0, stolen = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Phase& phase = phases[i];
    std::uint32_t taken = 0;
    counts[thread].busy.store(true, std::memory_order_relaxed);
    for (std::size_t away = 0; away < groups; ++away) {
      Phase::Queue& queue = phase.queues[(home + away) % groups];
      std::uint32_t item;
      while ((item = queue.next.fetch_add(1, std::memory_order_relaxed)) < queue.end) {
        phase.run(phase.context, item);
        ++taken;
        ++(away == 0 ? own : stolen);
      }
    }
    const std::uint32_t items = phase.items;
    if (taken != 0 && phase.done.fetch_add(taken, std::memory_order_acq_rel) + taken == items) phase.done.notify_all();
    counts[thread].busy.store(false, std::memory_order_relaxed);
    if (thread == 0) wait_for(phase);
    wait_until(phase.done, spin_us, [items](std::uint32_t done) { return done >= items; });
  }
  counts[thread].own.fetch_add(own, std::memory_order_relaxed);
  counts[thread].stolen.fetch_add(stolen, std::memory_order_relaxed);
}

// The calling thread waits for the last items. Where their threads lost their processors to another program, they would get
// them back after milliseconds: they are brought to this one, which is about to have nothing to do.
void Pool::State::wait_for(Phase& phase) noexcept {
  const auto done = [&phase] { return phase.done.load(std::memory_order_acquire) >= phase.items; };
  const std::int64_t end = now_us() + spin_us;
  while (!done()) {
    pause();
    if (now_us() < end) continue;
    for (int tries = 0; tries < kRescues && !done(); ++tries) {
      if (!rescue()) return;
    }
    return;
  }
}

// Lets a thread that is ready and does not run finish its item here; false where there is none.
bool Pool::State::rescue() noexcept {
  for (std::size_t i = 1; i < threads; ++i) {
    if (!counts[i].busy.load(std::memory_order_relaxed)) continue;
    const pthread_t thread = workers[i - 1].native_handle();
    const std::int64_t before = processor_us(thread), until = now_us() + kProbeUs;
    while (now_us() < until) pause();
    if (!counts[i].busy.load(std::memory_order_relaxed) || processor_us(thread) - before > kProbeUs / 4) continue;
    cpu_set_t set;
    const int here = sched_getcpu();
    if (here < 0 || pthread_getaffinity_np(thread, sizeof set, &set) != 0) return false;
    counts[i].rests_until.store(now_us() + kRestUs, std::memory_order_relaxed);
    if (pin(thread, {&here, 1}) != 0) return false;
    for (int naps = 0; naps < kNaps && counts[i].busy.load(std::memory_order_relaxed); ++naps) {
      const timespec nap{.tv_sec = 0, .tv_nsec = 50000};
      nanosleep(&nap, nullptr);
    }
    pthread_setaffinity_np(thread, sizeof set, &set);
    return true;
  }
  return false;
}

void Pool::State::worker(std::size_t thread) {
  // places[thread].node never changes: only the processors of two places are exchanged
  if (places[thread].node >= 0) {
    if (const int error = prefer_node(places[thread].node)) policy_error.store(error);
  }
  std::uint32_t seen = 0;
  bool resting = false;
  for (;;) {
    const bool slept = wait_until(generation, resting ? 0 : idle_us, [seen](std::uint32_t now) { return now != seen; });
    if (stop.load(std::memory_order_acquire)) return;
    if (slept) {  // each thread that wakes up wakes two more, so that no one has to wake all
      generation.notify_one();
      generation.notify_one();
    }
    seen = generation.load(std::memory_order_acquire);
    const std::int64_t until = counts[thread].rests_until.load(std::memory_order_relaxed);
    resting = until != 0 && now_us() < until;
    if (resting) continue;
    std::uint64_t now = entry.load(std::memory_order_acquire);
    bool inside = false;
    while (!inside && now >> 32 == seen && (now & kOpen) != 0) {
      inside = entry.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire);
    }
    if (!inside) continue;
    work(thread);
    if ((entry.fetch_sub(1, std::memory_order_acq_rel) & (kOpen | kInside)) == 1) {  // closed, and the last to leave
      left.fetch_add(1, std::memory_order_release);
      left.notify_all();
    }
  }
}

void Pool::State::settle(std::thread& thread, std::size_t index) noexcept {
  if (places[index].cpus.empty()) return;
  if (const int error = pin(thread.native_handle(), places[index].cpus)) pin_error.store(error);
}

void Pool::State::start() {
  while (workers.size() + 1 < threads) {
    const std::size_t index = workers.size() + 1;
    try {
      workers.emplace_back([this, index] { worker(index); });
    } catch (const std::system_error& error) {
      throw std::runtime_error("thread " + std::to_string(index + 1) + " of " + std::to_string(threads) +
                               " could not be started: " + error.what());
    }
    settle(workers.back(), index);
  }
}

// Where the caller runs on a worker's own processor, that worker goes to the one left to the caller: it could not start
// before the caller is done otherwise.
void Pool::State::step_aside() noexcept {
  if (places[0].cpus.size() != 1) return;
  const int here = sched_getcpu();
  if (here < 0 || places[0].cpus[0] == here) return;
  for (std::size_t i = 1; i < threads; ++i) {
    if (places[i].group != places[0].group || places[i].cpus.size() != 1 || places[i].cpus[0] != here) continue;
    std::swap(places[0].cpus, places[i].cpus);
    settle(workers[i - 1], i);
    return;
  }
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
    pool->state_ = std::make_unique<Pool::State>(pool->places_, pool->groups_, pool->spin_us_);
  }
  pools_lock.unlock();
}

namespace {

std::size_t group_count(const std::vector<Place>& places) {
  if (places.empty()) throw std::invalid_argument("a pool needs a thread");
  std::size_t groups = 0;
  for (const Place& place : places) groups = std::max(groups, place.group + 1);
  if (groups > kMaxGroups) throw std::invalid_argument("a pool has at most " + std::to_string(kMaxGroups) + " groups");
  return groups;
}

}  // namespace

Pool::Pool(std::vector<Place> places, int spin_us)
    : places_(std::move(places)),
      groups_(group_count(places_)),
      spin_us_(spin_us),
      state_(std::make_unique<State>(places_, groups_, spin_us)) {
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

int Pool::node_of(std::size_t group) const {
  for (const Place& place : places_) {
    if (place.group == group) return place.node;
  }
  return -1;
}

Scratch& Pool::scratch() { return state_->scratch; }

void Pool::run(Phase* phases, std::size_t count, bool alone) noexcept {
  State& s = *state_;
  s.phases = phases;
  s.count = count;
  for (std::size_t i = 0; i < count; ++i) s.share(phases[i]);
  if (alone || s.threads == 1) {
    s.work(0);
    return;
  }
  s.step_aside();
  const std::uint32_t generation = s.generation.load(std::memory_order_relaxed) + 1;
  s.entry.store(std::uint64_t{generation} << 32 | kOpen, std::memory_order_release);
  s.generation.store(generation, std::memory_order_release);
  s.generation.notify_one();
  s.generation.notify_one();
  s.work(0);
  const std::uint32_t left = s.left.load(std::memory_order_acquire);
  if ((s.entry.fetch_and(~kOpen, std::memory_order_acq_rel) & kInside) != 0) {
    wait_until(s.left, s.spin_us, [left](std::uint32_t now) { return now != left; });
  }
}

void Pool::submit(std::function<void()> job) {
  State& s = *state_;
  {
    const std::lock_guard<std::mutex> guard(s.queue_lock);
    // first the thread, which may not be had; then the job, which must not stay behind
    if (!s.dispatcher.joinable()) s.dispatcher = std::thread([&s] { s.dispatch(); });
    s.queue.push_back(std::move(job));
  }
  s.queue_filled.notify_one();
}

std::vector<Taken> Pool::taken() const {
  std::vector<Taken> all;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    all.push_back({state_->counts[i].own.load(std::memory_order_relaxed),
                   state_->counts[i].stolen.load(std::memory_order_relaxed)});
  }
  return all;
}

std::vector<std::vector<int>> Pool::affinity() const {
  const std::lock_guard<std::mutex> turn(state_->turn);
  std::vector<std::vector<int>> all(places_.size());
  for (std::size_t i = 0; i < state_->workers.size(); ++i) {
    cpu_set_t set;
    if (pthread_getaffinity_np(state_->workers[i].native_handle(), sizeof set, &set) != 0) continue;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) all[i + 1].push_back(cpu);
    }
  }
  return all;
}

int Pool::pin_error() const { return state_->pin_error.load(); }
int Pool::policy_error() const { return state_->policy_error.load(); }
std::size_t Pool::current_thread() noexcept { return this_thread; }

}  // namespace ktplan
