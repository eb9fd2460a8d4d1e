// The checks of MoeConfig::make.
#include "core/config.h"

#include <array>
#include <cmath>
#include <cstdio>

#include "core/float_formats.h"
#include "core/quantize.h"

namespace nvfp4_moe::internal {
namespace {

// A dot product of this many products of two E2M1 x E4M3 values, in units of 2^-20, still fits an
// int64: 144 (512 * 448)^2 < 2^43.
constexpr int64_t kMaxDimension = int64_t{1} << 20;
// Expert ids and counts stay small integers everywhere; published models have at most 512 experts.
constexpr int64_t kMaxExperts = 65536;

std::string text(float value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.9g", static_cast<double>(value));
  return buffer;
}

Status check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(std::string(name) + ": expected " + std::to_string(low) + ".." +
                          std::to_string(high) + ", got " + std::to_string(value));
}

Status check_dimension(const char* name, int64_t value) {
  if (value > 0 && value <= kMaxDimension && value % 16 == 0) return {};
  return invalid_argument(std::string(name) + ": expected a positive multiple of 16 up to " +
                          std::to_string(kMaxDimension) + ", got " + std::to_string(value));
}

Status check_positive(const char* name, float value) {
  if (std::isfinite(value) && value > 0) return {};
  return invalid_argument(std::string(name) + ": expected finite and > 0, got " + text(value));
}

Status check_power_of_two(const char* name, float value) {
  if (is_power_of_two(value)) return {};
  return invalid_argument(std::string(name) + ": expected a power of two in [2^-126, 2^127], got " +
                          text(value));
}

Status check_limit(const MoeOptions& o, const char* name, const std::optional<float>& limit,
                   bool needed) {
  if (needed && limit.has_value()) return check_positive(name, *limit);
  if (!needed && !limit.has_value()) return {};
  return invalid_argument(std::string(name) + ": expected " + (needed ? "a limit" : "none") +
                          " with activation " + to_string(o.activation) + ", got " +
                          (limit.has_value() ? text(*limit) : "none"));
}

Status check_limits(const MoeOptions& o) {
  const bool situ = o.activation == Activation::kSitu;
  NVFP4_MOE_TRY(check_limit(o, "swiglu_limit", o.swiglu_limit, has_swiglu_limit(o.activation)));
  NVFP4_MOE_TRY(check_limit(o, "situ_gate_limit", o.situ_gate_limit, situ));
  return check_limit(o, "situ_up_limit", o.situ_up_limit, situ);
}

Status check_alpha(const MoeOptions& o) {
  NVFP4_MOE_TRY(check_positive("swiglu_alpha", o.swiglu_alpha));
  if (o.activation == Activation::kSwigluOai || o.swiglu_alpha == MoeOptions{}.swiglu_alpha)
    return {};
  return invalid_argument(std::string("swiglu_alpha: expected none (1.702) with activation ") +
                          to_string(o.activation) + ", got " + text(o.swiglu_alpha));
}

Status check_fixed(const MoeOptions& o) {
  if (!o.intermediate_fixed.has_value()) return {};
  if (o.intermediate_scale != IntermediateScale::kFixed)
    return invalid_argument(
        std::string("intermediate_fixed: expected none with intermediate_scale ") +
        to_string(o.intermediate_scale) + ", got " + text(*o.intermediate_fixed));
  return check_power_of_two("intermediate_fixed", *o.intermediate_fixed);
}

// A token has one row of activations, and that row holds one weight.
Status check_router_weight(const MoeOptions& o) {
  NVFP4_MOE_TRY(check_named(o.router_weight));
  if (o.router_weight != RouterWeight::kOnInput || o.top_k == 1) return {};
  return invalid_argument(
      "top_k: expected 1 with router_weight on_input (hidden times one expert's weight), got " +
      std::to_string(o.top_k));
}

// If the weight is applied anywhere before gemm2's output, it does not multiply the down bias.
Status check_expert_biases(const MoeOptions& o) {
  if (!o.expert_biases || o.router_weight == RouterWeight::kAfterDown) return {};
  return invalid_argument(std::string("router_weight: expected after_down with expert_biases (the "
                                      "weight multiplies the down bias too), "
                                      "got ") +
                          to_string(o.router_weight));
}

}  // namespace

