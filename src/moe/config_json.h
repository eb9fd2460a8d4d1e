// MoeOptions as JSON and back, for files that carry a layer's config (repros, cache keys) and for
// describe.
#pragma once

#include <string>
#include <string_view>

#include "core/config.h"
#include "io/json.h"

namespace nvfp4_moe::internal {

// With the names of MoeOptions; floats survive the way back bit for bit. expert_biases is written
// if it is set.
std::string to_json(const MoeOptions& options);
// The same with the fields that are not set.
std::string every_field_json(const MoeOptions& options);
// kBadInput, naming the field, for anything that is not such an object: unknown, missing or
// doubtful fields included.
Result<MoeOptions> moe_options_from_json(std::string_view text);

// How one of a layer's two quantizations gets its scale, for describe and explain: "dynamic_token",
// the number that all rows share (scale), "dynamic_block" under int8_block, null under bf16, where
// nothing is quantized.
Json activation_scale_json(ActivationFormat format, float scale);

}  // namespace nvfp4_moe::internal
