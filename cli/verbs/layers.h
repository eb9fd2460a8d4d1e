// Helpers of several verbs for a checkpoint's layers and for the backend.
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

// The layers named by a list option; all MoE layers if it is empty. kInvalidArgument, listing the
// MoE layers, for a number that is not one.
Result<std::vector<int64_t>> chosen_layers(const ModelInfo& model, const std::string& list,
                                           const char* option = "--layers");
// "0-2,5,7-9".
std::string list_text(const std::vector<int64_t>& ascending);

// "swiglu_clamped L=10", "situ b=4 l=25".
std::string activation_text(const MoeOptions& options);

// "chosen", "not chosen" (it supports the layer) or "refused" (it does not).
const char* result_text(const BackendReport& choice);

// A layer's activation format and the reason for it.
struct LayerActivations {
  int64_t layer = 0;
  ActivationFormat format = ActivationFormat::kBf16;
  std::string because;
};
// Prints one line, and adds one object to "activations", for each set of layers that have the same.
void report_activations(const std::vector<LayerActivations>& layers, Report& report);

// The backend of --backend: "auto" gives NVFP4_MOE_BACKEND if that is set; a name this build does
// not have is kInvalidArgument.
Result<std::string> wanted_backend(const std::string& option);

}  // namespace nvfp4_moe::internal::cli
