// The C interface: reads config, options and arrays of a layer as the library's own types, and
// opens one.
// Long because each struct of the interface is read field by field.
#include <cmath>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "c_api/layer.h"
#include "io/json.h"
#include "moe/batch_check.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::c_api {

Result<MoeOptions> read_config(const nvfp4_moe_config* config) {
  NVFP4_MOE_ASSIGN(const nvfp4_moe_config c, read_struct("config", config));
  MoeOptions options;
  options.num_experts = c.num_experts;
  options.top_k = c.top_k;
  options.hidden_size = c.hidden_size;
  options.intermediate_size = c.intermediate_size;
  options.shared_intermediate_size = c.shared_intermediate_size;
  NVFP4_MOE_ASSIGN(options.activation, read_enum("activation", c.activation, Activation::kSitu));
  if (c.swiglu_limit != 0.0f) options.swiglu_limit = c.swiglu_limit;
  if (c.swiglu_alpha != 0.0f) options.swiglu_alpha = c.swiglu_alpha;
  if (c.situ_gate_limit != 0.0f) options.situ_gate_limit = c.situ_gate_limit;
  if (c.situ_up_limit != 0.0f) options.situ_up_limit = c.situ_up_limit;
  if (c.activation_format == NVFP4_MOE_FORMAT_AUTO)
    return invalid_argument(
        "activation_format: expected a format, got AUTO, which is for "
        "nvfp4_moe_layer_open_checkpoint only");
  NVFP4_MOE_ASSIGN(options.activation_format,
                   read_enum("activation_format", c.activation_format, ActivationFormat::kFp8));
  NVFP4_MOE_ASSIGN(options.activation_scale,
                   read_enum("activation_scale", c.activation_scale, ActivationScale::kVllmOrder));
  NVFP4_MOE_ASSIGN(options.intermediate_scale, read_enum("intermediate_scale", c.intermediate_scale,
                                                         IntermediateScale::kVllmOrder));
  if (c.intermediate_fixed != 0.0f) options.intermediate_fixed = c.intermediate_fixed;
  if (c.max_router_weight != 0.0f) options.max_router_weight = c.max_router_weight;
  if (c.static_headroom != 0.0f) options.static_headroom = c.static_headroom;
  NVFP4_MOE_ASSIGN(options.router_weight,
                   read_enum("router_weight", c.router_weight, RouterWeight::kOnInput));
  NVFP4_MOE_ASSIGN(options.row_format, read_enum("row_format", c.row_format, RowFormat::kFp32));
  if (c.batch_invariant != 0 && c.batch_invariant != 1)
    return invalid_argument("batch_invariant: expected 0 or 1, got " +
                            std::to_string(c.batch_invariant));
  options.batch_invariant = c.batch_invariant == 1;
  if (c.expert_biases != 0 && c.expert_biases != 1)
    return invalid_argument("expert_biases: expected 0 or 1, got " +
                            std::to_string(c.expert_biases));
  options.expert_biases = c.expert_biases == 1;
  NVFP4_MOE_TRY(check_zero("config.reserved", c.reserved));
  return options;
}

nvfp4_moe_config to_c(const MoeOptions& options) {
  nvfp4_moe_config c{};
  c.struct_size = sizeof(c);
  c.num_experts = options.num_experts;
  c.top_k = options.top_k;
  c.hidden_size = options.hidden_size;
  c.intermediate_size = options.intermediate_size;
  c.shared_intermediate_size = options.shared_intermediate_size;
  c.activation = static_cast<int32_t>(options.activation);
  c.swiglu_limit = options.swiglu_limit.value_or(0.0f);
  c.swiglu_alpha = options.swiglu_alpha;
  c.situ_gate_limit = options.situ_gate_limit.value_or(0.0f);
  c.situ_up_limit = options.situ_up_limit.value_or(0.0f);
  c.activation_format = static_cast<int32_t>(options.activation_format);
  c.activation_scale = static_cast<int32_t>(options.activation_scale);
  c.intermediate_scale = static_cast<int32_t>(options.intermediate_scale);
  c.intermediate_fixed = options.intermediate_fixed.value_or(0.0f);
  c.max_router_weight = options.max_router_weight;
  c.static_headroom = options.static_headroom;
  c.router_weight = static_cast<int32_t>(options.router_weight);
  c.row_format = static_cast<int32_t>(options.row_format);
  c.batch_invariant = options.batch_invariant ? 1 : 0;
  c.expert_biases = options.expert_biases ? 1 : 0;
  return c;
}

