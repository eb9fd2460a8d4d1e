// A model's files with what its config, or its GGUF metadata, declares. Private to the room.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/findings.h"

namespace nvfp4_moe::internal {

struct OpenedModel {
  TensorIndex index;
  ModelInfo model;
};
// path: as Checkpoint::open takes it.
Result<OpenedModel> open_model(const std::string& path);

// Findings of the tensors that the model's index leaves out.
void report_left_out(const TensorIndex::LeftOut& left_out, FindingList& findings);

}  // namespace nvfp4_moe::internal
