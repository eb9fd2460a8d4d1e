// inspect: what a checkpoint is, whether it is sound, and whether it fits. Reads headers, config, and the scales of the
// chosen layers; never the codes. Findings that are errors make the exit code 1; what cannot be read at all makes it 4.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include "checkpoint/checkpoint.h"
#include "cli/console/lists.h"
#include "cli/console/verb.h"
#include "cli/verbs/layers.h"
#include "core/float_formats.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::cli {
namespace {

struct InspectOptions {
  std::string path;
  std::string layers;
  std::string gpu_memory = "80,141,192";
  int64_t max_tokens = 8192;
  bool no_scales = false;
};

// "model.layers.3.mlp.experts.17.up_proj" -> "model.layers.*.mlp.experts.*.up_proj": like tensors fold into one line.
std::string folded_name(const std::string& name) {
  std::string out;
  bool word_begins = true, in_number = false;
  for (const char c : name) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (digit && (word_begins || in_number)) {
      if (!in_number) out += '*';
      in_number = true;
    } else {
      out += c;
      in_number = false;
    }
    word_begins = c == '.';
  }
  return out;
}

bool is_ignored(const Finding& finding) { return finding.id.starts_with("ignored"); }

void report_model(const Checkpoint& checkpoint, Report& report) {
  const ModelInfo& model = checkpoint.model();
  const MoeOptions& sizes = model.options;
  const TensorIndex& index = checkpoint.index();
  report.fact("format",
              fmt::format("{} in {} file{}, {}, {} tensors{}", to_string(model.format), index.files().size(),
                          index.files().size() == 1 ? "" : "s", bytes_text(index.size_bytes()), index.tensors().size(),
                          model.producer.empty() ? "" : ", written by " + model.producer));
  std::string activation = to_string(sizes.activation);
  if (sizes.swiglu_limit) activation += fmt::format(" L={:g}", *sizes.swiglu_limit);
  report.fact("model", fmt::format("{} ({}): {} MoE layers ({}), {} experts, top-{}{}, hidden {}, intermediate {}",
                                   model.family, model.architecture, model.layers.size(), list_text(model.layers),
                                   sizes.num_experts, sizes.top_k,
                                   model.shared_experts > 0 ? fmt::format(", +{} shared", model.shared_experts) : "",
                                   sizes.hidden_size, sizes.intermediate_size));
  report.fact("numbers", fmt::format("{}, router weight {}", activation, to_string(sizes.router_weight)));
  Json& json = report.json();
  json["path"] = index.directory();
  json["format"] = to_string(model.format);
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
  json["intermediate_size"] = sizes.intermediate_size;
  json["activation"] = to_string(sizes.activation);
  json["swiglu_limit"] = sizes.swiglu_limit ? Json(*sizes.swiglu_limit) : Json(nullptr);
  json["router_weight"] = to_string(sizes.router_weight);
}

Cell range_cell(const std::optional<float>& low, const std::optional<float>& high) {
  if (!low || !high) return {"none", nullptr};
  const std::string text = *low == *high ? fmt::format("{:.3g}", *low) : fmt::format("{:.3g} .. {:.3g}", *low, *high);
  return {text, Json::array({*low, *high})};
}