Result<LayerOptions> layer_options(const nvfp4_moe_layer_options& options) {
  if (options.cache_checksum != 0 && options.cache_checksum != 1)
    return invalid_argument("cache_checksum: expected 0 or 1, got " +
                            std::to_string(options.cache_checksum));
  if (options.cache_trusted != 0 && options.cache_trusted != 1)
    return invalid_argument("cache_trusted: expected 0 or 1, got " +
                            std::to_string(options.cache_trusted));
  LayerOptions result;
  if (options.device != nullptr) result.device = options.device;
  result.backend = backend_name(options.backend);
  result.range = {options.first_expert, options.expert_count};
  result.limits.max_tokens = options.max_tokens;
  return result;
}

ProgressFn progress_fn(const nvfp4_moe_layer_options& options) {
  if (options.progress == nullptr) return {};
  return [callback = options.progress, user = options.progress_user](const Progress& progress) {
    const std::string what(progress.what), item(progress.item);
    nvfp4_moe_progress c{};
    c.struct_size = sizeof(c);
    c.what = what.c_str();
    c.item = item.c_str();
    c.done = progress.done;
    c.total = progress.total;
    c.done_bytes = progress.done_bytes;
    c.total_bytes = progress.total_bytes;
    c.elapsed_s = progress.elapsed_s;
    return callback(&c, user) != 0;
  };
}

namespace {

// 0 means no scale. Any other value is taken unchanged and checked when it is used.
Result<std::optional<float>> input_scale(const char* name, float value) {
  if (value == 0.0f) return std::optional<float>();
  if (!std::isfinite(value) || value < 0)
    return invalid_argument(std::string(name) +
                            ": expected a positive number, or 0 for none, got " +
                            std::to_string(value));
  return std::optional<float>(value);
}

Result<LayerScales> input_scales(float hidden, float intermediate) {
  LayerScales scales;
  NVFP4_MOE_ASSIGN(scales.hidden, input_scale("hidden_scale", hidden));
  NVFP4_MOE_ASSIGN(scales.intermediate, input_scale("intermediate_scale", intermediate));
  return scales;
}

// Checks the memory of the arrays of one expert, or of all.
Status check_memory(const char* name, int32_t on_device, void* stream) {
  if (on_device != 0 && on_device != 1)
    return invalid_argument(std::string(name) + ".on_device: expected 0 or 1, got " +
                            std::to_string(on_device));
  if (on_device == 0 && stream != nullptr)
    return invalid_argument(std::string(name) +
                            ".stream: expected null for arrays in host memory, got a pointer");
  return {};
}

}  // namespace

namespace {

// Checks that the arrays of the gate are null if there is no gate.
Status check_no_gate(const char* activation,
                     std::initializer_list<std::pair<const char*, const void*>> arrays) {
  for (const auto& [name, array] : arrays)
    if (array != nullptr)
      return invalid_argument(std::string(name) + ": expected null with activation " + activation +
                              ", got a pointer");
  return {};
}

}  // namespace

Result<ExpertSource> read_expert(const char* name, const nvfp4_moe_expert* expert,
                                 const MoeConfig& config, int64_t inner) {
  const int64_t hidden = config->hidden_size;
  NVFP4_MOE_ASSIGN(const nvfp4_moe_expert e, read_struct(name, expert));
  NVFP4_MOE_TRY(check_memory(name, e.on_device, e.stream));
  for (const float* bias : {e.gate_bias, e.up_bias, e.down_bias})
    if (bias != nullptr) NVFP4_MOE_TRY(check_array({name, bias, DType::kF32, 1}));
  ExpertSource source;
  if (has_gate(config->activation))
    source.gate = Nvfp4View::contiguous(e.gate_codes, e.gate_block_scales, e.gate_tensor_scale,
                                        inner, hidden);
  else
    NVFP4_MOE_TRY(
        check_no_gate(to_string(config->activation),
                      {{"gate_codes", e.gate_codes}, {"gate_block_scales", e.gate_block_scales}}));
  source.up =
      Nvfp4View::contiguous(e.up_codes, e.up_block_scales, e.up_tensor_scale, inner, hidden);
  source.down =
      Nvfp4View::contiguous(e.down_codes, e.down_block_scales, e.down_tensor_scale, hidden, inner);
  source.on_device = e.on_device == 1;
  source.stream = e.stream;
  source.biases = {e.gate_bias, e.up_bias, e.down_bias};
  return source;
}

