// Whether a checkpoint fits in the memory of 1, 2, 4 or 8 GPUs under expert parallel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "cli/console/report.h"
#include "core/plan.h"

namespace nvfp4_moe::internal::cli {

// Prints the table of `inspect`. forced: a backend's name, or "auto". Its packed size is also a
// GPU's, because the codes and block scales are the same bytes in another order. memories: in units
// of 10^9 bytes. max_tokens: the most tokens of one call.
Status report_fit(const Checkpoint& checkpoint, const std::string& forced,
                  const DeviceFacts& device, const std::vector<int64_t>& memories,
                  int64_t max_tokens, Report& report);

}  // namespace nvfp4_moe::internal::cli
