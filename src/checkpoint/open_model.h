// A model's files with the declarations of its config or GGUF metadata. Private to src/checkpoint.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "checkpoint/findings.h"

namespace nvfp4_moe::internal {

struct OpenedModel {
  TensorIndex index;
  ModelInfo model;
};
// path, family: as for Checkpoint::open.
Result<OpenedModel> open_model(const std::string& path, std::string_view family = {});

// Adds findings for the tensors that the model's index leaves out.
void report_left_out(const TensorIndex::LeftOut& left_out, FindingList& findings);

}  // namespace nvfp4_moe::internal
