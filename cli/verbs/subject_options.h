// The options that select a verb's layer: from a checkpoint (DIR --layer L) or by the name of a
// shape (--shape).
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "cli/bench/subject.h"
#include "cli/verbs/choices.h"
#include "cli/verbs/shared_options.h"

namespace nvfp4_moe::internal::cli {

struct SubjectOptions {
  std::string path;
  std::optional<int64_t> layer;
  std::string shape;
  int64_t experts = 0;
  uint64_t seed = 42;
  NumericChoices choices;
  LocalPart part;
  ReadingChoices reading;
};
void add_subject(CLI::App& verb, SubjectOptions& options, bool shapes_too);

// kYes: validates a checkpoint's layer first. A finding that is an error becomes kBadInput.
enum class CheckScales : bool { kNo, kYes };
// backend, device: where the layer will run, which determines the activation format.
Result<Subject> open_subject(const SubjectOptions& options, CheckScales check,
                             const std::string& backend, const std::string& device);

}  // namespace nvfp4_moe::internal::cli
