// The table of names and its two directions. A name is parsed from its "layers." outwards: whatever stands before must
// be one of the known prefixes, so that "mtp.layers.0..." or a vision tower's layers are never taken for the model's.
#include "checkpoint/names.h"

#include <algorithm>
#include <cctype>

namespace nvfp4_moe {
namespace {

constexpr FamilyNames kFamilies[] = {
    // family        blocks                                      shared            stacked (E, K, N)
    {"deepseek_v3", {"mlp"}, "shared_experts", false},
    {"deepseek_v4", {"ffn", "mlp"}, "shared_experts", false},
    {"kimi", {"mlp", "block_sparse_moe"}, "shared_experts", false},
    {"qwen", {"mlp"}, "shared_expert", false},
    {"qwen_vl", {"mlp"}, "shared_expert", true},
    {"glm", {"mlp"}, "shared_experts", false},
    {"minimax", {"block_sparse_moe", "mlp"}, "shared_experts", false},
    {"mixtral", {"block_sparse_moe", "mlp"}, "", false},
    {"llama4", {"feed_forward"}, "shared_expert", true},
    {"motif", {"moe", "mlp"}, "shared_experts", false},
    {"gpt_oss", {"mlp"}, "", true, true},
    {"nemotron_h", {"mixer"}, "shared_experts", false, false, false},
};

constexpr std::string_view kPrefixes[] = {"",
                                          "model.",
                                          "language_model.model.",
                                          "model.language_model.",
                                          "language_model.",
                                          "model.language_model.model.",
                                          "backbone.",
                                          "language_model.backbone."};

// Takes a decimal of at most 9 digits without leading zeros from the front.
std::optional<int64_t> take_number(std::string_view& text) {
  size_t digits = 0;
  int64_t value = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') {
    if (digits == 9) return std::nullopt;
    value = value * 10 + (text[digits++] - '0');
  }
  if (digits == 0 || (digits > 1 && text[0] == '0')) return std::nullopt;
  text.remove_prefix(digits);
  return value;
}

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

struct Word {
  std::string_view word;
  Projection projection;
  bool w_words;
};
constexpr Word kWords[] = {
    {"gate_proj", Projection::kGate, false}, {"up_proj", Projection::kUp, false},
    {"down_proj", Projection::kDown, false}, {"w1", Projection::kGate, true},
    {"w3", Projection::kUp, true},           {"w2", Projection::kDown, true},
};

// "<projection>." off the front.
bool take_word(std::string_view& rest, MoeTensorName& out) {
  for (const Word& word : kWords) {
    std::string_view text = rest;
    if (!take(text, word.word) || !take(text, ".")) continue;
    out.projection = word.projection;
    out.w_words = word.w_words;
    rest = text;
    return true;
  }
  return false;
}

bool take_part(std::string_view rest, MoeTensorName& out) {
  out.part = rest;
  return !rest.empty();
}

// "<projection>.<part>"
bool take_projection(std::string_view rest, MoeTensorName& out) { return take_word(rest, out) && take_part(rest, out); }

// The same, where gate and up may be one tensor.
bool take_shared(std::string_view rest, MoeTensorName& out) {
  if (!take(rest, "gate_up_proj.")) return take_projection(rest, out);
  out.projection = Projection::kGateUp;
  return take_part(rest, out);
}

// "<projection>.<expert>.<part>"
bool take_projection_first(std::string_view rest, MoeTensorName& out) {
  if (!take_word(rest, out)) return false;
  const std::optional<int64_t> expert = take_number(rest);
  if (!expert || !take(rest, ".")) return false;
  out.expert = *expert;
  out.projection_first = true;
  return take_part(rest, out);
}

// "gate_up_proj", "gate_up_proj_weight_scale", "down_proj.weight", ...; "up_proj" where there is no gate.
bool take_stacked(std::string_view rest, bool gated, MoeTensorName& out) {
  if (take(rest, gated ? "gate_up_proj" : "up_proj")) {
    out.projection = gated ? Projection::kGateUp : Projection::kUp;
  } else if (take(rest, "down_proj")) {
    out.projection = Projection::kDown;
  } else {
    return false;
  }
  if (rest.empty()) {
    out.part = "weight";
    return true;
  }
  if (rest.front() != '_' || rest.size() < 2) return false;
  out.part = rest.substr(1);
  return true;
}

bool contains(std::string_view text, std::string_view word) { return text.find(word) != std::string_view::npos; }

}  // namespace

const FamilyNames* family_names(std::string_view family) {
  for (const FamilyNames& row : kFamilies) {
    if (row.family == family) return &row;
  }
  return nullptr;
}

