// A checkpoint's findings, and the tensors that are left alone, as `inspect` prints them.
#pragma once

#include <vector>

#include "checkpoint/checkpoint.h"
#include "cli/console/report.h"

namespace nvfp4_moe::internal::cli {

// An error makes the report fail. Ignored tensors are listed by name, layer and expert numbers
// folded into '*'.
void report_findings(const std::vector<Finding>& findings, Report& report);

}  // namespace nvfp4_moe::internal::cli
