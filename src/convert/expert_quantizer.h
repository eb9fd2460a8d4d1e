// Quantizes one expert at a time: from floats to the twelve tensors of its quantized matrices, with
// their loss.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "convert/channel_moments.h"
#include "convert/output_plan.h"
#include "convert/quantize_checkpoint.h"
#include "core/executor.h"
#include "core/status.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {

using ExpertQuality = std::array<QuantizationQuality, 3>;  // gate, up, down

struct QuantizedMatrix {
  std::vector<uint8_t> codes;         // (rows, cols/2)
  std::vector<uint8_t> block_scales;  // (rows, cols/16)
  QuantizationQuality quality;
};

class ExpertQuantizer {
 public:
  // All are borrowed. moments: those of the layers, or null.
  ExpertQuantizer(const Checkpoint& checkpoint, const QuantizeOptions& options,
                  const ChannelMoments* moments, Executor& executor, ShardedWriter& writer)
      : checkpoint_(checkpoint),
        options_(options),
        moments_(moments),
        executor_(executor),
        writer_(writer) {}

  // Quantizes the expert and writes its tensors. `measured` receives their quality before the last
  // of them is written, so that it is known when that write completes a shard.
  Status run(const OutputItem& item, const std::function<void(const ExpertQuality&)>& measured);

 private:
  float input_scale(int64_t layer, bool down) const;
  Status write(const std::string& base, float tensor_scale, float input_scale);

  const Checkpoint& checkpoint_;
  const QuantizeOptions& options_;
  const ChannelMoments* moments_;
  Executor& executor_;
  ShardedWriter& writer_;
  QuantizedMatrix matrix_;
};

}  // namespace nvfp4_moe::internal