// Scale statistics and findings of the layers; findings are appended to `all`.
Status report_layers(const Checkpoint& checkpoint, const std::vector<int64_t>& layers, Report& report,
                     std::vector<Finding>& all) {
  Table table({{"layer", "layer"},
               {"codes_bytes", "codes"},
               {"scales_bytes", "block scales"},
               {"tensor_scale", "tensor scale"},
               {"block_scale", "block scale"},
               {"saturated_block_share", "at 448"},
               {"gate_up_mismatches", "gate/up differ"},
               {"input_scale", "input scale"},
               {"findings", "findings"}});
  {
    ProgressBar bar(report.progress());
    const ProgressFn tell = bar.callback();
    Progress progress;
    progress.what = "inspect";
    progress.total = static_cast<int64_t>(layers.size());
    for (const int64_t layer : layers) {
      const std::string item = fmt::format("layer {}", layer);
      progress.item = item;
      if (!tell(progress)) return Status(Code::kCancelled, "interrupted");
      NVFP4_MOE_ASSIGN(const MoeOptions sizes, checkpoint.layer_options(layer));
      const ExpertRange range{0, sizes.num_experts};
      NVFP4_MOE_ASSIGN(const std::vector<Finding> findings, checkpoint.validate(layer, range));
      NVFP4_MOE_ASSIGN(const LayerStatistics s, checkpoint.statistics(layer, range));
      int64_t worse_than_notes = 0;
      for (const Finding& finding : findings) {
        worse_than_notes += finding.severity == Severity::kNote ? 0 : finding.count;
        all.push_back(finding);
      }
      table.add({cell(layer),
                 {bytes_text(s.codes_bytes), s.codes_bytes},
                 {bytes_text(s.scales_bytes), s.scales_bytes},
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
  report.line("");
  report.table("layer_statistics", table);
  return {};
}

// One row per finding; notes of one kind fold into one row of the text, because a model has one per layer.
Table findings_table(const std::vector<const Finding*>& findings, bool fold_notes) {
  Table table({{"severity", "severity", false},
               {"id", "finding", false},
               {"layer", "layer"},
               {"expert", "expert"},
               {"tensor", "tensor", false},
               {"expected", "expected", false},
               {"actual", "actual", false},
               {"count", "count"}});
  std::set<std::string> folded;
  for (const Finding* finding : findings) {
    int64_t count = finding->count;
    bool several = false;
    if (fold_notes && finding->severity == Severity::kNote) {
      if (!folded.insert(finding->id).second) continue;
      for (const Finding* other : findings) {
        if (other == finding || other->id != finding->id || other->severity != Severity::kNote) continue;
        count += other->count;
        several = true;
      }
    }
    const auto number = [](int64_t value) { return value < 0 ? Cell{"", nullptr} : cell(value); };
    const Style style = finding->severity == Severity::kError     ? Style::kBad
                        : finding->severity == Severity::kWarning ? Style::kWarning
                                                                  : Style::kPlain;
    table.add({cell(to_string(finding->severity), style), cell(finding->id),
               several ? cell("several") : number(finding->layer),
               several ? Cell{"", nullptr} : number(finding->expert), cell(finding->tensor + (several ? ", ..." : "")),
               cell(finding->expected), cell(finding->actual), cell(count)});
  }
  return table;
}

void report_findings(const std::vector<Finding>& findings, Report& report) {
  int64_t errors = 0, warnings = 0;
  std::vector<const Finding*> shown;
  std::map<std::string, std::pair<int64_t, std::string>> ignored;  // folded name -> count, reason
  for (const Finding& finding : findings) {
    if (is_ignored(finding)) {
      auto& [count, reason] = ignored[folded_name(finding.tensor)];
      count += finding.count;
      reason = finding.actual.empty() ? finding.expected : finding.actual;
      continue;
    }
    errors += finding.severity == Severity::kError;
    warnings += finding.severity == Severity::kWarning;
    if (finding.severity == Severity::kError) report.fail(to_string(finding));
    shown.push_back(&finding);
  }
  report.line("");
  report.fact(
      "findings",
      fmt::format("{} error{}, {} warning{}", errors, errors == 1 ? "" : "s", warnings, warnings == 1 ? "" : "s"),
      errors > 0     ? Style::kBad
      : warnings > 0 ? Style::kWarning
                     : Style::kGood);
  report.json()["errors"] = errors;
  report.json()["warnings"] = warnings;
  if (!shown.empty()) report.table("findings", findings_table(shown, true));
  report.json()["findings"] = findings_table(shown, false).json();

  Json json = Json::array();
  int64_t total = 0;
  for (const auto& [name, what] : ignored) {
    total += what.first;
    json.push_back({{"tensor", name}, {"count", what.first}, {"reason", what.second}});
  }
  report.json()["ignored"] = json;
  if (total > 0) report.fact("ignored", fmt::format("{} tensors that are not routed experts:", total));
  for (const auto& [name, what] : ignored) {
    report.line(fmt::format("          {:>6}  {}{}", what.first, name, what.second.empty() ? "" : "  " + what.second));
  }
}

// Bytes of the tensors that hold routed experts. All else stays on every rank (attention, embeddings, routers).
uint64_t expert_bytes(const Checkpoint& checkpoint) {
  std::set<std::string_view> counted;  // stacked experts share one tensor
  uint64_t bytes = 0;
  const auto& tensors = checkpoint.index().tensors();
  for (const int64_t layer : checkpoint.model().layers) {
    for (int64_t expert = 0; expert < checkpoint.model().options.num_experts; ++expert) {
      for (const char* projection : {"gate", "up", "down"}) {
        const std::string name = checkpoint.tensor_name(layer, expert, projection);
        const std::string stem = name.substr(0, name.rfind('.') + 1);  // its scales lie beside it
        for (auto at = tensors.lower_bound(stem); at != tensors.end() && at->first.starts_with(stem); ++at) {
          if (counted.insert(at->first).second) bytes += at->second.info->size_bytes();
        }
      }
    }
  }
  return bytes;
}

// Bytes one of `ranks` GPUs needs under expert parallel.
struct Need {
  uint64_t experts_bytes = 0;    // packed, of the layers that can be loaded
  uint64_t workspace_bytes = 0;  // one, shared by all layers
};

Result<Need> need_of(const Checkpoint& checkpoint, const Backend& backend, int64_t ranks, int64_t max_tokens,
                     const DeviceFacts& device) {
  Need need;
  std::map<std::string, std::pair<uint64_t, uint64_t>> seen;  // layers of one shape are measured once
  for (const int64_t layer : checkpoint.model().layers) {
    NVFP4_MOE_ASSIGN(const MoeOptions options, checkpoint.layer_options(layer));
    const std::string key =
        fmt::format("{} {} {}", options.num_experts, options.hidden_size, options.intermediate_size);
    if (!seen.contains(key)) {
      NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
      const ExpertRange range{0, (options.num_experts + ranks - 1) / ranks};
      NVFP4_MOE_ASSIGN(const Plan plan, backend.plan(config, range, {}, Limits{max_tokens}, device));
      seen[key] = {backend.packed_bytes(config, range), plan.workspace.total_bytes};
    }
    need.experts_bytes += seen[key].first;
    need.workspace_bytes = std::max(need.workspace_bytes, seen[key].second);
  }
  return need;
}

// Which backend's packed layout stands for a GPU's: the codes and block scales are the same bytes in another order.
Status report_fit(const Checkpoint& checkpoint, const std::string& forced, const DeviceFacts& device,
                  const std::vector<int64_t>& memories, int64_t max_tokens, Report& report) {
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(checkpoint.model().options));
  NVFP4_MOE_ASSIGN(const Backend* const backend, choose_backend(config, device, forced));

  const uint64_t other_bytes = checkpoint.index().size_bytes() - expert_bytes(checkpoint);
  std::vector<Column> columns = {{"ranks", "GPUs"},
                                 {"experts_bytes", "experts each"},
                                 {"other_bytes", "other tensors"},
                                 {"workspace_bytes", "workspace"},
                                 {"total_bytes", "sum"}};
  for (const int64_t memory : memories) {
    columns.push_back({fmt::format("fits_{}gb", memory), fmt::format("{} GB", memory), false});
  }
  Table table(columns);
  for (const int64_t ranks : {1, 2, 4, 8}) {
    if (ranks > checkpoint.model().options.num_experts) break;
    NVFP4_MOE_ASSIGN(const Need need, need_of(checkpoint, *backend, ranks, max_tokens, device));
    const uint64_t total = need.experts_bytes + other_bytes + need.workspace_bytes;
    std::vector<Cell> cells = {{ranks == 1 ? "1" : fmt::format("{} (EP{})", ranks, ranks), ranks},
                               {bytes_text(need.experts_bytes), need.experts_bytes},
                               {bytes_text(other_bytes), other_bytes},
                               {bytes_text(need.workspace_bytes), need.workspace_bytes},
                               {bytes_text(total), total}};
    for (const int64_t memory : memories) {
      const bool fits = static_cast<double>(total) < static_cast<double>(memory) * 1e9;
      cells.push_back({fits ? "fits" : "no", fits, fits ? Style::kGood : Style::kWarning});
    }
    table.add(std::move(cells));
  }
  report.line("");
  report.fact("fit",
              fmt::format("bytes per GPU, workspace at {} tokens; without KV cache and activations of other layers",
                          max_tokens));
  report.json()["fit_max_tokens"] = max_tokens;
  report.table("fit", table);
  return {};
}

Status inspect(const InspectOptions& options, Report& report) {
  NVFP4_MOE_ASSIGN(const std::vector<int64_t> memories, parse_list(options.gpu_memory));
  NVFP4_MOE_ASSIGN(const std::string forced, wanted_backend(report.common().backend));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(report.common().device));
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(options.path));
  NVFP4_MOE_ASSIGN(const std::vector<int64_t> layers, chosen_layers(checkpoint.model(), options.layers));
  report_model(checkpoint, report);
  std::vector<Finding> findings = checkpoint.findings();
  const SourceFormat format = checkpoint.model().format;
  if (options.no_scales || format == SourceFormat::kFloat) {
    if (format == SourceFormat::kFloat) {
      report.fact("scales", "none: floats, quantized at load or by nvfp4-moe quantize");
    }
  } else {
    NVFP4_MOE_TRY(report_layers(checkpoint, layers, report, findings));
  }
  report_findings(findings, report);
  NVFP4_MOE_TRY(report_fit(checkpoint, forced, device, memories, options.max_tokens, report));
  return {};
}

}  // namespace

void add_inspect(CLI::App& app, Invocation& invocation) {
  add_verb<InspectOptions>(
      app, invocation, "inspect", "What a checkpoint is, its scales and faults, and whether it fits", UsesBackend::kYes,
      inspect, [](CLI::App& verb, InspectOptions& options) {
        verb.add_option("DIR", options.path, "Checkpoint directory, or one safetensors file")->required();
        verb.add_option("--layers", options.layers, "Layers whose scales are read, for example 0,3,5-9; default all");
        verb.add_option("--gpu-memory", options.gpu_memory, "GPU memories in GB to judge the fit by")
            ->capture_default_str();
        verb.add_option("--max-tokens", options.max_tokens, "Tokens of one call, for the workspace")
            ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
            ->capture_default_str();
        verb.add_flag("--no-scales", options.no_scales, "Read headers and config only");
      });
}

}  // namespace nvfp4_moe::cli
