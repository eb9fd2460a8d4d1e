// What a checkpoint's config files declare about the routed experts' quantization. Private to src/checkpoint.
//
// Four dialects: hf_quant_config.json {"quantization": {...}}, config.json quantization_config of ModelOpt (flat), of
// compressed-tensors (config_groups), and of DeepSeek-V4 (quant_method fp8 with moe_quant_algo). Attention, dense
// layers and the output head may be quantized otherwise; only what concerns routed and shared experts is looked at.
// Names of methods, algorithms and formats are read in either case: producers differ.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "safetensors/json.h"

namespace nvfp4_moe {

struct QuantDeclaration {
  bool declared = false;  // false: the experts are floats
  SourceFormat format = SourceFormat::kFloat;
  ActivationFormat activation_format = ActivationFormat::kNvfp4;
  std::string method;  // "modelopt", "compressed-tensors", "fp8", "mxfp4"
  std::string algo;    // of the routed experts: "NVFP4", "W4A16_NVFP4", "MXFP4"
  std::string producer;
  std::map<int64_t, LayerQuantization> by_layer;             // empty where all layers are declared alike
  std::optional<ActivationFormat> shared_activation_format;  // where the shared expert's is declared apart
};

// `quantization`: the flat object of config.json, or the "quantization" object of hf_quant_config.json.
Result<QuantDeclaration> parse_quantization(const Json& quantization, std::string_view family);

}  // namespace nvfp4_moe
