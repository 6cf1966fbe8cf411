// Share tasks out over threads.
//
// They are those of the call's team where it has one. Else threads are kept and sleep between calls; starting them anew
// would cost 20 us each. Calls may come from several threads at once, and from a process that was forked off: it starts
// threads of its own.
#pragma once

#include <cstdint>

#include "linbias/attention.h"

namespace linbias {

// Call run(context, task, worker) for every task in [0, num_tasks), each once, the lowest first as workers get free.
// worker is in [0, call.num_threads). What a task computes must not depend on its worker.
using Task = void (*)(void* context, std::int64_t task, int worker);
void parallel(const Call& call, std::int64_t num_tasks, Task run, void* context);

}  // namespace linbias
