// doctor --self-check.
#pragma once

#include "cli/console/report.h"

namespace nvfp4_moe::internal::cli {

// Runs the self-checks of --device, or of all GPUs if that is "cpu", and prints a line for each. A
// failure is exit code 1. False if one has timed out: its kernel still occupies the device.
Result<bool> report_self_checks(Report& report);

}  // namespace nvfp4_moe::internal::cli
