// One pass over a checkpoint: plan, claim OUT, stream the experts, close OUT.
#include "convert/quantize_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <set>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/float_experts.h"
#include "convert/channel_moments.h"
#include "convert/checkpoint_copy.h"
#include "convert/expert_quantizer.h"
#include "convert/output_plan.h"
#include "convert/quantize_config.h"
#include "convert/unfinished_output.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output_file.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

Result<std::set<int64_t>> choose_layers(const ModelInfo& model,
                                        const std::vector<int64_t>& wanted) {
  const std::set<int64_t> all(model.layers.begin(), model.layers.end());
  if (all.empty()) return bad_input("no MoE layer with expert weights found");
  if (wanted.empty()) return all;
  for (const int64_t layer : wanted) {
    if (!all.contains(layer))
      return invalid_argument(fmt::format("layer {}: expected one of the MoE layers {} to {}",
                                          layer, *all.begin(), *all.rbegin()));
  }
  return std::set<int64_t>(wanted.begin(), wanted.end());
}

void add_notes(const QuantizeOptions& options, const OutputPlan& plan,
               const std::set<int64_t>& layers, QuantizeResult& result) {
  int64_t uncalibrated = 0;
  for (const int64_t layer : layers) {
    const auto scales = options.input_scales.find(layer);
    uncalibrated += scales == options.input_scales.end() || !scales->second.hidden ||
                    !scales->second.intermediate;
  }
  if (uncalibrated > 0)
    result.notes.push_back(fmt::format(
        "input_scale is 1.0 in {} of {} layers: not measured (activations up to 2688 "
        "are representable; `calibrate --json` measures, `--input-scales` takes the result)",
        uncalibrated, layers.size()));
  if (!options.share_gate_up_scale)
    result.notes.push_back(
        "gate and up keep their own tensor scales: engines that use gate's for both (vLLM) read up "
        "wrongly");
  if (plan.left_out_tensors > 0)
    result.notes.push_back(fmt::format(
        "{} tensors of the quantized experts' modules are left out: they belong to no format",
        plan.left_out_tensors));
  if (!plan.modules.kept_stems.empty()) {
    result.notes.push_back(
        fmt::format("experts of {} modules stay unquantized", plan.modules.kept_stems.size()));
    if (plan.modules.deepseek_v4)
      result.notes.push_back(
          "engines choose one format for all routed experts of deepseek_v4: a part of its layers "
          "serves comparison "
          "only");
  }
}

void add_notes(const ChannelMoments& moments, const std::set<int64_t>& layers,
               QuantizeResult& result) {
  result.notes.push_back(
      "the errors of experts' outputs are least under the calibration, not those of their weights: "
      "SQNR is of weights");
  if (moments.unweighted_experts() > 0)
    result.notes.push_back(fmt::format(
        "{} experts of {} layers saw no rows in the calibration: their errors have no weights",
        moments.unweighted_experts(), layers.size()));
}

// Sets the sizes of the exceptions, which are known once an expert is quantized. Counts of an
// earlier run are kept, and new ones are saved after each layer.
Status count_exceptions(ExpertQuantizer& quantizer, const ProgressFn& report, Progress progress,
                        UnfinishedOutput& unfinished, OutputPlan& plan) {
  std::map<ExpertId, ExceptionCounts>& counts = unfinished.exceptions();
  int64_t layer = -1;
  bool unsaved = false;
  for (const OutputItem& item : plan.items) {
    ++progress.done;
    if (item.copy.info != nullptr) continue;
    if (!counts.contains(item.expert)) {
      if (unsaved && item.expert.layer != layer) NVFP4_MOE_TRY(unfinished.save_exceptions());
      const std::string name =
          fmt::format("layer {} expert {}: scales", item.expert.layer, item.expert.expert);
      progress.item = name;
      if (report && !report(progress)) {
        if (unsaved) NVFP4_MOE_TRY(unfinished.save_exceptions());
        return Status(Code::kCancelled,
                      "quantize: cancelled before " + name + "; the same call continues");
      }
      NVFP4_MOE_ASSIGN(counts[item.expert], quantizer.count_exceptions(item));
      layer = item.expert.layer;
      unsaved = true;
    }
    for (int p = 0; p < 3; ++p)
      if (!item.modules[p].empty())
        set_exceptions(plan, item, p, counts[item.expert][static_cast<size_t>(p)]);
  }
  return unsaved ? unfinished.save_exceptions() : Status();
}

