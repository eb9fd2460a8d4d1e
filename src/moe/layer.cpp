// open -> pack -> plan -> run. Everything that can fail fails in open or in the checks before run;
// run itself only computes.
#include "moe/layer.h"

#include <chrono>
#include <cmath>
#include <limits>

#include "moe/batch_check.h"
#include "moe/layer_debug.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

// Every byte count of a layer is below this, so no backend's size arithmetic can overflow. The
// estimate uses double, which cannot overflow, and its error is far smaller than the margin.
constexpr double kMaxBytes = static_cast<double>(int64_t{1} << 60);

Status check_sizes(const MoeConfig& config, const ExpertRange& range, const Limits& limits) {
  if (range.first < 0 || range.count < 1 || range.count > config->num_experts ||
      range.first > config->num_experts - range.count)
    return invalid_argument("expert range: expected a part of [0, " +
                            std::to_string(config->num_experts) + "), got first " +
                            std::to_string(range.first) + " count " + std::to_string(range.count));
  if (limits.max_tokens < 1 ||
      limits.max_tokens > std::numeric_limits<int32_t>::max() / config->top_k)
    return invalid_argument("max_tokens: expected 1 to " +
                            std::to_string(std::numeric_limits<int32_t>::max() / config->top_k) +
                            " (top_k " + std::to_string(config->top_k) + "), got " +
                            std::to_string(limits.max_tokens));
  const auto hidden = static_cast<double>(config->hidden_size);
  const auto intermediate =
      static_cast<double>(std::max(config->intermediate_size, config->shared_intermediate_size));
  const double packed_bytes = (static_cast<double>(range.count) + 1) * 4 * hidden * intermediate;
  const double workspace_bytes = static_cast<double>(limits.max_tokens) *
                                 (static_cast<double>(config->top_k) + 1) * 8 *
                                 (hidden + intermediate);
  if (packed_bytes > kMaxBytes || workspace_bytes > kMaxBytes)
    return invalid_argument(
        "sizes: expected a layer below 2^60 bytes, got " + std::to_string(range.count) +
        " experts of " + std::to_string(config->intermediate_size) + " x " +
        std::to_string(config->hidden_size) + ", " + std::to_string(limits.max_tokens) + " tokens");
  return {};
}

// The range in the options, checked so that no size can overflow.
Result<ExpertRange> checked_range(const MoeConfig& config, const LayerOptions& options) {
  ExpertRange range = options.range;
  if (range.count == 0 && range.first == 0) range.count = config->num_experts;
  NVFP4_MOE_TRY(check_sizes(config, range, options.limits));
  return range;
}

std::string place(const LayerSource& source, int64_t local_expert, const ExpertRange& range) {
  std::string text = source.name.empty() ? "" : source.name + " ";
  return text + (local_expert == kSharedExpert
                     ? "shared expert"
                     : "expert " + std::to_string(range.global(local_expert)));
}

int64_t matrix_bytes(const Nvfp4View& view) { return view.rows * (view.cols / 2 + view.cols / 16); }

// Checks that rows `stride` bytes apart, the last one row_bytes long, end inside the address space.
Status check_stride(const char* name, const char* what, const uint8_t* first, int64_t rows,
                    int64_t stride, int64_t row_bytes) {
  if (ends_in_memory(first, rows, stride, row_bytes)) return {};
  return invalid_argument(std::string(name) + what + ": expected " + std::to_string(rows) +
                          " rows inside the address space, got " + std::to_string(stride) +
                          " bytes between them");
}

