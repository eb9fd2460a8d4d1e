// Second moments of the inputs of a layer's experts, by input channel. They are measured with the
// activation scales, and written as the file that `quantize --calibration` reads
// (convert/channel_moments.h).
//
// For an expert's rows r: hidden[c] = mean of x[r][c]^2 over gemm1's input (under on_input with the
// router weight), intermediate[c] = mean of h[r][c]^2 over gemm2's input before it is quantized. 0
// without rows.
//
// File, safetensors, for each layer L: layers.L.rows I64 (experts), layers.L.hidden_moments F32
// (experts, hidden), layers.L.intermediate_moments F32 (experts, intermediate).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backend/layer_steps.h"
#include "core/config.h"
#include "core/executor.h"
#include "core/status.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {

struct LayerMoments {
  std::vector<int64_t> rows;        // (experts)
  std::vector<float> hidden;        // (experts, hidden)
  std::vector<float> intermediate;  // (experts, intermediate)
};

// Measures a part whose gemm1 has run, with bf16 activations. kBadInput if a moment exceeds fp32.
Result<LayerMoments> measure_moments(const PartBuffers& part, int64_t top_k, int64_t hidden_size,
                                     Executor& executor);

class MomentsWriter {
 public:
  // layers: number and options of each, in the order of write(). kInvalidArgument if `path` exists.
  static Result<MomentsWriter> create(const std::string& path,
                                      const std::vector<std::pair<int64_t, MoeOptions>>& layers);
  Status write(const LayerMoments& moments);  // of the next layer
  Status finish() { return writer_.finish(); }

 private:
  explicit MomentsWriter(SafetensorsWriter writer) : writer_(std::move(writer)) {}
  SafetensorsWriter writer_;
};

}  // namespace nvfp4_moe::internal
