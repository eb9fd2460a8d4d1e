// Tiny checkpoints of every family and format, from seeded weights, with faults planted on request.
//
//   CheckpointBuilder builder({.model_type = "deepseek_v4", .format = SourceFormat::kModelOpt});
//   builder.plant(Plant::kScaleTimesTwo, 0, 3);
//   ASSERT_OK(builder.write(dir.path().string()));
//
// The builder has its own table of names and its own config writers: it shares none with
// src/checkpoint, so that a wrong name there cannot hide here. Codes and scales come from core's
// quantizers.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

struct BuilderOptions {
  // deepseek_v3, deepseek_v4, kimi_k2, kimi_k25, qwen2_moe, qwen3_moe, qwen3_next, qwen3_5_moe,
  // glm4_moe, glm5_next, minimax_m2, minimax_m3, mixtral, llama4, motif
  std::string model_type = "deepseek_v4";
  SourceFormat format = SourceFormat::kModelOpt;  // kModelOptStacked: stacked in the family's order
  bool stacked_floats = false;       // kFloat only: gate_up_proj and down_proj of all experts
  bool weight_only = false;          // W4A16_NVFP4 / NVFP4A16: no input scales
  DType float_dtype = DType::kBf16;  // kFloat
  int64_t layers = 2;
  int64_t num_experts = 8;
  int64_t top_k = 2;
  int64_t hidden_size = 64;
  int64_t intermediate_size = 32;
  bool hf_quant_config = true;  // ModelOpt: also write hf_quant_config.json
  int shards = 1;               // more than one: with model.safetensors.index.json
  // random codes and scales instead of quantized weights: for large files
  bool random_codes = false;
  uint64_t seed = 1;
};

// One expert's projection, to be written.
struct BuiltMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> weights;   // (rows, cols) what was quantized
  std::vector<uint8_t> codes;   // (rows, cols/2)
  std::vector<uint8_t> scales;  // (rows, cols/16) E4M3, or (rows, cols/32) E8M0 for MXFP4
  float tensor_scale = 0;       // amax/2688
  float input_scale = 0;        // amax/2688
};

struct RawTensor {
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};

template <class T>
RawTensor raw_tensor(DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {dtype, std::move(shape), {bytes, bytes + values.size() * sizeof(T)}};
}
// A safetensors file of these tensors, in the order of their names.
Status write_tensors(const std::string& path, const std::map<std::string, RawTensor>& tensors);

// Faults that users' checkpoints have, planted in `layer` and `expert`.
enum class Plant {
  kFlippedCode,            // one bit of one code of the gate projection
  kScaleTimesTwo,          // one block scale of the up projection: one exponent step up
  kSwappedGateUp,          // the two matrices exchanged
  kTransposedScales,       // down's scales written as (cols/16, rows): same shape if square, else a
                           // shape error
  kReciprocalTensorScale,  // down's tensor scale inverted
  kShiftedExperts,         // the layer's experts are numbered from 1
  kMissingExpert,
  kMissingInputScale,
  kZeroInputScale,
  kDenormalInputScale,
  kInfiniteInputScale,
  kNanInputScale,
  kNegativeInputScale,
  kOneInputScale,  // uncalibrated
  kNanBlockScale,
  kNegativeBlockScale,
  kNanTensorScale,
  kZeroTensorScale,
  kNegativeTensorScale,
  kGateUpMismatch,      // up's tensor scale times 1.5 (legal)
  kWrongShape,          // one row of scales less
  kWrongDtype,          // scales as U8
  kGroupSize32,         // one scale per 32 elements
  kZeroScaleOverCodes,  // one block scale 0 over nonzero codes
  kAllZeroScales,       // over nonzero codes
};
const char* to_string(Plant);

class CheckpointBuilder {
 public:
  explicit CheckpointBuilder(const BuilderOptions& options);

  const BuilderOptions& options() const { return options_; }
  const std::vector<int64_t>& layers() const { return layers_; }  // numbers of the MoE layers
  // projection: "gate", "up" or "down"; expert -1 is the shared expert. Edits affect later writes.
  BuiltMatrix& matrix(int64_t layer, int64_t expert, const std::string& projection);
  bool has_shared() const;

  void plant(Plant fault, int64_t layer, int64_t expert);

  // For edits on the tensors themselves, after planted faults; render() fills them from the
  // matrices once.
  std::map<std::string, RawTensor>& tensors();
  nlohmann::json& config() { return config_; }
  nlohmann::json& hf_quant_config() { return hf_quant_; }
  // Replaces the block scales of a layer's routed experts by streams of CSF (core/csf.h). flat: the
  // fixed stream in one dimension, as containers have it.
  void code_scales(int64_t layer, bool flat = false);
  // The name of a tensor: part is "codes", "scales", "tensor_scale" or "input_scale".
  std::string tensor_name(int64_t layer, int64_t expert, const std::string& projection,
                          const std::string& part) const;

  // Creates the directory if needed.
  Status write(const std::string& directory);

 private:
  struct Names;
  void generate();
  void make_config();
  void render();
  void render_matrix(int64_t layer, int64_t expert, const std::string& projection,
                     const BuiltMatrix& matrix);
  void render_stacked(int64_t layer);
  std::vector<uint8_t> scalar_bytes(float value) const;  // as the format stores it
  const Names& names() const;
  bool stacked() const;

  BuilderOptions options_;
  std::vector<int64_t> layers_;
  std::map<std::string, BuiltMatrix> matrices_;
  std::map<std::string, RawTensor> tensors_;
  bool rendered_ = false;
  nlohmann::json config_;
  nlohmann::json hf_quant_;
};

// A builder's checkpoint, written and opened.
class Opened {
 public:
  explicit Opened(CheckpointBuilder&& builder, const CheckpointOptions& options = {})
      : Opened(builder, options) {}
  explicit Opened(CheckpointBuilder& builder, const CheckpointOptions& options = {});
  const Checkpoint& operator*() const { return *checkpoint_; }
  const Checkpoint* operator->() const { return &*checkpoint_; }

  const TempDir dir;

 private:
  const Result<Checkpoint> checkpoint_;
};

// The status of Checkpoint::open for a builder's checkpoint.
Status refusal_of_open(CheckpointBuilder& builder);

}  // namespace nvfp4_moe::internal::test
