#include "convert/quantize_config.h"

#include "io/json.h"

namespace nvfp4_moe::internal {
namespace {

Json producer() { return {{"name", "nvfp4-moe"}, {"version", NVFP4_MOE_VERSION}}; }

// Exact module names, then stems as patterns: shell style for ModelOpt, regular expressions for
// compressed-tensors.
Json not_quantized(const QuantizedModules& m) {
  Json names = Json::array();
  for (const std::string& name : m.kept) names.push_back(name);
  for (const std::string& stem : m.kept_stems) {
    if (m.format == OutputFormat::kModelOpt) {
      names.push_back(stem + "*");
      continue;
    }
    std::string pattern = "re:^";
    for (const char c : stem) {
      if (c == '.') pattern += '\\';
      pattern += c;
    }
    names.push_back(pattern + ".*");
  }
  return names;
}

Json compressed_tensors(const QuantizedModules& m) {
  const auto arguments = [](Json dynamic) {
    return Json{{"actorder", nullptr},
                {"block_structure", nullptr},
                {"dynamic", std::move(dynamic)},
                {"group_size", 16},
                {"num_bits", 4},
                {"scale_dtype", "torch.float8_e4m3fn"},
                {"strategy", "tensor_group"},
                {"symmetric", true},
                {"type", "float"}};
  };
  return {{"config_groups",
           {{"group_0",
             {{"format", "nvfp4-pack-quantized"},
              {"input_activations", arguments("local")},
              {"output_activations", nullptr},
              {"targets", {"Linear"}},
              {"weights", arguments(false)}}}}},
          {"format", "nvfp4-pack-quantized"},
          {"global_compression_ratio", nullptr},
          {"ignore", not_quantized(m)},
          {"kv_cache_scheme", nullptr},
          {"quant_method", "compressed-tensors"},
          {"quantization_status", "compressed"}};
}

Json nvfp4_layers(const std::vector<std::string>& names, bool csf) {
  Json layers = Json::object();
  for (const std::string& name : names) {
    layers[name] = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
    if (csf) layers[name]["weight_scale_encoding"] = "csf";
  }
  return layers;
}

Json modelopt(const QuantizedModules& m) {
  const Json arguments = {
      {"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
  if (m.csf)
    return {{"config_groups",
             {{"group_0",
               {{"input_activations", arguments},
                {"weights", arguments},
                {"targets", m.expert_stems}}}}},
            {"ignore", not_quantized(m)},
            {"quant_algo", "MIXED_PRECISION"},
            {"quantized_layers", nvfp4_layers(m.expert_stems, true)},
            {"producer", producer()},
            {"quant_method", "modelopt"}};
  return {{"config_groups",
           {{"group_0",
             {{"input_activations", arguments}, {"weights", arguments}, {"targets", {"Linear"}}}}}},
          {"ignore", not_quantized(m)},
          {"quant_algo", "NVFP4"},
          {"producer", producer()},
          {"quant_method", "modelopt"}};
}

// Keeps the dense layers' own description. If they are not FP8, modules_to_not_convert lists them.
Json modelopt_v4(const QuantizedModules& m, Json source) {
  if (!source.is_object()) source = Json::object();
  const bool dense_is_fp8 = source.value("quant_method", "") == "fp8";
  source["quant_method"] = "fp8";
  if (!source.contains("activation_scheme")) source["activation_scheme"] = "dynamic";
  if (!source.contains("weight_block_size")) source["weight_block_size"] = {128, 128};
  source["moe_quant_algo"] = "NVFP4";
  source["quant_algo"] = "MIXED_PRECISION";
  source["group_size"] = 16;
  source["quantized_layers"] = nvfp4_layers(m.expert_stems, m.csf);
  Json ignore = {"*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"};
  for (const std::string& stem : m.kept_stems) ignore.push_back(stem + ".*");
  source["ignore"] = std::move(ignore);
  if (!dense_is_fp8) source["modules_to_not_convert"] = m.kept;
  source["producer"] = producer();
  return source;
}

}  // namespace

Result<ConfigFiles> quantized_config_files(const std::string& source_config,
                                           const QuantizedModules& m) {
  Json config = Json::parse(source_config, /*non_finite=*/true);
  if (!config.is_object()) return bad_input("config.json: expected a JSON object");
  ConfigFiles files;
  if (m.format == OutputFormat::kCompressedTensors) {
    config["quantization_config"] = compressed_tensors(m);
  } else {
    const bool by_layer = m.deepseek_v4 || m.csf;
    Json quantization = {{"quant_algo", by_layer ? "MIXED_PRECISION" : "NVFP4"},
                         {"kv_cache_quant_algo", nullptr},
                         {"group_size", 16},
                         {"exclude_modules", not_quantized(m)}};
    if (m.deepseek_v4) {
      config["expert_dtype"] = "fp4";
      config["quantization_config"] = modelopt_v4(m, config.value("quantization_config", Json()));
    } else {
      config["quantization_config"] = modelopt(m);
    }
    if (by_layer) quantization["quantized_layers"] = nvfp4_layers(m.modules, m.csf);
    files.hf_quant_config =
        Json{{"producer", producer()}, {"quantization", std::move(quantization)}}.dump(2) + "\n";
  }
  // Names from files are UTF-8, since others were refused when the files were opened. Fields of the
  // model do not change, including an Infinity in Nemotron-H's time_step_limit: null would be
  // another model.
  files.config = config.dump(2, false, /*non_finite=*/true) + "\n";
  return files;
}

}  // namespace nvfp4_moe::internal
