#include "moe/linear.h"

#include <cmath>
#include <limits>

#include "core/quantize.h"
#include "io/json.h"
#include "moe/batch_check.h"
#include "moe/config_json.h"
#include "moe/layer.h"
#include "moe/registry.h"
#include "moe/workspaces.h"

namespace nvfp4_moe::internal {
namespace {

// The value of LinearWeights::input_scale: 0 if each token has its own scale.
Result<float> resolve_input_scale(const LinearOptions& options) {
  NVFP4_MOE_TRY(check_scale_option(options.activation_format, options.activation_scale));
  NVFP4_MOE_TRY(check_static_headroom(options.activation_scale, options.static_headroom));
  if (options.activation_format == ActivationFormat::kBf16 ||
      options.activation_scale == ActivationScale::kDynamicToken)
    return 0.0f;
  if (!std::isnormal(options.input_scale) || options.input_scale <= 0)
    return invalid_argument(
        std::string("input_scale: expected a positive normal number (activation_scale ") +
        to_string(options.activation_scale) + "), got " + std::to_string(options.input_scale));
  if (options.activation_scale == ActivationScale::kVllmOrder) {
    if (options.input_scale <= 0x1p126f) return options.input_scale;
    return invalid_argument(
        "input_scale: expected at most 2^126 (activation_scale vllm_order), got " +
        std::to_string(options.input_scale));
  }
  return static_row_scale(options.activation_format, "input_scale x static_headroom",
                          options.input_scale, options.static_headroom);
}

// The layer that the backend is chosen for. A linear is a product like those of its gemm2, so the
// layer's self-check covers the linear too.
Result<MoeConfig> minimal_layer(const LinearOptions& options) {
  MoeOptions layer;
  layer.num_experts = layer.top_k = 1;
  layer.hidden_size = layer.intermediate_size = 16;
  layer.activation_format = options.activation_format;
  return MoeConfig::make(layer);
}

Result<LinearWeights> pack(const Backend& backend, const Nvfp4View& view,
                           const LinearOptions& options, const DeviceFacts& device,
                           float input_scale) {
  if (backend.linear_pack == nullptr)
    return unsupported(std::string("backend: expected one with a dense linear, ") + backend.name +
                       " has none");
  LinearWeights weights;
  weights.rows = view.rows;
  weights.cols = view.cols;
  weights.tensor_scale = view.tensor_scale;
  weights.activation_format = options.activation_format;
  weights.activation_scale = options.activation_scale;
  weights.input_scale = input_scale;
  NVFP4_MOE_ASSIGN(weights.bytes, backend.allocate(backend.linear_bytes(view.rows, view.cols),
                                                   device.index, "packed weights of a linear"));
  weights.device = device.index;
  weights.facts = device;
  NVFP4_MOE_TRY(backend.linear_pack(weights, view));
  return weights;
}

}  // namespace

Result<std::unique_ptr<NvfpLinear>> NvfpLinear::open(const Nvfp4View& view,
                                                     const LinearOptions& options) {
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  return open(view, options, env, selector_to_open(env));
}

Result<std::unique_ptr<NvfpLinear>> NvfpLinear::open(const Nvfp4View& view,
                                                     const LinearOptions& options, const Env& env,
                                                     const BackendSelector& selector) {
  constexpr int64_t kMaxSide = int64_t{1}
                               << 28;  // keeps every size product of a backend below 2^60
  if (view.rows < 1 || view.rows > kMaxSide || view.cols < 16 || view.cols > kMaxSide ||
      view.cols % 16 != 0)
    return invalid_argument(
        "linear weight: expected (rows, cols) from (1, 16) to (2^28, 2^28), cols a multiple of 16, "
        "got (" +
        std::to_string(view.rows) + ", " + std::to_string(view.cols) + ")");
  if (options.max_tokens < 1 || options.max_tokens > std::numeric_limits<int32_t>::max())
    return invalid_argument("max_tokens: expected 1 to 2147483647, got " +
                            std::to_string(options.max_tokens));
  NVFP4_MOE_TRY(check_matrix("linear weight", view, view.rows, view.cols));
  NVFP4_MOE_ASSIGN(const float input_scale, resolve_input_scale(options));

  NVFP4_MOE_ASSIGN(const std::string forced, forced_backend(options.backend, env));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
  NVFP4_MOE_ASSIGN(const MoeConfig layer, minimal_layer(options));
  Result<BackendSelection> selected = selector.choose_checked(layer, device, forced);
  NVFP4_MOE_TRY(selected.status().in("linear"));
  std::unique_ptr<NvfpLinear> linear(new NvfpLinear);
  linear->backend_ = selected->backend;
  linear->self_check_ = std::move(selected->check);
  NVFP4_MOE_ASSIGN(linear->weights_, pack(*linear->backend_, view, options, device, input_scale));

  linear->max_tokens_ = options.max_tokens;
  linear->executor_ = options.executor;
  if (linear->executor_ == nullptr) {
    linear->owned_executor_ = make_thread_pool(env.threads);
    linear->executor_ = linear->owned_executor_.get();
  }
  return linear;
}

Status NvfpLinear::check_process(const char* what) const {
  return check_forked(what, backend_->memory != nullptr && process_ != fork_count());
}

Status NvfpLinear::run(const LinearBatch& batch, void* workspace, size_t workspace_bytes,
                       void* stream) const {
  NVFP4_MOE_TRY(check_process("run"));
  NVFP4_MOE_TRY(check_tokens(batch.tokens, max_tokens_));
  NVFP4_MOE_TRY(check_activation_dtype("x", batch.x_dtype));
  NVFP4_MOE_TRY(check_activation_dtype("out", batch.out_dtype));
  NVFP4_MOE_TRY(check_workspace(workspace, workspace_bytes, this->workspace_bytes(batch.tokens)));
  if (batch.tokens == 0) return {};
  const Array x{"x", batch.x, batch.x_dtype, batch.tokens * weights_.cols};
  const Array out{"out", batch.out, batch.out_dtype, batch.tokens * weights_.rows};
  const Array space{"workspace", workspace, DType::kU8, static_cast<int64_t>(workspace_bytes)};
  NVFP4_MOE_TRY(check_array(x));
  NVFP4_MOE_TRY(check_array(out));
  NVFP4_MOE_TRY(check_apart(out, x));
  NVFP4_MOE_TRY(check_apart(space, x));
  NVFP4_MOE_TRY(check_apart(space, out));
  const WorkspaceClaim claim(backend_->memory == nullptr ? workspace : nullptr);
  if (!claim) return WorkspaceClaim::busy();
  return backend_->linear_run(weights_, batch, static_cast<std::byte*>(workspace),
                              RunContext{executor_, stream});
}

std::string NvfpLinear::describe_json() const {
  Json json;
  json["backend"] = backend_->name;
  json["rows"] = weights_.rows;
  json["cols"] = weights_.cols;
  json["tensor_scale"] = weights_.tensor_scale;
  json["activation_format"] = to_string(weights_.activation_format);
  json["activation_scale"] =
      activation_scale_json(weights_.activation_format, weights_.input_scale);
  const bool fp8 = weights_.activation_format == ActivationFormat::kFp8;
  const Fp8LayerWeights of_one{
      weights_.fp8.shift, weights_.fp8.shift,
      static_cast<uint64_t>(weights_.rows) * static_cast<uint64_t>(weights_.cols),
      weights_.fp8.inexact};
  json["fp8_weights"] = fp8_weights_json(fp8 ? std::optional(of_one) : std::nullopt);
  json["max_tokens"] = max_tokens_;
  json["packed_bytes"] = weights_.bytes.size_bytes();
  json["workspace_bytes"] = workspace_bytes();
  Json notes = backend_notes(*backend_, weights_.activation_format);
  if (self_check_ && self_check_->failed())
    notes.push_back(check_warning(*self_check_, *backend_, weights_.facts));
  json["notes"] = notes;
  return json.dump();
}

}  // namespace nvfp4_moe::internal
