// Declarations of a checkpoint's config files about the routed experts' quantization. Private to
// src/checkpoint.
//
// There are four dialects: hf_quant_config.json {"quantization": {...}}, config.json
// quantization_config of ModelOpt (flat), of compressed-tensors (config_groups), and of DeepSeek-V4
// (quant_method fp8 with moe_quant_algo). Attention, dense layers and the output head may be
// quantized differently; the rules below are used for experts only. Names of methods, algorithms
// and formats are read in either case, since producers differ.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/module_rules.h"
#include "io/json.h"

namespace nvfp4_moe::internal {

struct QuantDeclaration {
  std::string method;  // "modelopt", "compressed-tensors", "fp8", "mxfp4"; empty: none
  std::string
      algo;  // of most routed experts: "NVFP4", "W4A16_NVFP4", "MXFP4"; empty: not quantized
  SourceFormat format = SourceFormat::kFloat;  // format of the same experts
  std::string producer;
  std::vector<ModuleRules>
      rules;  // of a module: the first gives its format, the most precise its activations
  std::vector<ModuleRules>
      other_file;  // the same from hf_quant_config.json next to config.json: algorithms must agree
  std::vector<ModuleRules>
      rotations;  // modules whose inputs or outputs are rotated, which is not implemented
  // Why the declaration is not understood. Experts in floats are loaded anyway.
  Status refusal;

  bool declared() const { return !rules.empty() || !refusal.ok(); }
  // The module's scheme over all rules; its algo is empty if none names it.
  Result<ModuleScheme> of(std::string_view module);
  // kUnsupported if the module's inputs or outputs are rotated.
  Status rotation_of(std::string_view module);
  // Why nothing that is declared can be loaded; ok if something can be, or if nothing is declared.
  Status refusal_of_all() const;
};

// `quantization`: the flat object of config.json, or the "quantization" object of
// hf_quant_config.json.
Result<QuantDeclaration> parse_quantization(const Json& quantization, std::string_view family);

}  // namespace nvfp4_moe::internal
