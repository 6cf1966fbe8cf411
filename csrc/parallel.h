// Share tasks out over threads that live for one call: no state between calls, so that fork, interrupts and calls
// from several threads at once need no care. Starting a thread takes about 20 us; short calls should ask for one.
#pragma once

#include <cstdint>

namespace linbias {

// Call run(context, task, worker) for every task in [0, num_tasks), each once, the lowest first as workers get free.
// worker is in [0, num_threads). What a task computes must not depend on its worker.
using Task = void (*)(void* context, std::int64_t task, int worker);
void parallel(std::int64_t num_tasks, int num_threads, Task run, void* context);

}  // namespace linbias
