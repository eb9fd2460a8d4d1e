// Places a layer's arrays in its workspace, and computes the activation scales from config and
// checkpoint. Arrays that a config does not need (codes under bf16, the shared part without a
// shared expert) take no memory.
#include "backend/layer_steps.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "core/float_formats.h"
#include "core/quantize.h"

namespace nvfp4_moe::internal {
namespace {

// 16x: SwiGLU's output at run time may exceed what calibration saw, and headroom costs nothing
// (numerics.md).
constexpr float kFixedHeadroom = 16.0f;

class Walk {
 public:
  Walk(const MoeConfig& config, Arena& arena) : config_(config), arena_(arena) {}

  LayerBuffers operator()(const ExpertRange& range, int64_t tokens) {
    const int64_t top_k = config_->top_k, hidden = config_->hidden_size;
    const int64_t shared_size = config_->shared_intermediate_size;
    LayerBuffers buffers;
    buffers.status = arena_.take<RunStatus>("", "status", 1);
    buffers.row_of_assignment = arena_.take<int32_t>("", "row_of_assignment", tokens * top_k);
    const bool bf16 = config_->activation_format == ActivationFormat::kBf16,
               has_shared = shared_size > 0;
    const ActivationBuffers routed_hidden = activations("hidden", tokens, hidden, bf16);
    ActivationBuffers shared_hidden = routed_hidden;
    if (router_weight_on_input(config_)) {
      // the widest dtype
      buffers.weighted_hidden = arena_.take<float>("", "weighted_hidden", tokens * hidden);
      if (has_shared) shared_hidden = activations("shared_hidden", tokens, hidden, bf16);
    }
    buffers.routed =
        part("routed", range.count, config_->intermediate_size, tokens * top_k, hidden);
    buffers.routed.hidden = routed_hidden;
    buffers.routed.assignment_of_row =
        arena_.take<int32_t>("routed", ".assignment_of_row", tokens * top_k);
    if (!has_shared) return buffers;
    buffers.shared = part("shared", 1, shared_size, tokens, hidden);
    buffers.shared.hidden = shared_hidden;
    return buffers;
  }

 private:
  ActivationBuffers activations(const char* name, int64_t rows, int64_t k, bool bf16) {
    ActivationBuffers result;
    if (bf16) result.bf16 = arena_.take<uint16_t>(name, ".bf16", rows * k);
    if (config_->activation_format == ActivationFormat::kNvfp4) {
      result.codes = arena_.take<uint8_t>(name, ".codes", rows * (k / 2));
      result.block_scales = arena_.take<uint8_t>(name, ".block_scales", rows * (k / 16));
      result.row_scale = arena_.take<float>(name, ".row_scale", rows);
    }
    if (config_->activation_format == ActivationFormat::kInt8Block) {
      result.int8_codes = arena_.take<int8_t>(name, ".int8_codes", rows * k);
      result.int8_scales = arena_.take<float>(name, ".int8_scales", rows * (k / 16));
    }
    if (config_->activation_format == ActivationFormat::kFp8) {
      result.fp8 = arena_.take<uint8_t>(name, ".fp8", rows * k);
      result.row_scale = arena_.take<float>(name, ".row_scale", rows);
    }
    result.nonfinite = arena_.take<uint8_t>(name, ".nonfinite", rows);
    return result;
  }

  PartBuffers part(const char* name, int64_t experts, int64_t intermediate_size, int64_t rows,
                   int64_t hidden) {
    const int64_t row_bytes = hidden * (config_->row_format == RowFormat::kBf16 ? 2 : 4);
    PartBuffers part;
    part.experts = experts;
    part.intermediate_size = intermediate_size;
    part.row_offsets = arena_.take<int64_t>(name, ".row_offsets", experts + 1);
    part.intermediate = activations(name, rows, intermediate_size, true);
    part.rows_out = arena_.take<std::byte>(name, ".rows_out", rows * row_bytes);
    return part;
  }

