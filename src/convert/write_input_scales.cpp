// Copies a checkpoint with other activation scales. Everything is copied, not linked and patched:
// if a tensor were in two shards, some loaders would read one and some the other.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/names.h"
#include "convert/checkpoint_copy.h"
#include "convert/quantize_checkpoint.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output_file.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

// W4A16 checkpoints have no activation scales, and engines would not read one that was added.
Status check_quantizes_activations(const Checkpoint& checkpoint) {
  std::string why;
  for (const int64_t layer : checkpoint.model().layers) {
    NVFP4_MOE_ASSIGN(const DeclaredActivations declared, checkpoint.declared_activations(layer));
    if (declared.format != ActivationFormat::kBf16) return {};
    why = declared.why;
  }
  return unsupported(
      "expected a checkpoint with quantized activations, got a weight-only one (W4A16), which "
      "needs no input scales: " +
      why);
}

struct Output {
  TensorInfo info;
  TensorIndex::Ref copy;  // null info: `value` is written
  float value = 0;
};

Result<std::vector<Output>> plan(const Checkpoint& checkpoint,
                                 const std::map<int64_t, LayerScales>& scales) {
  const bool reciprocal = checkpoint.model().format == SourceFormat::kCompressedTensors;
  const std::string_view part = reciprocal ? "input_global_scale" : "input_scale";
  const std::string_view after = reciprocal ? "weight_global_scale" : "weight_scale_2";
  const FamilyNames* family = family_names(checkpoint.model().family);
  if (family == nullptr)
    return unsupported("family " + checkpoint.model().family + ": its tensor names are not known");
  std::vector<Output> outputs;
  for (const auto& file : checkpoint.index().files()) {
    for (const TensorInfo& info : file->tensors()) {
      const TensorIndex::Ref ref = checkpoint.index().find(info.name);
      if (ref.file != file.get()) continue;
      Output output;
      output.info = info;
      output.info.begin = 0;
      output.info.end = info.size_bytes();
      output.copy = ref;
      const std::optional<MoeTensorName> name = parse_moe_tensor_name(*family, info.name);
      const bool ours = name && name->role == TensorRole::kExpert && scales.contains(name->layer);
      if (ours && (name->part == part || name->part == after)) {
        const LayerScales& layer = scales.at(name->layer);
        const float scale =
            (name->projection == Projection::kDown ? layer.intermediate : layer.hidden)
                .value_or(1.0f);
        Output scalar;
        scalar.info = output.info;
        scalar.info.name.replace(info.name.size() - name->part.size(), name->part.size(), part);
        scalar.value = reciprocal ? static_cast<float>(1.0 / static_cast<double>(scale)) : scale;
        if (name->part == part) {
          if (info.dtype != DType::kF32 || info.size_bytes() != sizeof(float))
            return bad_input(info.name + ": expected one F32, got " + describe(info));
          outputs.push_back(std::move(scalar));
          continue;
        }
        if (checkpoint.index().find(scalar.info.name).info == nullptr)
          outputs.push_back(std::move(scalar));
      }
      outputs.push_back(std::move(output));
    }
  }
  return outputs;
}

}  // namespace

Status check_takes_input_scales(const Checkpoint& checkpoint, const std::string& out) {
  const std::string& in = checkpoint.index().directory();
  NVFP4_MOE_TRY(check_apart(in, out));
  NVFP4_MOE_ASSIGN(const bool plain, has_entry(in + "/config.json"));
  if (!plain)
    return unsupported(in +
                       ": expected config.json next to the shards; a container of CSF is not "
                       "written again");
  const ModelInfo& model = checkpoint.model();
  if (model.format != SourceFormat::kModelOpt && model.format != SourceFormat::kCompressedTensors)
    return unsupported(fmt::format("{}: expected a per-expert NVFP4 checkpoint, got {}", in,
                                   to_string(model.format)));
  NVFP4_MOE_TRY(check_quantizes_activations(checkpoint).in(in));
  NVFP4_MOE_ASSIGN(const bool there, has_entry(out));
  if (!there) return {};
  const auto names = list_directory(out);
  if (names.ok() && names->empty()) return {};
  return invalid_argument(out +
                          ": expected a new or empty directory; choose another name, or remove it");
}

Status write_input_scales(const std::string& in, const std::string& out,
                          const std::map<int64_t, LayerScales>& scales, uint64_t max_shard_bytes,
                          const ProgressFn& progress, const CheckpointOptions& reading) {
  const auto start = std::chrono::steady_clock::now();
  for (const auto& [layer, s] : scales) {
    for (const std::optional<float>& scale : {s.hidden, s.intermediate}) {
      if (scale && !(*scale >= 0x1p-126f && std::isfinite(*scale)))
        return invalid_argument(fmt::format(
            "input scale of layer {}: expected a positive normal number, got {}", layer, *scale));
    }
  }
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(in, reading));
  NVFP4_MOE_TRY(check_takes_input_scales(checkpoint, out));
  const ModelInfo& model = checkpoint.model();
  const std::set<int64_t> layers(model.layers.begin(), model.layers.end());
  for (const auto& [layer, s] : scales) {
    if (!layers.contains(layer))
      return invalid_argument(fmt::format("layer {}: the checkpoint has no such MoE layer", layer));
  }
  NVFP4_MOE_ASSIGN(const std::string config,
                   read_text_file((fs::path(in) / "config.json").string()));
  NVFP4_MOE_ASSIGN(const std::vector<Output> outputs, plan(checkpoint, scales));
  NVFP4_MOE_ASSIGN(const std::vector<OtherFile> others, other_files(in));
  const std::string hf_name = "hf_quant_config.json";
  NVFP4_MOE_ASSIGN(const bool has_hf, has_entry((fs::path(in) / hf_name).string()));
  std::string hf;
  if (has_hf) {
    NVFP4_MOE_ASSIGN(hf, read_text_file((fs::path(in) / hf_name).string()));
  }

  NVFP4_MOE_TRY(make_directories(out));
  std::vector<TensorInfo> tensors;
  for (const Output& output : outputs) tensors.push_back(output.info);
  NVFP4_MOE_ASSIGN(ShardedWriter writer,
                   ShardedWriter::create(out, tensors, max_shard_bytes, {{"format", "pt"}}));
  Progress reported{"write scales",
                    "",
                    0,
                    static_cast<int64_t>(outputs.size()),
                    0,
                    static_cast<int64_t>(writer.data_bytes()),
                    0};
  for (const Output& output : outputs) {
    if (output.copy.info != nullptr) {
      NVFP4_MOE_TRY(copy_tensor(output.copy, writer));
    } else {
      NVFP4_MOE_TRY(writer.write(output.info.name, std::as_bytes(std::span(&output.value, 1))));
    }
    reported.item = output.info.name;
    ++reported.done;
    reported.done_bytes += static_cast<int64_t>(output.info.size_bytes());
    reported.elapsed_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (progress && !progress(reported))
      return Status(Code::kCancelled, "write scales: cancelled after " + output.info.name);
  }
  NVFP4_MOE_TRY(writer.finish());
  NVFP4_MOE_TRY(copy_other_files(others, out).status());
  if (has_hf) NVFP4_MOE_TRY(write_text_file((fs::path(out) / hf_name).string(), hf));
  return write_text_file((fs::path(out) / "config.json").string(), config);
}

}  // namespace nvfp4_moe::internal