namespace {

// first: the arrays with this stride, `experts` experts each.
Result<int64_t> expert_stride(const char* name, int64_t stride, int64_t one_expert, int64_t experts,
                              std::initializer_list<const void*> first) {
  if (stride == 0) return one_expert;
  if (stride < one_expert)
    return invalid_argument(std::string(name) + ": expected 0 or at least " +
                            std::to_string(one_expert) + " bytes, got " + std::to_string(stride));
  for (const void* array : first)
    if (!ends_in_memory(array, experts, stride, one_expert))
      return invalid_argument(std::string(name) + ": expected " + std::to_string(experts) +
                              " experts inside the address space, got " + std::to_string(stride) +
                              " bytes between them");
  return stride;
}

// Expert e of stacked arrays. The tensors struct is a checked copy.
struct Stacked {
  nvfp4_moe_layer_tensors t;
  bool gated = true;
  int64_t hidden = 0, inner = 0;
  int64_t gate_up_codes = 0, gate_up_scales = 0, down_codes = 0, down_scales = 0,
          gate_up_biases = 0;  // strides

  // experts: number of experts in the arrays.
  static Result<Stacked> make(const nvfp4_moe_layer_tensors& t, const MoeConfig& config,
                              int64_t experts) {
    Stacked s{t, has_gate(config->activation), config->hidden_size, config->intermediate_size};
    const std::initializer_list<std::pair<const char*, const void*>> gate = {
        {"gate_codes", t.gate_codes},
        {"gate_block_scales", t.gate_block_scales},
        {"gate_tensor_scales", t.gate_tensor_scales}};
    if (!s.gated) NVFP4_MOE_TRY(check_no_gate(to_string(config->activation), gate));
    // A null base plus an offset is no longer null, so the bases are checked here.
    if (s.gated)
      for (const auto& [name, array] : gate) NVFP4_MOE_TRY(check_pointer(name, array));
    for (const auto& [name, array] : std::initializer_list<std::pair<const char*, const void*>>{
             {"up_codes", t.up_codes},
             {"up_block_scales", t.up_block_scales},
             {"up_tensor_scales", t.up_tensor_scales},
             {"down_codes", t.down_codes},
             {"down_block_scales", t.down_block_scales},
             {"down_tensor_scales", t.down_tensor_scales}})
      NVFP4_MOE_TRY(check_pointer(name, array));
    NVFP4_MOE_TRY(check_zero("tensors.reserved", t.reserved));
    NVFP4_MOE_TRY(check_memory("tensors", t.on_device, t.stream));
    int64_t values = 0;
    if (__builtin_mul_overflow(s.hidden, s.inner, &values))
      return invalid_argument("hidden_size x intermediate_size: expected a size in memory, got " +
                              std::to_string(s.hidden) + " x " + std::to_string(s.inner));
    NVFP4_MOE_ASSIGN(s.gate_up_codes,
                     expert_stride("gate_up_codes_stride", t.gate_up_codes_stride, values / 2,
                                   experts, {t.gate_codes, t.up_codes}));
    NVFP4_MOE_ASSIGN(s.gate_up_scales,
                     expert_stride("gate_up_scales_stride", t.gate_up_scales_stride, values / 16,
                                   experts, {t.gate_block_scales, t.up_block_scales}));
    NVFP4_MOE_ASSIGN(s.down_codes, expert_stride("down_codes_stride", t.down_codes_stride,
                                                 values / 2, experts, {t.down_codes}));
    NVFP4_MOE_ASSIGN(s.down_scales, expert_stride("down_scales_stride", t.down_scales_stride,
                                                  values / 16, experts, {t.down_block_scales}));
    // The layer reports a count that is out of range.
    for (const auto& [name, scales] : {std::pair("gate_tensor_scales", t.gate_tensor_scales),
                                       std::pair("up_tensor_scales", t.up_tensor_scales),
                                       std::pair("down_tensor_scales", t.down_tensor_scales)})
      if (s.gated || scales != t.gate_tensor_scales)
        NVFP4_MOE_TRY(check_array({name, scales, DType::kF32, 1}));
    NVFP4_MOE_TRY(s.check_biases(config, experts));
    return s;
  }