// Checks a matrix except for its block scales.
Status check_view(const char* name, const Nvfp4View& view, int64_t rows, int64_t cols) {
  const auto where = [name](const char* what) { return std::string(name) + what + ": expected "; };
  if (view.rows != rows || view.cols != cols)
    return invalid_argument(where("") + "(" + std::to_string(rows) + ", " + std::to_string(cols) +
                            "), got (" + std::to_string(view.rows) + ", " +
                            std::to_string(view.cols) + ")");
  if (view.codes == nullptr) return invalid_argument(where(" codes") + "a pointer, got null");
  if (view.block_scales == nullptr)
    return invalid_argument(where(" block scales") + "a pointer, got null");
  if (view.codes_stride < cols / 2)
    return invalid_argument(where(" codes stride") + "at least " + std::to_string(cols / 2) +
                            " bytes, got " + std::to_string(view.codes_stride));
  if (view.scales_stride < cols / 16)
    return invalid_argument(where(" block scales stride") + "at least " +
                            std::to_string(cols / 16) + " bytes, got " +
                            std::to_string(view.scales_stride));
  NVFP4_MOE_TRY(
      check_stride(name, " codes stride", view.codes, view.rows, view.codes_stride, cols / 2));
  NVFP4_MOE_TRY(check_stride(name, " block scales stride", view.block_scales, view.rows,
                             view.scales_stride, cols / 16));
  if (!std::isfinite(view.tensor_scale) || view.tensor_scale < 0)
    return bad_input(where(" tensor scale") + "a finite number >= 0, got " +
                     std::to_string(view.tensor_scale));
  return {};
}

Status check_block_scales(const char* name, const Nvfp4View& view) {
  const int64_t blocks = view.cols / 16;
  for (int64_t row = 0; row < view.rows; ++row) {
    const uint8_t* scales = view.row_scales(row);
    uint8_t largest = 0;
    for (int64_t block = 0; block < blocks; ++block) largest = std::max(largest, scales[block]);
    if (largest < 0x7F) continue;  // all positive and none NaN
    for (int64_t block = 0; block < blocks; ++block) {
      if (scales[block] < 0x7F) continue;
      return illegal_block_scale(name, scales[block], row, block);
    }
  }
  return {};
}

}  // namespace

Status check_matrix(const char* name, const Nvfp4View& view, int64_t rows, int64_t cols) {
  NVFP4_MOE_TRY(check_view(name, view, rows, cols));
  return check_block_scales(name, view);
}

namespace {

Status check_no_gate(const Nvfp4View& gate, Activation activation) {
  if (gate.rows == 0 && gate.tensor_scale == 1.0f) return {};
  return invalid_argument(std::string("gate: expected none with activation ") +
                          to_string(activation) + ", got (" + std::to_string(gate.rows) + ", " +
                          std::to_string(gate.cols) + ")");
}

// Checks for `count` finite bias values, or for no bias if none is expected.
Status check_bias(const char* name, const float* bias, bool expected, int64_t count) {
  if (!expected) {
    if (bias == nullptr) return {};
    return invalid_argument(std::string(name) +
                            " bias: expected none (a shared expert, a config without " +
                            "expert_biases, or no gate), got one");
  }
  if (bias == nullptr)
    return invalid_argument(std::string(name) + " bias: expected one (expert_biases), got none");
  for (int64_t i = 0; i < count; ++i)
    if (!std::isfinite(bias[i]))
      return bad_input(std::string(name) + " bias: expected finite numbers, got " +
                       std::to_string(bias[i]) + " at row " + std::to_string(i));
  return {};
}

}  // namespace

Status MoeLayer::check_source(const ExpertSource& source, int64_t local_expert) const {
  const MoeConfig& config = weights_->config;
  const int64_t hidden_size = config->hidden_size;
  const int64_t intermediate_size =
      local_expert == kSharedExpert ? config->shared_intermediate_size : config->intermediate_size;
  if (source.on_device && backend_->memory == nullptr)
    return invalid_argument(std::string("codes, block scales: expected host memory (backend ") +
                            backend_->name + "), got a device's");
  const auto check =
      source.on_device ? check_view : check_matrix;  // the packer checks block scales on a device
  const bool gated = has_gate(config->activation);
  NVFP4_MOE_TRY(gated ? check("gate", source.gate, intermediate_size, hidden_size)
                      : check_no_gate(source.gate, config->activation));
  NVFP4_MOE_TRY(check("up", source.up, intermediate_size, hidden_size));
  NVFP4_MOE_TRY(check("down", source.down, hidden_size, intermediate_size));
  const bool biased = config->expert_biases && local_expert != kSharedExpert;
  NVFP4_MOE_TRY(check_bias("gate", source.biases.gate, biased && gated, intermediate_size));
  NVFP4_MOE_TRY(check_bias("up", source.biases.up, biased, intermediate_size));
  return check_bias("down", source.biases.down, biased, hidden_size);
}

