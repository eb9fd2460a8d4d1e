// Names of expert tensors in GGUF files: one spelling for all architectures. Private to
// src/checkpoint.
//
//   blk.<L>.ffn_<gate|up|down|gate_up>_exps.<part>    the routed experts, stacked in one tensor;
//                                                     gate above up
//   blk.<L>.ffn_<gate|up|down|gate_up>_shexp.<part>   the shared expert
//
// <part> is weight (codes and block scales, or floats), scale (tensor scales, NVFP4 only: one per
// expert, 1 if missing), input_scale (amax/2688, one per expert) or bias.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/names.h"

namespace nvfp4_moe::internal {

// nullopt if the name is not an expert's. The stem is "blk.<L>"; the role is kStacked or kShared.
std::optional<MoeTensorName> parse_gguf_tensor_name(std::string_view name);

// The inverse.
std::string gguf_tensor_name(const std::string& stem, TensorRole role, Projection projection,
                             std::string_view part);

// Why a tensor that is not an expert's is not read.
std::string_view gguf_ignored_reason(std::string_view name);

}  // namespace nvfp4_moe::internal
