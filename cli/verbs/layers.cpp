#include "cli/verbs/layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "cli/console/lists.h"
#include "moe/env.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::cli {

std::string list_text(const std::vector<int64_t>& ascending) {
  std::string out;
  for (size_t i = 0; i < ascending.size();) {
    size_t end = i + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) ++end;
    if (!out.empty()) out += ",";
    out += end - i == 1 ? fmt::format("{}", ascending[i])
                        : fmt::format("{}-{}", ascending[i], ascending[end - 1]);
    i = end;
  }
  return out;
}

Result<std::vector<int64_t>> chosen_layers(const ModelInfo& model, const std::string& list,
                                           const char* option) {
  if (list.empty()) return model.layers;
  Result<std::vector<int64_t>> parsed = parse_list(list);
  if (!parsed.ok()) return parsed.status().in(option);
  std::vector<int64_t> layers = std::move(*parsed);
  for (const int64_t layer : layers) {
    if (!std::binary_search(model.layers.begin(), model.layers.end(), layer)) {
      return invalid_argument(
          fmt::format("{}: expected layers with experts that can be loaded ({}), got {}", option,
                      list_text(model.layers), layer));
    }
  }
  return layers;
}

void report_activations(const std::vector<LayerActivations>& layers, Report& report) {
  std::map<std::pair<ActivationFormat, std::string>, std::vector<int64_t>> alike;
  for (const LayerActivations& one : layers) alike[{one.format, one.because}].push_back(one.layer);
  Json json = Json::array();
  for (const auto& [what, numbers] : alike) {
    const char* format = to_string(what.first);
    report.fact(
        "activations",
        fmt::format("{}, because {}{}", format, what.second,
                    alike.size() > 1 ? fmt::format(": layers {}", list_text(numbers)) : ""));
    json.push_back({{"format", format}, {"because", what.second}, {"layers", numbers}});
  }
  report.json()["activations"] = json;
}

std::string activation_text(const MoeOptions& options) {
  std::string text = to_string(options.activation);
  if (options.swiglu_limit) text += fmt::format(" L={:g}", *options.swiglu_limit);
  if (options.situ_gate_limit) text += fmt::format(" b={:g}", *options.situ_gate_limit);
  if (options.situ_up_limit) text += fmt::format(" l={:g}", *options.situ_up_limit);
  return text;
}

const char* result_text(const BackendReport& choice) {
  return choice.chosen ? "chosen" : choice.supported ? "not chosen" : "refused";
}

Result<std::string> wanted_backend(const std::string& option) {
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  return forced_backend(option, env, "--backend");
}

}  // namespace nvfp4_moe::internal::cli
