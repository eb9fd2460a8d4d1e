// Queries of several verbs to a checkpoint's layers and to the registry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "checkpoint/checkpoint.h"
#include "cli/console/report.h"
#include "core/config.h"
#include "core/status.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal::cli {

// The layers named by a list option; all MoE layers if it is empty. A number that is not a MoE
// layer is kInvalidArgument, and names those there are.
Result<std::vector<int64_t>> chosen_layers(const ModelInfo& model, const std::string& list);
// "0-2,5,7-9".
std::string list_text(const std::vector<int64_t>& ascending);

// "chosen", "not chosen" (it would take the layer) or "refused" (it would not).
const char* result_text(const BackendReport& choice);

// The activation format that a layer runs in, and why.
struct LayerActivations {
  int64_t layer = 0;
  ActivationFormat format = ActivationFormat::kBf16;
  std::string because;
};
// One line and one object of "activations" for layers that have the same.
void report_activations(const std::vector<LayerActivations>& layers, Report& report);

// The backend of --backend: "auto" gives NVFP4_MOE_BACKEND if that is set; a name this build does
// not have is kInvalidArgument.
Result<std::string> wanted_backend(const std::string& option);

}  // namespace nvfp4_moe::internal::cli
