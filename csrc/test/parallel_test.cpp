// Whether every thread that a call asks for comes, once, and whether every task is done, once, as the caller would do
// it.
#include "parallel.h"

#include <signal.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "attention_test.h"

namespace linbias::testing {
namespace {

// Do every task on a number of threads, and check what `parallel` promises. `wait` is called by each task.
void check_tasks(int num_threads, int num_tasks, const std::function<void()>& wait, Team team = nullptr) {
  struct Context {
    const std::function<void()>& wait;
    std::vector<std::atomic<int>> done, busy;
    std::atomic<bool> alone{true}, asked_for{true};
  } context{wait, std::vector<std::atomic<int>>(num_tasks), std::vector<std::atomic<int>>(num_threads)};
  Call call;
  call.num_threads = num_threads;
  call.team = team;
  parallel(
      call, num_tasks,
      [](void* data, std::int64_t task, int worker) {
        Context& context = *static_cast<Context*>(data);
        if (worker >= static_cast<int>(context.busy.size())) {
          context.asked_for = false;
          return;
        }
        if (context.busy[worker].fetch_add(1) != 0) context.alone = false;
        context.wait();
        ++context.done.at(task);
        --context.busy[worker];
      },
      &context);
  const std::string name = std::to_string(num_tasks) + " tasks on " + std::to_string(num_threads) + " threads";
  bool once = true;
  for (const std::atomic<int>& count : context.done) once &= count == 1;
  check(context.asked_for, name, "no worker comes that the call did not ask for");
  check(once, name, "each task is done once");
  check(context.alone, name, "a worker is one thread at a time");
}

// Returns when so many threads have called it, or gives them up after half a minute.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  void operator()() {
    constexpr int kPatience = 30'000;
    ++come_;
    for (int i = 0; i < kPatience && come_ < expected_ && !given_up_; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (come_ < expected_) given_up_ = true;
  }
  bool complete() const { return !given_up_; }

 private:
  const int expected_;
  std::atomic<int> come_{0};
  std::atomic<bool> given_up_{false};
};

// Tasks that wait for one another are done only if a thread for each of them comes: those that are started at first,
// and those that sleep later on.
void check_all_come(int num_callers, int num_threads) {
  Meeting meeting(num_callers * num_threads);
  std::vector<std::thread> callers;
  for (int i = 1; i < num_callers; ++i) {
    callers.emplace_back([&] { check_tasks(num_threads, num_threads, std::ref(meeting)); });
  }
  check_tasks(num_threads, num_threads, std::ref(meeting));
  for (std::thread& caller : callers) caller.join();
  check(meeting.complete(), std::to_string(num_callers) + " times " + std::to_string(num_threads), "all threads come");
}

// Threads of a caller's own, which round in a way of theirs.
std::atomic<bool> team_is_as_it_was{true};
void team_of_three(void (*work)(void*), void* data, unsigned, unsigned) {
  std::vector<std::thread> others;
  for (int i = 1; i < 3; ++i) {
    others.emplace_back([=] {
      std::fesetround(FE_TOWARDZERO);
      work(data);
      if (std::fegetround() != FE_TOWARDZERO) team_is_as_it_was = false;
    });
  }
  work(data);
  for (std::thread& other : others) other.join();
}

// Every thread rounds as the caller does, and has its own way again when it is a caller's. The pool's threads are there
// already, and began with another.
void check_rounding(int num_threads, Team team) {
  const int before = std::fegetround();
  for (const int mode : {FE_UPWARD, FE_DOWNWARD}) {
    std::atomic<int> different{0};
    Meeting meeting(num_threads);
    std::fesetround(mode);
    check_tasks(
        num_threads, num_threads,
        [&] {
          if (std::fegetround() != mode) ++different;
          meeting();
        },
        team);
    check(std::fegetround() == mode, team ? "team" : "pool", "the caller's rounding mode stays");
    std::fesetround(before);
    check(different == 0, team ? "team" : "pool", "every thread rounds as the caller does");
  }
  check(team_is_as_it_was, "team", "a caller's thread gets its rounding mode back");
}

// A call asks for two of a caller's three threads: the third does none of the many tasks.
void check_large_team() {
  check_tasks(2, 100, [] { std::this_thread::sleep_for(std::chrono::microseconds(100)); }, team_of_three);
}

// Signals are for the threads of the program: those of the pool take none, and the caller goes on taking them.
void check_signals() {
  const auto takes_signals = [] {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    return !sigismember(&blocked, SIGUSR1);
  };
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> wrong{0};
  Meeting meeting(3);
  check_tasks(3, 3, [&] {
    if (takes_signals() != (std::this_thread::get_id() == caller)) ++wrong;
    meeting();
  });
  check(wrong == 0 && takes_signals(), "three threads", "only the caller takes signals");
}

}  // namespace

void test_tasks_are_shared_out() {
  for (int i = 0; i < 20 && !failures; ++i) {
    check_all_come(3, 7);
    check_all_come(1, 64);
    check_all_come(1, 2);
  }
  for (const int num_threads : {2, 3, 64}) {
    for (int i = 0; i < 50; ++i) check_tasks(num_threads, i * i, [] {});  // which are over before many have come
  }
  check_rounding(7, nullptr);
  check_rounding(3, team_of_three);
  check_large_team();
  check_signals();
}

}  // namespace linbias::testing
