// explain: shows which backend would run a layer here and why the others would not, with the plan,
// the workspace and the scale policy. It packs nothing and runs nothing.
#include <fmt/format.h>

#include <algorithm>

#include "backend/layer_steps.h"
#include "cli/console/lists.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/subject_options.h"
#include "cli/verbs/verbs.h"
#include "moe/activation_choice.h"
#include "moe/config_json.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct ExplainVerb {
  SubjectOptions subject;
  int64_t tokens = 8192;
};

std::string scale_text(const Json& how) {
  if (how.is_null()) return "not quantized (bf16)";
  return how.is_string() ? how.get<std::string>()
                         : fmt::format("{:.6g} for every line", how.get<float>());
}

// Returns the backend for which the rule of activation formats chose: the first that supports the
// layer, also if its self-check has failed.
std::string report_choices(const MoeConfig& config, const DeviceFacts& device,
                           const std::string& forced, Report& report) {
  std::string first = forced == "auto" ? "" : forced;
  Table table({{"backend", "backend", false},
               {"chosen", "result", false},
               {"supported", ""},
               {"reason", "reason", false}});
  for (const BackendReport& choice : explain(config, device, forced)) {
    if (first.empty() && choice.supported) first = choice.backend;
    table.add({cell(choice.backend),
               {result_text(choice), choice.chosen, choice.chosen ? Style::kGood : Style::kPlain},
               {"", choice.supported},
               cell(choice.reason)});
  }
  report.table("backends", table);
  return first;
}

// Reports the kernels of a step by the number of tokens, if they differ. Plans change at a few
// counts, which bisection finds.
void report_variants(const Backend& backend, const MoeConfig& config, const Subject& subject,
                     const Plan& plan, int64_t most_tokens, Report& report) {
  const auto kernels = [&](int64_t tokens) {
    std::vector<StepPlan> steps = describe_run(backend, config, subject.range, plan, tokens);
    std::erase_if(steps,
                  [](const StepPlan& step) { return step.step.find("gemm") == std::string::npos; });
    return steps;
  };
  Table table({{"first_tokens", "tokens from"},
               {"last_tokens", "to"},
               {"kernel", "gemm1_swiglu, gemm2", false}});
  for (int64_t first = 1; first <= most_tokens;) {
    const std::vector<StepPlan> here = kernels(first);
    int64_t last = first,
            other = most_tokens + 1;  // [first, last] have these kernels, `other` does not
    for (int64_t step = 1; last < most_tokens; step *= 2) {
      const int64_t next = std::min(last + step, most_tokens);
      const std::vector<StepPlan> there = kernels(next);
      if (here != there) {
        other = next;
        break;
      }
      last = next;
    }
    while (other - last > 1) {
      const int64_t middle = last + (other - last) / 2;
      const std::vector<StepPlan> there = kernels(middle);
      (here == there ? last : other) = middle;
    }
    std::string names;
    for (const StepPlan& step : here) {
      if (names.find(step.kernel) == std::string::npos)
        names += (names.empty() ? "" : ", ") + step.kernel;
    }
    table.add({cell(first), cell(last), cell(names)});
    first = last + 1;
  }
  report.line("");
  report.table("variants", table);
}

// run: the steps of a call with the most tokens that the plan allows.
void report_plan(const Plan& plan, const std::vector<StepPlan>& run, Report& report) {
  Table steps({{"step", "step", false}, {"kernel", "kernel", false}});
  for (const StepPlan& step : run) steps.add({cell(step.step), cell(step.kernel)});
  report.line("");
  report.table("steps", steps);
  Table spans(
      {{"name", "workspace span", false}, {"offset_bytes", "offset"}, {"size_bytes", "bytes"}});
  for (const Span& span : plan.workspace.spans) {
    spans.add({cell(span.name), count_cell(span.offset_bytes), count_cell(span.size_bytes)});
  }
  report.line("");
  report.table("workspace", spans);
}

Status explain_verb(const ExplainVerb& verb, Report& report) {
  NVFP4_MOE_ASSIGN(const std::string forced, wanted_backend(report.common().backend));
  NVFP4_MOE_ASSIGN(const Subject subject,
                   open_subject(verb.subject, CheckScales::kNo, forced, report.common().device));
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(subject.options));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(report.common().device));
  const MoeOptions& sizes = config.options();
  report.fact("layer", sizes_text(subject));
  report.fact("numbers", fmt::format("{}, {} activations, router weight {}, rows {}{}",
                                     activation_text(sizes), to_string(sizes.activation_format),
                                     to_string(sizes.router_weight), to_string(sizes.row_format),
                                     sizes.expert_biases ? ", expert biases" : ""));
  report.fact("device", fmt::format("{}, {} {}, {}", device.name, device.compute_units,
                                    device.kind == DeviceKind::kCpu ? "threads" : "multiprocessors",
                                    bytes_text(static_cast<uint64_t>(device.memory_bytes))));
  report.line("");
  const std::string first = report_choices(config, device, forced, report);
  NVFP4_MOE_ASSIGN(const Backend* const backend, choose_backend(config, device, forced));
  NVFP4_MOE_ASSIGN(const ActivationScales scales,
                   resolve_activation_scales(config, subject.source.scales));
  NVFP4_MOE_ASSIGN(const Plan plan, backend->plan(config, subject.range, subject.source.scales,
                                                  Limits{verb.tokens}, device));
  report_plan(plan, describe_run(*backend, config, subject.range, plan, verb.tokens), report);
  report_variants(*backend, config, subject, plan, std::max<int64_t>(verb.tokens, 1), report);

  const Json hidden = activation_scale_json(sizes.activation_format, scales.hidden);
  const Json intermediate = activation_scale_json(sizes.activation_format, scales.intermediate);
  const size_t packed_bytes = backend->packed_bytes(config, subject.range);
  report.line("");
  if (subject.source.declared) {
    const std::string because =
        reason_of_format(sizes.activation_format, *subject.source.declared, first);
    report.fact("activations",
                fmt::format("{}, because {}", to_string(sizes.activation_format), because));
    report.json()["activations_because"] = because;
  }
  report.fact("scales", fmt::format("hidden: {}; intermediate: {}", scale_text(hidden),
                                    scale_text(intermediate)));
  report.fact(
      "memory",
      fmt::format("packed {}, workspace {} for up to {} tokens, shared by all layers",
                  bytes_text(packed_bytes), bytes_text(plan.workspace.total_bytes), verb.tokens));
  Json& json = report.json();
  json["layer"] = subject.name;
  json["device"] = report.common().device;
  json["backend"] = backend->name;
  json["activation"] = to_string(sizes.activation);
  json["activation_format"] = to_string(sizes.activation_format);
  json["activation_scale"] = {{"hidden", hidden}, {"intermediate", intermediate}};
  json["expert_biases"] = sizes.expert_biases;
  json["max_tokens"] = verb.tokens;
  json["packed_bytes"] = packed_bytes;
  json["workspace_bytes"] = plan.workspace.total_bytes;
  return {};
}

}  // namespace

void add_explain(CLI::App& app, Invocation& invocation) {
  add_verb<ExplainVerb>(
      app, invocation, "explain",
      "Show which backend would run a layer here, why others would not, and its plan",
      UsesBackend::kYes, explain_verb, [](CLI::App& verb, ExplainVerb& options) {
        add_subject(verb, options.subject, true);
        add_token_count(verb, "--tokens", options.tokens, "Most tokens of one call")
            ->capture_default_str();
      });
}

}  // namespace nvfp4_moe::internal::cli
