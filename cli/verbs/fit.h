// Whether a checkpoint fits GPUs of given memory, under expert parallel over 1, 2, 4 and 8 of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "cli/console/report.h"
#include "core/plan.h"

namespace nvfp4_moe::internal::cli {

// The table of `inspect`. forced: a backend's name, or "auto"; its packed layout stands for a
// GPU's, since the codes and block scales are the same bytes in another order. memories: in units
// of 10^9 bytes. max_tokens: of one call.
Status report_fit(const Checkpoint& checkpoint, const std::string& forced,
                  const DeviceFacts& device, const std::vector<int64_t>& memories,
                  int64_t max_tokens, Report& report);

}  // namespace nvfp4_moe::internal::cli
