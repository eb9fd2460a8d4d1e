// Which scheme of a config file applies to a module, by its producer's own rules. Private to
// src/checkpoint.
//
//   compressed-tensors   a target or an entry of `ignore` is a module's name, "re:" and an
//                        expression for re.match, or a class. Names win over expressions, in
//                        alphabetical order, and those over classes; a module that `ignore`
//                        matches has no scheme. (compressed_tensors/utils/match.py,
//                        quantization/lifecycle/apply.py)
//   ModelOpt             targets and keys of `quantized_layers` are names of modules or of
//                        modules that contain them; entries of `ignore` are globs.
//
// A module has the name of its tensors without the part: "model.layers.3.mlp.experts.7.down_proj".
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/module_regex.h"

namespace nvfp4_moe::internal {

// The declarations of a config file for some modules.
struct ModuleScheme {
  std::string algo;  // "NVFP4", "W4A16_NVFP4", "MXFP4", "FP8", ...
  SourceFormat format = SourceFormat::kFloat;
  ActivationFormat activation_format = ActivationFormat::kBf16;
  bool csf = false;  // block scales are declared to be coded as CSF
  std::string why;   // the field that declares the activations
  Status refusal;    // why such experts are not loaded
};

class ModuleRules {
 public:
  enum class Dialect : uint8_t { kCompressedTensors, kModelOpt };
  explicit ModuleRules(Dialect dialect) : dialect_(dialect) {}

  size_t add(ModuleScheme scheme);
  // If two schemes have the same target, the one with the more precise activations applies.
  Status target(std::string_view target, size_t scheme);
  Status ignore(std::string_view entry);
  const std::vector<ModuleScheme>& schemes() const { return schemes_; }
  // Adds the file's name to all refusals.
  void refuse_in(std::string_view file);

  // The module's scheme; null if it has none. kUnsupported once the expressions of this file have
  // cost too much. The budget of other files is not affected.
  Result<const ModuleScheme*> of(std::string_view module);

 private:
  struct Pattern {
    std::string text;
    ModuleRegex regex;
    size_t scheme = 0;  // kIgnored: an entry of `ignore`
  };
  static constexpr size_t kNone = static_cast<size_t>(-1), kIgnored = static_cast<size_t>(-2);
  Result<size_t> of_patterns(std::string_view module);
  size_t of_name(std::string_view module) const;

  Dialect dialect_;
  std::vector<ModuleScheme> schemes_;
  std::map<std::string, size_t, std::less<>> names_;     // keys are results of canonical()
  std::set<std::string, std::less<>> ignored_names_;     // the same for ignore
  std::vector<Pattern> ignored_, patterns_;              // the latter in the order of their texts
  std::map<std::string, size_t, std::less<>> of_class_;  // "Linear"
  bool ignores_class_ = false;
  bool digits_are_equal_ = true;  // for all expressions
  std::map<std::string, size_t, std::less<>>
      seen_;                           // of_patterns by name, digits as 0, if digits_are_equal_
  int64_t budget_ = int64_t{1} << 28;  // steps of all expressions over all names
};

// More precise activations of the two, or `first`: nvfp4 < fp8 < bf16.
const ModuleScheme& more_precise(const ModuleScheme& first, const ModuleScheme& second);

}  // namespace nvfp4_moe::internal
