// The id that Linux gives to each boot. Processes that read the same id run on the same host.
#pragma once

#include <string>

#include "core/status.h"

namespace nvfp4_moe::internal {

// Returns 36 characters. kUnsupported, with the system's reason, if the id cannot be read, for
// example because too many files are open. Not cached, since a later call may succeed.
Result<std::string> boot_id();

}  // namespace nvfp4_moe::internal