std::optional<MoeTensorName> parse_moe_tensor_name(const FamilyNames& family, std::string_view name) {
  const std::string_view* prefix = std::find_if(std::begin(kPrefixes), std::end(kPrefixes), [&](std::string_view p) {
    return name.starts_with(p) && name.substr(p.size()).starts_with("layers.");
  });
  if (prefix == std::end(kPrefixes)) return std::nullopt;
  std::string_view rest = name.substr(prefix->size());
  MoeTensorName out;
  take(rest, "layers.");
  const std::optional<int64_t> layer = take_number(rest);
  if (!layer || !take(rest, ".")) return std::nullopt;
  out.layer = *layer;
  for (const std::string_view block : family.blocks) {
    std::string_view text = rest;
    if (block.empty() || !take(text, block) || !take(text, ".")) continue;
    const bool shared =
        !family.shared.empty() && text.starts_with(family.shared) && text.substr(family.shared.size()).starts_with(".");
    if (shared) {
      text.remove_prefix(family.shared.size());
    } else if (!take(text, "experts")) {
      return std::nullopt;
    }
    if (!take(text, ".")) return std::nullopt;
    out.stem = name.substr(0, name.size() - text.size() - 1);
    if (shared) {
      out.role = TensorRole::kShared;
      return take_shared(text, out) ? std::optional(out) : std::nullopt;
    }
    if (take_projection_first(text, out)) return out;
    if (const std::optional<int64_t> expert = take_number(text)) {
      out.role = TensorRole::kExpert;
      out.expert = *expert;
      return take(text, ".") && take_projection(text, out) ? std::optional(out) : std::nullopt;
    }
    out.role = TensorRole::kStacked;
    return take_stacked(text, family.gated, out) ? std::optional(out) : std::nullopt;
  }
  return std::nullopt;
}

std::string_view projection_word(Projection projection, bool w_words) {
  switch (projection) {
    case Projection::kGate: return w_words ? "w1" : "gate_proj";
    case Projection::kUp: return w_words ? "w3" : "up_proj";
    case Projection::kDown: return w_words ? "w2" : "down_proj";
    case Projection::kGateUp: return "gate_up_proj";
  }
  return "";
}

std::string expert_tensor_name(const std::string& stem, int64_t expert, Projection projection, bool w_words,
                               bool projection_first, std::string_view part) {
  const std::string number = std::to_string(expert);
  if (!projection_first) return shared_tensor_name(stem + "." + number, projection, w_words, part);
  std::string name = stem + ".";
  ((name += projection_word(projection, w_words)) += '.') += number;
  return (name += '.') += part;
}

std::string stacked_tensor_name(const std::string& stem, Projection projection, std::string_view part) {
  std::string name = stem + ".";
  name += projection_word(projection, false);
  if (part != "weight") (name += '_') += part;
  return name;
}

std::string shared_tensor_name(const std::string& stem, Projection projection, bool w_words, std::string_view part) {
  std::string name = stem + ".";
  (name += projection_word(projection, w_words)) += '.';
  return name += part;
}

std::string_view ignored_reason(std::string_view name) {
  if (name.starts_with("mtp.") || contains(name, ".mtp.")) return "multi-token prediction: not a main layer";
  if (contains(name, "vision") || contains(name, "visual") || contains(name, "projector") || contains(name, "audio")) {
    return "another modality";
  }
  if (contains(name, "attention_layernorm") || contains(name, "attention_norm")) return "normalisation";
  if (contains(name, "attn") || contains(name, "attention") || contains(name, "kv_")) return "attention";
  if (contains(name, "shared_expert_gate")) return "gate of the shared expert: its result is given with each batch";
  if (contains(name, "e_score_correction_bias") || contains(name, ".gate.") || contains(name, "router") ||
      contains(name, "tid2eid")) {
    return "router: its result is given with each batch";
  }
  if (contains(name, "_latent_proj.")) return "projection between the model's width and the experts': the host's";
  if (contains(name, "norm")) return "normalisation";
  if (contains(name, "embed") || contains(name, "head")) return "embedding or output head";
  if (contains(name, "shared_expert")) return "shared expert in a form that is not loaded here";
  if (contains(name, "mlp") || contains(name, "ffn") || contains(name, "feed_forward")) return "dense feed-forward";
  return "not part of an MoE layer";
}

std::string name_pattern(std::string_view name) {
  std::string out;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool starts = i == 0 || name[i - 1] == '.';
    if (starts && std::isdigit(static_cast<unsigned char>(name[i])) != 0) {
      size_t end = i;
      while (end < name.size() && std::isdigit(static_cast<unsigned char>(name[end])) != 0) ++end;
      if (end == name.size() || name[end] == '.') {
        out += '*';
        i = end - 1;
        continue;
      }
    }
    out += name[i];
  }
  return out;
}

}  // namespace nvfp4_moe
