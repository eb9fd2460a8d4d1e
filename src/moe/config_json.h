// MoeOptions as JSON and back, for files that carry a layer's config (repros, cache keys) and for describe.
#pragma once

#include <string>
#include <string_view>

#include "core/config.h"

namespace nvfp4_moe {

// Every field, with the names of MoeOptions; floats survive the way back bit for bit.
std::string to_json(const MoeOptions& options);
// kBadInput, naming the field, for anything that is not such an object: unknown, missing or doubtful fields included.
Result<MoeOptions> moe_options_from_json(std::string_view text);

}  // namespace nvfp4_moe
