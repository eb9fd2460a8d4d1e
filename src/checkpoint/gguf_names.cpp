#include "checkpoint/gguf_names.h"

#include <charconv>

namespace nvfp4_moe::internal {
namespace {

struct Word {
  std::string_view word;
  Projection projection;
};
constexpr Word kWords[] = {{"ffn_gate_up", Projection::kGateUp},
                           {"ffn_gate", Projection::kGate},
                           {"ffn_up", Projection::kUp},
                           {"ffn_down", Projection::kDown}};
constexpr std::string_view kRouted = "_exps";
constexpr std::string_view kShared = "_shexp";

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

bool contains(std::string_view text, std::string_view word) {
  return text.find(word) != std::string_view::npos;
}

}  // namespace

std::optional<MoeTensorName> parse_gguf_tensor_name(std::string_view name) {
  std::string_view rest = name;
  if (!take(rest, "blk.")) return std::nullopt;
  MoeTensorName out;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out.layer);
  const auto digits = static_cast<size_t>(end - rest.data());
  // A number has only one spelling. Otherwise two names could mean the same tensor.
  if (error != std::errc() || out.layer < 0 || digits > 9 || (digits > 1 && rest.front() == '0'))
    return std::nullopt;
  rest.remove_prefix(digits);
  out.stem = name.substr(0, name.size() - rest.size());
  if (!take(rest, ".")) return std::nullopt;
  for (const Word& word : kWords) {
    std::string_view text = rest;
    if (!take(text, word.word)) continue;
    out.projection = word.projection;
    if (take(text, kRouted)) {
      out.role = TensorRole::kStacked;
    } else if (take(text, kShared)) {
      out.role = TensorRole::kShared;
    } else {
      continue;
    }
    if (!take(text, ".") || text.empty()) return std::nullopt;
    out.part = text;
    return out;
  }
  return std::nullopt;
}

std::string gguf_tensor_name(const std::string& stem, TensorRole role, Projection projection,
                             std::string_view part) {
  std::string name = stem + ".";
  for (const Word& word : kWords) {
    if (word.projection == projection) name += word.word;
  }
  name += role == TensorRole::kShared ? kShared : kRouted;
  return (name += '.') += part;
}

std::string_view gguf_ignored_reason(std::string_view name) {
  if (contains(name, ".nextn.")) return "multi-token prediction: not a main layer";
  if (contains(name, "_norm")) return "normalisation";
  if (contains(name, ".attn") || contains(name, ".ssm_") || contains(name, ".indexer"))
    return "attention";
  if (contains(name, ".ffn_latent_"))
    return "projection between the model's width and the experts': the host's";
  if (contains(name, "ffn_gate_inp_shexp"))
    return "gate of the shared expert: its result is given with each batch";
  if (contains(name, "ffn_gate_inp") || contains(name, "exp_probs_b") || contains(name, "tid2eid"))
    return "router: its result is given with each batch";
  if (name.starts_with("token_embd") || name.starts_with("output"))
    return "embedding or output head";
  if (contains(name, ".ffn_")) return "dense feed-forward";
  return "not part of an MoE layer";
}

}  // namespace nvfp4_moe::internal