// Reads all moments here, so that a fault in the file is found before anything is written.
Result<std::optional<ChannelMoments>> read_moments(const QuantizeOptions& options,
                                                   const Checkpoint& checkpoint,
                                                   const std::set<int64_t>& layers) {
  std::optional<ChannelMoments> moments;
  if (options.calibration.empty()) return moments;
  NVFP4_MOE_ASSIGN(moments, ChannelMoments::open(options.calibration));
  for (const int64_t layer : layers) {
    NVFP4_MOE_ASSIGN(const MoeOptions sizes, checkpoint.layer_options(layer));
    NVFP4_MOE_TRY(
        moments->read_layer(layer, sizes.num_experts, sizes.hidden_size, sizes.intermediate_size));
  }
  return moments;
}

}  // namespace

const char* to_string(OutputFormat format) { return name_of(format); }
const char* to_string(ScaleCoding coding) { return name_of(coding); }

Result<QuantizeResult> quantize_checkpoint(const std::string& in, const std::string& out,
                                           const QuantizeOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  if (!options.calibration.empty() && options.search == ScaleSearch::kMax)
    return invalid_argument(
        "calibration: expected search mse or sweep, since max compares no errors, got max");
  const bool csf = options.scale_coding == ScaleCoding::kCsf;
  if (csf && options.format != OutputFormat::kModelOpt)
    return invalid_argument(fmt::format(
        "scale_coding csf: expected format modelopt, whose config can declare it, got {}",
        to_string(options.format)));
  if (options.max_shard_bytes == 0)
    return invalid_argument("max_shard_bytes: expected more than 0");
  for (const auto& [layer, scales] : options.input_scales) {
    for (const std::optional<float>& scale : {scales.hidden, scales.intermediate}) {
      if (scale && !(*scale >= 0x1p-126f && std::isfinite(*scale)))
        return invalid_argument(fmt::format(
            "input scale of layer {}: expected a positive normal number, got {}", layer, *scale));
    }
  }
  NVFP4_MOE_TRY(UnfinishedOutput::check(in, out));
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(in, options.reading));
  if (checkpoint.model().gguf)
    return unsupported(
        fmt::format("{}: expected safetensors with their config.json, which the output gets a copy "
                    "of, got GGUF",
                    in));
  if (checkpoint.model().format != SourceFormat::kFloat)
    return unsupported(
        fmt::format("{}: expected BF16, F16 or F32 experts, got {}: they are "
                    "quantized already, so take the original",
                    in, to_string(checkpoint.model().format)));
  if (checkpoint.model().options.expert_biases)
    return unsupported(
        fmt::format("{}: expected experts without biases, got a {}, which loads as it is", in,
                    checkpoint.model().model_type));
  for (const Finding& finding : checkpoint.findings()) {
    if (finding.severity == Severity::kError) return error_of(finding, 0);
  }
  NVFP4_MOE_ASSIGN(const std::set<int64_t> layers,
                   choose_layers(checkpoint.model(), options.layers));
  for (const auto& [layer, scales] : options.input_scales)
    if (std::ranges::count(checkpoint.model().layers, layer) == 0)
      return invalid_argument(
          fmt::format("input scale of layer {}: the checkpoint has no such MoE layer", layer));
  NVFP4_MOE_ASSIGN(OutputPlan plan,
                   make_output_plan(checkpoint, layers, options.format, options.scale_coding));
  NVFP4_MOE_ASSIGN(const std::vector<OtherFile> others, other_files(in));
  NVFP4_MOE_ASSIGN(const std::string source_config,
                   read_text_file((fs::path(in) / "config.json").string()));
  NVFP4_MOE_ASSIGN(const ConfigFiles config, quantized_config_files(source_config, plan.modules));
  NVFP4_MOE_ASSIGN(const std::optional<ChannelMoments> moments,
                   read_moments(options, checkpoint, layers));
  NVFP4_MOE_ASSIGN(QuantizePlan work,
                   make_quantize_plan(in, checkpoint, source_config, layers, options,
                                      moments ? to_string(moments->hash()) : std::string()));
  NVFP4_MOE_ASSIGN(UnfinishedOutput unfinished, UnfinishedOutput::claim(out, std::move(work)));

  Executor& executor = options.executor == nullptr ? serial_executor() : *options.executor;
  Progress progress{"quantize", "",
                    0,          static_cast<int64_t>(plan.items.size()),
                    0,          static_cast<int64_t>(plan.source_bytes),
                    0};
  const ChannelMoments* const weights = moments ? &*moments : nullptr;
  if (csf) {
    ExpertQuantizer counter(checkpoint, options, weights, executor);
    NVFP4_MOE_TRY(count_exceptions(counter, options.progress, progress, unfinished, plan));
  }
  ShardRecords records = unfinished.records();
  records.checking = [&](const std::string& shard) {
    const std::string item = "checking " + shard;
    progress.item = item;
    progress.elapsed_s = seconds();
    return !options.progress || options.progress(progress);
  };
  NVFP4_MOE_ASSIGN(ShardedWriter writer,
                   ShardedWriter::create(out, plan.tensors, options.max_shard_bytes,
                                         {{"format", "pt"}}, std::move(records)));
  progress.item = {};
  // A run that was stopped after its last step left a config.json. OUT is not a checkpoint while
  // shards are missing.
  const std::string config_path = (fs::path(out) / "config.json").string();
  if (writer.complete_shards() < writer.shards()) {
    NVFP4_MOE_TRY(remove_file(config_path));
    NVFP4_MOE_TRY(sync_directory(out));
  }
  QuantizeResult result;
  result.format = options.format;
  result.scale_coding = options.scale_coding;
  result.quantized_tensors = plan.quantized_tensors;
  result.copied_tensors = plan.copied_tensors;
  result.source_bytes = plan.source_bytes;
  result.expert_source_bytes = plan.expert_source_bytes;
  result.shards = static_cast<int64_t>(writer.shards());
  result.resumed_shards = static_cast<int64_t>(writer.complete_shards());
  result.written_bytes = writer.data_bytes();

  ExpertQuantizer quantizer(checkpoint, options, weights, executor, &writer);
  const std::vector<std::string> parts = part_names(options.format, options.scale_coding);
  std::map<int64_t, QuantizedLayer> by_layer;
  int64_t unmeasured = 0;
  for (const OutputItem& item : plan.items) {
    std::string name;
    if (item.copy.info != nullptr) {
      name = item.copy.info->name;
      if (writer.needs(name)) NVFP4_MOE_TRY(copy_tensor(item.copy, writer));
      progress.done_bytes += static_cast<int64_t>(item.copy.info->size_bytes());
    } else {
      name = fmt::format("layer {} expert {}", item.expert.layer, item.expert.expert);
      bool needed = false;
      for (const std::string& module : item.modules) {
        if (module.empty()) continue;
        for (const std::string& part : parts) needed = needed || writer.needs(module + "." + part);
      }
      if (needed)
        NVFP4_MOE_TRY(
            quantizer.run(item, [&](const ExpertQuality& q) { unfinished.add(item.expert, q); })
                .in(name));
      ExpertQuality quality;
      if (const ExpertQuality* const known = unfinished.find(item.expert))
        quality = *known;
      else
        ++unmeasured;
      QuantizedLayer& layer = by_layer[item.expert.layer];
      layer.layer = item.expert.layer;
      ++layer.experts;
      layer.gate += quality[0];
      layer.up += quality[1];
      layer.down += quality[2];
      NVFP4_MOE_ASSIGN(FloatExpert source,
                       float_expert(checkpoint, item.expert.layer, item.expert.expert));
      progress.done_bytes += static_cast<int64_t>(
          source.gate.size_bytes() + source.up.size_bytes() + source.down.size_bytes());
    }
    ++progress.done;
    progress.item = name;
    progress.elapsed_s = seconds();
    if (options.progress && !options.progress(progress))
      return Status(Code::kCancelled,
                    "quantize: cancelled after " + name + "; the same call continues");
  }
  NVFP4_MOE_TRY(writer.finish());
  NVFP4_MOE_ASSIGN(result.copied_files, copy_other_files(others, out));
  NVFP4_MOE_TRY(check_source_unchanged(unfinished.plan(), checkpoint.index()));
  if (!config.hf_quant_config.empty())
    NVFP4_MOE_TRY(
        write_text_file((fs::path(out) / "hf_quant_config.json").string(), config.hf_quant_config));
  NVFP4_MOE_TRY(write_text_file(config_path, config.config));
  NVFP4_MOE_TRY(unfinished.close());

  for (const auto& [number, layer] : by_layer) result.layers.push_back(layer);
  add_notes(options, plan, layers, result);
  if (csf)
    result.notes.push_back(
        "block scales are coded as CSF: for engines that read weight_scale_encoding csf");
  if (moments) add_notes(*moments, layers, result);
  for (const std::string& shard : writer.altered_shards())
    result.notes.push_back(shard +
                           " was not as the earlier run had written it: it was written again");
  if (unmeasured > 0)
    result.notes.push_back(
        fmt::format("{} experts were quantized by an earlier run that left no measurements: they "
                    "are not in the SQNR",
                    unmeasured));
  result.seconds = seconds();
  return result;
}

}  // namespace nvfp4_moe::internal
