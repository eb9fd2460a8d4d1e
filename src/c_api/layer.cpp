// The C interface for an open layer: description, runs, replaced experts, repros.
#include "c_api/layer.h"

#include "backend/layer_steps.h"
#include "io/json.h"
#include "io/output_file.h"
#include "moe/batch_check.h"
#include "moe/repro.h"

namespace nvfp4_moe::internal::c_api {

Result<Batch> read_batch(const nvfp4_moe_batch* batch) {
  NVFP4_MOE_ASSIGN(const nvfp4_moe_batch b, read_struct("batch", batch));
  NVFP4_MOE_TRY(check_zero("batch.reserved", b.reserved));
  Batch result;
  result.tokens = b.tokens;
  result.hidden = b.hidden;
  NVFP4_MOE_ASSIGN(result.hidden_dtype, read_dtype("hidden_dtype", b.hidden_dtype, DType::kBf16));
  result.topk_ids = b.topk_ids;
  NVFP4_MOE_ASSIGN(result.ids_dtype, read_dtype("ids_dtype", b.ids_dtype, DType::kI32));
  result.topk_weights = b.topk_weights;
  result.shared_weights = b.shared_weights;
  result.out = b.out;
  NVFP4_MOE_ASSIGN(result.out_dtype, read_dtype("out_dtype", b.out_dtype, result.hidden_dtype));
  return result;
}

namespace {

// Reads the expert that replaces local_expert.
Result<ExpertSource> read_replacement(const nvfp4_moe_layer* layer, int64_t local_expert,
                                      const nvfp4_moe_expert* expert) {
  NVFP4_MOE_TRY(check_pointer("layer", layer));
  const MoeConfig& config = layer->layer->weights().config;
  const int64_t inner =
      local_expert == kSharedExpert ? config->shared_intermediate_size : config->intermediate_size;
  return read_expert("expert", expert, config, inner);
}

template <class Element>
void copy_out(const std::vector<Element>& from, Element* to) {
  if (to != nullptr && !from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(Element));
}

Json to_json(const Comparison& c) {
  return {{"tokens", c.tokens},
          {"channels", c.channels},
          {"cosine", c.cosine},
          {"relative_l2", c.relative_l2},
          {"worst_token_l2", c.worst_token_l2},
          {"worst_token", c.worst_token},
          {"max_abs", c.max_abs},
          {"max_token", c.max_token},
          {"max_channel", c.max_channel},
          {"nonfinite_mismatches", c.nonfinite_mismatches}};
}

}  // namespace
}  // namespace nvfp4_moe::internal::c_api

using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace moe = nvfp4_moe::internal;

extern "C" {

nvfp4_moe_status nvfp4_moe_layer_describe(const nvfp4_moe_layer* layer, char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("json", json));
    *json = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    return api::write_text(layer->layer->describe_json(), json);
  });
}

nvfp4_moe_status nvfp4_moe_layer_describe_run(const nvfp4_moe_layer* layer, int64_t tokens,
                                              char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("json", json));
    *json = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    NVFP4_MOE_ASSIGN(const std::string text, layer->layer->describe_run_json(tokens));
    return api::write_text(text, json);
  });
}

nvfp4_moe_status nvfp4_moe_layer_workspace_bytes(const nvfp4_moe_layer* layer, int64_t tokens,
                                                 size_t* bytes) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    NVFP4_MOE_TRY(api::check_pointer("bytes", bytes));
    NVFP4_MOE_TRY(moe::check_tokens(tokens, layer->layer->max_tokens()));
    *bytes = layer->layer->workspace_bytes(tokens);
    return {};
  });
}

nvfp4_moe_status nvfp4_moe_layer_run(const nvfp4_moe_layer* layer, const nvfp4_moe_batch* batch,
                                     void* workspace, size_t workspace_bytes, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    const moe::Result<moe::Batch> checked = api::read_batch(batch);
    if (!checked.ok()) return layer->layer->decline(checked.status());
    return layer->layer->run(*checked, workspace, workspace_bytes, stream);
  });
}