  Status check_biases(const MoeConfig& config, int64_t experts) {
    const int64_t one = inner * static_cast<int64_t>(sizeof(float));
    for (const auto& [name, biases] :
         {std::pair("gate_biases", t.gate_biases), std::pair("up_biases", t.up_biases),
          std::pair("down_biases", t.down_biases)}) {
      const bool of_no_gate = !gated && std::string_view(name) == "gate_biases";
      if (config->expert_biases && !of_no_gate)
        NVFP4_MOE_TRY(check_array({name, biases, DType::kF32, 1}));
      if ((!config->expert_biases || of_no_gate) && biases != nullptr)
        return invalid_argument(std::string(name) + ": expected null (" +
                                (config->expert_biases ? "no gate" : "expert_biases 0") +
                                "), got a pointer");
    }
    NVFP4_MOE_ASSIGN(gate_up_biases, expert_stride("gate_up_biases_stride", t.gate_up_biases_stride,
                                                   one, experts, {t.gate_biases, t.up_biases}));
    if (gate_up_biases % static_cast<int64_t>(sizeof(float)) == 0) return {};
    return invalid_argument("gate_up_biases_stride: expected a multiple of 4, got " +
                            std::to_string(gate_up_biases));
  }

  LoadedExpert expert(int64_t e) const {
    LoadedExpert loaded;
    if (t.up_biases != nullptr) {
      const int64_t apart = e * (gate_up_biases / static_cast<int64_t>(sizeof(float)));
      loaded.source.biases = {gated ? t.gate_biases + apart : nullptr, t.up_biases + apart,
                              t.down_biases + e * hidden};
    }
    if (gated)
      loaded.source.gate = Nvfp4View::contiguous(t.gate_codes + e * gate_up_codes,
                                                 t.gate_block_scales + e * gate_up_scales,
                                                 t.gate_tensor_scales[e], inner, hidden);
    loaded.source.up = Nvfp4View::contiguous(t.up_codes + e * gate_up_codes,
                                             t.up_block_scales + e * gate_up_scales,
                                             t.up_tensor_scales[e], inner, hidden);
    loaded.source.down =
        Nvfp4View::contiguous(t.down_codes + e * down_codes, t.down_block_scales + e * down_scales,
                              t.down_tensor_scales[e], hidden, inner);
    loaded.source.on_device = t.on_device == 1;
    loaded.source.stream = t.stream;
    return loaded;
  }
};

// given: a checked copy. reported: set once the other ranks, if there are any, receive a failure
// without further calls.
Status open_tensors(const nvfp4_moe_config* config, const nvfp4_moe_layer_tensors* tensors,
                    const nvfp4_moe_layer_options& given, nvfp4_moe_layer** out, bool* reported) {
  NVFP4_MOE_ASSIGN(const MoeOptions moe_options, read_config(config));
  NVFP4_MOE_ASSIGN(const MoeConfig moe_config, MoeConfig::make(moe_options));
  NVFP4_MOE_ASSIGN(const nvfp4_moe_layer_tensors t, read_struct("tensors", tensors));
  if (given.cache_directory != nullptr || given.slice_first != 0 || given.slice_count != 0)
    return invalid_argument(
        "options: expected neither cache_directory nor a slice with tensors of the caller, got "
        "one");
  NVFP4_MOE_ASSIGN(LayerOptions layer_options, layer_options(given));
  NVFP4_MOE_ASSIGN(const Stacked stacked,
                   Stacked::make(t, moe_config,
                                 layer_options.range.count > 0 ? layer_options.range.count
                                                               : moe_options.num_experts));
  LayerSource source;
  NVFP4_MOE_ASSIGN(source.scales, input_scales(t.hidden_scale, t.intermediate_scale));
  NVFP4_MOE_ASSIGN(const std::optional<Parallel> parallel,
                   read_parallel(given, moe_options.num_experts));
  const int64_t first = given.first_expert;
  source.expert = [&stacked, first](int64_t global) -> Result<LoadedExpert> {
    return stacked.expert(global - first);
  };
  if (t.shared != nullptr) {
    if (moe_options.shared_intermediate_size == 0)
      return invalid_argument(
          "tensors.shared: expected null (shared_intermediate_size 0), got a pointer");
    source.shared_expert = [&]() -> Result<LoadedExpert> {
      LoadedExpert loaded;
      NVFP4_MOE_ASSIGN(loaded.source, read_expert("shared", t.shared, moe_config,
                                                  moe_options.shared_intermediate_size));
      return loaded;
    };
  }
  auto handle = std::make_unique<nvfp4_moe_layer>();
  NVFP4_MOE_ASSIGN(handle->executor,
                   make_executor(given.parallel_for, given.parallel_for_user, given.threads));
  layer_options.executor = handle->executor.get();
  *reported = true;
  NVFP4_MOE_ASSIGN(handle->layer,
                   open_layer(moe_config, source, layer_options, parallel, progress_fn(given)));
  *out = handle.release();
  return {};
}

// Collective: a rank with wrong arguments reports that to all.
Status rearrange_tensors(RankCombine& ranks, const int64_t* expert_of_slot, int64_t slots,
                         const nvfp4_moe_layer_tensors* tensors) {
  struct Prepared {
    Placement placement;
    Stacked stacked;
  };
  const auto prepare = [&]() -> Result<Prepared> {
    NVFP4_MOE_TRY(check_slots(ranks, expert_of_slot, slots));
    const int64_t experts = ranks.config()->num_experts;
    NVFP4_MOE_ASSIGN(Placement placement,
                     Placement::of_map(experts, ranks.exchange().world(),
                                       {expert_of_slot, expert_of_slot + slots}));
    NVFP4_MOE_ASSIGN(const nvfp4_moe_layer_tensors t, read_struct("tensors", tensors));
    NVFP4_MOE_ASSIGN(const Stacked stacked, Stacked::make(t, ranks.config(), experts));
    return Prepared{std::move(placement), stacked};
  };
  const Result<Prepared> prepared = prepare();
  NVFP4_MOE_TRY(ranks.exchange().agree(prepared.status()));
  LayerSource source;
  source.expert = [&](int64_t expert) -> Result<LoadedExpert> {
    return prepared->stacked.expert(expert);
  };
  return ranks.rearrange(prepared->placement, source);
}

}  // namespace
}  // namespace nvfp4_moe::internal::c_api

