// Tensors of a quantized checkpoint, their order, and the source of each.
//
// The order is the source's: file by file, tensor by tensor. At an expert's source tensor, the
// expert's whole set follows (all experts' sets, if it is a stacked tensor). The list, and so every
// shard's boundary, is known before the first weight is read. Resuming relies on that.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "convert/quantize_config.h"
#include "core/status.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {

struct ExpertId {
  int64_t layer = 0;
  int64_t expert = 0;
  auto operator<=>(const ExpertId&) const = default;
};

// One step of the output: a tensor to copy, or an expert to quantize.
struct OutputItem {
  TensorIndex::Ref copy;  // null info: an expert
  ExpertId expert;
  std::string modules[3];     // gate, up, down: "layers.0.ffn.experts.7.w1"; no gate: empty
  size_t exceptions[3] = {};  // with CSF: their positions in OutputPlan::tensors
};

struct OutputPlan {
  std::vector<OutputItem> items;
  std::vector<TensorInfo> tensors;
  QuantizedModules modules;
  uint64_t expert_source_bytes = 0;
  uint64_t source_bytes = 0;
  int64_t copied_tensors = 0;
  int64_t quantized_tensors = 0;
  int64_t left_out_tensors = 0;  // tensors in the modules of quantized experts that no format has
};

// The tensors of a quantized matrix, and their names after the module's.
enum MatrixPart { kCodes, kBlockScales, kTensorScale, kInputScale, kMatrixParts };
std::string part_name(OutputFormat format, MatrixPart part);
// The names of all of them, in their order in the file.
std::vector<std::string> part_names(OutputFormat format, ScaleCoding coding);

// Sets the number of a matrix's exceptions, which the plan has as 0. matrix: 0 to 2, gate to down.
void set_exceptions(OutputPlan& plan, const OutputItem& item, int matrix, int64_t count);

Result<OutputPlan> make_output_plan(const Checkpoint& checkpoint, const std::set<int64_t>& layers,
                                    OutputFormat format, ScaleCoding coding);

}  // namespace nvfp4_moe::internal
