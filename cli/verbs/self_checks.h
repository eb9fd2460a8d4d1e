// The self-checks of doctor.
#pragma once

#include <optional>

#include "cli/console/report.h"
#include "moe/kept_checks.h"

namespace nvfp4_moe::internal::cli {

// --self-check: runs the checks of --device, or of all GPUs if that is "cpu", and prints a line for
// each. A failure is exit code 1. False if one has timed out: its kernel may still occupy the
// device.
Result<bool> report_self_checks(Report& report);

// The self-check of a layer's kernels on a device if it has failed, so that the layer might hang.
// For a backend that needs a check before use, it is run first if no result is kept. A kernel that
// hangs is given up after 10 s, and then still occupies the device.
std::optional<KeptCheck> failed_self_check(const Backend& backend, const MoeConfig& config,
                                           const DeviceFacts& device);

}  // namespace nvfp4_moe::internal::cli
