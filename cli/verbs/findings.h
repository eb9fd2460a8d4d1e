// Prints a checkpoint's findings and ignored tensors for `inspect`.
#pragma once

#include <vector>

#include "checkpoint/checkpoint.h"
#include "cli/console/report.h"

namespace nvfp4_moe::internal::cli {

// An error makes the report fail. Ignored tensors are listed by name, with layer and expert numbers
// replaced by '*'.
void report_findings(const std::vector<Finding>& findings, Report& report);

}  // namespace nvfp4_moe::internal::cli