using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace moe = nvfp4_moe::internal;

extern "C" {
nvfp4_moe_status nvfp4_moe_explain(const nvfp4_moe_config* config, const char* backend,
                                   char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("json", json));
    *json = nullptr;
    NVFP4_MOE_ASSIGN(const moe::MoeOptions options, api::read_config(config));
    NVFP4_MOE_ASSIGN(const moe::MoeConfig moe_config, moe::MoeConfig::make(options));
    moe::Json list = moe::Json::array();
    for (const auto& report : explain(moe_config, moe::host_facts(), api::backend_name(backend)))
      list.push_back(
          {{"backend", report.backend}, {"chosen", report.chosen}, {"reason", report.reason}});
    return api::write_text(list.dump(), json);
  });
}

nvfp4_moe_status nvfp4_moe_plan(const nvfp4_moe_config* config,
                                const nvfp4_moe_layer_options* options, float hidden_scale,
                                float intermediate_scale, char** text, size_t* workspace_bytes,
                                size_t* packed_bytes) {
  return api::guarded([&]() -> Status {
    if (text != nullptr) *text = nullptr;
    NVFP4_MOE_ASSIGN(const moe::MoeOptions moe_options, api::read_config(config));
    NVFP4_MOE_ASSIGN(const moe::MoeConfig moe_config, moe::MoeConfig::make(moe_options));
    NVFP4_MOE_ASSIGN(const nvfp4_moe_layer_options given, api::read_struct("options", options));
    NVFP4_MOE_ASSIGN(const moe::LayerOptions layer_options, api::layer_options(given));
    NVFP4_MOE_ASSIGN(const moe::LayerScales scales,
                     api::input_scales(hidden_scale, intermediate_scale));
    NVFP4_MOE_ASSIGN(const moe::LayerNeeds needs,
                     moe::plan_layer(moe_config, scales, layer_options));
    if (workspace_bytes != nullptr) *workspace_bytes = needs.plan.workspace.total_bytes;
    if (packed_bytes != nullptr) *packed_bytes = needs.packed_bytes;
    return text == nullptr ? Status() : api::write_text(to_string(needs.plan), text);
  });
}

nvfp4_moe_status nvfp4_moe_layer_open_tensors(const nvfp4_moe_config* config,
                                              const nvfp4_moe_layer_tensors* tensors,
                                              const nvfp4_moe_layer_options* options,
                                              nvfp4_moe_layer** out) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_pointer("out", out));
    *out = nullptr;
    NVFP4_MOE_ASSIGN(const nvfp4_moe_layer_options given, api::read_struct("options", options));
    return api::report_to_ranks(given, [&](bool* reported) {
      return api::open_tensors(config, tensors, given, out, reported);
    });
  });
}

nvfp4_moe_status nvfp4_moe_layer_rearrange_tensors(nvfp4_moe_layer* layer,
                                                   const int64_t* expert_of_slot, int64_t slots,
                                                   const nvfp4_moe_layer_tensors* tensors) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(moe::RankCombine* const ranks, api::ranks_in(layer));
    return api::rearrange_tensors(*ranks, expert_of_slot, slots, tensors);
  });
}

void nvfp4_moe_layer_close(nvfp4_moe_layer* layer) { delete layer; }

}  // extern "C"
