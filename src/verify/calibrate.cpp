// Runs route, quantize and gemm1_swiglu of the reference on each layer, with bf16 activations. So
// it measures the model's own activations, not those of a layer that already quantizes them.
#include "verify/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <set>
#include <thread>

#include "backend/layer_steps.h"
#include "core/float_formats.h"
#include "core/quantize.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal {
namespace {

// max |x| over (count) bf16 values; NaN if any is NaN.
float bf16_amax(const uint16_t* x, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float a = std::fabs(bf16_to_float(x[i]));
    if (!(a <= most)) most = a;
    if (std::isnan(most)) return most;
  }
  return most;
}

struct Seen {
  std::vector<uint8_t> token;  // (tokens) 1 if the token has an assignment
  int64_t tokens = 0;
  int64_t experts = 0;
};

Seen who_is_seen(const Batch& batch, const MoeOptions& options) {
  Seen seen;
  seen.token.resize(static_cast<size_t>(batch.tokens));
  std::set<int64_t> experts;
  for (int64_t assignment = 0; assignment < batch.tokens * options.top_k; ++assignment) {
    const int64_t id = batch.ids_dtype == DType::kI32
                           ? static_cast<const int32_t*>(batch.topk_ids)[assignment]
                           : static_cast<const int64_t*>(batch.topk_ids)[assignment];
    if (id < 0 || id >= options.num_experts) continue;
    experts.insert(id);
    seen.token[static_cast<size_t>(assignment / options.top_k)] = 1;
  }
  seen.tokens = std::count(seen.token.begin(), seen.token.end(), uint8_t{1});
  seen.experts = static_cast<int64_t>(experts.size());
  return seen;
}

float as_dtype(float x, DType dtype) {
  if (dtype == DType::kBf16) return bf16_to_float(bf16_from_float(x));
  return dtype == DType::kF16 ? fp16_to_float(fp16_from_float(x)) : x;
}

// The largest magnitude that quantize sees. Under on_input that is hidden times its router weight,
// and also hidden itself if a shared expert multiplies it. Rounding keeps order, so a row's largest
// magnitude times the weight is the largest magnitude of the product.
Result<float> hidden_amax(const Batch& batch, const Seen& seen, const MoeOptions& options,
                          bool has_shared, const std::string& states) {
  const int64_t hidden_size = options.hidden_size;
  const bool on_input = options.router_weight == RouterWeight::kOnInput;
  std::vector<float> row(static_cast<size_t>(hidden_size));
  const int64_t row_bytes = hidden_size * bits(batch.hidden_dtype) / 8;
  float most = 0;
  for (int64_t t = 0; t < batch.tokens; ++t) {
    if (seen.token[static_cast<size_t>(t)] == 0) continue;
    to_floats(static_cast<const std::byte*>(batch.hidden) + t * row_bytes, batch.hidden_dtype,
              hidden_size, row.data());
    const float amax = row_amax(row);
    if (!std::isfinite(amax))
      return bad_input(fmt::format("{}: token {} holds NaN or Inf", states, t));
    if (!on_input || has_shared) most = std::max(most, amax);
    if (!on_input) continue;
    const float weight = as_dtype(batch.topk_weights[t], batch.hidden_dtype);  // top_k is 1
    const float weighted = as_dtype(amax * std::fabs(weight), batch.hidden_dtype);
    if (!std::isfinite(weighted))
      return bad_input(
          fmt::format("{}: token {} times its router weight {} is not finite", states, t, weight));
    most = std::max(most, weighted);
  }
  return most;
}

// An executor whose loops end early if progress cancels. The thread that runs the loop calls
// progress after each range that it computes itself. Results of a loop that ended early must not be
// used.
class CancellableExecutor final : public Executor {
 public:
  CancellableExecutor(Executor& executor, const ProgressFn& progress)
      : executor_(executor), progress_(progress) {}
  void parallel_for(int64_t count, int64_t grain, const Body& body) override {
    if (!progress_) return executor_.parallel_for(count, grain, body);
    const auto self = std::this_thread::get_id();
    executor_.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
      if (cancelled_.load(std::memory_order_relaxed)) return;
      body(begin, end);
      if (std::this_thread::get_id() == self && !progress_({"calibrate", "", end, count, 0, 0, 0}))
        cancelled_.store(true, std::memory_order_relaxed);
    });
  }
  int threads() const override { return executor_.threads(); }
  Status status() const {
    return cancelled_ ? Status(Code::kCancelled, "calibrate: cancelled") : Status();
  }

 private:
  Executor& executor_;
  const ProgressFn& progress_;
  std::atomic<bool> cancelled_{false};
};