// The environment can only restrict what a caller allows.
static Limits limits_of(const LayerOptions& options, const Env& env) {
  Limits limits = options.limits;
  limits.one_launch = limits.one_launch && env.one_launch;
  return limits;
}

Result<LayerNeeds> plan_layer(const MoeConfig& config, const LayerScales& scales,
                              const LayerOptions& options) {
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  NVFP4_MOE_ASSIGN(const std::string forced, forced_backend(options.backend, env));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
  NVFP4_MOE_ASSIGN(const Backend* backend, choose_backend(config, device, forced));
  NVFP4_MOE_ASSIGN(const ExpertRange range, checked_range(config, options));
  NVFP4_MOE_ASSIGN(Plan plan,
                   backend->plan(config, range, scales, limits_of(options, env), device));
  return LayerNeeds{std::move(plan), backend->packed_bytes(config, range)};
}

MoeLayer::~MoeLayer() = default;

Result<std::unique_ptr<MoeLayer>> MoeLayer::open(const MoeConfig& config, const LayerSource& source,
                                                 const LayerOptions& options,
                                                 const ProgressFn& progress) {
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  NVFP4_MOE_ASSIGN(const std::string forced, forced_backend(options.backend, env));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
  NVFP4_MOE_ASSIGN(const BackendSelection selected,
                   choose_backend_to_open(config, device, forced, env));
  NVFP4_MOE_ASSIGN(auto layer, open_on(*selected.backend, config, source, options, progress));
  layer->set_self_check(selected.check);
  return layer;
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::open_on(const Backend& backend, const MoeConfig& config,
                                                    const LayerSource& source,
                                                    const LayerOptions& options,
                                                    const ProgressFn& progress) {
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  NVFP4_MOE_ASSIGN(auto layer, prepare(backend, config, source.scales, options, env));
  layer->declared_ = source.declared;
  NVFP4_MOE_TRY(layer->pack(source, progress));
  NVFP4_MOE_TRY(layer->attach_debug(env, options, source.name));
  return layer;
}

Result<std::unique_ptr<MoeLayer>> MoeLayer::prepare(const Backend& backend, const MoeConfig& config,
                                                    const LayerScales& scales,
                                                    const LayerOptions& options, const Env& env) {
  set_log_level(env.log_level);
  NVFP4_MOE_ASSIGN(const ExpertRange range, checked_range(config, options));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
  NVFP4_MOE_TRY(backend.supports(config, device).in(std::string("backend ") + backend.name));

  std::unique_ptr<MoeLayer> layer(new MoeLayer);
  layer->backend_ = &backend;
  NVFP4_MOE_ASSIGN(layer->plan_,
                   backend.plan(config, range, scales, limits_of(options, env), device));
  layer->executor_ = options.executor;
  if (layer->executor_ == nullptr) {
    layer->owned_executor_ = make_thread_pool(env.threads);
    layer->executor_ = layer->owned_executor_.get();
  }
  const size_t scale_sets =
      static_cast<size_t>(range.count) + (config->shared_intermediate_size > 0 ? 1 : 0);
  layer->weights_.reset(
      new PackedWeights{config, range, scales, std::vector<TensorScales>(scale_sets), Buffer()});
  layer->weights_->device = device.index;
  return layer;
}

Status MoeLayer::pack(const LayerSource& source, const ProgressFn& progress) {
  const auto start = std::chrono::steady_clock::now();
  const MoeConfig& config = weights_->config;
  const ExpertRange& range = weights_->range;
  const bool shared = config->shared_intermediate_size > 0;
  if (!source.expert)
    return invalid_argument("layer source: expected a function that gives experts, got none");
  if (shared && !source.shared_expert)
    return invalid_argument("layer source: expected a shared expert (shared_intermediate_size " +
                            std::to_string(config->shared_intermediate_size) + "), got none");

  const std::string purpose =
      source.name.empty() ? "packed weights" : "packed weights of " + source.name;
  NVFP4_MOE_ASSIGN(weights_->bytes, backend_->allocate(backend_->packed_bytes(config, range),
                                                       weights_->device, purpose.c_str()));

  Progress report;
  report.what = "pack";
  report.total = range.count + (shared ? 1 : 0);
  const int64_t expert_values = matrices_of_expert(config->activation) * config->hidden_size;
  report.total_bytes = (range.count * expert_values * config->intermediate_size +
                        expert_values * config->shared_intermediate_size) /
                       16 * 9;
  for (int64_t local = 0; local < report.total; ++local) {
    const int64_t expert = local == range.count ? kSharedExpert : local;
    const std::string item = place(source, expert, range);
    {
      NVFP4_MOE_ASSIGN(const LoadedExpert loaded, expert == kSharedExpert
                                                      ? source.shared_expert()
                                                      : source.expert(range.global(expert)));
      NVFP4_MOE_TRY(check_source(loaded.source, expert).in(item));
      NVFP4_MOE_TRY(backend_->pack_expert(*weights_, expert, loaded.source).in(item));
      report.done_bytes += matrix_bytes(loaded.source.gate) + matrix_bytes(loaded.source.up) +
                           matrix_bytes(loaded.source.down);
    }
    if (!progress) continue;
    report.item = item;
    report.done = local + 1;
    report.elapsed_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!progress(report))
      return Status(Code::kCancelled, item + ": packing was cancelled by the progress callback");
  }
  weights_->staging = {};
  return {};
}

