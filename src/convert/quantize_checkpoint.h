// quantize_checkpoint: from a bf16/fp16/fp32 Hugging Face checkpoint to an NVFP4 checkpoint that
// the engines read.
//
// Only the routed experts' matrices are quantized (weights along K). Everything else - router,
// norms, embeddings, attention, shared experts, layers left out by `layers` - is copied byte for
// byte and listed in the written config as not quantized. Other files of IN are copied too. Stacked
// experts (gate_up_proj [E, 2I, H]) are written one by one under per-expert names, as other
// exporters do.
//
// Experts are streamed one at a time: anonymous memory stays near one expert in float plus its
// codes, for any model size. Runs can be resumed: while OUT is unfinished it has a plan file with a
// fingerprint of source and options (convert/quantize_plan.h). A second run with the same ones
// keeps the shards that still have the recorded bytes; a different run is refused. OUT is a
// checkpoint only once config.json is in it, which is written last. Everything is on disk when
// quantize_checkpoint() returns.
//
// Formats written:
//   modelopt            weight U8 [out, in/2], weight_scale F8_E4M3 [out, in/16], weight_scale_2
//                       F32 [], input_scale F32 []; config.json quantization_config and
//                       hf_quant_config.json (deepseek_v4: its MIXED_PRECISION form).
//   compressed-tensors  weight_packed, weight_scale, weight_global_scale F32 [1] and
//                       input_global_scale F32 [1], both reciprocal; quantization_config with
//                       format nvfp4-pack-quantized.
//   modelopt, CSF       block scales as two streams, weight_scale.nvfp4_csf_fixed and
//                       .nvfp4_csf_exceptions (core/csf.h); the config is MIXED_PRECISION, whose
//                       quantized_layers declare weight_scale_encoding "csf".
//
// The number of exceptions is part of a shard's header, so with CSF all experts are quantized once
// to count them, and once to write them. The plan file keeps the counts.
//
// input_scale without calibration is 1.0, as in ModelOpt's input_scale1 recipes and NVIDIA's
// Kimi-K3 checkpoint: one tensor scale covers 17 octaves, so 1.0 loses nothing for activations up
// to 2688. QuantizeResult::notes reports it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_options.h"
#include "core/executor.h"
#include "core/nvfp4_view.h"
#include "core/progress.h"
#include "core/quantize.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

class Checkpoint;

enum class OutputFormat : uint8_t { kModelOpt, kCompressedTensors };
const char* to_string(OutputFormat);
template <>
struct EnumNames<OutputFormat> {
  static constexpr const char* kWhat = "output_format";
  static constexpr std::array kAll = {"modelopt", "compressed-tensors"};
};

enum class ScaleCoding : uint8_t { kPlain, kCsf };
const char* to_string(ScaleCoding);
template <>
struct EnumNames<ScaleCoding> {
  static constexpr const char* kWhat = "scale_coding";
  static constexpr std::array kAll = {"plain", "csf"};
};

struct QuantizeOptions {
  CheckpointOptions reading;  // options for opening IN
  OutputFormat format = OutputFormat::kModelOpt;
  ScaleCoding scale_coding = ScaleCoding::kPlain;  // kCsf: modelopt only
  std::vector<int64_t> layers;  // empty: all MoE layers; kInvalidArgument for any other number
  ScaleSearch search = ScaleSearch::kMax;
  // True: gate and up of an expert get one tensor scale, from the larger amax, since vLLM applies
  // gate's to both (numerics.md 6). False: each has its own, which is exact in this library.
  bool share_gate_up_scale = true;
  // Scales measured by calibrate, by layer, in the ModelOpt direction (amax/2688). Layers without
  // an entry get 1.0.
  std::map<int64_t, LayerScales> input_scales;
  // A file of second moments (convert/channel_moments.h), or empty. kMse and kSweep then compare
  // each expert's error times its moments. Needs one of these two searches, and moments of all
  // experts of the quantized layers.
  std::string calibration;
  uint64_t max_shard_bytes = 5ull << 30;
  Executor* executor = nullptr;  // null: serial
  ProgressFn progress;           // item "layer 12 expert 7"; bytes of the source
};

// Statistics of quantizing a set of matrices.
struct QuantizationQuality {
  double sum_sq = 0;        // of the original weights
  double sum_sq_error = 0;  // of original - decoded
  QuantizeCounts counts;
  double sqnr_db() const;         // 10 log10(sum_sq / sum_sq_error); +inf if nothing was lost
  double relative_error() const;  // sqrt(sum_sq_error / sum_sq); 0 for a matrix of zeros
  QuantizationQuality& operator+=(const QuantizationQuality& other);
};

struct QuantizedLayer {
  int64_t layer = 0;
  int64_t experts = 0;
  QuantizationQuality gate, up, down;  // gate: zero blocks if experts have no gate
  QuantizationQuality total() const;
};

struct QuantizeResult {
  OutputFormat format = OutputFormat::kModelOpt;
  ScaleCoding scale_coding = ScaleCoding::kPlain;
  std::vector<QuantizedLayer> layers;
  int64_t quantized_tensors = 0;  // source matrices
  int64_t copied_tensors = 0;
  int64_t shards = 0;
  int64_t resumed_shards = 0;  // complete from an earlier run, kept
  uint64_t source_bytes = 0;   // of all tensors of IN
  uint64_t expert_source_bytes = 0;
  uint64_t written_bytes = 0;  // of all tensors of OUT
  double seconds = 0;
  std::vector<std::string> copied_files;
  std::vector<std::string> notes;  // notes for users of OUT
  double mean_sqnr_db() const;     // mean over layers
};
std::string to_json(const QuantizeResult& result, int indent = 2);

// kInvalidArgument: wrong options, or OUT has other contents (another plan, a finished checkpoint,
// IN itself). kUnsupported: IN's experts are not floats, or have biases. kBadInput: a tensor is
// missing, misshapen or not finite, or a symbolic link leads out of IN (convert/checkpoint_copy.h).
Result<QuantizeResult> quantize_checkpoint(const std::string& in, const std::string& out,
                                           const QuantizeOptions& options = {});

// Writes IN again as OUT with other activation scales, for checkpoints that are already NVFP4
// (ModelOpt or compressed-tensors, per expert). Every input_scale (or its reciprocal) of a layer in
// `scales` is replaced, gate and up by `hidden`, down by `intermediate`; a missing one is added.
// Everything else is byte for byte IN's. IN is never written to. The index of OUT is rebuilt; while
// unfinished, OUT has no config.json. check_takes_input_scales checks IN and OUT before any scale
// is measured.
Status check_takes_input_scales(const Checkpoint& in, const std::string& out);
Status write_input_scales(const std::string& in, const std::string& out,
                          const std::map<int64_t, LayerScales>& scales,
                          uint64_t max_shard_bytes = 5ull << 30, const ProgressFn& progress = {},
                          const CheckpointOptions& reading = {});

}  // namespace nvfp4_moe::internal
