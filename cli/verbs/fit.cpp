#include "cli/verbs/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "moe/activation_choice.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::cli {
namespace {

// The bytes that one of `ranks` GPUs needs under expert parallel.
struct Need {
  uint64_t experts_bytes = 0;    // packed experts of the layers that can be loaded
  uint64_t workspace_bytes = 0;  // one workspace, shared by all layers
};

Result<Need> need_of(const Checkpoint& checkpoint, const Backend& backend,
                     const std::string& forced, int64_t ranks, int64_t max_tokens,
                     const DeviceFacts& device) {
  Need need;
  std::map<std::string, std::pair<uint64_t, uint64_t>>
      seen;  // layers of the same shape are measured once
  for (const int64_t layer : checkpoint.model().layers) {
    NVFP4_MOE_ASSIGN(MoeOptions options, checkpoint.layer_options(layer));
    NVFP4_MOE_ASSIGN(const ChosenFormat chosen, choose_activation_format(options, device, forced));
    options.activation_format = chosen.format;
    const std::string key = fmt::format("{} {} {} {}", options.num_experts, options.hidden_size,
                                        options.intermediate_size, to_string(chosen.format));
    if (!seen.contains(key)) {
      NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
      const ExpertRange range{0, (options.num_experts + ranks - 1) / ranks};
      NVFP4_MOE_ASSIGN(const Plan plan,
                       backend.plan(config, range, {}, Limits{max_tokens}, device));
      seen[key] = {backend.packed_bytes(config, range), plan.workspace.total_bytes};
    }
    need.experts_bytes += seen[key].first;
    need.workspace_bytes = std::max(need.workspace_bytes, seen[key].second);
  }
  return need;
}

}  // namespace

Status report_fit(const Checkpoint& checkpoint, const std::string& forced,
                  const DeviceFacts& device, const std::vector<int64_t>& memories,
                  int64_t max_tokens, Report& report) {
  MoeOptions options = checkpoint.model().options;
  NVFP4_MOE_ASSIGN(const ChosenFormat chosen, choose_activation_format(options, device, forced));
  options.activation_format = chosen.format;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  NVFP4_MOE_ASSIGN(const Backend* const backend, choose_backend(config, device, forced));

  // on every rank
  const uint64_t other_bytes = checkpoint.index().size_bytes() - checkpoint.expert_bytes();
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
    NVFP4_MOE_ASSIGN(const Need need,
                     need_of(checkpoint, *backend, forced, ranks, max_tokens, device));
    const uint64_t total = need.experts_bytes + other_bytes + need.workspace_bytes;
    std::vector<Cell> cells = {{ranks == 1 ? "1" : fmt::format("{} (EP{})", ranks, ranks), ranks},
                               bytes_cell(need.experts_bytes),
                               bytes_cell(other_bytes),
                               bytes_cell(need.workspace_bytes),
                               bytes_cell(total)};
    for (const int64_t memory : memories) {
      const bool fits = static_cast<double>(total) < static_cast<double>(memory) * 1e9;
      cells.push_back({fits ? "fits" : "no", fits, fits ? Style::kGood : Style::kWarning});
    }
    table.add(std::move(cells));
  }
  report.line("");
  report.fact(
      "fit",
      fmt::format(
          "bytes per GPU, workspace at {} tokens; without KV cache and activations of other layers",
          max_tokens));
  report.json()["fit_max_tokens"] = max_tokens;
  report.table("fit", table);
  return {};
}

}  // namespace nvfp4_moe::internal::cli