size_t MoeLayer::local_workspace_bytes(int64_t tokens) const {
  return workspace_size_.get(tokens, [&](int64_t n) {
    return backend_->workspace_bytes(weights_->config, weights_->range, plan_, n);
  });
}

Status MoeLayer::check_one_rank(const char* what) const {
  if (!combine_) return {};
  return unsupported(std::string(what) +
                     ": expected a layer of one rank, got one over an exchange");
}

Status MoeLayer::check_process(const char* what) const {
  return check_forked(what, backend_->memory != nullptr && process_ != fork_count());
}

Status MoeLayer::check_local_expert(int64_t local_expert) const {
  if (local_expert == kSharedExpert) {
    if (weights_->config->shared_intermediate_size > 0) return {};
    return invalid_argument("local expert: this layer has no shared expert");
  }
  if (local_expert >= 0 && local_expert < weights_->range.count) return {};
  return invalid_argument("local expert: expected 0 to " +
                          std::to_string(weights_->range.count - 1) + ", got " +
                          std::to_string(local_expert));
}

Status MoeLayer::unpack_expert(int64_t local_expert, ExpertBuffers& out) const {
  NVFP4_MOE_TRY(check_process("unpack"));
  NVFP4_MOE_TRY(check_local_expert(local_expert));
  const WeightUses::Use in_use = use();
  if (!in_use) return Status(Code::kBusy, "unpack: the layer's weights are being replaced");
  if (last_replacement_ != nullptr)
    NVFP4_MOE_TRY(device_replacement(plan_.device.kind)->wait(last_replacement_));
  return backend_->unpack_expert(*weights_, local_expert, {}, out);
}

