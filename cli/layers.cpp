#include "cli/layers.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/lists.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::cli {

std::string list_text(const std::vector<int64_t>& ascending) {
  std::string out;
  for (size_t i = 0; i < ascending.size();) {
    size_t end = i + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) ++end;
    if (!out.empty()) out += ",";
    out += end - i == 1 ? fmt::format("{}", ascending[i]) : fmt::format("{}-{}", ascending[i], ascending[end - 1]);
    i = end;
  }
  return out;
}

Result<std::vector<int64_t>> chosen_layers(const ModelInfo& model, const std::string& list) {
  if (list.empty()) return model.layers;
  NVFP4_MOE_ASSIGN(std::vector<int64_t> layers, parse_list(list));
  for (const int64_t layer : layers) {
    if (!std::binary_search(model.layers.begin(), model.layers.end(), layer)) {
      return invalid_argument(
          fmt::format("--layers: layer {} has no experts; those that have: {}", layer, list_text(model.layers)));
    }
  }
  return layers;
}

Status known_backend(const std::string& forced) {
  if (forced == "auto" || find_backend(forced) != nullptr) return {};
  std::string names = "auto";
  for (const Backend* backend : backends()) names += fmt::format(", {}", backend->name);
  return invalid_argument(fmt::format("--backend: expected one of {}, got {}", names, forced));
}

Result<const Backend*> chosen_backend(const MoeConfig& config, const DeviceFacts& device, const std::string& forced) {
  NVFP4_MOE_TRY(known_backend(forced));
  std::string reasons;
  for (const Choice& choice : explain(config, device, forced)) {
    if (choice.chosen) return find_backend(choice.backend);
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", choice.backend, choice.reason);
  }
  return unsupported("no backend takes this layer here: " + reasons);
}

}  // namespace nvfp4_moe::cli
