// The config files of a quantized checkpoint, in the form that vLLM, SGLang, TensorRT-LLM and
// compressed-tensors read.
//
//   modelopt            config.json: quantization_config {quant_method "modelopt", quant_algo
//                       "NVFP4", config_groups, ignore}
//                       hf_quant_config.json: quantization {quant_algo, group_size,
//                       kv_cache_quant_algo, exclude_modules}
//   modelopt, V4        config.json keeps quant_method "fp8" (which the loader of its dense
//                       layers needs), adds moe_quant_algo "NVFP4"; hf_quant_config.json is
//                       MIXED_PRECISION with quantized_layers
//   modelopt, CSF       quant_algo MIXED_PRECISION in both files, with quantized_layers that
//   declare
//                       weight_scale_encoding "csf"
//   compressed-tensors  config.json: quantization_config {quant_method,
//                       format "nvfp4-pack-quantized", config_groups, ignore}
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/quantize_checkpoint.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct QuantizedModules {
  OutputFormat format = OutputFormat::kModelOpt;
  bool deepseek_v4 = false;
  bool csf = false;                       // block scales are coded (core/csf.h)
  std::vector<std::string> expert_stems;  // "layers.3.ffn.experts"; their experts are NVFP4
  std::vector<std::string> modules;  // every quantized matrix's module, "layers.3.ffn.experts.0.w1"
  std::vector<std::string> kept;     // modules with a matrix that is not quantized, by exact name
  std::vector<std::string> kept_stems;  // expert stems that are not quantized
};

struct ConfigFiles {
  std::string config;           // config.json
  std::string hf_quant_config;  // hf_quant_config.json; empty: not written
};
// source_config: IN's config.json. kBadInput if it is not a JSON object.
Result<ConfigFiles> quantized_config_files(const std::string& source_config,
                                           const QuantizedModules& modules);

}  // namespace nvfp4_moe::internal
