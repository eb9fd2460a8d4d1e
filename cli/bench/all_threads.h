// Runs one function on every thread of an executor at the same time, for measurements of the whole
// host.
#pragma once

#include <cstdint>
#include <functional>

#include "core/executor.h"

namespace nvfp4_moe::internal::cli {

// Calls body(thread) for thread = 0 .. executor.threads() - 1, each on its own thread, once all
// threads are ready. Returns the seconds from the first call's begin to the last call's end.
double time_on_all_threads(Executor& executor, const std::function<void(int64_t thread)>& body);

}  // namespace nvfp4_moe::internal::cli