LayerSource unpacked_source(const MoeLayer& layer) {
  const auto load = [&layer](int64_t local_expert,
                             int64_t intermediate_size) -> Result<LoadedExpert> {
    ExpertBuffers buffers;
    NVFP4_MOE_TRY(layer.unpack_expert(local_expert, buffers));
    const int64_t hidden_size = layer.weights().config->hidden_size;
    LoadedExpert loaded;
    const auto keep = [&loaded](Nvfp4Buffers& from, float scale, int64_t rows, int64_t cols) {
      loaded.storage.push_back(std::move(from.codes));
      loaded.storage.push_back(std::move(from.block_scales));
      const size_t last = loaded.storage.size() - 1;
      return Nvfp4View::contiguous(loaded.storage[last - 1].data(), loaded.storage[last].data(),
                                   scale, rows, cols);
    };
    loaded.source.gate =
        keep(buffers.gate, buffers.scales.gate,
             gate_rows(layer.weights().config->activation, intermediate_size), hidden_size);
    loaded.source.up = keep(buffers.up, buffers.scales.up, intermediate_size, hidden_size);
    loaded.source.down = keep(buffers.down, buffers.scales.down, hidden_size, intermediate_size);
    loaded.source.biases = {loaded.keep(buffers.gate_bias), loaded.keep(buffers.up_bias),
                            loaded.keep(buffers.down_bias)};
    return loaded;
  };
  LayerSource source;
  source.scales = layer.weights().scales;
  source.expert = [&layer, load](int64_t global_expert) -> Result<LoadedExpert> {
    const auto local = layer.weights().range.local(global_expert);
    if (!local)
      return invalid_argument(
          "expert " + std::to_string(global_expert) +
          ": expected one that this layer holds (its first_expert and expert_count)");
    return load(*local, layer.weights().config->intermediate_size);
  };
  if (layer.weights().config->shared_intermediate_size > 0)
    source.shared_expert = [&layer, load] {
      return load(kSharedExpert, layer.weights().config->shared_intermediate_size);
    };
  return source;
}

Result<LayerSource> layer_source(const Checkpoint& checkpoint, int64_t layer,
                                 const IntermediateSlice& slice) {
  LayerSource source;
  NVFP4_MOE_ASSIGN(source.scales, checkpoint.layer_scales(layer));
  NVFP4_MOE_ASSIGN(source.declared, checkpoint.declared_activations(layer));
  NVFP4_MOE_ASSIGN(const MoeOptions options, checkpoint.layer_options(layer));
  // The shared expert is sliced like the routed ones: the same fraction of its own intermediate
  // size.
  IntermediateSlice shared_slice;
  if (slice.count > 0 && options.shared_intermediate_size > 0) {
    const int64_t routed = options.intermediate_size;
    const int64_t shared = options.shared_intermediate_size;
    if (slice.first < 0 || slice.first > routed || slice.count > routed - slice.first)
      return invalid_argument(
          "intermediate slice: expected a part of [0, " + std::to_string(routed) + "), got first " +
          std::to_string(slice.first) + " count " + std::to_string(slice.count));
    // Exact and free of overflow: both sizes come from existing tensors.
    if (slice.first * shared % (routed * 16) != 0 || slice.count * shared % (routed * 16) != 0)
      return invalid_argument("intermediate slice: expected one that cuts the shared expert's " +
                              std::to_string(shared) + " at multiples of 16, got first " +
                              std::to_string(slice.first) + " count " +
                              std::to_string(slice.count) + " of " + std::to_string(routed));
    shared_slice = {slice.first * shared / routed, slice.count * shared / routed};
  }
  source.name = "layer " + std::to_string(layer);
  source.expert = [&checkpoint, layer, slice](int64_t expert) {
    return checkpoint.expert(layer, expert, slice);
  };
  source.shared_expert = [&checkpoint, layer, shared_slice] {
    return checkpoint.shared_expert(layer, shared_slice);
  };
  return source;
}

}  // namespace nvfp4_moe::internal
