// The table of names and its two directions. A name is parsed from its "layers." outwards: the text
// before must be one of the known prefixes, so that layers of "mtp.layers.0..." or of a vision
// tower are never taken for the model's.
#include "checkpoint/names.h"

#include <algorithm>
#include <cctype>

namespace nvfp4_moe::internal {
namespace {

// The experts are in the layer itself: layers.L.experts, not layers.L.mlp.experts.
constexpr std::string_view kNoBlock = "experts";

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
    {"afmoe", {"mlp"}, "shared_experts", false},
    {"aria", {"mlp"}, "shared_experts", true, false, Stacks::kDotted},
    {"axk", {"mlp"}, "shared_experts", false},
    {"bailing", {"mlp"}, "shared_experts", false},
    {"beam", {"mlp"}, "", false},
    {"cohere", {"mlp"}, "", false},
    {"dots", {"mlp"}, "shared_experts", false},
    {"ernie", {"mlp"}, "shared_experts", false},
    {"exaone", {"mlp"}, "shared_experts", false},
    {"flint", {"mlp"}, "shared_expert", false},
    {"gemma", {kNoBlock}, "", false},
    {"granite", {"block_sparse_moe"}, "shared_mlp", false, false, Stacks::kDottedInBlock, true},
    {"hunyuan", {"mlp"}, "shared_mlp", false},
    {"hunyuan_v3", {"mlp"}, {"shared_mlp", "shared_experts"}, false},
    {"hunyuan_v4", {"mlp"}, "", false},
    {"inkling", {"mlp"}, "", false, false, Stacks::kExperts, false, true, true},
    {"jamba", {"feed_forward"}, "", false},
    {"kolibri", {"mlp"}, "shared_experts", false},
    {"lara", {"mlp"}, "shared_expert", false},
    {"laguna", {"mlp"}, {"shared_expert", "shared_experts"}, false},
    {"lfm2", {"feed_forward"}, "", false},
    {"longcat", {"mlp"}, "", false},
    {"mellum", {"mlp"}, "", false},
    {"mimo", {"mlp"}, "shared_experts", false},
    {"mistral", {"mlp"}, "shared_experts", false},
    {"mistral_large", {"mlp", kNoBlock}, "shared_experts", false},
    {"olmo", {"mlp"}, "", false},
    {"phi", {"block_sparse_moe", "mlp"}, "", false},
    {"privacy_filter", {"mlp"}, "", true},
    {"sarvam", {"mlp"}, "shared_experts", false},
    {"solar", {"mlp"}, "shared_experts", false},
    {"step", {"moe", "mlp"}, "", false, false, Stacks::kDottedInBlock},
    {"zaya", {"mlp"}, "", false},
    {"nemotron_h", {"mixer"}, "shared_experts", false, false, Stacks::kExperts, false, false},
};

constexpr std::string_view kPrefixes[] = {"", "model.", "language_model.model.",
                                          "model.language_model.", "language_model.",
                                          "model.language_model.model.", "thinker.model.",
                                          "model.llm.", "backbone.", "language_model.backbone.",
                                          // DiffusionGemma's encoder and decoder share their
                                          // experts; a file has them once, under either name
                                          "model.encoder.language_model.", "model.decoder."};

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
  Words words;
};
constexpr Word kWords[] = {
    {"gate_proj", Projection::kGate, Words::kProj},
    {"up_proj", Projection::kUp, Words::kProj},
    {"down_proj", Projection::kDown, Words::kProj},
    {"w1", Projection::kGate, Words::kW},
    {"w3", Projection::kUp, Words::kW},
    {"w2", Projection::kDown, Words::kW},
    {"gate_up_proj", Projection::kGateUp, Words::kProj},
    {"w13", Projection::kGateUp, Words::kW},
    {"input_linear", Projection::kGateUp, Words::kLinear},
    {"output_linear", Projection::kDown, Words::kLinear},
    {"fc1", Projection::kGateUp, Words::kFc},
    {"fc2", Projection::kDown, Words::kFc},
};

