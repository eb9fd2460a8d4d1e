#include "moe/activation_choice.h"

namespace nvfp4_moe {
namespace {

// What multiplies in a backend, by its name: engines ask on machines whose build does not have that backend.
enum class Arithmetic { kUnknown, kHost, kBf16TensorCores, kFp4TensorCores };
Arithmetic arithmetic_of(std::string_view backend) {
  if (backend == "sm100" || backend == "sm120") return Arithmetic::kFp4TensorCores;
  if (backend == "sm90" || backend == "cuda") return Arithmetic::kBf16TensorCores;
  if (backend == "cpu" || backend.starts_with("cpu:") || backend == "reference") return Arithmetic::kHost;
  return Arithmetic::kUnknown;
}

}  // namespace

Result<ChosenFormat> choose_activation_format(ActivationFormat declared, std::string_view backend) {
  const std::string name(backend);
  const Arithmetic arithmetic = arithmetic_of(backend);
  if (arithmetic == Arithmetic::kUnknown)
    return invalid_argument("backend: expected cpu, cpu:ISA, reference, cuda, sm90, sm100 or sm120, got \"" + name +
                            "\"");
  switch (declared) {
    case ActivationFormat::kNvfp4:
      if (arithmetic == Arithmetic::kFp4TensorCores)
        return ChosenFormat{ActivationFormat::kNvfp4, "W4A4 is declared and " + name + " has FP4 tensor cores"};
      if (arithmetic == Arithmetic::kHost)
        return ChosenFormat{ActivationFormat::kInt8Block,
                            "W4A4 is declared and int8_block is more precise and fast on a host"};
      return ChosenFormat{ActivationFormat::kBf16,
                          "W4A4 is declared, " + name + " multiplies in bf16, and bf16 is more precise"};
    case ActivationFormat::kFp8:
      if (backend == "sm100")  // has no GEMMs for it
        return ChosenFormat{ActivationFormat::kBf16,
                            "FP8 activations are declared, sm100 does not run them, and bf16 is more precise"};
      return ChosenFormat{ActivationFormat::kFp8, "FP8 activations are declared"};
    case ActivationFormat::kBf16:
      return ChosenFormat{ActivationFormat::kBf16, "no quantization of activations is declared"};
    case ActivationFormat::kInt8Block: break;
  }
  return invalid_argument(std::string("declared: expected bf16, nvfp4 or fp8, got ") + name_of(declared));
}

}  // namespace nvfp4_moe
