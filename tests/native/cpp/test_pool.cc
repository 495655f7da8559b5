// The pool: every item once, phases in order, homes and stealing, callers in turn, fork, ends.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.h"
#include "ktplan/threads.h"

using namespace ktplan;

namespace {

std::vector<Place> in_groups(std::initializer_list<std::size_t> sizes) {
  std::vector<Place> places;
  std::size_t group = 0;
  for (const std::size_t size : sizes) {
    for (std::size_t i = 0; i < size; ++i) places.push_back(Place{.group = group, .cpus = {}, .node = -1});
    ++group;
  }
  return places;
}

// What items write, without any synchronization of their own: the pool's must do.
struct Board {
  std::vector<std::uint32_t> count, thread;
  const std::vector<std::uint32_t>* before = nullptr;  // all of it must be 1 when an item runs
  explicit Board(std::size_t items) : count(items, 0), thread(items, 0) {}
};

void mark(void* at, std::uint32_t item) noexcept {
  auto* board = static_cast<Board*>(at);
  if (board->before != nullptr) {
    for (const std::uint32_t done : *board->before) CHECK(done == 1);
  }
  ++board->count[item];
  board->thread[item] = static_cast<std::uint32_t>(Pool::current_thread());
}

void run_boards(Pool& pool, std::vector<Board>& boards, const std::uint32_t* ends = nullptr, bool alone = false) {
  const auto phases = std::make_unique<Phase[]>(boards.size());
  for (std::size_t i = 0; i < boards.size(); ++i) {
    phases[i].run = &mark;
    phases[i].context = &boards[i];
    phases[i].items = static_cast<std::uint32_t>(boards[i].count.size());
    phases[i].ends = ends;
    if (i > 0) boards[i].before = &boards[i - 1].count;
  }
  const auto turn = pool.lock();
  pool.run(phases.get(), boards.size(), alone);
}

void check_once(const std::vector<Board>& boards) {
  for (const Board& board : boards) {
    for (const std::uint32_t count : board.count) CHECK(count == 1);
  }
}

}  // namespace

TEST(every_item_runs_once_and_phases_wait_for_each_other) {
  for (const int spin : {0, 50}) {
    for (const auto& places : {in_groups({1}), in_groups({2}), in_groups({2, 2}), in_groups({1, 3, 2})}) {
      Pool pool(places, spin);
      std::mt19937 random(7);
      for (int job = 0; job < 60; ++job) {
        std::vector<Board> boards;
        for (int phase = 0; phase < 4; ++phase) boards.emplace_back(random() % 40);
        run_boards(pool, boards, nullptr, job % 5 == 0);
        check_once(boards);
      }
    }
  }
}

TEST(items_go_to_their_home_group_first) {
  // The other group's threads are held back in an item of their own until all items of group 0 are taken.
  Pool pool(in_groups({1, 1}), 50);
  struct Shared {
    std::atomic<std::uint32_t> left{100};
    std::vector<std::size_t> thread = std::vector<std::size_t>(101, 9);
  } shared;
  const std::uint32_t ends[2] = {100, 101};
  const auto phase = std::make_unique<Phase>();
  phase->context = &shared;
  phase->items = 101;
  phase->ends = ends;
  phase->run = [](void* at, std::uint32_t item) noexcept {
    auto* s = static_cast<Shared*>(at);
    s->thread[item] = Pool::current_thread();
    if (item == 100 && s->thread[item] == 1) {
      while (s->left.load() != 0) std::this_thread::yield();
    }
    if (item < 100) s->left.fetch_sub(1);
  };
  {
    const auto turn = pool.lock();
    pool.run(phase.get(), 1);
  }
  // Thread 1 is of group 1: it took its own item first, and then waited; or it came so late that thread 0 took that too.
  if (shared.thread[100] == 1) {
    for (std::size_t i = 0; i < 100; ++i) CHECK_WHERE(shared.thread[i] == 0, i, shared.thread[i]);
    CHECK(pool.taken()[0].own == 100 && pool.taken()[0].stolen == 0 && pool.taken()[1].own == 1);
  } else {
    CHECK(pool.taken()[0].stolen == 1);
  }
}

TEST(an_idle_group_takes_what_others_have) {
  Pool pool(in_groups({1, 1}), 50);
  const std::uint32_t ends[2] = {0, 50};  // all of it is at home in the worker's group
  bool both = false;
  for (int tries = 0; tries < 1000 && !both; ++tries) {
    std::vector<Board> boards;
    boards.emplace_back(50);
    run_boards(pool, boards, ends);
    check_once(boards);
    both = pool.taken()[0].stolen != 0;
  }
  CHECK(both);
  CHECK(pool.taken()[0].own == 0 && pool.taken()[1].stolen == 0);
}