const char* to_string(Activation value) { return name_of(value); }
const char* to_string(ActivationFormat value) { return name_of(value); }
const char* to_string(ActivationScale value) { return name_of(value); }
const char* to_string(IntermediateScale value) { return name_of(value); }
const char* to_string(RouterWeight value) { return name_of(value); }
const char* to_string(RowFormat value) { return name_of(value); }

template <class Scale>
Status check_scale_option(ActivationFormat format, Scale scale) {
  if (format == ActivationFormat::kInt8Block && scale != Scale::kDynamicToken)
    return invalid_argument(
        std::string(EnumNames<Scale>::kWhat) +
        ": expected dynamic_token with activation_format int8_block (each block of 16 has its own "
        "scale), got " +
        to_string(scale));
  if (format == ActivationFormat::kFp8 && scale == Scale::kVllmOrder)
    return invalid_argument(std::string(EnumNames<Scale>::kWhat) + ": expected " +
                            EnumNames<Scale>::kAll[0] + " or " + EnumNames<Scale>::kAll[1] +
                            " with activation_format fp8 (vllm_order is an order of operations for "
                            "NVFP4), got vllm_order");
  return {};
}
template Status check_scale_option<ActivationScale>(ActivationFormat, ActivationScale);
template Status check_scale_option<IntermediateScale>(ActivationFormat, IntermediateScale);

Status check_static_headroom(ActivationScale scale, float headroom) {
  NVFP4_MOE_TRY(check_power_of_two("static_headroom", headroom));
  if (scale == ActivationScale::kStatic || headroom == 1.0f) return {};
  return invalid_argument(std::string("static_headroom: expected none (1) with activation_scale ") +
                          to_string(scale) + ", got " + text(headroom));
}

double row_scale_range(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::kNvfp4: return kNvfp4Range;
    case ActivationFormat::kFp8: return double{kE4m3Max};
    case ActivationFormat::kBf16:
    case ActivationFormat::kInt8Block: break;
  }
  return 0;
}

Result<MoeConfig> MoeConfig::make(const MoeOptions& o) {
  NVFP4_MOE_TRY(check_range("num_experts", o.num_experts, 1, kMaxExperts));
  NVFP4_MOE_TRY(check_range("top_k", o.top_k, 1, o.num_experts));
  NVFP4_MOE_TRY(check_dimension("hidden_size", o.hidden_size));
  NVFP4_MOE_TRY(check_dimension("intermediate_size", o.intermediate_size));
  if (o.shared_intermediate_size != 0)
    NVFP4_MOE_TRY(check_dimension("shared_intermediate_size", o.shared_intermediate_size));
  NVFP4_MOE_TRY(check_named(o.activation));
  NVFP4_MOE_TRY(check_named(o.activation_format));
  NVFP4_MOE_TRY(check_named(o.activation_scale));
  NVFP4_MOE_TRY(check_named(o.intermediate_scale));
  NVFP4_MOE_TRY(check_router_weight(o));
  NVFP4_MOE_TRY(check_named(o.row_format));
  NVFP4_MOE_TRY(check_limits(o));
  NVFP4_MOE_TRY(check_alpha(o));
  NVFP4_MOE_TRY(check_scale_option(o.activation_format, o.activation_scale));
  NVFP4_MOE_TRY(check_scale_option(o.activation_format, o.intermediate_scale));
  NVFP4_MOE_TRY(check_fixed(o));
  NVFP4_MOE_TRY(check_positive("max_router_weight", o.max_router_weight));
  NVFP4_MOE_TRY(check_static_headroom(o.activation_scale, o.static_headroom));
  NVFP4_MOE_TRY(check_expert_biases(o));
  return MoeConfig(o);
}

}  // namespace nvfp4_moe::internal
