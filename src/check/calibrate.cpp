// Runs route, quantize and gemm1_swiglu of the reference on each layer, with bf16 activations: what is measured is the
// model's own activations, not those of a layer that already quantizes them.
#include "check/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>

#include "backend/host_layer.h"
#include "core/float_formats.h"
#include "core/quantize.h"
#include "moe/layer.h"

namespace nvfp4_moe {
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
  std::vector<uint8_t> token;  // (tokens) 1 where the token has a choice
  int64_t tokens = 0;
  int64_t experts = 0;
};

Seen who_is_seen(const LayerStates& states, int64_t top_k) {
  Seen seen;
  seen.token.resize(static_cast<size_t>(states.tokens));
  std::set<int32_t> experts;
  for (size_t i = 0; i < states.topk_ids.size(); ++i) {
    if (states.topk_ids[i] < 0) continue;
    experts.insert(states.topk_ids[i]);
    seen.token[i / static_cast<size_t>(top_k)] = 1;
  }
  seen.tokens = std::count(seen.token.begin(), seen.token.end(), uint8_t{1});
  seen.experts = static_cast<int64_t>(experts.size());
  return seen;
}

Result<float> hidden_amax(const LayerStates& states, const Seen& seen, int64_t hidden_size) {
  std::vector<float> row(static_cast<size_t>(hidden_size));
  const int64_t row_bytes = hidden_size * bits(states.hidden_dtype) / 8;
  float most = 0;
  for (int64_t t = 0; t < states.tokens; ++t) {
    if (seen.token[static_cast<size_t>(t)] == 0) continue;
    to_floats(states.hidden.data() + t * row_bytes, states.hidden_dtype, hidden_size, row.data());
    const float amax = row_amax(row);
    if (!std::isfinite(amax)) return bad_input(fmt::format("{}: token {} holds NaN or Inf", states.source, t));
    most = std::max(most, amax);
  }
  return most;
}

// max |SwiGLU output| over all routed rows.
Result<float> intermediate_amax(const Checkpoint& checkpoint, int64_t number, const MoeConfig& config,
                                const LayerStates& states, Executor& executor) {
  NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint, number));
  LayerOptions options;
  options.limits.max_tokens = std::max<int64_t>(states.tokens, 1);
  options.executor = &executor;
  NVFP4_MOE_ASSIGN(const std::unique_ptr<MoeLayer> layer,
                   MoeLayer::open_on(kReferenceBackend, config, source, options));
  NVFP4_MOE_ASSIGN(const Buffer bytes, allocate_pages(std::max<size_t>(layer->workspace_bytes(), 1)));
  NVFP4_MOE_ASSIGN(const Workspace workspace,
                   Workspace::make(bytes.data(), bytes.size_bytes(), layer->plan().workspace));
  const HostBuffers buffers = host_buffers(config, layer->weights().range, workspace);
  const Batch batch = states.batch();
  const HostCall call{layer->weights(), batch, buffers, executor, nullptr};
  const HostSteps& steps = *kReferenceBackend.steps;
  steps.route(call);
  steps.quantize(call);
  steps.gemm1_swiglu(call, buffers.routed);
  const HostPart& part = buffers.routed;
  const int64_t rows = part.row_offsets[part.experts];
  const float amax = bf16_amax(part.intermediate.bf16, rows * part.intermediate_size);
  if (!std::isfinite(amax))
    return bad_input(fmt::format("layer {}: its intermediate overflows on {}", number, states.source));
  return amax;
}

float scale_of(float amax) { return tensor_scale_from_amax(static_cast<double>(amax)); }

}  // namespace

LayerScales LayerCalibration::scales() const { return {scale_of(hidden_amax), scale_of(intermediate_amax)}; }

std::map<int64_t, LayerScales> Calibration::scales() const {
  std::map<int64_t, LayerScales> all;
  for (const LayerCalibration& layer : layers) all[layer.layer] = layer.scales();
  return all;
}

Result<Calibration> calibrate(const Checkpoint& checkpoint, const CalibrateOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const std::vector<int64_t>& all = checkpoint.model().layers;
  const std::vector<int64_t>& layers = options.layers.empty() ? all : options.layers;
  Executor& executor = options.executor == nullptr ? serial_executor() : *options.executor;
  Calibration calibration;
  int64_t unseen = 0;
  for (const int64_t number : layers) {
    if (std::find(all.begin(), all.end(), number) == all.end())
      return invalid_argument(fmt::format("layer {}: expected one of the model's {} MoE layers", number, all.size()));
    NVFP4_MOE_ASSIGN(MoeOptions o, checkpoint.layer_options(number));
    o.activation_format = ActivationFormat::kBf16;
    o.activation_scale = ActivationScale::kDynamicToken;
    o.intermediate_scale = IntermediateScale::kDynamicToken;
    o.shared_intermediate_size = 0;  // the shared expert has no place in the routed experts' scales
    NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(o));
    LayerStates states;
    if (options.input.empty()) {
      states = seeded_states(o, number, options.states);
    } else {
      NVFP4_MOE_ASSIGN(states, load_states(options.input, o, number, options.states));
    }
    const Seen seen = who_is_seen(states, o.top_k);
    LayerCalibration layer;
    layer.layer = number;
    layer.tokens = seen.tokens;
    layer.experts_seen = seen.experts;
    layer.router_weighted = o.router_weight == RouterWeight::kBeforeDown;
    layer.source = states.source;
    NVFP4_MOE_ASSIGN(layer.hidden_amax, hidden_amax(states, seen, o.hidden_size));
    NVFP4_MOE_ASSIGN(layer.intermediate_amax, intermediate_amax(checkpoint, number, config, states, executor));
    unseen += o.num_experts - seen.experts;
    calibration.layers.push_back(layer);
    const std::string item = "layer " + std::to_string(number);
    if (options.progress && !options.progress({"calibrate", item, static_cast<int64_t>(calibration.layers.size()),
                                               static_cast<int64_t>(layers.size()), 0, 0, seconds()}))
      return Status(Code::kCancelled, "calibrate: cancelled after " + item);
  }
  if (options.input.empty())
    calibration.notes.push_back(
        "hidden states are seeded random numbers, not a model's: the scales serve tests and demos only");
  if (unseen > 0)
    calibration.notes.push_back(
        fmt::format("{} experts were named by no token; they get their layer's scales", unseen));
  calibration.seconds = seconds();
  return calibration;
}

}  // namespace nvfp4_moe
