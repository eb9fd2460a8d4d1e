// Subject: the layer that a verb works on, from a checkpoint (DIR --layer L) or from a shape's name (--shape).
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "cli/verbs/choices.h"
#include "moe/layer.h"

namespace nvfp4_moe::cli {

struct SubjectOptions {
  std::string path;
  std::optional<int64_t> layer;
  std::string shape;
  int64_t experts = 0;
  uint64_t seed = 42;
  NumericChoices choices;
  LocalPart part;
};
void add_subject(CLI::App& verb, SubjectOptions& options, bool shapes_too);

struct Subject {
  std::unique_ptr<Checkpoint> checkpoint;  // null for a shape; outlives source
  std::string name;                        // "layer 3 of DIR", "shape A"
  MoeOptions options;                      // sizes of this rank's slice, choices applied
  ExpertRange range;
  LayerSource source;
};
// Of a checkpoint, the layer's findings are asked first: an error is kBadInput.
enum class CheckScales : bool { kNo, kYes };
Result<Subject> open_subject(const SubjectOptions& options, CheckScales check);

}  // namespace nvfp4_moe::cli
