// quantize: converts a float checkpoint to an NVFP4 checkpoint for inference engines, and reports
// the quantization error (SQNR).
#include <fmt/format.h>

#include <limits>

#include "cli/console/console.h"
#include "cli/console/lists.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/verbs.h"
#include "convert/input_scales.h"
#include "convert/quantize_checkpoint.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct QuantizeVerb {
  std::string in, out;
  std::string format = "modelopt";
  std::string scale_coding = "plain";
  std::string layers;
  std::string search = "max";
  std::string max_shard_size = "5GB";
  std::string input_scales;
  std::string calibration;
  bool separate_gate_up = false;
  ReadingChoices reading;
};

Result<QuantizeOptions> engine_options(const QuantizeVerb& verb) {
  QuantizeOptions options;
  NVFP4_MOE_ASSIGN(options.format, parse<OutputFormat>(verb.format, "--format"));
  NVFP4_MOE_ASSIGN(options.scale_coding, parse<ScaleCoding>(verb.scale_coding, "--scale-coding"));
  if (!verb.layers.empty()) {
    Result<std::vector<int64_t>> layers = parse_list(verb.layers);
    if (!layers.ok()) return layers.status().in("--layers");
    options.layers = std::move(*layers);
  }
  NVFP4_MOE_ASSIGN(options.search, parse<ScaleSearch>(verb.search, "--search"));
  options.calibration = verb.calibration;
  NVFP4_MOE_ASSIGN(options.reading, verb.reading.options());
  options.share_gate_up_scale = !verb.separate_gate_up;
  NVFP4_MOE_ASSIGN(options.max_shard_bytes, parse_bytes(verb.max_shard_size));
  if (!verb.input_scales.empty()) {
    NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(verb.in));
    NVFP4_MOE_ASSIGN(const std::vector<int64_t> needed,
                     chosen_layers(checkpoint.model(), verb.layers));
    NVFP4_MOE_ASSIGN(options.input_scales,
                     read_input_scales(verb.input_scales, checkpoint.model().layers, needed));
  }
  return options;
}

Status quantize(const QuantizeVerb& verb, Report& report) {
  NVFP4_MOE_ASSIGN(QuantizeOptions options, engine_options(verb));
  options.executor = &report.executor();
  QuantizeResult result;
  {
    ProgressBar bar(report.progress());
    options.progress = bar.callback();
    NVFP4_MOE_ASSIGN(result, quantize_checkpoint(verb.in, verb.out, options));
  }

  Table table({{"layer", "layer"},
               {"experts", "experts"},
               {"gate_sqnr_db", "gate dB"},
               {"up_sqnr_db", "up dB"},
               {"down_sqnr_db", "down dB"},
               {"sqnr_db", "SQNR dB"},
               {"relative_error", "rel. error"},
               {"saturated_scales", "at 448"},
               {"zero_scales", "to zero"},
               {"blocks", "blocks"}});
  double worst_db = std::numeric_limits<double>::infinity();
  int64_t worst_layer = -1;
  for (const QuantizedLayer& layer : result.layers) {
    const QuantizationQuality total = layer.total();
    if (total.sqnr_db() < worst_db) {
      worst_db = total.sqnr_db();
      worst_layer = layer.layer;
    }
    const bool gated = layer.gate.counts.blocks > 0;
    table.add({cell(layer.layer), cell(layer.experts),
               gated ? cell(layer.gate.sqnr_db(), "{:.2f}") : no_cell(),
               cell(layer.up.sqnr_db(), "{:.2f}"), cell(layer.down.sqnr_db(), "{:.2f}"),
               cell(total.sqnr_db(), "{:.2f}"), cell(total.relative_error(), "{:.3e}"),
               count_cell(total.counts.saturated_scales), count_cell(total.counts.zero_scales),
               count_cell(total.counts.blocks)});
  }
  report.table("layers", table);
  std::string worst;
  if (worst_layer >= 0) worst = fmt::format(" (worst: layer {}, {:.2f} dB)", worst_layer, worst_db);
  report.fact("done", fmt::format("{} layers to {} ({} search) in {}, mean SQNR {:.2f} dB{}",
                                  result.layers.size(), to_string(result.format), verb.search,
                                  duration_text(result.seconds), result.mean_sqnr_db(), worst));
  report.fact(
      "wrote",
      fmt::format("{} -> {} in {} shards{}; {} matrices quantized, {} tensors copied",
                  bytes_text(result.source_bytes), bytes_text(result.written_bytes), result.shards,
                  result.resumed_shards > 0
                      ? fmt::format(" ({} kept from before)", result.resumed_shards)
                      : "",
                  result.quantized_tensors, result.copied_tensors));
  for (const std::string& note : result.notes) report.fact("note", note);
  report.fact("next", fmt::format("nvfp4-moe verify {} --against {}{}", shell_quoted(verb.out),
                                  shell_quoted(verb.in), verb.reading.text()));

  Json& json = report.json();
  json["in"] = verb.in;
  json["out"] = verb.out;
  json["format"] = to_string(result.format);
  json["scale_coding"] = to_string(result.scale_coding);
  json["search"] = verb.search;
  json["calibration"] = verb.calibration.empty() ? Json() : Json(verb.calibration);
  json["mean_sqnr_db"] = result.mean_sqnr_db();
  json["quantized_tensors"] = result.quantized_tensors;
  json["copied_tensors"] = result.copied_tensors;
  json["shards"] = result.shards;
  json["resumed_shards"] = result.resumed_shards;
  json["source_bytes"] = result.source_bytes;
  json["expert_source_bytes"] = result.expert_source_bytes;
  json["written_bytes"] = result.written_bytes;
  json["copied_files"] = result.copied_files;
  json["notes"] = result.notes;
  json["elapsed_s"] = result.seconds;
  return {};
}

}  // namespace

