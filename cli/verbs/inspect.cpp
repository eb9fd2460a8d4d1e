// inspect: describes a checkpoint, lists what is wrong with it, and shows whether it fits in GPU
// memory. Reads headers, config and the scales of the chosen layers, never the codes. Findings that
// are errors give exit code 1 and are always reported, even if the rest of the report is not
// possible. Files that cannot be opened give 4.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "cli/console/lists.h"
#include "cli/verbs/findings.h"
#include "cli/verbs/fit.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/output_option.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/verbs.h"
#include "core/float_formats.h"
#include "moe/activation_choice.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct InspectOptions {
  std::string path;
  std::string layers;
  std::string gpu_memory = "80,141,192";
  int64_t max_tokens = 8192;
  bool headers_only = false;
  std::string html;
  ReadingChoices reading;
};

void report_model(const Checkpoint& checkpoint, Report& report) {
  const ModelInfo& model = checkpoint.model();
  const MoeOptions& sizes = model.options;
  const TensorIndex& index = checkpoint.index();
  report.fact("format",
              fmt::format("{}{} in {} file{}, {}, {} tensors{}", to_string(model.format),
                          model.csf ? " with block scales coded as CSF" : "", index.files().size(),
                          index.files().size() == 1 ? "" : "s", bytes_text(index.size_bytes()),
                          index.tensors().size(),
                          model.producer.empty() ? "" : ", written by " + model.producer));
  report.fact(
      "model",
      fmt::format("{} ({}): {} MoE layers ({}), {} experts, top-{}{}, hidden {}, intermediate {}",
                  model.family, model.architecture, model.layers.size(), list_text(model.layers),
                  sizes.num_experts, sizes.top_k,
                  model.shared_experts > 0 ? fmt::format(", +{} shared", model.shared_experts) : "",
                  sizes.hidden_size, sizes.intermediate_size) +
          (sizes.hidden_size == model.model_hidden_size
               ? ""
               : fmt::format(", after a projection from the model's {}", model.model_hidden_size)));
  report.fact("numbers", fmt::format("{}, router weight {}", activation_text(sizes),
                                     to_string(sizes.router_weight)));
  Json& json = report.json();
  json["path"] = index.directory();
  json["format"] = to_string(model.format);
  json["scale_coding"] = model.csf ? "csf" : "plain";
  json["quant_method"] = model.quant_method;
  json["quant_algo"] = model.quant_algo;
  json["producer"] = model.producer;
  json["architecture"] = model.architecture;
  json["model_type"] = model.model_type;
  json["family"] = model.family;
  json["files"] = index.files().size();
  json["size_bytes"] = index.size_bytes();
  json["tensors"] = index.tensors().size();
  json["layers"] = model.layers;
  json["num_experts"] = sizes.num_experts;
  json["top_k"] = sizes.top_k;
  json["shared_experts"] = model.shared_experts;
  json["hidden_size"] = sizes.hidden_size;
  json["model_hidden_size"] = model.model_hidden_size;
  json["intermediate_size"] = sizes.intermediate_size;
  json["activation"] = to_string(sizes.activation);
  json["swiglu_limit"] = sizes.swiglu_limit ? Json(*sizes.swiglu_limit) : Json(nullptr);
  if (sizes.activation == Activation::kSitu) {
    json["situ_gate_limit"] = *sizes.situ_gate_limit;
    json["situ_up_limit"] = *sizes.situ_up_limit;
  }
  json["router_weight"] = to_string(sizes.router_weight);
}

// The activation format that each layer would run in on this device.
Status report_declared(const Checkpoint& checkpoint, const std::vector<int64_t>& layers,
                       const DeviceFacts& device, const std::string& forced, Report& report) {
  std::vector<LayerActivations> activations;
  for (const int64_t layer : layers) {
    NVFP4_MOE_ASSIGN(const MoeOptions options, checkpoint.layer_options(layer));
    NVFP4_MOE_ASSIGN(const DeclaredActivations declared, checkpoint.declared_activations(layer));
    const Result<ChosenFormat> chosen = choose_activation_format(options, device, forced);
    if (!chosen.ok()) continue;  // illegal sizes: reported as a finding, and there is no fit
    activations.push_back({layer, chosen->format, chosen->because + " (" + declared.why + ")"});
  }
  report_activations(activations, report);
  return {};
}

Cell range_cell(const std::optional<float>& low, const std::optional<float>& high) {
  if (!low || !high) return {"none", nullptr};
  const std::string text =
      *low == *high ? fmt::format("{:.3g}", *low) : fmt::format("{:.3g} .. {:.3g}", *low, *high);
  return {text, Json::array({*low, *high})};
}

// The coding of the block scales of the layers that were read.
void report_csf(const LayerStatistics& sum, Report& report) {
  report.fact("scales", fmt::format("coded as CSF: {} instead of {}, {} exceptions",
                                    bytes_text(sum.scales_bytes),
                                    bytes_text(sum.decoded_scales_bytes), sum.csf_exceptions));
  report.json()["csf"] = {{"scales_bytes", sum.scales_bytes},
                          {"decoded_scales_bytes", sum.decoded_scales_bytes},
                          {"exceptions", sum.csf_exceptions}};
}