// max |SwiGLU output| over all routed rows of the range's experts; also their moments if `moments`
// is given.
Result<float> intermediate_amax(const LayerSource& source, const MoeConfig& config,
                                const ExpertRange& range, const Batch& batch, Executor& threads,
                                const std::string& states, const ProgressFn& progress,
                                LayerMoments* moments) {
  CancellableExecutor executor(threads, progress);
  LayerOptions options;
  options.range = range;
  options.limits.max_tokens = std::max<int64_t>(batch.tokens, 1);
  options.executor = &executor;
  NVFP4_MOE_ASSIGN(const std::unique_ptr<MoeLayer> layer,
                   MoeLayer::open_on(kReferenceBackend, config, source, options, progress));
  NVFP4_MOE_ASSIGN(const Buffer bytes,
                   allocate_pages(std::max<size_t>(layer->workspace_bytes(), 1)));
  Arena arena(bytes.data());
  const LayerBuffers buffers = layer_buffers(config, layer->weights().range, batch.tokens, arena);
  const StepContext step{layer->weights(), batch, buffers, executor};
  const LayerSteps& steps = *kReferenceBackend.steps;
  NVFP4_MOE_TRY(steps.route(step));
  NVFP4_MOE_TRY(steps.quantize(step));
  NVFP4_MOE_TRY(executor.status());
  NVFP4_MOE_TRY(steps.gemm1_swiglu(step, buffers.routed));
  NVFP4_MOE_TRY(executor.status());
  const PartBuffers& part = buffers.routed;
  const int64_t rows = part.row_offsets[part.experts];
  const float amax = bf16_amax(part.intermediate.bf16, rows * part.intermediate_size);
  if (!std::isfinite(amax))
    return bad_input(fmt::format("{}: their intermediate overflows", states));
  if (moments != nullptr) {
    auto measured = measure_moments(part, config->top_k, config->hidden_size, executor);
    NVFP4_MOE_TRY(executor.status());
    if (!measured.ok()) return measured.status().in(states);
    *moments = std::move(*measured);
  }
  return amax;
}

float scale_of(float amax) { return tensor_scale_from_amax(static_cast<double>(amax)); }

}  // namespace

Result<LayerCalibration> calibrate_layer(const LayerSource& source, MoeOptions options,
                                         const ExpertRange& range, const Batch& batch,
                                         Executor& executor, const std::string& states,
                                         const ProgressFn& progress, LayerMoments* moments) {
  options.activation_format = ActivationFormat::kBf16;
  options.activation_scale = ActivationScale::kDynamicToken;
  options.intermediate_scale = IntermediateScale::kDynamicToken;
  options.intermediate_fixed.reset();
  const bool has_shared = options.shared_intermediate_size > 0;
  // the shared expert does not affect the routed experts' scales
  options.shared_intermediate_size = 0;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  const Seen seen = who_is_seen(batch, options);
  LayerCalibration layer;
  layer.tokens = seen.tokens;
  layer.experts_seen = seen.experts;
  layer.router_weighted = options.router_weight == RouterWeight::kBeforeDown;
  layer.source = states;
  NVFP4_MOE_ASSIGN(layer.hidden_amax, hidden_amax(batch, seen, options, has_shared, states));
  NVFP4_MOE_ASSIGN(layer.intermediate_amax, intermediate_amax(source, config, range, batch,
                                                              executor, states, progress, moments));
  return layer;
}

LayerScales LayerCalibration::scales() const {
  if (tokens == 0) return {};
  return {scale_of(hidden_amax), scale_of(intermediate_amax)};
}