nvfp4_moe_status nvfp4_moe_layer_run_status(const nvfp4_moe_layer* layer, const void* workspace,
                                            size_t workspace_bytes, nvfp4_moe_run_status* status) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    NVFP4_MOE_ASSIGN(const moe::RunStatus run, layer->layer->status(workspace, workspace_bytes));
    const nvfp4_moe_run_status c{sizeof(c),
                                 run.bad_expert_ids,
                                 run.nonfinite_tokens,
                                 run.nonfinite_rows,
                                 run.hidden_blocks,
                                 run.hidden_saturated,
                                 run.hidden_zeroed,
                                 run.intermediate_blocks,
                                 run.intermediate_saturated,
                                 run.intermediate_zeroed,
                                 run.nonfinite_weights,
                                 run.nonfinite_outputs};
    return api::write_struct("status", c, status);
  });
}

nvfp4_moe_status nvfp4_moe_layer_replace_expert(nvfp4_moe_layer* layer, int64_t local_expert,
                                                const nvfp4_moe_expert* expert) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::ExpertSource source,
                     api::read_replacement(layer, local_expert, expert));
    return layer->layer->replace_expert(local_expert, source);
  });
}

nvfp4_moe_status nvfp4_moe_layer_replace_expert_on_stream(nvfp4_moe_layer* layer,
                                                          int64_t local_expert,
                                                          const nvfp4_moe_expert* expert,
                                                          void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::ExpertSource source,
                     api::read_replacement(layer, local_expert, expert));
    return layer->layer->replace_expert_on_stream(local_expert, source, stream);
  });
}

nvfp4_moe_status nvfp4_moe_layer_unpack_expert(const nvfp4_moe_layer* layer, int64_t local_expert,
                                               nvfp4_moe_expert_out* expert) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    NVFP4_MOE_ASSIGN(nvfp4_moe_expert_out e, api::read_struct("expert", expert));
    moe::ExpertBuffers buffers;
    NVFP4_MOE_TRY(layer->layer->unpack_expert(local_expert, buffers));
    api::copy_out(buffers.gate.codes, e.gate_codes);
    api::copy_out(buffers.gate.block_scales, e.gate_block_scales);
    api::copy_out(buffers.up.codes, e.up_codes);
    api::copy_out(buffers.up.block_scales, e.up_block_scales);
    api::copy_out(buffers.down.codes, e.down_codes);
    api::copy_out(buffers.down.block_scales, e.down_block_scales);
    api::copy_out(buffers.gate_bias, e.gate_bias);
    api::copy_out(buffers.up_bias, e.up_bias);
    api::copy_out(buffers.down_bias, e.down_bias);
    e.gate_tensor_scale = buffers.scales.gate;
    e.up_tensor_scale = buffers.scales.up;
    e.down_tensor_scale = buffers.scales.down;
    return api::write_struct("expert", e, expert);
  });
}

nvfp4_moe_status nvfp4_moe_layer_write_repro(const nvfp4_moe_layer* layer,
                                             const nvfp4_moe_batch* batch, int32_t with_output,
                                             const char* path) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("layer", layer));
    NVFP4_MOE_TRY(api::check_pointer("path", path));
    NVFP4_MOE_TRY(layer->layer->check_one_rank("repro"));
    NVFP4_MOE_ASSIGN(const moe::Batch checked, api::read_batch(batch));
    NVFP4_MOE_ASSIGN(const std::string target, moe::output_path(path));
    return moe::write_repro(target, *layer->layer, checked, with_output != 0);
  });
}

nvfp4_moe_status nvfp4_moe_replay(const char* path, const char* backend, char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("json", json));
    *json = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("path", path));
    NVFP4_MOE_ASSIGN(const moe::ReplayReport report, moe::replay(path, api::backend_name(backend)));
    moe::Json result;
    result["recorded_backend"] = report.recorded_backend;
    result["layer"] = moe::Json::parse(report.describe);
    result["tokens"] = report.tokens;
    result["same_bits"] = report.same_bits ? moe::Json(*report.same_bits) : nullptr;
    result["with_output"] = report.with_output ? api::to_json(*report.with_output) : nullptr;
    result["with_reference"] = api::to_json(report.with_reference);
    result["broken_output_limit"] = report.broken_output_limit;
    result["broken_reference_limit"] = report.broken_reference_limit;
    result["passed"] = report.passed();
    NVFP4_MOE_TRY(api::write_text(result.dump(), json));
    if (report.passed()) return {};
    return moe::check_failed(report.broken_reference_limit.empty()
                                 ? "stored output: " + report.broken_output_limit
                                 : "reference: " + report.broken_reference_limit);
  });
}

}  // extern "C"