void add_quantize(CLI::App& app, Invocation& invocation) {
  add_verb<QuantizeVerb>(
      app, invocation, "quantize",
      "Quantize the experts of a bf16, fp16 or fp32 checkpoint to NVFP4 (resumable)",
      UsesBackend::kNo, quantize, [](CLI::App& verb, QuantizeVerb& options) {
        verb.add_option("IN", options.in, "Checkpoint directory with bf16, fp16 or fp32 weights")
            ->required()
            ->type_name("");
        verb.add_option("OUT", options.out,
                        "Directory to write; the same command resumes an unfinished one")
            ->required()
            ->type_name("");
        verb.add_option("--format", options.format, "Format of the written checkpoint")
            ->type_name(choice_of<OutputFormat>())
            ->capture_default_str();
        verb.add_option("--scale-coding", options.scale_coding,
                        "How block scales are stored: plain, or csf (a lossless coding, modelopt "
                        "only; quantizes each expert twice)")
            ->capture_default_str();
        add_layer_list(verb, options.layers, "Layers to quantize");
        verb.add_option(
                "--search", options.search,
                "How block scales are chosen: max (from the block's maximum), mse (least error of "
                "up to four E4M3 values) or sweep (least error of all E4M3 values)")
            ->type_name(choice_of<ScaleSearch>())
            ->capture_default_str();
        verb.add_option("--max-shard-size", options.max_shard_size,
                        "Size limit of a written file, for example 5GB")
            ->type_name("SIZE")
            ->capture_default_str();
        verb.add_option("--input-scales", options.input_scales,
                        "File with activation scales: the output of calibrate --json")
            ->type_name(kFile);
        verb.add_option(
                "--calibration", options.calibration,
                "For mse and sweep, how much each channel's error counts: second moments from "
                "calibrate --moments, or an imatrix of llama.cpp")
            ->type_name(kFile);
        verb.add_flag("--separate-gate-up", options.separate_gate_up,
                      "Give gate and up separate tensor scales (exact in this library; vLLM "
                      "applies gate's to both)");
        add_reading_choices(verb, options.reading);
      });
}

}  // namespace nvfp4_moe::internal::cli
