// pack: the checkpoint's layout unchanged, without row strides.
//
// Expert after expert, the shared expert last. Within one: gate codes, gate scales, up codes, up
// scales, down codes, down scales. gate and up (I, H), down (H, I), codes (rows, cols/2), block
// scales (rows, cols/16). Without a gate it begins with up. The biases follow all experts.
#include <cstring>
#include <limits>
#include <string>

#include "backend/backend.h"
#include "backend/reference/fp8_weights.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {
namespace {

size_t matrix_bytes(int64_t rows, int64_t cols) { return linear_bytes(rows, cols); }

int64_t intermediate_of(const MoeConfig& config, int64_t local_expert) {
  return local_expert == kSharedExpert ? config->shared_intermediate_size
                                       : config->intermediate_size;
}

size_t expert_bytes(const MoeConfig& config, int64_t intermediate_size) {
  return static_cast<size_t>(matrices_of_expert(config->activation)) *
         matrix_bytes(intermediate_size, config->hidden_size);
}

std::byte* expert_base(const PackedWeights& weights, int64_t local_expert) {
  const size_t one = expert_bytes(weights.config, weights.config->intermediate_size);
  const int64_t index = local_expert == kSharedExpert ? weights.range.count : local_expert;
  return weights.bytes.data() + static_cast<size_t>(index) * one;
}

void unpack_matrix(const Nvfp4View& view, Nvfp4Buffers& out) {
  out.codes.assign(view.codes, view.codes + view.rows * (view.cols / 2));
  out.block_scales.assign(view.block_scales, view.block_scales + view.rows * (view.cols / 16));
}

// Copies rows without their stride.
void copy_matrix(const Nvfp4View& source, const Nvfp4View& packed) {
  auto* codes = const_cast<uint8_t*>(packed.codes);  // packed points into our own writable bytes
  auto* scales = const_cast<uint8_t*>(packed.block_scales);
  for (int64_t r = 0; r < source.rows; ++r) {
    std::memcpy(codes + r * packed.codes_stride, source.row_codes(r),
                static_cast<size_t>(packed.codes_stride));
    std::memcpy(scales + r * packed.scales_stride, source.row_scales(r),
                static_cast<size_t>(packed.scales_stride));
  }
}

// Size of all matrices, and so the offset of the biases.
size_t matrices_bytes(const MoeConfig& config, const ExpertRange& range) {
  const size_t routed = expert_bytes(config, config->intermediate_size);
  const size_t shared = expert_bytes(config, config->shared_intermediate_size);
  size_t total = 0;  // an impossible size makes the allocation fail with a proper message
  if (__builtin_mul_overflow(routed, static_cast<size_t>(range.count), &total) ||
      __builtin_add_overflow(total, shared, &total))
    return std::numeric_limits<size_t>::max();
  return total;
}

}  // namespace

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range) {
  size_t total = 0;
  if (__builtin_add_overflow(matrices_bytes(config, range), packed_biases_bytes(config, range),
                             &total))
    return std::numeric_limits<size_t>::max();
  return total;
}

ExpertBiases expert_biases(const StepContext& step, const PartBuffers& part, int64_t expert) {
  if (part.assignment_of_row == nullptr) return {};
  return packed_biases(step.weights, matrices_bytes(step.weights.config, step.weights.range),
                       expert);
}

ExpertMatrices expert_matrices(const PackedWeights& weights, int64_t local_expert) {
  const int64_t hidden = weights.config->hidden_size,
                intermediate = intermediate_of(weights.config, local_expert);
  const TensorScales& scales = weights.tensor_scales_of(local_expert);
  const auto* next = reinterpret_cast<const uint8_t*>(expert_base(weights, local_expert));
  const Fp8ExpertWeights fp8 = weights.fp8_weights_of(local_expert);
  auto take = [&](int64_t rows, int64_t cols, float tensor_scale, int fp8_shift) {
    const uint8_t* codes = next;
    const uint8_t* block_scales = codes + rows * (cols / 2);
    next = block_scales + rows * (cols / 16);
    return Matrix{Nvfp4View::contiguous(codes, block_scales, tensor_scale, rows, cols), fp8_shift};
  };
  ExpertMatrices matrices;
  matrices.gate = take(gate_rows(weights.config->activation, intermediate), hidden, scales.gate,
                       fp8.gate.shift);
  matrices.up = take(intermediate, hidden, scales.up, fp8.up.shift);
  matrices.down = take(hidden, intermediate, scales.down, fp8.down.shift);
  return matrices;
}

Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source) {
  weights.tensor_scales_of(local_expert) = {source.gate.tensor_scale, source.up.tensor_scale,
                                            source.down.tensor_scale};
  if (weights.config->activation_format == ActivationFormat::kFp8) {
    weights.fp8_weights.resize(weights.tensor_scales.size());
    weights.fp8_weights[weights.index_of(local_expert)] = {define_fp8_weights(source.gate),
                                                           define_fp8_weights(source.up),
                                                           define_fp8_weights(source.down)};
  }
  const ExpertMatrices packed = expert_matrices(weights, local_expert);
  copy_matrix(source.gate, packed.gate);
  copy_matrix(source.up, packed.up);
  copy_matrix(source.down, packed.down);
  return store_biases(weights, matrices_bytes(weights.config, weights.range), local_expert,
                      source.biases);
}

Status unpack_expert(const PackedWeights& weights, int64_t local_expert, const LentStaging&,
                     ExpertBuffers& out) {
  const ExpertMatrices view = expert_matrices(weights, local_expert);
  unpack_matrix(view.gate, out.gate);
  unpack_matrix(view.up, out.up);
  unpack_matrix(view.down, out.down);
  out.scales = weights.tensor_scales_of(local_expert);
  return unpack_biases(weights, matrices_bytes(weights.config, weights.range), local_expert, out);
}

}  // namespace nvfp4_moe::internal::reference
