// The C interface: checkpoints, and layers opened from them.

#include "c_api/layer.h"
#include "io/json.h"
#include "moe/activation_choice.h"
#include "moe/config_json.h"
#include "moe/packed_cache.h"

using nvfp4_moe::internal::Json;
using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace moe = nvfp4_moe::internal;

namespace {

// Names come from files. Bytes in them that are not UTF-8 are replaced.
Status write_json(const Json& json, char** out) { return api::write_text(json.dump(), out); }

Json to_json(const moe::Finding& finding) {
  return {{"severity", to_string(finding.severity)},
          {"id", finding.id},
          {"layer", finding.layer},
          {"expert", finding.expert},
          {"tensor", finding.tensor},
          {"expected", finding.expected},
          {"actual", finding.actual},
          {"count", finding.count},
          {"examples", finding.examples},
          {"text", to_string(finding)}};
}

// given: a checked copy. reported: set once the other ranks, if there are any, receive a failure
// without further calls.
Status open_layer(const moe::Checkpoint& checkpoint, int64_t layer, const nvfp4_moe_config* config,
                  const nvfp4_moe_layer_options& given, nvfp4_moe_layer** out, bool* reported) {
  NVFP4_MOE_ASSIGN(moe::LayerOptions layer_options, api::layer_options(given));
  std::optional<moe::MoeOptions> moe_options;
  if (config != nullptr) {
    NVFP4_MOE_ASSIGN(nvfp4_moe_config c, api::read_struct("config", config));
    const bool chooses = c.activation_format == NVFP4_MOE_FORMAT_AUTO;
    if (chooses) {
      NVFP4_MOE_ASSIGN(const moe::DeclaredActivations declared,
                       checkpoint.declared_activations(layer));
      c.activation_format = static_cast<int32_t>(declared.format);
    }
    NVFP4_MOE_ASSIGN(moe_options, api::read_config(&c));
    if (chooses) {
      NVFP4_MOE_ASSIGN(moe_options, moe::with_chosen_format(*moe_options, layer_options));
    }
  }
  std::optional<moe::Parallel> parallel;
  if (given.expert_parallel != nullptr) {
    NVFP4_MOE_ASSIGN(const moe::MoeOptions stored, checkpoint.layer_options(layer));
    NVFP4_MOE_ASSIGN(parallel, api::read_parallel(given, stored.num_experts));
  }
  auto handle = std::make_unique<nvfp4_moe_layer>();
  NVFP4_MOE_ASSIGN(handle->executor,
                   api::make_executor(given.parallel_for, given.parallel_for_user, given.threads));
  layer_options.executor = handle->executor.get();
  const moe::IntermediateSlice slice{given.slice_first, given.slice_count};
  moe::CacheOptions cache;
  if (given.cache_directory != nullptr) cache.directory = given.cache_directory;
  cache.checksum = given.cache_checksum != 0;
  cache.unchecked = given.cache_trusted != 0;
  *reported = true;
  NVFP4_MOE_ASSIGN(handle->layer,
                   moe::open_layer(checkpoint, layer, moe_options, slice, layer_options, cache,
                                   parallel, api::progress_fn(given)));
  *out = handle.release();
  return {};
}

moe::Result<moe::CheckpointOptions> read_options(const nvfp4_moe_checkpoint_options* from) {
  NVFP4_MOE_ASSIGN(const nvfp4_moe_checkpoint_options given, api::read_struct("options", from));
  moe::CheckpointOptions options;
  if (given.family != nullptr) options.family = given.family;
  if (given.gate_up_order != nullptr) {
    NVFP4_MOE_ASSIGN(options.gate_up_order, moe::parse<moe::GateUpOrder>(given.gate_up_order));
  }
  if (given.accept_count > 0)
    NVFP4_MOE_TRY(api::check_pointer("options.accept_tensors", given.accept_tensors));
  for (size_t i = 0; i < given.accept_count; ++i) {
    NVFP4_MOE_TRY(api::check_pointer("options.accept_tensors[]", given.accept_tensors[i]));
    options.accept_tensors.emplace_back(given.accept_tensors[i]);
  }
  return options;
}

// options: may be null.
Status open_checkpoint(const char* path, const nvfp4_moe_checkpoint_options* options,
                       nvfp4_moe_checkpoint** checkpoint) {
  NVFP4_MOE_TRY(api::check_pointer("checkpoint", checkpoint));
  *checkpoint = nullptr;
  NVFP4_MOE_TRY(api::check_pointer("path", path));
  moe::CheckpointOptions reading;
  if (options != nullptr) {
    NVFP4_MOE_ASSIGN(reading, read_options(options));
  }
  NVFP4_MOE_ASSIGN(moe::Checkpoint opened, moe::Checkpoint::open(path, reading));
  *checkpoint = new nvfp4_moe_checkpoint{std::move(opened)};
  return {};
}

}  // namespace

