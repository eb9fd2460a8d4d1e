// Engines: the inference engines that the python3 on PATH has, and whether the package's adapters
// support them. Queries the package (`python3 -m nvfp4_moe.engines`), which imports no engine.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"
#include "io/json.h"

namespace nvfp4_moe::internal::cli {

// Returns {"python": its path, "summary": one line, "missing": [a sentence, ...], "engines":
// [{"name", "version" or null, "fits" or null, "misfits", "note"}, ...]}. kUnsupported with the
// reason if python3 is not on PATH, has no nvfp4_moe, or does not answer in time.
Result<Json> read_engines();

// One line: the summary and the Python that was asked. If none could be asked: why, and how to ask.
std::string engines_text(const Result<Json>& report);
// One sentence for each engine that does not fit.
std::vector<std::string> missing_for_engines(const Result<Json>& report);

}  // namespace nvfp4_moe::internal::cli
