// The C interface: a router's GEMM and its selection, on the host and on a device, and the
// selection as the beginning of a layer's run.
#include "moe/router.h"

#include "c_api/layer.h"

using nvfp4_moe::internal::Result;
using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace moe = nvfp4_moe::internal;

namespace {

Status read_flag(const char* name, int32_t value, bool& flag) {
  if (value != 0 && value != 1)
    return moe::invalid_argument(std::string(name) + ": expected 0 or 1, got " +
                                 std::to_string(value));
  flag = value == 1;
  return {};
}

Result<moe::RouterConfig> read_router_config(const nvfp4_moe_router_config* given) {
  NVFP4_MOE_ASSIGN(const nvfp4_moe_router_config c, api::read_struct("config", given));
  moe::RouterConfig config;
  config.num_experts = c.num_experts;
  config.top_k = c.top_k;
  config.num_expert_group = c.num_expert_group == 0 ? 1 : c.num_expert_group;
  config.topk_group = c.topk_group == 0 ? config.num_expert_group : c.topk_group;
  NVFP4_MOE_ASSIGN(config.scoring,
                   api::read_enum("scoring", c.scoring, moe::Scoring::kSqrtSoftplus));
  NVFP4_MOE_ASSIGN(config.group_score,
                   api::read_enum("group_score", c.group_score, moe::GroupScore::kTop2Sum));
  NVFP4_MOE_TRY(read_flag("renormalize", c.renormalize, config.renormalize));
  config.renormalize_epsilon = c.renormalize_epsilon;
  config.routed_scaling_factor = c.routed_scaling_factor == 0.0f ? 1.0f : c.routed_scaling_factor;
  NVFP4_MOE_TRY(read_flag("correction_bias", c.correction_bias, config.correction_bias));
  NVFP4_MOE_TRY(read_flag("hash_routing", c.hash_routing, config.hash_routing));
  NVFP4_MOE_TRY(read_flag("expert_scale", c.expert_scale, config.expert_scale));
  return config;
}

Result<moe::SelectExperts> read_router_call(const nvfp4_moe_router_config* config,
                                            const nvfp4_moe_router_batch* batch) {
  moe::SelectExperts call;
  NVFP4_MOE_ASSIGN(call.config, read_router_config(config));
  NVFP4_MOE_ASSIGN(const nvfp4_moe_router_batch b, api::read_struct("batch", batch));
  call.tokens = b.tokens;
  call.logits = b.logits;
  call.logits_stride = b.logits_stride == 0 ? call.config.num_experts : b.logits_stride;
  call.correction_bias = b.correction_bias;
  call.expert_scale = b.expert_scale;
  call.token_ids = b.token_ids;
  call.hash_table = b.hash_table;
  call.vocab_size = b.vocab_size;
  call.topk_ids = b.topk_ids;
  call.topk_weights = b.topk_weights;
  call.bad_ids = b.bad_ids;
  NVFP4_MOE_ASSIGN(call.logits_dtype,
                   api::read_dtype("logits_dtype", b.logits_dtype, moe::DType::kBf16));
  NVFP4_MOE_ASSIGN(call.token_ids_dtype,
                   api::read_dtype("token_ids_dtype", b.token_ids_dtype, moe::DType::kI64));
  NVFP4_MOE_ASSIGN(call.hash_table_dtype,
                   api::read_dtype("hash_table_dtype", b.hash_table_dtype, moe::DType::kI64));
  NVFP4_MOE_ASSIGN(call.ids_dtype, api::read_dtype("ids_dtype", b.ids_dtype, moe::DType::kI32));
  return call;
}

Result<moe::RouterGemm> read_router_gemm(const nvfp4_moe_router_gemm_call* given) {
  NVFP4_MOE_ASSIGN(const nvfp4_moe_router_gemm_call c, api::read_struct("call", given));
  moe::RouterGemm call;
  call.tokens = c.tokens;
  call.num_experts = c.num_experts;
  call.hidden_size = c.hidden_size;
  call.hidden = c.hidden;
  call.hidden_stride = c.hidden_stride == 0 ? c.hidden_size : c.hidden_stride;
  call.weight = c.weight;
  call.logits = c.logits;
  NVFP4_MOE_ASSIGN(call.logits_dtype,
                   api::read_dtype("logits_dtype", c.logits_dtype, moe::DType::kBf16));
  return call;
}

}  // namespace

extern "C" {

nvfp4_moe_status nvfp4_moe_router_gemm(const nvfp4_moe_router_gemm_call* call) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::RouterGemm gemm, read_router_gemm(call));
    return moe::router::router_gemm(gemm);
  });
}

nvfp4_moe_status nvfp4_moe_device_router_gemm(const char* device,
                                              const nvfp4_moe_router_gemm_call* call,
                                              void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::RouterGemm gemm, read_router_gemm(call));
    NVFP4_MOE_ASSIGN(const int gpu, api::read_gpu(device));
    return moe::router::device_router_gemm(gpu, gemm, stream);
  });
}

nvfp4_moe_status nvfp4_moe_select_experts(const nvfp4_moe_router_config* config,
                                          const nvfp4_moe_router_batch* batch) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::SelectExperts call, read_router_call(config, batch));
    return moe::router::select_experts(call);
  });
}

nvfp4_moe_status nvfp4_moe_device_select_experts(const char* device,
                                                 const nvfp4_moe_router_config* config,
                                                 const nvfp4_moe_router_batch* batch,
                                                 void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::SelectExperts call, read_router_call(config, batch));
    NVFP4_MOE_ASSIGN(const int gpu, api::read_gpu(device));
    return moe::router::device_select_experts(gpu, call, stream);
  });
}

nvfp4_moe_status nvfp4_moe_layer_run_logits(const nvfp4_moe_layer* layer,
                                            const nvfp4_moe_router_config* router,
                                            const nvfp4_moe_router_batch* routing,
                                            const nvfp4_moe_batch* batch, void* workspace,
                                            size_t workspace_bytes, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    NVFP4_MOE_ASSIGN(const moe::SelectExperts call, read_router_call(router, routing));
    NVFP4_MOE_ASSIGN(moe::Batch selected, api::read_batch(batch));
    const bool own_ids = selected.topk_ids == nullptr || selected.topk_ids == call.topk_ids;
    if (!own_ids ||
        (selected.topk_weights != nullptr && selected.topk_weights != call.topk_weights))
      return moe::invalid_argument(
          "batch.topk_ids, topk_weights: expected NULL or routing's arrays, got others");
    selected.topk_ids = call.topk_ids;
    selected.ids_dtype = call.ids_dtype;
    selected.topk_weights = call.topk_weights;
    selected.selection = &call;
    return layer->layer->run(selected, workspace, workspace_bytes, stream);
  });
}

}  // extern "C"
