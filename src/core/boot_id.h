// The number that Linux gives to each start of the kernel. Processes that read the same one run on
// the same host.
#pragma once

#include <string>

#include "core/status.h"

namespace nvfp4_moe::internal {

// 36 characters. kUnsupported, with the system's reason, if it cannot be read: for example, too
// many files are open. Not cached, since a later call may succeed.
Result<std::string> boot_id();

}  // namespace nvfp4_moe::internal