TEST(items_without_a_home_are_shared_as_threads_are) {
  Pool pool(in_groups({3, 1}), 0);
  std::vector<Board> boards;
  boards.emplace_back(8);
  run_boards(pool, boards, nullptr, true);  // alone: thread 0 takes 6 of its own group and 2 of the other's
  check_once(boards);
  CHECK(pool.taken()[0].own == 6 && pool.taken()[0].stolen == 2);
}

TEST(callers_take_turns) {
  Pool pool(in_groups({2, 1}), 20);
  std::vector<std::thread> callers;
  std::atomic<int> jobs{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int job = 0; job < 50; ++job) {
        std::vector<Board> boards;
        for (int phase = 0; phase < 3; ++phase) boards.emplace_back(9);
        run_boards(pool, boards);
        check_once(boards);
        ++jobs;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(jobs == 200);
}

TEST(scratch_belongs_to_whoever_has_the_turn) {
  Pool pool(in_groups({2}), 20);
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&pool, c] {
      for (std::size_t job = 1; job < 40; ++job) {
        const auto turn = pool.lock();
        std::uint8_t* const memory = pool.scratch().take(job * 5000);
        CHECK(reinterpret_cast<std::uintptr_t>(memory) % 64 == 0);
        std::memset(memory, c, job * 5000);
        CHECK(memory[job * 5000 - 1] == c);
        if (job % 7 == 0) pool.scratch().trim(0);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(submitted_work_runs_in_order_and_is_finished_before_the_pool_ends) {
  std::vector<int> order;
  {
    Pool pool(in_groups({2}), 20);
    for (int i = 0; i < 30; ++i) {
      pool.submit([&pool, &order, i] {
        std::vector<Board> boards;
        boards.emplace_back(5);
        run_boards(pool, boards);
        check_once(boards);
        order.push_back(i);
      });
    }
  }
  CHECK(order.size() == 30);
  for (int i = 0; i < 30; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
}

TEST(pools_begin_and_end_without_work) {
  for (int i = 0; i < 20; ++i) {
    Pool idle(in_groups({3}), 10);
    Pool used(in_groups({1, 2}), 0);
    std::vector<Board> boards;
    boards.emplace_back(1);
    run_boards(used, boards);
  }
}

TEST(threads_that_lose_their_processor_do_not_hold_up_for_ever) {
  // Many more threads than processors, and items long enough to be interrupted.
  Pool pool(in_groups({12}), 10);
  const auto phase = std::make_unique<Phase>();
  std::atomic<std::uint64_t> sum{0};
  for (int job = 0; job < 30; ++job) {
    const auto phases = std::make_unique<Phase[]>(3);
    for (std::size_t p = 0; p < 3; ++p) {
      phases[p].context = &sum;
      phases[p].items = 24;
      phases[p].run = [](void* at, std::uint32_t item) noexcept {
        std::uint64_t x = item + 1;
        for (int i = 0; i < 20000; ++i) x = x * 6364136223846793005u + 1;
        static_cast<std::atomic<std::uint64_t>*>(at)->fetch_add(x | 1);
      };
    }
    const auto turn = pool.lock();
    pool.run(phases.get(), 3);
    for (std::size_t p = 0; p < 3; ++p) CHECK(phases[p].done.load() == 24);
  }
}

TEST(a_pool_needs_places_that_exist) {
  for (auto places : {in_groups({}), std::vector<Place>{Place{.group = kMaxGroups, .cpus = {}, .node = -1}}}) {
    bool refused = false;
    try {
      const Pool pool(std::move(places), 0);
    } catch (const std::exception&) {
      refused = true;
    }
    CHECK(refused);
  }
}

#if !defined(__SANITIZE_THREAD__)  // it does not follow threads that start after fork()
TEST(a_forked_child_has_threads_of_its_own) {
  Pool pool(in_groups({2, 1}), 20);
  std::vector<Board> boards;
  boards.emplace_back(50);
  run_boards(pool, boards);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<Board> again;
    for (int i = 0; i < 3; ++i) again.emplace_back(50);
    run_boards(pool, again);
    check_once(again);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::vector<Board> after;
  after.emplace_back(50);
  run_boards(pool, after);
  check_once(after);
}
#endif
