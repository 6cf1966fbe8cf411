// Whether every thread that a call asks for comes, once, and whether every task is done, once.
#include "parallel.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "attention_test.h"

namespace linbias::testing {
namespace {

// Do every task on a number of threads, and check what `parallel` promises. `wait` is called by each task.
void check_tasks(int num_threads, int num_tasks, const std::function<void()>& wait) {
  struct Context {
    const std::function<void()>& wait;
    std::vector<std::atomic<int>> done, busy;
    std::atomic<bool> alone{true};
  } context{wait, std::vector<std::atomic<int>>(num_tasks), std::vector<std::atomic<int>>(num_threads)};
  Call call;
  call.num_threads = num_threads;
  parallel(
      call, num_tasks,
      [](void* data, std::int64_t task, int worker) {
        Context& context = *static_cast<Context*>(data);
        if (context.busy.at(worker).fetch_add(1) != 0) context.alone = false;
        context.wait();
        ++context.done.at(task);
        --context.busy.at(worker);
      },
      &context);
  const std::string name = std::to_string(num_tasks) + " tasks on " + std::to_string(num_threads) + " threads";
  bool once = true;
  for (const std::atomic<int>& count : context.done) once &= count == 1;
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
}

}  // namespace linbias::testing
