// Converts MoeOptions to JSON and back, for files that contain a layer's config (repros, cache
// keys) and for describe.
#pragma once

#include <string>
#include <string_view>

#include "core/config.h"
#include "io/json.h"

namespace nvfp4_moe::internal {

// Uses the names of MoeOptions. Floats survive the round trip bit for bit. expert_biases is written
// only if set.
std::string to_json(const MoeOptions& options);
// The same, including fields that are not set.
std::string every_field_json(const MoeOptions& options);
// kBadInput, naming the field, if the text is not such an object; unknown, missing and ambiguous
// fields are errors too.
Result<MoeOptions> moe_options_from_json(std::string_view text);

// How one of a layer's two quantizations gets its scale, for describe and explain: "dynamic_token";
// the number that all rows share (scale); "dynamic_block" under int8_block; null under bf16, which
// quantizes nothing.
Json activation_scale_json(ActivationFormat format, float scale);

}  // namespace nvfp4_moe::internal
