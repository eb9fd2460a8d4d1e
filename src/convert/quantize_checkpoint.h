// quantize_checkpoint: a bf16/fp16/fp32 Hugging Face checkpoint in, an NVFP4 checkpoint that the
// real engines read out.
//
// Only the routed experts' matrices are quantized (weights along K). Everything else - router,
// norms, embeddings, attention, shared experts, layers left out by `layers` - is copied byte for
// byte and listed in the written config as not quantized; other files of IN are copied too. Stacked
// experts (gate_up_proj [E, 2I, H]) are written one by one under per-expert names, as the real
// exporters do.
//
// Streams one expert at a time: anonymous memory stays near one expert in float plus its codes,
// whatever the model's size. Resumable: while OUT is unfinished it holds a plan file with a
// fingerprint of source and options (convert/quantize_plan.h); a second run with the same ones
// keeps the shards that still have the recorded bytes, a different one is refused. OUT is a
// checkpoint only when config.json appears in it, which is last; everything is on disk when
// quantize_checkpoint() returns.
//
// Formats written:
//   modelopt            weight U8 [out, in/2], weight_scale F8_E4M3 [out, in/16], weight_scale_2
//                       F32 [], input_scale F32 []; config.json quantization_config and
//                       hf_quant_config.json (deepseek_v4: its MIXED_PRECISION form).
//   compressed-tensors  weight_packed, weight_scale, weight_global_scale F32 [1] and
//                       input_global_scale F32 [1], both reciprocal; quantization_config with
//                       format nvfp4-pack-quantized.
// input_scale without calibration: 1.0 (what ModelOpt's input_scale1 recipes and NVIDIA's Kimi-K3
// checkpoint ship: one tensor scale covers 17 octaves, so 1.0 loses nothing for activations up to
// 2688); QuantizeResult::notes says so.
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

struct QuantizeOptions {
  CheckpointOptions reading;  // how IN is opened
  OutputFormat format = OutputFormat::kModelOpt;
  std::vector<int64_t> layers;  // empty: every MoE layer; a number that is none is kInvalidArgument
  ScaleSearch search = ScaleSearch::kMax;
  // gate and up of an expert get one tensor scale, from the larger amax: vLLM applies gate's to
  // both (numerics.md 6). false: each its own, exact in this library.
  bool share_gate_up_scale = true;
  // By layer, in the ModelOpt direction (amax/2688): what calibrate measured. Layers without an
  // entry get 1.0.
  std::map<int64_t, LayerScales> input_scales;
  // A file of second moments (convert/channel_moments.h), or none: what kMse and kSweep compare is
  // then each expert's error times them. Needs one of these two, and moments of all experts of the
  // layers that are quantized.
  std::string calibration;
  uint64_t max_shard_bytes = 5ull << 30;
  Executor* executor = nullptr;  // null: serial
  ProgressFn progress;           // item "layer 12 expert 7"; bytes are the source's
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
  QuantizationQuality gate, up, down;  // gate: of no block if experts have none
  QuantizationQuality total() const;
};

struct QuantizeResult {
  OutputFormat format = OutputFormat::kModelOpt;
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
  std::vector<std::string> notes;  // what a user of OUT should know
  double mean_sqnr_db() const;     // mean over layers
};
std::string to_json(const QuantizeResult& result, int indent = 2);

// kInvalidArgument: options, or OUT holds something else (another plan, a finished checkpoint, IN
// itself); kUnsupported: IN's experts are not floats, or have biases; kBadInput: a tensor is
// missing, misshapen or not finite, or a symbolic link leads out of IN (convert/checkpoint_copy.h).
Result<QuantizeResult> quantize_checkpoint(const std::string& in, const std::string& out,
                                           const QuantizeOptions& options = {});

// IN again as OUT with other activation scales, for checkpoints that are NVFP4 already (ModelOpt or
// compressed-tensors, per expert): every input_scale (or its reciprocal) of a layer in `scales` is
// replaced, gate and up by `hidden`, down by `intermediate`; a missing one is added. All else is
// byte for byte IN's. IN is never written to. The index of OUT is rebuilt; unfinished, OUT has no
// config.json. Checks IN and OUT before any scale is measured.
Status check_takes_input_scales(const Checkpoint& in, const std::string& out);
Status write_input_scales(const std::string& in, const std::string& out,
                          const std::map<int64_t, LayerScales>& scales,
                          uint64_t max_shard_bytes = 5ull << 30, const ProgressFn& progress = {},
                          const CheckpointOptions& reading = {});

}  // namespace nvfp4_moe::internal