// Appends findings of the layers to `all` and reports statistics of their scales. Floats have none.
Status report_layers(const Checkpoint& checkpoint, const std::vector<int64_t>& layers, bool floats,
                     Report& report, std::vector<Finding>& all) {
  Table table({{"layer", "layer"},
               {"codes_bytes", "codes"},
               {"scales_bytes", "block scales"},
               {"tensor_scale", "tensor scale"},
               {"block_scale", "block scale"},
               {"saturated_block_share", "at 448"},
               {"gate_up_mismatches", "gate/up differ"},
               {"input_scale", "input scale"},
               {"findings", "findings"}});
  LayerStatistics sum;
  {
    ProgressBar bar(report.progress());
    const ProgressFn advance = bar.callback();
    Progress progress;
    progress.what = "inspect";
    progress.total = static_cast<int64_t>(layers.size());
    for (const int64_t layer : layers) {
      const std::string item = fmt::format("layer {}", layer);
      progress.item = item;
      if (!advance(progress)) return Status(Code::kCancelled, "interrupted");
      NVFP4_MOE_ASSIGN(const MoeOptions sizes, checkpoint.layer_options(layer));
      const ExpertRange range{0, sizes.num_experts};
      NVFP4_MOE_ASSIGN(const std::vector<Finding> findings, checkpoint.validate(layer, range));
      LayerStatistics s;
      if (!floats) {
        NVFP4_MOE_ASSIGN(s, checkpoint.statistics(layer, range));
      }
      sum.scales_bytes += s.scales_bytes;
      sum.decoded_scales_bytes += s.decoded_scales_bytes;
      sum.csf_exceptions += s.csf_exceptions;
      int64_t worse_than_notes = 0;
      for (const Finding& finding : findings) {
        worse_than_notes += finding.severity == Severity::kNote ? 0 : finding.count;
        all.push_back(finding);
      }
      table.add({cell(layer),
                 bytes_cell(s.codes_bytes),
                 bytes_cell(s.scales_bytes),
                 range_cell(s.tensor_scale_min, s.tensor_scale_max),
                 range_cell(e4m3_to_float(s.block_scale_min), e4m3_to_float(s.block_scale_max)),
                 {fmt::format("{:.2f} %", s.saturated_block_share * 100), s.saturated_block_share},
                 cell(s.gate_up_mismatches),
                 range_cell(s.input_scale_min, s.input_scale_max),
                 {fmt::format("{}", worse_than_notes), worse_than_notes,
                  worse_than_notes > 0 ? Style::kWarning : Style::kPlain}});
      progress.done += 1;
    }
  }
  if (floats) return {};
  report.line("");
  report.table("layer_statistics", table);
  if (checkpoint.model().csf) report_csf(sum, report);
  return {};
}

Status inspect(const InspectOptions& options, Report& report) {
  NVFP4_MOE_ASSIGN(const std::string page, checked_page(options.html, "", {options.path}));
  begin_page(page, report);
  const Result<std::vector<int64_t>> memories = parse_list(options.gpu_memory);
  if (!memories.ok()) return memories.status().in("--gpu-memory");
  NVFP4_MOE_ASSIGN(const std::string forced, wanted_backend(report.common().backend));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(report.common().device));
  NVFP4_MOE_ASSIGN(const CheckpointOptions reading, options.reading.options());
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(options.path, reading));
  NVFP4_MOE_ASSIGN(const std::vector<int64_t> layers,
                   chosen_layers(checkpoint.model(), options.layers));
  report_model(checkpoint, report);
  NVFP4_MOE_TRY(report_declared(checkpoint, layers, device, forced, report));
  const bool floats = checkpoint.model().format == SourceFormat::kFloat;
  std::vector<Finding> findings = checkpoint.findings();
  if (floats) report.fact("scales", "none: floats, quantized at load or by nvfp4-moe quantize");
  if (!options.headers_only) {
    // Opening has already found some findings of these layers; reading them finds those again.
    std::erase_if(findings, [&](const Finding& f) {
      return std::binary_search(layers.begin(), layers.end(), f.layer);
    });
    NVFP4_MOE_TRY(report_layers(checkpoint, layers, floats, report, findings));
  }
  report_findings(findings, report);
  if (report.failed()) {
    report.fact("fit", "not judged: the config's sizes are not those of sound files");
    report.json()["fit"] = nullptr;
    return {};
  }
  return report_fit(checkpoint, forced, device, *memories, options.max_tokens, report);
}

}  // namespace

void add_inspect(CLI::App& app, Invocation& invocation) {
  add_verb<InspectOptions>(
      app, invocation, "inspect",
      "Describe a checkpoint: model, scales, errors, and whether it fits in GPU memory",
      UsesBackend::kYes, inspect, [](CLI::App& verb, InspectOptions& options) {
        add_checkpoint_directory(verb, options.path);
        add_layer_list(verb, options.layers, "Layers whose scales are read");
        verb.add_option("--gpu-memory", options.gpu_memory,
                        "GPU memory sizes in GB to check against")
            ->capture_default_str();
        add_token_count(verb, "--max-tokens", options.max_tokens,
                        "Most tokens of one call; determines the workspace size")
            ->capture_default_str();
        verb.add_flag("--headers-only", options.headers_only,
                      "Read only headers and config, no scales");
        add_reading_choices(verb, options.reading);
        add_html(verb, options.html);
      });
}

}  // namespace nvfp4_moe::internal::cli
