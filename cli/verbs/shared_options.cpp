#include "cli/verbs/shared_options.h"

#include "cli/console/console.h"

namespace nvfp4_moe::internal::cli {

std::string choice_of(std::string names) {
  for (size_t at; (at = names.find(", ")) != std::string::npos;) names.replace(at, 2, "|");
  return names;
}

void add_checkpoint_directory(CLI::App& verb, std::string& path) {
  verb.add_option("DIR", path, "Checkpoint: a model directory, or one safetensors or GGUF file")
      ->required()
      ->type_name("");
}

Result<CheckpointOptions> ReadingChoices::options() const {
  CheckpointOptions options;
  if (!gate_up_order.empty()) {
    NVFP4_MOE_ASSIGN(options.gate_up_order, parse<GateUpOrder>(gate_up_order, "--gate-up-order"));
  }
  options.family = family;
  options.accept_tensors = accept_tensors;
  return options;
}

std::string ReadingChoices::text() const {
  std::string text;
  if (!family.empty()) text += " --family " + shell_quoted(family);
  if (!gate_up_order.empty()) text += " --gate-up-order " + shell_quoted(gate_up_order);
  for (const std::string& name : accept_tensors) text += " --accept-tensor " + shell_quoted(name);
  return text;
}

void add_reading_choices(CLI::App& verb, ReadingChoices& choices) {
  verb.add_option("--family", choices.family,
                  "Known model type whose rules read a checkpoint of an unknown model_type "
                  "(inspect says which fit)");
  verb.add_option("--gate-up-order", choices.gate_up_order,
                  "Order of rows in tensors that hold gate and up (default: the model family's)")
      ->type_name(choice_of<GateUpOrder>());
  verb.add_option("--accept-tensor", choices.accept_tensors,
                  "Ignore experts' tensors of this name instead of failing; * matches any text; "
                  "may be repeated")
      ->allow_extra_args(false);
}

void add_layer_list(CLI::App& verb, std::string& layers, const std::string& what) {
  verb.add_option("--layers", layers, what + ", for example 0,3,5-9 (default: all)")
      ->type_name("LIST");
}

void add_seed(CLI::App& verb, uint64_t& seed) {
  verb.add_option("--seed", seed, "Seed of the random values")->capture_default_str();
}

void add_states(CLI::App& verb, std::string& input, std::optional<int64_t>& tokens,
                int64_t least_tokens, const std::string& seeded) {
  verb.add_option("--input", input,
                  "Safetensors file with hidden states: hidden, optionally topk_ids and "
                  "topk_weights; what is missing is drawn from the seed")
      ->type_name(kFile);
  verb.add_option("--tokens", tokens,
                  "Number of random tokens: " + seeded + ". With --input, the most to read")
      ->check(CLI::Range(least_tokens, kMostTokens));
}

CLI::Option* add_token_count(CLI::App& verb, const std::string& name, int64_t& tokens,
                             const std::string& help) {
  return verb.add_option(name, tokens, help)->check(CLI::Range(int64_t{0}, kMostTokens));
}

}  // namespace nvfp4_moe::internal::cli
