// Engines: the inference engines that the python3 on PATH has, and whether the package's adapters
// support them. Queries the package (`python3 -m nvfp4_moe.engines`), which imports no engine.
#pragma once

#include "core/status.h"
#include "io/json.h"

namespace nvfp4_moe::internal::cli {

// Returns [{"name", "version" or null, "fits" or null, "misfits", "note"}, ...]. kUnsupported with
// the reason if python3 is not on PATH, has no nvfp4_moe, or does not answer in time.
Result<Json> read_engines();

}  // namespace nvfp4_moe::internal::cli