extern "C" {

nvfp4_moe_status nvfp4_moe_checkpoint_open(const char* path, nvfp4_moe_checkpoint** checkpoint) {
  return api::guarded([&] { return open_checkpoint(path, nullptr, checkpoint); });
}

nvfp4_moe_status nvfp4_moe_checkpoint_open_with(const char* path,
                                                const nvfp4_moe_checkpoint_options* options,
                                                nvfp4_moe_checkpoint** checkpoint) {
  return api::guarded([&] { return open_checkpoint(path, options, checkpoint); });
}

void nvfp4_moe_checkpoint_close(nvfp4_moe_checkpoint* checkpoint) { delete checkpoint; }

nvfp4_moe_status nvfp4_moe_checkpoint_info(const nvfp4_moe_checkpoint* checkpoint, char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("json", json));
    *json = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("checkpoint", checkpoint));
    const moe::ModelInfo& model = checkpoint->checkpoint.model();
    Json info;
    info["architecture"] = model.architecture;
    info["model_type"] = model.model_type;
    info["family"] = model.family;
    info["format"] = to_string(model.format);
    info["quant_method"] = model.quant_method;
    info["quant_algo"] = model.quant_algo;
    info["producer"] = model.producer;
    info["layers"] = model.layers;
    info["shared_experts"] = model.shared_experts;
    info["config"] = Json::parse(moe::to_json(model.options));
    Json files = Json::array();
    for (const auto& file : checkpoint->checkpoint.index().files())
      files.push_back({{"path", file->path()}, {"size_bytes", file->size_bytes()}});
    info["files"] = files;
    info["size_bytes"] = checkpoint->checkpoint.index().size_bytes();
    return write_json(info, json);
  });
}

nvfp4_moe_status nvfp4_moe_checkpoint_findings(const nvfp4_moe_checkpoint* checkpoint,
                                               int64_t layer, char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("json", json));
    *json = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("checkpoint", checkpoint));
    const moe::Checkpoint& files = checkpoint->checkpoint;
    std::vector<moe::Finding> findings;
    if (layer == -1) {
      findings = files.findings();
    } else {
      NVFP4_MOE_ASSIGN(const moe::MoeOptions options, files.layer_options(layer));
      NVFP4_MOE_ASSIGN(findings, files.validate(layer, {0, options.num_experts}));
    }
    Json list = Json::array();
    for (const moe::Finding& finding : findings) list.push_back(to_json(finding));
    return write_json(list, json);
  });
}

nvfp4_moe_status nvfp4_moe_checkpoint_config(const nvfp4_moe_checkpoint* checkpoint, int64_t layer,
                                             nvfp4_moe_config* config) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("checkpoint", checkpoint));
    NVFP4_MOE_ASSIGN(const moe::MoeOptions options, checkpoint->checkpoint.layer_options(layer));
    return api::write_struct("config", api::to_c(options), config);
  });
}

nvfp4_moe_status nvfp4_moe_layer_open_checkpoint(const nvfp4_moe_checkpoint* checkpoint,
                                                 int64_t layer, const nvfp4_moe_config* config,
                                                 const nvfp4_moe_layer_options* options,
                                                 nvfp4_moe_layer** out) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("out", out));
    *out = nullptr;
    NVFP4_MOE_TRY(api::check_pointer("checkpoint", checkpoint));
    NVFP4_MOE_ASSIGN(const nvfp4_moe_layer_options given, api::read_struct("options", options));
    return api::report_to_ranks(given, [&](bool* reported) {
      return open_layer(checkpoint->checkpoint, layer, config, given, out, reported);
    });
  });
}

}  // extern "C"
