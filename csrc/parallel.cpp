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

  std::int64_t num_left() const { return num_tasks - next.load(std::memory_order_relaxed); }
  bool wants_help() const { return joined < num_threads && num_left() > 0; }
  bool is_helped() const { return helpers.load(std::memory_order_acquire) > 0; }
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
    std::unique_lock lock(mutex_);
    job.following = jobs_;
    jobs_ = &job;
    const int woken = call_helpers();
    lock.unlock();
    wake(woken);
    job.work(0);
    // Now that no task is left, nobody joins any more; the last task of a helper rarely takes long.
    for (int i = 0; i < kSpins && job.is_helped(); ++i) pause();
    lock.lock();
    Job** place = &jobs_;
    while (*place != &job) place = &(*place)->following;
    *place = job.following;
    left_.wait(lock, [&job] { return !job.is_helped(); });
  }

 private:
  static constexpr int kSpins = 1000, kCallsEach = 2;

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

  // How many more threads the jobs have work for.
  std::int64_t wanted() const {
    std::int64_t count = 0;
    for (Job* job = jobs_; job; job = job->following) {
      if (job->wants_help()) count += std::min<std::int64_t>(job->num_threads - job->joined, job->num_left());
    }
    return count;
  }

  // Call a few threads that sleep, or start them where none does, and return how many are to be woken. Each that comes
  // calls as many while help is wanted: the last of 64 is six calls away, however many come the caller is soon at
  // work, and none is called for a job that is done. Needs the lock.
  int call_helpers() {
    int woken = 0;
    for (std::int64_t count = std::min<std::int64_t>(kCallsEach, wanted() - called_); count > 0; --count) {
      if (asleep_ > 0) {
        --asleep_;
        ++woken;
      } else if (!start_helper()) {
        break;  // no more threads to be had: those that there are do all the tasks
      }
      ++called_;
    }
    return woken;
  }

  // Without the lock, which those that wake would only wait for.
  void wake(int count) {
    for (; count > 0; --count) called_on_.notify_one();
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
    for (;; ++asleep_) {
      called_on_.wait(lock, [this] { return called_ > 0; });
      --called_;
      while (Job* job = find_job()) {
        const int worker = job->joined++;
        job->helpers.fetch_add(1, std::memory_order_relaxed);
        const int woken = call_helpers();
        lock.unlock();
        wake(woken);
        std::fesetenv(&job->environment);
        job->work(worker);
        const bool was_last = job->helpers.fetch_sub(1, std::memory_order_acq_rel) == 1;  // the job may be gone now
        lock.lock();
        if (was_last) left_.notify_all();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable called_on_, left_;
  Job* jobs_ = nullptr;
  int asleep_ = 0, called_ = 0;  // threads that sleep and are not called; threads that are called and not yet up
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
  Pool* existing = shared_pool.load();
  if (existing) return *existing;
  Pool* fresh = new Pool;
  if (shared_pool.compare_exchange_strong(existing, fresh)) return *fresh;
  delete fresh;
  return *existing;
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
