// NumericChoices: options for the choices of the numeric contract, for every verb that runs a
// layer.
//
// Options that are not given keep the values of the checkpoint's family (or of the shape).
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "core/config.h"
#include "core/nvfp4_view.h"
#include "core/status.h"

namespace nvfp4_moe::internal::cli {

struct NumericChoices {
  std::string activation_format;   // auto | nvfp4 | bf16 | int8_block | fp8
  std::string activation_scale;    // dynamic_token | static | vllm_order
  std::string intermediate_scale;  // dynamic_token | fixed | vllm_order
  std::optional<float> intermediate_fixed;
  std::optional<float> static_headroom;
  std::string router_weight;  // after_down | before_down | on_input
  std::string row_format;     // bf16 | fp32
  bool batch_invariant = false;

  // Writes the given choices into options. kInvalidArgument for an unknown name. "auto" leaves the
  // activation format unchanged.
  Status apply(MoeOptions& options) const;
  // Whether the rule of moe/activation_choice.h chooses the activation format.
  bool chooses_format() const { return activation_format.empty() || activation_format == "auto"; }
};
void add_numeric_choices(CLI::App& verb, NumericChoices& choices);

// The part of the layer that this process runs.
struct LocalPart {
  std::string expert_range;        // "first:count"; empty: all experts
  std::string intermediate_slice;  // "first:count"; empty: the whole dimension
  Result<ExpertRange> range(int64_t num_experts) const;
  Result<IntermediateSlice> slice(int64_t intermediate_size) const;
};
void add_expert_range(CLI::App& verb, LocalPart& part);
void add_intermediate_slice(CLI::App& verb, LocalPart& part);

}  // namespace nvfp4_moe::internal::cli
