// Subject: the layer that a verb works on, with its sizes and weights.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal::cli {

struct Subject {
  std::unique_ptr<Checkpoint> checkpoint;  // null for a shape; outlives source
  std::string name;                        // "layer 3 of DIR", "shape A"
  MoeOptions options;                      // of this rank's slice, with the verb's options applied
  ExpertRange range;
  LayerSource source;
};
// "shape A: experts 0:8 of 8, top-2, hidden 4096, intermediate 14336", and the shared expert's size
// if there is one.
std::string sizes_text(const Subject& subject);

}  // namespace nvfp4_moe::internal::cli
