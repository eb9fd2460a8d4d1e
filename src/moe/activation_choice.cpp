#include "moe/activation_choice.h"

#include <algorithm>

#include "core/activation_precision.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

// The arithmetic of a backend, looked up by name, because engines query it on machines whose build
// lacks that backend.
enum class Arithmetic { kUnknown, kHost, kBf16TensorCores, kFp4TensorCores };
Arithmetic arithmetic_of(std::string_view backend) {
  if (backend == "sm100" || backend == "sm120") return Arithmetic::kFp4TensorCores;
  if (backend == "sm90" || backend == "cuda") return Arithmetic::kBf16TensorCores;
  if (backend == "cpu" || backend.starts_with("cpu:") || backend == "reference")
    return Arithmetic::kHost;
  return Arithmetic::kUnknown;
}

}  // namespace

Result<ChosenFormat> choose_activation_format(ActivationFormat declared, std::string_view backend) {
  const std::string name(backend);
  const Arithmetic arithmetic = arithmetic_of(backend);
  if (arithmetic == Arithmetic::kUnknown)
    return invalid_argument(
        "backend: expected cpu, cpu:ISA, reference, cuda, sm90, sm100 or sm120, got \"" + name +
        "\"");
  switch (declared) {
    case ActivationFormat::kNvfp4:
      if (arithmetic == Arithmetic::kFp4TensorCores)
        return ChosenFormat{ActivationFormat::kNvfp4,
                            "W4A4 is declared and " + name + " has FP4 tensor cores"};
      if (arithmetic == Arithmetic::kHost)
        return ChosenFormat{ActivationFormat::kInt8Block,
                            "W4A4 is declared and int8_block is more precise and fast on a host"};
      return ChosenFormat{
          ActivationFormat::kBf16,
          "W4A4 is declared, " + name + " multiplies in bf16, and bf16 is more precise"};
    case ActivationFormat::kFp8:
      if (backend == "sm100")  // has no fp8 GEMMs
        return ChosenFormat{
            ActivationFormat::kBf16,
            "FP8 activations are declared, sm100 does not run them, and bf16 is more precise"};
      return ChosenFormat{ActivationFormat::kFp8, "FP8 activations are declared"};
    case ActivationFormat::kBf16:
      return ChosenFormat{ActivationFormat::kBf16, "no quantization of activations is declared"};
    case ActivationFormat::kInt8Block: break;
  }
  return invalid_argument(std::string("declared: expected bf16, nvfp4 or fp8, got ") +
                          name_of(declared));
}

namespace {

// The rule's format for this backend, followed by the formats that may replace it, in ascending
// precision.
Result<std::vector<ChosenFormat>> allowed_formats(const MoeOptions& options,
                                                  std::string_view backend) {
  const ActivationFormat declared = options.activation_format;
  NVFP4_MOE_ASSIGN(const ChosenFormat rule, choose_activation_format(declared, backend));
  const bool own_scale = options.activation_scale != ActivationScale::kDynamicToken ||
                         options.intermediate_scale != IntermediateScale::kDynamicToken;
  if (own_scale)
    return std::vector{ChosenFormat{declared, "a scale of the declared format is asked for"}};
  std::vector<ChosenFormat> formats = {rule};
  for (const ActivationFormat format :
       {ActivationFormat::kFp8, ActivationFormat::kInt8Block, ActivationFormat::kBf16}) {
    if (less_precise(rule.format, format))
      formats.push_back({format, rule.because + ", but " + std::string(backend) + " declines " +
                                     to_string(rule.format)});
  }
  return formats;
}

}  // namespace

Result<ChosenFormat> choose_activation_format(const MoeOptions& options, const DeviceFacts& device,
                                              const std::string& forced) {
  for (const Backend* backend : backends()) {
    if (forced != "auto" && forced != backend->name) continue;
    NVFP4_MOE_ASSIGN(const std::vector<ChosenFormat> formats,
                     allowed_formats(options, backend->name));
    for (const ChosenFormat& chosen : formats) {
      MoeOptions one = options;
      one.activation_format = chosen.format;
      NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(one));
      if (backend->supports(config, device).ok()) return chosen;
    }
  }
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  // no backend takes the layer; the status has the reasons
  return choose_backend(config, device, forced).status();
}

Result<MoeOptions> with_chosen_format(MoeOptions options, const LayerOptions& layer) {
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  NVFP4_MOE_ASSIGN(const std::string forced, forced_backend(layer.backend, env));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(layer.device));
  NVFP4_MOE_ASSIGN(const ChosenFormat chosen, choose_activation_format(options, device, forced));
  options.activation_format = chosen.format;
  return options;
}

std::string reason_of_format(ActivationFormat format, const DeclaredActivations& declared,
                             std::string_view backend) {
  const Result<ChosenFormat> rule = choose_activation_format(declared.format, backend);
  if (rule.ok() && rule->format == format) return rule->because + " (" + declared.why + ")";
  return std::string("it was asked for") +
         (less_precise(format, declared.format) ? ", less precise than declared: "
                                                : "; declared: ") +
         to_string(declared.format) + " (" + declared.why + ")";
}

}  // namespace nvfp4_moe::internal
