#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#define LINBIAS_POSIX
#endif

namespace linbias {
namespace {

// One call of `parallel`. It lies on the stack of its caller, who stays until every helper has left.
struct Job {
  Task run;
  void* context;
  std::int64_t num_tasks;
  int num_threads;
  std::fenv_t environment{};  // the caller's: whether its sums flush what is nearly 0
  std::atomic<std::int64_t> next{0};
  std::atomic<int> helpers{0};  // at work now
  int joined = 1;               // ever, the caller included
  Job* following = nullptr;     // in the pool's list

  bool has_tasks() const { return next.load(std::memory_order_relaxed) < num_tasks; }
  bool wants_help() const { return joined < num_threads && has_tasks(); }
  void work(int worker) {
    for (std::int64_t task; (task = next.fetch_add(1)) < num_tasks;) run(context, task, worker);
  }
};

// Run a job on the caller's threads, of which there may be more or fewer than it asks for.
void run_on(Team team, Job& job) {
  struct Context {
    Job& job;
    std::atomic<int> joined{0};
  } context{job};
  team(
      [](void* data) {
        Context& context = *static_cast<Context*>(data);
        const int worker = context.joined.fetch_add(1);
        if (worker >= context.job.num_threads) return;
        std::fenv_t own;
        std::fegetenv(&own);
        std::fesetenv(&context.job.environment);
        context.job.work(worker);
        std::fesetenv(&own);
      },
      &context, 0, 0);
}

class Pool {
 public:
  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      job.following = jobs_;
      jobs_ = &job;
      call_helper();
    }
    job.work(0);
    // Now that no task is left, nobody joins any more; the last task of a helper rarely takes long.
    for (int i = 0; i < kSpins && job.helpers.load(std::memory_order_relaxed) > 0; ++i) pause();
    std::unique_lock lock(mutex_);
    Job** place = &jobs_;
    while (*place != &job) place = &(*place)->following;
    *place = job.following;
    left_.wait(lock, [&job] { return job.helpers.load(std::memory_order_relaxed) == 0; });
  }

 private:
  static constexpr int kSpins = 1000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  Job* find_job() const {
    Job* job = jobs_;
    while (job && !job->wants_help()) job = job->following;
    return job;
  }

  // Wake a thread that sleeps, or start one more. Each that comes calls the next while help is wanted: calling many
  // takes the caller no longer than calling one, and none is called for a job that is done. Needs the lock.
  void call_helper() {
    if (called_ > 0) return;  // one is on its way
    called_ = 1;
    if (asleep_ > 0) {
      wanted_.notify_one();
    } else if (!start_helper()) {
      called_ = 0;  // no more threads to be had: those that there are do all the tasks
    }
  }

  bool start_helper() {
#if defined(LINBIAS_POSIX)
    sigset_t every, before;  // signals are for the program's own threads
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
#endif
    bool started = true;
    try {
      std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
#if defined(LINBIAS_POSIX)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    return started;
  }

  // What a thread of the pool does, for ever.
  void help() {
    std::unique_lock lock(mutex_);
    for (called_ = 0;; called_ = 0) {
      while (Job* job = find_job()) {
        const int worker = job->joined++;
        job->helpers.fetch_add(1, std::memory_order_relaxed);
        if (find_job()) call_helper();
        lock.unlock();
        std::fesetenv(&job->environment);
        job->work(worker);
        lock.lock();
        if (job->helpers.fetch_sub(1, std::memory_order_relaxed) == 1) left_.notify_all();
      }
      ++asleep_;
      wanted_.wait(lock, [this] { return called_ > 0; });
      --asleep_;
    }
  }

  std::mutex mutex_;
  std::condition_variable wanted_, left_;
  Job* jobs_ = nullptr;
  int asleep_ = 0, called_ = 0;  // threads that sleep; threads that were woken or started and are not yet up: 0 or 1
};

std::atomic<Pool*> shared_pool{nullptr};
std::atomic<bool> forked{false};

// A process that was forked off has none of the threads: neither a team's, for which it would wait for ever, nor the
// pool's, one of which may hold the lock.
#if defined(LINBIAS_POSIX)
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  shared_pool = nullptr;
  forked = true;
});
#endif

// The pool of this process. It is never destroyed: its threads may sleep in it until the very end.
Pool& pool() {
  Pool* found = shared_pool.load();
  if (found) return *found;
  Pool* fresh = new Pool;
  if (shared_pool.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

}  // namespace

void parallel(const Call& call, std::int64_t num_tasks, Task run, void* context) {
  Job job{run, context, num_tasks, static_cast<int>(std::min<std::int64_t>(call.num_threads, num_tasks))};
  if (job.num_threads <= 1) return job.work(0);
  std::fegetenv(&job.environment);
  if (call.team && !forked) run_on(call.team, job);
  else pool().run(job);
}

}  // namespace linbias
