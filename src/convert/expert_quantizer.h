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
#include "core/csf.h"
#include "core/executor.h"
#include "core/status.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {

using ExpertQuality = std::array<QuantizationQuality, 3>;  // gate, up, down

using ExceptionCounts = std::array<int64_t, 3>;  // the same

struct QuantizedMatrix {
  int64_t rows = 0;
  std::vector<uint8_t> codes;         // (rows, cols/2)
  std::vector<uint8_t> block_scales;  // (rows, cols/16)
  QuantizationQuality quality;
  CsfStreams coded_scales() const;
};

class ExpertQuantizer {
 public:
  // All are borrowed. moments: those of the layers, or null. writer: needed by run() only.
  ExpertQuantizer(const Checkpoint& checkpoint, const QuantizeOptions& options,
                  const ChannelMoments* moments, Executor& executor,
                  ShardedWriter* writer = nullptr)
      : checkpoint_(checkpoint),
        options_(options),
        moments_(moments),
        executor_(executor),
        writer_(writer) {}

  // Quantizes the expert and writes its tensors. `measured` receives their quality before the last
  // of them is written, so that it is known when that write completes a shard.
  Status run(const OutputItem& item, const std::function<void(const ExpertQuality&)>& measured);
  // Quantizes the expert and counts the exceptions that its block scales have in CSF.
  Result<ExceptionCounts> count_exceptions(const OutputItem& item);

 private:
  // Quantizes the matrices in order. `take` gets each of them, in matrix_, with its tensor scale.
  Status quantize(const OutputItem& item, const std::function<Status(int matrix, float)>& take);
  float input_scale(int64_t layer, bool down) const;
  Status write(const std::string& base, float tensor_scale, float input_scale);

  const Checkpoint& checkpoint_;
  const QuantizeOptions& options_;
  const ChannelMoments* moments_;
  Executor& executor_;
  ShardedWriter* writer_;
  QuantizedMatrix matrix_;
};

}  // namespace nvfp4_moe::internal
