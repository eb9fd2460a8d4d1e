// Engines: which inference engines the Python of PATH has, and whether the package's adapters fit
// them. The package answers (`python3 -m nvfp4_moe.engines`); it imports no engine.
#pragma once

#include "core/status.h"
#include "io/json.h"

namespace nvfp4_moe::internal::cli {

// The engines: [{"name", "version" or null, "fits" or null, "misfits", "note"}, ...]. Unsupported,
// with why, where there is nobody to ask: no python3 on PATH, no nvfp4_moe in it, no answer in
// time.
Result<Json> read_engines();

}  // namespace nvfp4_moe::internal::cli
