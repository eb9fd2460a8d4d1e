// Plans and launches the layer of a few tokens in one launch (decode.cuh).
#include <algorithm>
#include <bit>
#include <cmath>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_layout.h"
#include "backend/sm90/config.h"
#include "backend/sm90/decode.cuh"

namespace nvfp4_moe::internal::sm90 {
namespace {

using cuda::Gemm1Function;

// Weights that a batch reads on average, at most. Larger layers are limited by bandwidth, and
// launches per step reach more of it.
constexpr double kMostBytes = 400e6, kMostFp8Bytes = 200e6;

// Partial accumulators of down: `blocks` of 16 channels, of `warps` warps.
int64_t partial_bytes_of_down(int64_t rows, int64_t blocks, int warps) {
  return blocks * rows * warps * 16 * 4;
}

// Under fp8: warps that share `items` rows of `k_tiles` subtiles each: the power of two with the
// least work for the warp that has the most, at least `fewest`. A row costs as much as one more
// subtile, and another half if warps wait for each other.
int share_warps(int64_t items, int64_t k_tiles, int fewest = 1) {
  int best = fewest;
  int64_t least = INT64_MAX;
  for (int warps = fewest; warps <= kDecodeWarps && warps <= k_tiles; warps *= 2) {
    const int64_t of_one = cuda::ceil_div(items, kDecodeWarps / warps) *
                           (2 * cuda::ceil_div(k_tiles, warps) + (warps > 1 ? 3 : 2));
    if (of_one < least) least = of_one, best = warps;
  }
  return best;
}

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
  const double chosen = 1 - std::pow(1 - static_cast<double>(config->top_k) /
                                             static_cast<double>(config->num_experts),
                                     static_cast<double>(tokens));
  const double bytes = (static_cast<double>(range.count) * chosen * static_cast<double>(inner) +
                        static_cast<double>(shared)) *
                       static_cast<double>(hidden) * (has_gate(config->activation) ? 3 : 2) * 9 /
                       16;
  if (bytes > (fp8 ? kMostFp8Bytes : kMostBytes)) return {};
  // the intermediate takes the space of gemm2's rows
  if (row_elems(inner) > hidden || row_elems(shared) > hidden) return {};
  const int64_t k_tiles = cuda::ceil_div(hidden, cuda::kTileK),
                down_k_tiles = cuda::ceil_div(inner, cuda::kTileK),
                shared_k_tiles = cuda::ceil_div(shared, cuda::kTileK);
  const int64_t local = cuda::ceil_div(assignments * range.count, config->num_experts);
  const int64_t groups_of_expert =
      (gate_rows(config->activation, inner) + inner) / cuda::kGroupRows;
  cuda::OneLaunchPlan plan;
  const int64_t down_rows = assignments + (shared > 0 ? tokens : 0),
                blocks_of_cta = cuda::ceil_div(hidden / 16, device.compute_units);
  if (fp8) {
    plan.gate_up_warps_k =
        share_warps(cuda::ceil_div(local * groups_of_expert, device.compute_units), k_tiles);
    plan.down_warps_k = share_warps(
        (local + (shared > 0 ? 1 : 0)) * blocks_of_cta,
        shared > 0 ? std::min(down_k_tiles, shared_k_tiles) : down_k_tiles, kFp8DownWarps);
    plan.partial_bytes =
        std::max(int64_t{kFp8GateUpPartialBytes},
                 partial_bytes_of_down(down_rows, blocks_of_cta, plan.down_warps_k));
  } else {
    plan.partial_bytes = kDecodePartialBytes + partial_bytes_of_down(down_rows, blocks_of_cta, 1);
  }
  // hidden; under fp8 later the intermediate
  const int64_t rows_bytes =
      fp8 ? std::max(tokens * k_tiles,
                     assignments * down_k_tiles + (shared > 0 ? tokens * shared_k_tiles : 0)) *
                    cuda::kTileK +
                kFp8TableBytes + kFp8TailBytes
          : tokens * decode_row_bytes(static_cast<int32_t>(k_tiles));
  // At least half of a multiprocessor's, so that it never runs ctas of two of these grids: they
  // share one counter (decode_down.cuh).
  plan.shared_bytes = std::max(kDecodeRingBytes + plan.partial_bytes + rows_bytes,
                               device.cta_shared_bytes / 2 + int64_t{1024});
  if (plan.shared_bytes >
      device.cta_shared_bytes -
          static_cast<int64_t>(fp8 ? sizeof(Fp8DecodeRouting) : sizeof(Bf16DecodeRouting)))
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
  args.gate_up_k_shift = std::countr_zero(static_cast<unsigned>(plan.gate_up_warps_k));
  args.down_k_shift = std::countr_zero(static_cast<unsigned>(plan.down_warps_k));
  args.by_top_k = cuda::Divider(args.top_k), args.by_ctas = cuda::Divider(plan.ctas);
  args.by_groups = cuda::Divider(args.routed.groups);
  args.by_vec8s = cuda::Divider(args.k_tiles * (cuda::kTileK / 8));
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
    Bf16DecodeArgsOf<kFunction> own{};
    static_cast<DecodeArgs&>(own) = args;
    if constexpr (kFunction == Gemm1Function::kGeluOrSitu)
      own.gelu_or_situ = cuda::GeluOrSitu::from(config);
    own.gate_up = DecodeLength(args.k_tiles);
    own.down = DecodeLength(args.routed.down_k_tiles);
    own.shared_down = DecodeLength(args.shared.down_k_tiles);
    return cuda::launch_as<sm90_decode_kernel<kFunction>>(
        true, "decode", static_cast<unsigned>(plan.ctas), kDecodeThreads, plan.shared_bytes,
        step.stream, own);
  };
  return cuda::with_gemm1_function(cuda::gemm1_function(config->activation), launch_of);
}

}  // namespace nvfp4_moe::internal::sm90