  const MoeConfig& config_;
  Arena& arena_;
};

std::string text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.9g", value);
  return buffer;
}

Result<float> checkpoint_scale(const std::optional<float>& scale, const char* setting,
                               const char* input_scale) {
  if (!scale.has_value())
    return invalid_argument(std::string(setting) + ": expected a checkpoint with " + input_scale +
                            ", got none");
  if (!std::isfinite(*scale) || *scale <= 0)
    return invalid_argument(std::string(setting) + ": expected a finite positive " + input_scale +
                            ", got " + text(*scale));
  return *scale;
}

// A row's codes are x times fl32(1 / scale), so 1 / scale must be a normal number too.
Result<float> vllm_order_scale(const std::optional<float>& scale, const char* setting,
                               const char* input_scale) {
  NVFP4_MOE_ASSIGN(const float given, checkpoint_scale(scale, setting, input_scale));
  if (given < 0x1p-126f || given > 0x1p126f)
    return invalid_argument(std::string(setting) + ": expected " + input_scale +
                            " within [2^-126, 2^126], got " + text(given));
  return given;
}

// Upper bound of |the activation's output|; 0 if the activation has no bound. The gate's factor of
// the functions with swiglu_limit is at most L, and at least -0.2785 (the minimum of silu; that of
// g sigmoid(a g) is 1/a times it), which matters for small L.
double activation_bound(const MoeConfig& config) {
  double bound = 0;
  if (config->activation == Activation::kSitu) {
    bound =
        static_cast<double>(*config->situ_gate_limit) * static_cast<double>(*config->situ_up_limit);
  } else if (has_swiglu_limit(config->activation)) {
    constexpr double kSiluDepth = 0.27846455;  // 0.278464542..., rounded up
    const double limit = *config->swiglu_limit;
    const bool oai = config->activation == Activation::kSwigluOai;
    const double gate =
        std::max(limit, oai ? kSiluDepth / static_cast<double>(config->swiglu_alpha) : kSiluDepth);
    bound = gate * (oai ? limit + 1 : limit);
  }
  if (config->router_weight == RouterWeight::kBeforeDown)
    bound *= std::max(1.0, static_cast<double>(config->max_router_weight));
  return bound;
}

// The scale that can represent every h that the clamp lets through. A huge limit that was meant as
// "none" is an error: under its scale all ordinary values would be 0.
Result<float> clamp_scale(const MoeConfig& config, double bound) {
  const double range = row_scale_range(config->activation_format);
  // Largest magnitude of a block that becomes 0, divided by the scale: from half of the smallest
  // block scale, or half of the smallest E4M3.
  const double least =
      config->activation_format == ActivationFormat::kNvfp4 ? 6 * 0x1p-10 : 0x1p-10;
  if (bound <= std::ldexp(range, 127)) {
    const float scale = power_of_two_scale(bound, range);
    if (least * static_cast<double>(scale) < 1) return scale;
  }
  const bool situ = config->activation == Activation::kSitu;
  return invalid_argument(std::string("intermediate_scale fixed: expected a ") +
                          (situ ? "situ_gate_limit and a situ_up_limit" : "swiglu_limit") +
                          " whose bound of the activation's output, " + text(bound) +
                          ", leaves values of 1 above 0, got " +
                          (situ ? "situ_gate_limit " + text(*config->situ_gate_limit) +
                                      " and situ_up_limit " + text(*config->situ_up_limit)
                                : "swiglu_limit " + text(*config->swiglu_limit)) +
                          "; give intermediate_fixed, or take intermediate_scale dynamic_token");
}

Result<float> hidden_scale(const MoeConfig& config, const LayerScales& scales) {
  switch (config->activation_scale) {
    case ActivationScale::kDynamicToken: return 0.0f;
    case ActivationScale::kStatic: {
      NVFP4_MOE_ASSIGN(const float scale, checkpoint_scale(scales.hidden, "activation_scale static",
                                                           "gate/up input_scale"));
      return static_row_scale(config->activation_format,
                              "activation_scale static: gate/up input_scale x static_headroom",
                              scale, config->static_headroom);
    }
    case ActivationScale::kVllmOrder:
      return vllm_order_scale(scales.hidden, "activation_scale vllm_order", "gate/up input_scale");
  }
  return invalid_argument("activation_scale: expected a named choice, got " +
                          std::to_string(static_cast<int>(config->activation_scale)));
}

Result<float> intermediate_scale(const MoeConfig& config, const LayerScales& scales) {
  switch (config->intermediate_scale) {
    case IntermediateScale::kDynamicToken: return 0.0f;
    case IntermediateScale::kVllmOrder:
      return vllm_order_scale(scales.intermediate, "intermediate_scale vllm_order",
                              "down input_scale");
    case IntermediateScale::kFixed: {
      if (config->intermediate_fixed.has_value()) return *config->intermediate_fixed;
      if (const double bound = activation_bound(config); bound > 0)
        return clamp_scale(config, bound);
      const char* setting = "intermediate_scale fixed without a given power of two or a limit";
      NVFP4_MOE_ASSIGN(const float scale,
                       checkpoint_scale(scales.intermediate, setting, "down input_scale"));
      return static_row_scale(config->activation_format,
                              "intermediate_scale fixed: down input_scale x 16", scale,
                              kFixedHeadroom);
    }
  }
  return invalid_argument("intermediate_scale: expected a named choice, got " +
                          std::to_string(static_cast<int>(config->intermediate_scale)));
}

}  // namespace

LayerBuffers layer_buffers(const MoeConfig& config, const ExpertRange& range, int64_t tokens,
                           Arena& arena) {
  return Walk(config, arena)(range, tokens);
}

Status check_layer_limits(const MoeConfig& config, const ExpertRange& range, const Limits& limits) {
  if (limits.max_tokens < 0)
    return invalid_argument("max_tokens: expected 0 or more, got " +
                            std::to_string(limits.max_tokens));
  // a row's assignment is an int32
  const int64_t most_assignments = std::numeric_limits<int32_t>::max();
  if (limits.max_tokens > most_assignments / config->top_k)
    return invalid_argument("max_tokens: expected at most " +
                            std::to_string(most_assignments / config->top_k) + " at top_k " +
                            std::to_string(config->top_k) + ", got " +
                            std::to_string(limits.max_tokens));
  // An upper estimate in double: 4 bytes per element of hidden, intermediate and rows_out, with
  // room for the rest.
  const double token_bytes = 8.0 * static_cast<double>(config->hidden_size) + 64.0 +
                             4.0 * static_cast<double>(std::max(config->intermediate_size,
                                                                config->shared_intermediate_size));
  const double estimate = static_cast<double>(limits.max_tokens) *
                              static_cast<double>(config->top_k + 2) * token_bytes +
                          8.0 * static_cast<double>(range.count);
  if (estimate > 0x1p60)
    return invalid_argument("max_tokens: expected a workspace that fits into memory, got " +
                            std::to_string(limits.max_tokens) + " tokens");
  return {};
}

Result<ActivationScales> resolve_activation_scales(const MoeConfig& config,
                                                   const LayerScales& scales) {
  if (row_scale_range(config->activation_format) == 0) return ActivationScales{};
  NVFP4_MOE_ASSIGN(const float hidden, hidden_scale(config, scales));
  NVFP4_MOE_ASSIGN(const float intermediate, intermediate_scale(config, scales));
  return ActivationScales{hidden, intermediate};
}

}  // namespace nvfp4_moe::internal
