// One body at the same time on every thread of an executor, for measurements of what the whole host
// does at once.
#pragma once

#include <cstdint>
#include <functional>

#include "core/executor.h"

namespace nvfp4_moe::internal::cli {

// Calls body(thread) for thread = 0 .. executor.threads() - 1, each on a thread of its own, none
// before all are there. Returns the seconds from the first body's begin to the last one's end.
double time_on_all_threads(Executor& executor, const std::function<void(int64_t thread)>& body);

}  // namespace nvfp4_moe::internal::cli
