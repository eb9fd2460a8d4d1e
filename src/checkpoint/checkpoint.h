// Checkpoint: a model's files as experts. It knows tensor names and config files, and no device.
//
// Opening reads only headers and config. expert() touches only that expert's (or slice's) codes and
// block scales. layer_scales() reads the per-expert scalars of all experts.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_options.h"
#include "core/config.h"
#include "core/nvfp4_view.h"
#include "core/progress.h"
#include "core/status.h"
#include "safetensors/tensor_file.h"

namespace nvfp4_moe::internal {

struct FloatExpert;       // float_experts.h
struct QuantDeclaration;  // quant_config.h

enum class Severity : uint8_t { kNote, kWarning, kError };
const char* to_string(Severity);

// One problem of a checkpoint with a stable id. Problems of a layer with the same id are one
// finding, which names the first and counts all.
struct Finding {
  Severity severity = Severity::kNote;
  std::string
      id;  // stable name: "input_scale_zero", "block_scale_nan", "gate_up_scale_mismatch", ...
  int64_t layer = -1;  // -1: the whole model
  int64_t expert = -1;
  std::string tensor;
  std::string expected;
  std::string actual;
  int64_t count = 1;  // number of problems that this finding represents (per layer)
  // if it represents several: tensors of the next ones, at most kMaxExamples
  std::vector<std::string> examples = {};
  static constexpr size_t kMaxExamples = 3;
};
// The error for a finding: kBadInput "layer 3 expert 7 NAME: expected ..., got ...
// [input_scale_zero]", whose finding() is the id. more: the number of other errors.
Status error_of(const Finding& finding, int64_t more = 0);
// "error input_scale_zero: layer 3 expert 7 ...: expected ..., got ... (and 5 more, such as NAME,
// NAME)"
std::string to_string(const Finding& finding);

enum class SourceFormat : uint8_t {
  kModelOpt,           // NVFP4: weight, weight_scale, weight_scale_2, input_scale
  kModelOptStacked,    // NVFP4, experts stacked in one tensor
  kCompressedTensors,  // NVFP4: weight_packed, weight_scale, weight_global_scale,
                       // input_global_scale (reciprocals)
  kGgufNvfp4,  // NVFP4 in GGUF: blocks of codes and scales, experts stacked; scale, input_scale
  kMxfp4,      // E2M1 with one E8M0 scale per 32 along K; cast to NVFP4 at load if exact
  kFloat,      // BF16, FP16 or FP32; quantized at load
};
const char* to_string(SourceFormat);
bool is_nvfp4(SourceFormat);  // codes and E4M3 block scales are used as they are

// The activations that a checkpoint declares for a layer's routed experts, and the field that
// declares them.
struct DeclaredActivations {
  // bf16 for weight-only and for experts in floats; otherwise nvfp4 or fp8
  ActivationFormat format = ActivationFormat::kBf16;
  std::string why;  // "config_groups group_0: input_activations is null"
};

// The config files' facts about the model, in this library's terms. They are read and never
// defaulted.
struct ModelInfo {
  std::string architecture;  // config.json architectures[0]
  std::string model_type;
  bool gguf = false;  // read from a GGUF file's metadata: both of the above are its architecture
  // the model type whose rules the caller chose for one that is not known; otherwise empty
  std::string read_as;
  std::string family;  // "deepseek_v3", "deepseek_v4", "kimi", "qwen", ...: names.cpp has all
  // the model's; options.hidden_size differs from it if experts work in a latent space
  int64_t model_hidden_size = 0;
  SourceFormat format = SourceFormat::kModelOpt;
  std::string quant_method;  // as in the config
  std::string quant_algo;
  std::string producer;
  MoeOptions options;  // sizes, activation, limit, router_weight as the family defines them
  std::vector<int64_t> layers;  // the MoE layers that can be loaded, ascending
  int64_t num_hidden_layers = 0;
  int64_t shared_experts = 0;
  std::vector<Finding> findings;  // findings from the config only
  std::shared_ptr<QuantDeclaration>
      quantization;  // what the config files declare; read while a checkpoint is opened
  std::map<int64_t, float>
      swiglu_limits;  // for the layers that compute kSwigluStep, if the others compute kSwiglu
};

class ExpertMemory;

// An expert ready to be packed. Views point into `storage`, whose memory returns to the checkpoint
// for its next expert.
struct LoadedExpert {
  LoadedExpert() = default;
  LoadedExpert(LoadedExpert&&) = default;
  LoadedExpert& operator=(LoadedExpert&&) = default;
  ~LoadedExpert();
  // Copies a bias to storage. Null if it is empty.
  const float* keep(const std::vector<float>& bias);
  ExpertSource source;
  std::vector<std::vector<uint8_t>> storage;  // bytes as read, and bytes that had to be converted
  std::vector<Finding>
      findings;  // corrections while loading: codes under a zero block scale, MXFP4 blocks rounded
  std::shared_ptr<ExpertMemory> memory;  // receives storage; may be null
};

struct LayerStatistics {
  int64_t layer = 0;
  uint64_t codes_bytes = 0;
  uint64_t scales_bytes = 0;
  float tensor_scale_min = 0, tensor_scale_max = 0;
  uint8_t block_scale_min = 0, block_scale_max = 0;  // bytes
  double saturated_block_share = 0;                  // blocks whose scale byte is 0x7E (448)
  int64_t gate_up_mismatches = 0;  // experts whose gate and up tensor scales differ
  std::optional<float> input_scale_min, input_scale_max;
};

class Checkpoint {
 public:
  // Opens a checkpoint. path: a directory of safetensors with its config.json, one safetensors file
  // of such a directory, a GGUF file, one part of a split one, or a directory with one model in
  // GGUF.
  static Result<Checkpoint> open(const std::string& path, const CheckpointOptions& options = {});
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const ModelInfo& model() const;
  const TensorIndex& index() const;
  const CheckpointOptions& options() const;  // the options of open
  // Findings of opening, from config and names. Tensors that are neither experts' nor known are
  // listed as ignored.
  const std::vector<Finding>& findings() const;