std::map<int64_t, LayerScales> Calibration::scales() const {
  std::map<int64_t, LayerScales> all;
  for (const LayerCalibration& layer : layers) {
    if (layer.tokens > 0) all[layer.layer] = layer.scales();
  }
  return all;
}

Result<Calibration> calibrate(const Checkpoint& checkpoint, const CalibrateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const std::vector<int64_t>& all = checkpoint.model().layers;
  const std::vector<int64_t>& layers = options.layers.empty() ? all : options.layers;
  Executor& executor = options.executor == nullptr ? serial_executor() : *options.executor;
  Calibration calibration;
  int64_t unseen = 0;         // experts
  int64_t drawn_experts = 0;  // layers whose experts were drawn from the seed
  int64_t drawn_weights = 0;  // layers whose router weights were, and change what is measured
  std::vector<std::pair<int64_t, MoeOptions>> wanted;
  for (const int64_t number : layers) {
    if (std::find(all.begin(), all.end(), number) == all.end())
      return invalid_argument(
          fmt::format("layer {}: expected one of the model's {} MoE layers", number, all.size()));
    NVFP4_MOE_ASSIGN(MoeOptions o, checkpoint.layer_options(number));
    wanted.emplace_back(number, std::move(o));
  }
  std::optional<MomentsWriter> writer;
  if (!options.moments.empty()) {
    NVFP4_MOE_ASSIGN(writer, MomentsWriter::create(options.moments, wanted));
  }
  for (const auto& [number, o] : wanted) {
    NVFP4_MOE_TRY(checkpoint.check_layout(number, {0, o.num_experts}));
    LayerStates states;
    if (options.input.empty()) {
      states = seeded_states(o, number, options.states);
    } else {
      NVFP4_MOE_ASSIGN(states, load_states(options.input, o, number, options.states));
      if (!states.ids_from_file) ++drawn_experts;
      if (!states.weights_from_file && o.router_weight != RouterWeight::kAfterDown) ++drawn_weights;
    }
    NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint, number));
    LayerMoments moments;
    auto measured = calibrate_layer(source, o, {0, o.num_experts}, states.batch(), executor,
                                    states.source, {}, writer ? &moments : nullptr);
    if (!measured.ok()) return measured.status().in(fmt::format("layer {}", number));
    LayerCalibration& layer = *measured;
    layer.layer = number;
    unseen += o.num_experts - layer.experts_seen;
    calibration.layers.push_back(layer);
    if (writer) NVFP4_MOE_TRY(writer->write(moments));
    const std::string item = "layer " + std::to_string(number);
    if (options.progress &&
        !options.progress({"calibrate", item, static_cast<int64_t>(calibration.layers.size()),
                           static_cast<int64_t>(layers.size()), 0, 0, seconds()}))
      return Status(Code::kCancelled, "calibrate: cancelled after " + item);
  }
  if (writer) NVFP4_MOE_TRY(writer->finish());
  if (options.input.empty())
    calibration.notes.push_back(
        "hidden states are seeded random numbers, not a model's: the scales serve tests and demos "
        "only");
  if (drawn_experts > 0)
    calibration.notes.push_back(fmt::format(
        "{}: no topk_ids for {} of {} layers, so their experts were drawn from the seed: "
        "moments and intermediate scales are not the model's",
        options.input, drawn_experts, layers.size()));
  if (drawn_weights > 0)
    calibration.notes.push_back(fmt::format(
        "{}: no topk_weights for {} of {} layers, so they were drawn from the seed: with router "
        "weight {}, moments and scales are not the model's",
        options.input, drawn_weights, layers.size(),
        to_string(wanted.front().second.router_weight)));
  if (unseen > 0)
    calibration.notes.push_back(
        fmt::format("{} experts were named by no token; they get their layer's scales", unseen));
  if (const int64_t measured = static_cast<int64_t>(calibration.scales().size());
      measured < static_cast<int64_t>(layers.size()))
    calibration.notes.push_back(
        fmt::format("{} of {} layers have no token with an expert: not measured",
                    layers.size() - static_cast<size_t>(measured), layers.size()));
  calibration.seconds = seconds();
  return calibration;
}

}  // namespace nvfp4_moe::internal
