// Options that several verbs share: their names, help texts and ranges.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_options.h"
#include "core/enum_names.h"

namespace nvfp4_moe::internal::cli {

inline constexpr int64_t kMostTokens = int64_t{1} << 24;

// Types of options, for --help and for completion in shells: kFile, kDirectory, or the legal values
// as "max|mse|sweep".
inline constexpr const char* kFile = "FILE";
inline constexpr const char* kDirectory = "DIR";
std::string choice_of(std::string names);  // of "max, mse, sweep"
template <class Enum>
std::string choice_of() {
  return choice_of(legal_names<Enum>());
}

void add_checkpoint_directory(CLI::App& verb, std::string& path);

// How to read a checkpoint whose files are ambiguous.
struct ReadingChoices {
  std::string family;         // empty: from model_type
  std::string gate_up_order;  // empty: from the family and the names
  std::vector<std::string> accept_tensors;
  Result<CheckpointOptions> options() const;
  // The options as a command has them, each after a space.
  std::string text() const;
};
void add_reading_choices(CLI::App& verb, ReadingChoices& choices);
// what: "Layers to quantize", for the help.
void add_layer_list(CLI::App& verb, std::string& layers, const std::string& what);
void add_seed(CLI::App& verb, uint64_t& seed);
// The source of hidden states: a file, or a seed and a count. `seeded` describes the count for the
// help.
void add_states(CLI::App& verb, std::string& input, std::optional<int64_t>& tokens,
                int64_t least_tokens, const std::string& seeded);
// A number of tokens from `least` to kMostTokens.
CLI::Option* add_token_count(CLI::App& verb, const std::string& name, int64_t& tokens,
                             const std::string& help);

}  // namespace nvfp4_moe::internal::cli
