// describe_json: how a layer runs, including every named choice of the numeric contract.

#include <algorithm>

#include "backend/layer_steps.h"
#include "io/json.h"
#include "moe/activation_choice.h"
#include "moe/batch_check.h"
#include "moe/config_json.h"
#include "moe/layer.h"
#include "moe/layer_debug.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {

Json fp8_weights_json(const std::optional<Fp8LayerWeights>& fp8) {
  if (!fp8) return nullptr;
  return {{"weights", fp8->weights},
          {"inexact", fp8->inexact},
          {"least_shift", fp8->least_shift},
          {"most_shift", fp8->most_shift}};
}

namespace {

Json self_check_json(const std::optional<CheckReport>& check) {
  if (!check) return nullptr;
  const CheckOutcome outcome = check->kept ? check->kept->outcome : CheckOutcome{};
  return {{"scope", check->scope.name()},
          {"state", check->state()},
          {"kernel", outcome.kernel},
          {"difference", outcome.difference}};
}

}  // namespace

std::vector<StepPlan> describe_run(const Backend& backend, const MoeConfig& config,
                                   const ExpertRange& range, const Plan& plan, int64_t tokens) {
  return backend.describe_run == nullptr ? plan.steps
                                         : backend.describe_run(config, range, plan, tokens);
}

std::vector<StepPlan> MoeLayer::describe_run(int64_t tokens) const {
  return nvfp4_moe::internal::describe_run(*backend_, weights_->config, weights_->range, plan_,
                                           tokens);
}

Result<std::string> MoeLayer::describe_run_json(int64_t tokens) const {
  NVFP4_MOE_TRY(check_tokens(tokens, plan_.limits.max_tokens));
  Json steps = Json::object();
  for (const StepPlan& step : describe_run(tokens)) steps[step.step] = step.kernel;
  Json json;
  json["backend"] = backend_->name;
  json["tokens"] = tokens;
  json["steps"] = steps;
  json["workspace_bytes"] = local_workspace_bytes(tokens);
  return json.dump();
}

std::optional<Fp8LayerWeights> MoeLayer::fp8_weights() const {
  const WeightUses::Use in_use = use();
  if (!in_use || weights_->fp8_weights.empty()) return std::nullopt;
  const MoeConfig& config = weights_->config;
  const int64_t intermediates =
      weights_->range.count * config->intermediate_size + config->shared_intermediate_size;
  const int32_t first = weights_->fp8_weights.front().up.shift;
  const int64_t matrices = matrices_of_expert(config->activation);
  Fp8LayerWeights all{first, first,
                      static_cast<uint64_t>(matrices * intermediates * config->hidden_size), 0};
  for (const Fp8ExpertWeights& expert : weights_->fp8_weights) {
    const Fp8Weights* const of[] = {&expert.gate, &expert.up, &expert.down};
    for (int p = first_matrix(config->activation); p < 3; ++p) {
      all.least_shift = std::min(all.least_shift, of[p]->shift);
      all.most_shift = std::max(all.most_shift, of[p]->shift);
      all.inexact += of[p]->inexact;
    }
  }
  return all;
}

std::string MoeLayer::describe_json() const {
  const MoeConfig& config = weights_->config;
  Json json;
  json["backend"] = backend_->name;
  Json kernels = Json::object();
  for (const StepPlan& step : plan_.steps) kernels[step.step] = step.kernel;
  json["kernels"] = kernels;
  json["self_check"] = self_check_json(self_check_);
  json["activation"] = to_string(config->activation);
  json["swiglu_limit"] = config->swiglu_limit ? Json(*config->swiglu_limit) : nullptr;
  if (config->activation == Activation::kSitu) {
    json["situ_gate_limit"] = *config->situ_gate_limit;
    json["situ_up_limit"] = *config->situ_up_limit;
  }
  json["activation_format"] = to_string(config->activation_format);
  // The rule took the format for the backend that the device would have without a failed check.
  const char* const preferred =
      self_check_ && self_check_->failed() ? self_check_->scope.backend->name : backend_->name;
  json["activations"] = {
      {"format", to_string(config->activation_format)},
      {"declared", declared_ ? Json(to_string(declared_->format)) : Json(nullptr)},
      {"because", declared_ ? reason_of_format(config->activation_format, *declared_, preferred)
                            : std::string("the layer's config has it")}};
  const auto scales = resolve_activation_scales(config, weights_->scales);
  json["activation_scale"] = {
      {"hidden",
       activation_scale_json(config->activation_format, scales.ok() ? scales->hidden : 0.0f)},
      {"intermediate", activation_scale_json(config->activation_format,
                                             scales.ok() ? scales->intermediate : 0.0f)}};
  json["fp8_weights"] = fp8_weights_json(fp8_weights());
  json["router_weight"] = to_string(config->router_weight);
  json["row_format"] = to_string(config->row_format);
  json["batch_invariant"] = config->batch_invariant;
  json["expert_biases"] = config->expert_biases;
  json["num_experts"] = config->num_experts;
  json["expert_range"] = {{"first", weights_->range.first}, {"count", weights_->range.count}};
  json["top_k"] = config->top_k;
  json["hidden_size"] = config->hidden_size;
  json["intermediate_size"] = config->intermediate_size;
  json["shared_intermediate_size"] = config->shared_intermediate_size;
  json["max_tokens"] = plan_.limits.max_tokens;
  json["packed_bytes"] = weights_->bytes.size_bytes();
  json["workspace_bytes"] = plan_.workspace.total_bytes;

  Json notes = backend_notes(*backend_, config->activation_format);
  if (config->activation_format == ActivationFormat::kBf16)
    notes.push_back("hidden of F16 or F32 is rounded to bf16 once");
  if (config->activation_scale == ActivationScale::kVllmOrder ||
      config->intermediate_scale == IntermediateScale::kVllmOrder)
    notes.push_back("vllm_order: vLLM's operation order; activation scales are not powers of two");
  if (config->activation_scale == ActivationScale::kStatic && config->static_headroom != 1.0f)
    notes.push_back("static_headroom " + Json(config->static_headroom).dump() +
                    " is in the hidden scale");
  if (const std::string warning = self_check_warning(); !warning.empty()) notes.push_back(warning);
  if (debug_ && debug_->rows) {
    notes.push_back("NVFP4_MOE_CHECK is set: one token of each run is compared with the reference");
    const RowCheck::Counts counts = debug_->rows->counts();
    json["check"] = {
        {"checked", counts.checked}, {"dropped", counts.dropped}, {"failed", counts.failed}};
  } else if (debug_) {
    notes.push_back("NVFP4_MOE_CHECK or NVFP4_MOE_DUMP is set: runs allocate and are slow");
  }
  json["notes"] = notes;
  if (combine_) combine_->describe(json);
  return json.dump();
}

}  // namespace nvfp4_moe::internal