// Takes "<projection>." from the front, for projections with a tensor of their own.
bool take_word(std::string_view& rest, MoeTensorName& out, bool with_gate_up = false) {
  for (const Word& word : kWords) {
    std::string_view text = rest;
    if ((word.projection == Projection::kGateUp || word.words > Words::kW) && !with_gate_up)
      continue;
    if (!take(text, word.word) || !take(text, ".")) continue;
    out.projection = word.projection;
    out.words = word.words;
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
bool take_projection(std::string_view rest, MoeTensorName& out) {
  return take_word(rest, out) && take_part(rest, out);
}

// The same, if gate and up may be one tensor.
bool take_with_gate_up(std::string_view rest, MoeTensorName& out) {
  return take_word(rest, out, true) && take_part(rest, out);
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

// "gate_up_proj", "gate_up_proj_weight_scale", "w2_weight", "down_proj.weight" (dotted), ...;
// "up_proj" if there is no gate.
bool take_stacked(std::string_view rest, bool dotted, bool gated, MoeTensorName& out) {
  const Projection first = gated ? Projection::kGateUp : Projection::kUp;
  out.role = TensorRole::kStacked;
  out.dotted = true;
  if (dotted && take_with_gate_up(rest, out)) return true;
  out.dotted = false;
  for (const Word& word : kWords) {
    const bool stacked = word.projection == first || word.projection == Projection::kDown;
    std::string_view text = rest;
    if (!stacked || word.words > (gated ? Words::kW : Words::kProj) || !take(text, word.word))
      continue;
    if (!text.empty() && (text.front() != '_' || text.size() < 2)) continue;
    if (text.empty() && word.words != Words::kProj) continue;
    out.projection = word.projection;
    out.words = word.words;
    out.part = text.empty() ? "weight" : text.substr(1);
    return true;
  }
  return false;
}

bool contains(std::string_view text, std::string_view word) {
  return text.find(word) != std::string_view::npos;
}

// Takes "<block>." from the front, which is nothing for kNoBlock.
bool take_block(std::string_view& text, std::string_view block) {
  if (block.empty()) return false;
  return block == kNoBlock || (take(text, block) && take(text, "."));
}

// Takes "<shared>." from the front.
bool take_shared_module(std::string_view& text, const SharedNames& names) {
  for (const std::string_view name : {names.name, names.other}) {
    std::string_view rest = text;
    if (name.empty() || !take(rest, name) || !take(rest, ".")) continue;
    text = rest;
    return true;
  }
  return false;
}

// Takes "<prefix>layers.<L>." from the front.
std::optional<int64_t> take_layer(std::string_view& name) {
  const std::string_view* prefix =
      std::find_if(std::begin(kPrefixes), std::end(kPrefixes), [&](std::string_view p) {
        return name.starts_with(p) && name.substr(p.size()).starts_with("layers.");
      });
  if (prefix == std::end(kPrefixes)) return std::nullopt;
  std::string_view rest = name.substr(prefix->size() + std::string_view("layers.").size());
  const std::optional<int64_t> layer = take_number(rest);
  if (!layer || !take(rest, ".")) return std::nullopt;
  name = rest;
  return layer;
}

}  // namespace

const FamilyNames* family_names(std::string_view family) {
  for (const FamilyNames& row : kFamilies) {
    if (row.family == family) return &row;
  }
  return nullptr;
}

std::optional<MoeTensorName> parse_moe_tensor_name(const FamilyNames& family,
                                                   std::string_view name) {
  std::string_view rest = name;
  MoeTensorName out;
  const std::optional<int64_t> layer = take_layer(rest);
  if (!layer) return std::nullopt;
  out.layer = *layer;
  const auto take_shared = [&](std::string_view text) {
    if (!take_shared_module(text, family.shared)) return false;
    out.role = TensorRole::kShared;
    out.stem = name.substr(0, name.size() - text.size() - 1);
    return take_with_gate_up(text, out);
  };
  if (family.shared_beside_block && take_shared(rest)) return out;
  for (const std::string_view block : family.blocks) {
    std::string_view text = rest;
    if (!take_block(text, block)) continue;
    if (take_shared(text)) return out;
    if (block == kNoBlock && !text.starts_with("experts.")) continue;
    const bool in_experts = take(text, "experts.");
    const bool holds_stacks = family.stacks == Stacks::kDottedInBlock && block == family.blocks[0];
    if (!in_experts && !holds_stacks) return std::nullopt;
    out.role = TensorRole::kExpert;
    out.stem = name.substr(0, name.size() - text.size() - 1);
    if (in_experts && take_projection_first(text, out)) return out;
    const std::optional<int64_t> expert = in_experts ? take_number(text) : std::nullopt;
    if (!expert)
      return take_stacked(text, family.stacks != Stacks::kExperts, family.gated, out)
                 ? std::optional(out)
                 : std::nullopt;
    out.expert = *expert;
    return take(text, ".") && take_projection(text, out) ? std::optional(out) : std::nullopt;
  }
  return std::nullopt;
}

std::optional<ExpertsModule> experts_module(const FamilyNames& family, std::string_view name) {
  take(name, "base_model.model.");
  const std::optional<int64_t> layer = take_layer(name);
  if (!layer) return std::nullopt;
  const auto in_shared = [&](std::string_view rest) {
    return take_shared_module(rest, family.shared);
  };
  if (family.shared_beside_block && in_shared(name)) return ExpertsModule{*layer, true};
  for (const std::string_view block : family.blocks) {
    std::string_view rest = name;
    if (!take_block(rest, block)) continue;
    if (in_shared(rest)) return ExpertsModule{*layer, true};
    if (!take(rest, "experts.")) continue;
    if (rest == "e_score_correction_bias")
      return std::nullopt;  // the router's tensor, which Laguna keeps here
    return ExpertsModule{*layer, false};
  }
  return std::nullopt;
}

std::string_view projection_word(Projection projection, Words words) {
  for (const Word& word : kWords) {
    if (word.projection == projection && word.words == words) return word.word;
  }
  return "";
}

std::string expert_tensor_name(const std::string& stem, int64_t expert, Projection projection,
                               Words words, bool projection_first, std::string_view part) {
  const std::string number = std::to_string(expert);
  if (!projection_first) return shared_tensor_name(stem + "." + number, projection, words, part);
  std::string name = stem + ".";
  ((name += projection_word(projection, words)) += '.') += number;
  return (name += '.') += part;
}

std::string stacked_tensor_name(const std::string& stem, Projection projection, Words words,
                                bool dotted, std::string_view part) {
  if (dotted) return shared_tensor_name(stem, projection, words, part);
  std::string name = stem + ".";
  name += projection_word(projection, words);
  if (part != "weight" || words != Words::kProj) (name += '_') += part;
  return name;
}

std::string shared_tensor_name(const std::string& stem, Projection projection, Words words,
                               std::string_view part) {
  std::string name = stem + ".";
  (name += projection_word(projection, words)) += '.';
  return name += part;
}

std::string expert_stem(std::string_view stem) {
  std::string out(stem);
  if (!stem.ends_with(".experts")) out += ".experts";
  return out;
}

std::string_view ignored_reason(std::string_view name) {
  if (name.starts_with("mtp.") || contains(name, ".mtp."))
    return "multi-token prediction: not a main layer";
  if (contains(name, "vision") || contains(name, "visual") || contains(name, "projector") ||
      contains(name, "audio")) {
    return "another modality";
  }
  if (name.starts_with("talker.") || name.starts_with("code2wav."))
    return "speech output: not the language model";
  if (contains(name, "attention_layernorm") || contains(name, "attention_norm"))
    return "normalisation";
  if (contains(name, "attn") || contains(name, "attention") || contains(name, "kv_"))
    return "attention";
  if (contains(name, "shared_expert_gate"))
    return "gate of the shared expert: its result is given with each batch";
  if (contains(name, "e_score_correction_bias") || contains(name, "expert_bias") ||
      contains(name, ".gate.") || contains(name, "router") || contains(name, "tid2eid")) {
    return "router: its result is given with each batch";
  }
  if (contains(name, "_latent_proj.") || contains(name, ".routed_expert_"))
    return "projection between the model's width and the experts': the host's";
  if (contains(name, "norm")) return "normalisation";
  if (contains(name, "embed") || contains(name, "head")) return "embedding or output head";
  if (contains(name, "shared_expert") || contains(name, "share_expert"))
    return "shared expert in a form that is not loaded here";
  if (contains(name, "mlp") || contains(name, "ffn") || contains(name, "feed_forward"))
    return "dense feed-forward";
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

}  // namespace nvfp4_moe::internal
