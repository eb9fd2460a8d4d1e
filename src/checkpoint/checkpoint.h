// Checkpoint: a model directory as experts. Knows tensor names and config files, knows no device.
//
// Opening reads headers and config only. expert() touches that expert's (or slice's) codes and block scales, and
// nothing of the other experts'; the per-expert scalars of all experts are read by layer_scales().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/nvfp4_view.h"
#include "core/progress.h"
#include "core/status.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe {

enum class Severity : uint8_t { kNote, kWarning, kError };
const char* to_string(Severity);

// One named oddity or fault of a checkpoint.
struct Finding {
  Severity severity = Severity::kNote;
  std::string id;      // stable name: "input_scale_zero", "block_scale_nan", "gate_up_scale_mismatch", ...
  int64_t layer = -1;  // -1: the whole model
  int64_t expert = -1;
  std::string tensor;
  std::string expected;
  std::string actual;
  int64_t count = 1;  // how many times this finding stands for (like ones are folded per layer)
};
// What stops at the finding: kBadInput "layer 3 expert 7 NAME: expected ..., got ... [input_scale_zero]", whose
// finding() is the id. more: how many other errors there are.
Status error_of(const Finding& finding, int64_t more = 0);
std::string to_string(const Finding& finding);  // "error input_scale_zero: layer 3 expert 7 ...: expected ..., got ..."

enum class SourceFormat : uint8_t {
  kModelOpt,           // NVFP4: weight, weight_scale, weight_scale_2, input_scale
  kModelOptStacked,    // NVFP4, experts stacked in one tensor
  kCompressedTensors,  // NVFP4: weight_packed, weight_scale, weight_global_scale, input_global_scale (reciprocals)
  kMxfp4,              // E2M1 with one E8M0 scale per 32 along K; cast to NVFP4 at load where exact
  kFloat,              // BF16, FP16 or FP32; quantized at load
};
const char* to_string(SourceFormat);

// What the config files say of the model, in this library's words. Read, never defaulted.
struct ModelInfo {
  std::string architecture;  // config.json architectures[0]
  std::string model_type;
  std::string family;  // "deepseek_v3", "deepseek_v4", "kimi", "qwen", "glm", "minimax", "mixtral", "llama4", "motif"
  SourceFormat format = SourceFormat::kModelOpt;
  std::string quant_method;  // as the config has it
  std::string quant_algo;
  std::string producer;
  MoeOptions options;           // sizes, activation, limit, router_weight as the family defines them
  std::vector<int64_t> layers;  // the MoE layers that can be loaded, ascending
  int64_t num_hidden_layers = 0;
  int64_t shared_experts = 0;
  std::vector<Finding> findings;  // what the config alone says that a user should know
};

// An expert ready to be packed. Views point into mapped files or into `storage`.
struct LoadedExpert {
  ExpertSource source;
  std::vector<std::vector<uint8_t>> storage;  // holds what had to be converted (stacked K-major, MXFP4, floats)
  std::vector<Finding> findings;  // what loading put right: codes under a zero block scale, MXFP4 blocks rounded
};

struct LayerStatistics {
  int64_t layer = 0;
  uint64_t codes_bytes = 0;
  uint64_t scales_bytes = 0;
  float tensor_scale_min = 0, tensor_scale_max = 0;
  uint8_t block_scale_min = 0, block_scale_max = 0;  // bytes
  double saturated_block_share = 0;                  // blocks whose scale byte is 0x7E (448)
  int64_t gate_up_mismatches = 0;                    // experts whose gate and up tensor scales differ
  std::optional<float> input_scale_min, input_scale_max;
};

class Checkpoint {
 public:
  static Result<Checkpoint> open(const std::string& path);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const ModelInfo& model() const;
  const TensorIndex& index() const;
  // Findings of opening: config and names. Tensors that are neither experts' nor known are listed as ignored.
  const std::vector<Finding>& findings() const;

  // Sizes and options of one layer (a family may vary them by layer).
  Result<MoeOptions> layer_options(int64_t layer) const;
  // Max over all experts; unusable input scales are replaced by numerics.md section 7's rule and reported.
  Result<LayerScales> layer_scales(int64_t layer, std::vector<Finding>* findings = nullptr) const;
  Result<LoadedExpert> expert(int64_t layer, int64_t global_expert, const IntermediateSlice& slice = {}) const;
  // The layer's shared expert where it is stored as NVFP4 (or floats, or MXFP4); kUnsupported by name where not.
  Result<LoadedExpert> shared_expert(int64_t layer, const IntermediateSlice& slice = {}) const;
  // Gives the expert's mapped pages back to the system.
  void release(int64_t layer, int64_t global_expert) const;

  // Reads the block scales and scalars of the layer's experts in range; errors make loading refuse.
  Result<std::vector<Finding>> validate(int64_t layer, const ExpertRange& range) const;
  Result<LayerStatistics> statistics(int64_t layer, const ExpertRange& range) const;

  // (expert, projection) -> the tensor's name in the files, for messages: projection "gate", "up" or "down".
  std::string tensor_name(int64_t layer, int64_t global_expert, const std::string& projection) const;

  struct Impl;

 private:
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace nvfp4_moe