  // Sizes and options of one layer (a family may vary them by layer).
  Result<MoeOptions> layer_options(int64_t layer) const;
  // The activation_format of layer_options, with the field that declares it.
  Result<DeclaredActivations> declared_activations(int64_t layer) const;
  // The largest scales over all experts. Unusable input scales are left out, and reported
  // (docs/reference/checkpoints.md).
  Result<LayerScales> layer_scales(int64_t layer, std::vector<Finding>* findings = nullptr) const;
  Result<LoadedExpert> expert(int64_t layer, int64_t global_expert,
                              const IntermediateSlice& slice = {}) const;
  // Loads the layer's shared expert, stored as NVFP4, MXFP4 or floats. kUnsupported, with its name,
  // for other formats.
  Result<LoadedExpert> shared_expert(int64_t layer, const IntermediateSlice& slice = {}) const;

  // Bytes of the routed experts' tensors, over all layers that can be loaded.
  uint64_t expert_bytes() const;
  // Checks that the files have all experts of the range in the shapes that the config declares.
  // Reads headers only. Call it before planning or allocating for the config's sizes. shared:
  // checks the shared expert too.
  Status check_layout(int64_t layer, const ExpertRange& range, bool shared = true) const;
  // Reads the block scales and scalars of the layer's experts in range, and returns the findings,
  // including those of opening for this layer. A finding that is an error prevents loading.
  Result<std::vector<Finding>> validate(int64_t layer, const ExpertRange& range) const;
  // Statistics of everything readable. validate() reports the rest.
  Result<LayerStatistics> statistics(int64_t layer, const ExpertRange& range) const;

  // The tensor's name in the files, for messages. projection: "gate", "up" or "down".
  std::string tensor_name(int64_t layer, int64_t global_expert,
                          const std::string& projection) const;

  struct Impl;

 private:
  friend Result<FloatExpert> float_expert(const Checkpoint& checkpoint, int64_t layer,
                                          int64_t expert);
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace nvfp4_moe::internal
