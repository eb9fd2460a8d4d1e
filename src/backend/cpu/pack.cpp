#include "backend/cpu/pack.h"

#include "backend/backend.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/steps.h"

namespace nvfp4_moe::internal::cpu {
namespace {

ExpertPanels panels_of_expert(const MoeConfig& config, int64_t local_expert) {
  return local_expert == kSharedExpert ? shared_panels(config) : routed_panels(config);
}

uint8_t* bytes_of_expert(const PackedWeights& weights, int64_t local_expert) {
  const int64_t index = local_expert == kSharedExpert ? weights.range.count : local_expert;
  return reinterpret_cast<uint8_t*>(weights.bytes.data()) +
         index * routed_panels(weights.config).bytes();
}

// Size of all panels, and so the offset of the biases.
size_t panels_bytes(const MoeConfig& config, const ExpertRange& range) {
  const int64_t shared = config->shared_intermediate_size > 0 ? shared_panels(config).bytes() : 0;
  return static_cast<size_t>(range.count * routed_panels(config).bytes() + shared);
}

}  // namespace

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range) {
  return panels_bytes(config, range) + packed_biases_bytes(config, range);
}

Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source) {
  const ExpertPanels panels = panels_of_expert(weights.config, local_expert);
  uint8_t* bytes = bytes_of_expert(weights, local_expert);
  for (int64_t p = 0; p < panels_of(source.gate.rows); ++p)
    pack_panel(source.gate, p, bytes + panels.gate(p));
  for (int64_t p = 0; p < panels_of(panels.intermediate); ++p)
    pack_panel(source.up, p, bytes + panels.up(p));
  for (int64_t p = 0; p < panels_of(panels.hidden); ++p)
    pack_panel(source.down, p, bytes + panels.down(p));
  if (weights.config->activation_format == ActivationFormat::kFp8) {
    weights.fp8_weights.resize(weights.tensor_scales.size());
    weights.fp8_weights[weights.index_of(local_expert)] = {measure_fp8_weights(source.gate),
                                                           measure_fp8_weights(source.up),
                                                           measure_fp8_weights(source.down)};
  }
  weights.tensor_scales_of(local_expert) = {source.gate.tensor_scale, source.up.tensor_scale,
                                            source.down.tensor_scale};
  return store_biases(weights, panels_bytes(weights.config, weights.range), local_expert,
                      source.biases);
}

Status unpack_expert(const PackedWeights& weights, int64_t local_expert, const LentStaging&,
                     ExpertBuffers& out) {
  const ExpertPanels panels = panels_of_expert(weights.config, local_expert);
  const uint8_t* bytes = bytes_of_expert(weights, local_expert);
  const auto unpack = [&](Nvfp4Buffers& matrix, int64_t rows, int64_t cols, auto offset) {
    matrix.codes.resize(static_cast<size_t>(rows * cols / 2));
    matrix.block_scales.resize(static_cast<size_t>(rows * cols / 16));
    for (int64_t p = 0; p < panels_of(rows); ++p)
      unpack_panel(bytes + offset(p), p, rows, cols, matrix.codes.data(),
                   matrix.block_scales.data());
  };
  unpack(out.gate, gate_rows(weights.config->activation, panels.intermediate), panels.hidden,
         [&](int64_t p) { return panels.gate(p); });
  unpack(out.up, panels.intermediate, panels.hidden, [&](int64_t p) { return panels.up(p); });
  unpack(out.down, panels.hidden, panels.intermediate, [&](int64_t p) { return panels.down(p); });
  out.scales = weights.tensor_scales_of(local_expert);
  return unpack_biases(weights, panels_bytes(weights.config, weights.range), local_expert, out);
}

const uint8_t* expert_bytes(const PackedWeights& weights, const PartBuffers& part, int64_t expert) {
  return bytes_of_expert(weights, part.assignment_of_row == nullptr ? kSharedExpert : expert);
}

const TensorScales& expert_scales(const PackedWeights& weights, const PartBuffers& part,
                                  int64_t expert) {
  return weights.tensor_scales_of(part.assignment_of_row == nullptr ? kSharedExpert : expert);
}

ExpertBiases expert_biases(const PackedWeights& weights, const PartBuffers& part, int64_t expert) {
  if (part.assignment_of_row == nullptr) return {};
  return packed_biases(weights, panels_bytes(weights.config, weights.range), expert);
}

Fp8ExpertWeights expert_fp8(const PackedWeights& weights, const PartBuffers& part, int64_t expert) {
  return weights.fp8_weights_of(part.assignment_of_row == nullptr ? kSharedExpert : expert);
}

}  // namespace nvfp4_moe::internal::cpu
