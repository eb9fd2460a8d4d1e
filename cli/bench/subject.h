// Subject: one layer with its sizes and weights, as verbs work on it and `bench` times it.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal::cli {

struct Subject {
  std::unique_ptr<Checkpoint> checkpoint;  // null for a shape; outlives source
  std::string name;                        // "layer 3 of DIR", "shape A"
  MoeOptions options;                      // sizes of this rank's slice, the verb's options applied
  ExpertRange range;
  LayerSource source;
};
// "shape A: experts 0:8 of 8, top-2, hidden 4096, intermediate 14336", and the shared expert's size
// if there is one.
std::string sizes_text(const Subject& subject);

}  // namespace nvfp4_moe::internal::cli
