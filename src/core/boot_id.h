// The number that Linux gives to each start of the kernel. Processes that read the same one run on the same host.
#pragma once

#include <string>

#include "core/status.h"

namespace nvfp4_moe {

// 36 characters, read once per process. kUnsupported if /proc has none.
const Result<std::string>& boot_id();

}  // namespace nvfp4_moe
