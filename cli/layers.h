// What several verbs ask of a checkpoint's layers and of the registry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "checkpoint/checkpoint.h"
#include "core/config.h"
#include "core/status.h"

namespace nvfp4_moe::cli {

// The layers named by a list option; all MoE layers where it is empty. A number that is none of them is
// kInvalidArgument, and names those there are.
Result<std::vector<int64_t>> chosen_layers(const ModelInfo& model, const std::string& list);
// "0-2,5,7-9".
std::string list_text(const std::vector<int64_t>& ascending);

// kInvalidArgument where `forced` is neither "auto" nor a backend of this build.
Status known_backend(const std::string& forced);
// What `forced` ("auto" or a name) means for this config here: kInvalidArgument for a name this build does not have,
// kUnsupported with the backends' reasons where none takes it.
Result<const Backend*> chosen_backend(const MoeConfig& config, const DeviceFacts& device, const std::string& forced);

}  // namespace nvfp4_moe::cli
