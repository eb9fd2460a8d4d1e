// MoeConfig: the sizes of a layer and every named choice of the numeric contract
// (docs/explanation/numerics.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/enum_names.h"
#include "core/host_device.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

enum class Activation : uint8_t {
  kSwiglu,         // silu(g) * u
  kSwigluClamped,  // silu(min(g, L)) * clamp(u, -L, L)                            DeepSeek-V4
  kSwigluStep,     // min(silu(g), L) * clamp(u, -L, L)                            Step-3.5
  kSwigluOai,      // g = min(g, L), u = clamp(u, -L, L): g * sigmoid(a g) * (u + 1)  gpt-oss
  kRelu2,          // relu(u)^2, without a gate                                    Nemotron-3
  kGelu,           // gelu(g) * u, gelu(x) = x Phi(x)
  kGeluTanh,       // the same with gelu's approximation by tanh                   Gemma-4
  kSitu,           // b tanh(g / b) sigmoid(g) * l tanh(u / l)                     Kimi-K3
};
enum class ActivationFormat : uint8_t {
  kNvfp4,      // W4A4
  kBf16,       // W4A16
  kInt8Block,  // W4A8: int8 with a scale per 16 elements
  kFp8,  // W4A8: E4M3 with a power of two per row, and weights rounded once to E4M3 (core/fp8.h)
};
enum class ActivationScale : uint8_t { kDynamicToken, kStatic, kVllmOrder };   // of hidden
enum class IntermediateScale : uint8_t { kDynamicToken, kFixed, kVllmOrder };  // of SwiGLU's output
enum class RouterWeight : uint8_t {
  kAfterDown,   // multiplies the expert's output, at combine
  kBeforeDown,  // multiplies SwiGLU's output before its rounding                  DeepSeek-V4
  kOnInput,     // multiplies hidden before quantize, only for routed experts; top_k is 1  Llama-4
};
enum class RowFormat : uint8_t { kBf16, kFp32 };  // gemm2's rows before combine

const char* to_string(Activation);
const char* to_string(ActivationFormat);
const char* to_string(ActivationScale);
const char* to_string(IntermediateScale);
const char* to_string(RouterWeight);
const char* to_string(RowFormat);

template <>
struct EnumNames<Activation> {
  static constexpr const char* kWhat = "activation";
  static constexpr std::array kAll = {"swiglu", "swiglu_clamped", "swiglu_step", "swiglu_oai",
                                      "relu2",  "gelu",           "gelu_tanh",   "situ"};
};
template <>
struct EnumNames<ActivationFormat> {
  static constexpr const char* kWhat = "activation_format";
  static constexpr std::array kAll = {"nvfp4", "bf16", "int8_block", "fp8"};
};
template <>
struct EnumNames<ActivationScale> {
  static constexpr const char* kWhat = "activation_scale";
  static constexpr std::array kAll = {"dynamic_token", "static", "vllm_order"};
};
template <>
struct EnumNames<IntermediateScale> {
  static constexpr const char* kWhat = "intermediate_scale";
  static constexpr std::array kAll = {"dynamic_token", "fixed", "vllm_order"};
};
template <>
struct EnumNames<RouterWeight> {
  static constexpr const char* kWhat = "router_weight";
  static constexpr std::array kAll = {"after_down", "before_down", "on_input"};
};
template <>
struct EnumNames<RowFormat> {
  static constexpr const char* kWhat = "row_format";
  static constexpr std::array kAll = {"bf16", "fp32"};
};

// Without a gate, gemm1 multiplies `up` only. An expert's gate is then a matrix without rows and
// with tensor scale 1, so loops over rows skip it. Code that counts matrices calls this function.
NVFP4_MOE_HOST_DEVICE constexpr bool has_gate(Activation activation) {
  return activation != Activation::kRelu2;
}
// The functions of core/gelu_situ.h. Kernels hold either these or the others.
NVFP4_MOE_HOST_DEVICE constexpr bool is_gelu_or_situ(Activation activation) {
  return activation == Activation::kGelu || activation == Activation::kGeluTanh ||
         activation == Activation::kSitu;
}
// Whether the function needs swiglu_limit.
constexpr bool has_swiglu_limit(Activation activation) {
  return activation == Activation::kSwigluClamped || activation == Activation::kSwigluStep ||
         activation == Activation::kSwigluOai;
}
constexpr int64_t gate_rows(Activation activation, int64_t intermediate_size) {
  return has_gate(activation) ? intermediate_size : 0;
}
// An expert's matrices, each of hidden x intermediate values, are [first_matrix, 3) of gate, up and
// down.
constexpr int first_matrix(Activation activation) { return has_gate(activation) ? 0 : 1; }
constexpr int64_t matrices_of_expert(Activation activation) { return 3 - first_matrix(activation); }

// Checks that the format supports the scale option. Scale: ActivationScale or IntermediateScale.
//
// - int8_block has one way to choose its scales. kInvalidArgument for a static, fixed or vllm_order
//   scale, since quantizing without it would not be the computation that was asked for.
// - fp8 has no vllm_order, which is an order of operations for NVFP4.
// - bf16 quantizes nothing, so the option has no effect.
template <class Scale>
Status check_scale_option(ActivationFormat format, Scale scale);

// Checks that static_headroom is a power of two, and 1 unless there is a static scale to multiply.
Status check_static_headroom(ActivationScale scale, float headroom);

// The largest |value| that a row scale of 1 represents: 2688 (6 * 448) under nvfp4, 448 under fp8.
// 0 for formats without row scales.
double row_scale_range(ActivationFormat format);

struct MoeOptions {
  int64_t num_experts = 0;  // global
  int64_t top_k = 0;
  int64_t hidden_size = 0;        // multiple of 16
  int64_t intermediate_size = 0;  // multiple of 16; this rank's slice under tensor parallel
  Activation activation = Activation::kSwiglu;
  std::optional<float>
      swiglu_limit;  // L; required by the three clamped activations, refused by the others
  float swiglu_alpha = 1.702f;                          // a of swiglu_oai; 1.702 for the others
  std::optional<float> situ_gate_limit, situ_up_limit;  // b and l of situ, which needs both
  ActivationFormat activation_format = ActivationFormat::kNvfp4;
  ActivationScale activation_scale = ActivationScale::kDynamicToken;
  IntermediateScale intermediate_scale = IntermediateScale::kDynamicToken;
  std::optional<float>
      intermediate_fixed;  // the power of two of intermediate_scale = fixed, if the caller knows it
  float max_router_weight = 1.0f;  // for the bound of `fixed` under before_down; unused otherwise
  float static_headroom = 1.0f;    // power of two, multiplies the static scale; 1 if there is none
  RouterWeight router_weight = RouterWeight::kAfterDown;
  RowFormat row_format = RowFormat::kBf16;
  bool batch_invariant = false;
  int64_t shared_intermediate_size = 0;  // 0: no shared expert
  // gate, up and down of the routed experts have biases (ExpertBiases)   gpt-oss
  bool expert_biases = false;
  bool operator==(const MoeOptions&) const = default;
};

// A validated MoeOptions. There is no invalid MoeConfig.
class MoeConfig {
 public:
  static Result<MoeConfig> make(const MoeOptions& options);
  const MoeOptions* operator->() const { return &options_; }
  const MoeOptions& options() const { return options_; }
  bool operator==(const MoeConfig&) const = default;

 private:
  explicit MoeConfig(const MoeOptions& options) : options_(options) {}
  MoeOptions options_;
};

}  // namespace nvfp4_moe::internal
