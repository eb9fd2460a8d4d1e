// Plans and launches the layer of a few tokens in one launch (decode.cuh).
#include <algorithm>
#include <cmath>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_layout.h"
#include "backend/sm90/config.h"
#include "backend/sm90/decode.cuh"

namespace nvfp4_moe::internal::sm90 {
namespace {

using cuda::Gemm1Function;

// Weights that a batch reads on average, at most.
constexpr double kMostBytes = 256e6;

int64_t row_elems(int64_t channels) { return cuda::ceil_div(channels, 32) * 32; }

}  // namespace

cuda::OneLaunchPlan plan_decode(const MoeConfig& config, const ExpertRange& range,
                                const DeviceFacts& device, const cuda::RunFacts& facts) {
  const int64_t tokens = facts.tokens, assignments = tokens * config->top_k,
                hidden = config->hidden_size, inner = config->intermediate_size,
                shared = config->shared_intermediate_size;
  const bool fp8 = config->activation_format == ActivationFormat::kFp8;
  if ((config->activation_format != ActivationFormat::kBf16 && !fp8) || config->batch_invariant ||
      config->router_weight == RouterWeight::kOnInput || facts.single_steps || tokens < 1 ||
      tokens > (fp8 ? kFp8DecodeTokens : kDecodeTokens) || assignments > kDecodeAssignments ||
      range.count < 1 || range.count > kDecodeExperts)
    return {};
  // Larger layers are limited by bandwidth, and launches per step reach more of it.
  const double chosen = 1 - std::pow(1 - static_cast<double>(config->top_k) /
                                             static_cast<double>(config->num_experts),
                                     static_cast<double>(tokens));
  const double bytes = (static_cast<double>(range.count) * chosen * static_cast<double>(inner) +
                        static_cast<double>(shared)) *
                       static_cast<double>(hidden) * (has_gate(config->activation) ? 3 : 2) * 9 /
                       16;
  if (bytes > kMostBytes) return {};
  // the intermediate takes the space of gemm2's rows
  if (row_elems(inner) > hidden || row_elems(shared) > hidden) return {};
  const int64_t k_tiles = cuda::ceil_div(hidden, cuda::kTileK),
                down_k_tiles = cuda::ceil_div(inner, cuda::kTileK),
                shared_k_tiles = cuda::ceil_div(shared, cuda::kTileK);
  cuda::OneLaunchPlan plan;
  // the values of down's rows are those of two blocks of 16 channels
  plan.partial_bytes = (fp8 ? 3 : 1) * int64_t{kDecodePartialBytes} +
                       2 * (assignments + (shared > 0 ? tokens : 0)) * 16 * 4;
  // hidden, and later the intermediate
  const auto row_bytes = [&](int64_t tiles) {
    return fp8 ? tiles * cuda::kTileK : int64_t{decode_row_bytes(static_cast<int32_t>(tiles))};
  };
  const int64_t rows_bytes = std::max(tokens * row_bytes(k_tiles),
                                      assignments * row_bytes(down_k_tiles) +
                                          (shared > 0 ? tokens * row_bytes(shared_k_tiles) : 0)) +
                             (fp8 ? kFp8TableBytes + kFp8TailBytes : 0);
  // At least half of a multiprocessor's, so that it never runs ctas of two of these grids: they
  // share one counter (decode_down.cuh).
  plan.shared_bytes = std::max(kDecodeRingBytes + plan.partial_bytes + rows_bytes,
                               device.cta_shared_bytes / 2 + int64_t{1024});
  if (plan.shared_bytes >
      device.cta_shared_bytes -
          static_cast<int64_t>(fp8 ? sizeof(Fp8DecodeRouting) : sizeof(DecodeRouting)))
    return {};
  plan.ctas = device.compute_units;
  return plan;
}

DecodeArgs decode_args(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  const Batch& batch = step.batch;
  const cuda::OneLaunchPlan& plan = step.plan->one_launch;
  const cuda::PackedLayout packed(config, step.weights.range);
  const auto part_of = [&](const PartBuffers& buffers, const cuda::PartLayout& layout,
                           bool shared) {
    DecodePart part{};
    if (buffers.experts == 0) return part;
    const int64_t channels = buffers.intermediate_size;
    part.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + layout.offset;
    part.expert_stride = layout.expert_stride;
    part.down_offset = layout.gate_up.bytes();
    part.groups = static_cast<int32_t>((gate_rows(config->activation, channels) + channels) /
                                       cuda::kGroupRows);
    part.down_k_tiles = static_cast<int32_t>(layout.down.k_tiles);
    part.channels = static_cast<int32_t>(channels);
    part.row_elems = static_cast<int32_t>(row_elems(channels));
    part.rows = static_cast<uint16_t*>(buffers.rows_out);
    part.tensor_scales = cuda::tensor_scales(step.weights, shared);
    part.gemm1_biases = cuda::gemm1_biases(step.weights, shared);
    part.down_biases = cuda::down_biases(step.weights, shared);
    return part;
  };
  DecodeArgs args{};
  args.routed = part_of(step.buffers.routed, packed.routed, false);
  args.shared = part_of(step.buffers.shared, packed.shared, true);
  args.ids = cuda::assignment_ids(step);
  args.hidden = batch.hidden, args.hidden_dtype = batch.hidden_dtype;
  args.topk_weights = batch.topk_weights, args.shared_weights = batch.shared_weights;
  args.out = batch.out, args.out_dtype = batch.out_dtype;
  args.tokens = static_cast<int32_t>(batch.tokens);
  args.top_k = static_cast<int32_t>(config->top_k);
  args.hidden_size = static_cast<int32_t>(config->hidden_size);
  args.k_tiles = static_cast<int32_t>(packed.routed.gate_up.k_tiles);
  const int32_t together = config->activation_format == ActivationFormat::kFp8 ? kFp8Together : 1;
  args.by_gate_up_steps = cuda::Divider(cuda::ceil_div(args.k_tiles, together));
  args.by_down_steps = cuda::Divider(cuda::ceil_div(args.routed.down_k_tiles, together));
  args.by_top_k = cuda::Divider(args.top_k), args.by_ctas = cuda::Divider(plan.ctas);
  args.by_groups = cuda::Divider(args.routed.groups);
  args.partial_bytes = static_cast<int32_t>(plan.partial_bytes);
  args.activation = cuda::GatedActivation::from(config);
  args.before_down = config->router_weight == RouterWeight::kBeforeDown;
  args.rows_fp32 = config->row_format == RowFormat::kFp32;
  args.status = step.buffers.status;
  return args;
}

Status decode(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  const cuda::OneLaunchPlan& plan = step.plan->one_launch;
  const DecodeArgs args = decode_args(step);
  const auto launch_of = [&]<Gemm1Function kFunction>() {
    DecodeArgsOf<kFunction> own{};
    static_cast<DecodeArgs&>(own) = args;
    if constexpr (kFunction == Gemm1Function::kGeluOrSitu)
      own.gelu_or_situ = cuda::GeluOrSitu::from(config);
    return cuda::launch_as<sm90_decode_kernel<kFunction>>(
        true, "decode", static_cast<unsigned>(plan.ctas), kDecodeThreads, plan.shared_bytes,
        step.stream, own);
  };
  return cuda::with_gemm1_function(cuda::gemm1_function(config->activation), launch_of);
}

}  // namespace nvfp4_moe::internal::sm90
