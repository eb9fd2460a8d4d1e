#include "checkpoint/layer_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "safetensors/files.h"

namespace nvfp4_moe {
namespace {

constexpr FormatParts kModelOptParts = {SourceFormat::kModelOpt, "weight", "weight_scale", "weight_scale_2",
                                        "input_scale"};
constexpr FormatParts kCompressedParts = {SourceFormat::kCompressedTensors, "weight_packed", "weight_scale",
                                          "weight_global_scale", "input_global_scale"};
constexpr FormatParts kFloatParts = {SourceFormat::kFloat, "weight", "", "", ""};

constexpr FormatParts mxfp4_parts(std::string_view codes, std::string_view scales) {
  return {SourceFormat::kMxfp4, codes, scales, "", ""};
}

// Parts whose presence means that the experts compute something this library does not.
struct RefusedPart {
  std::string_view part;
  std::string_view reason;
};
constexpr RefusedPart kRefusedParts[] = {
    {"bias", "experts with biases are not implemented"},
    {"pre_quant_scale", "AWQ: activations must be multiplied by pre_quant_scale first, which is not implemented"},
    {"svdquant_lora_a", "SVDQuant: the low-rank part is not implemented"},
    {"svdquant_lora_b", "SVDQuant: the low-rank part is not implemented"},
    {"weight_zero_point", "zero points are not part of NVFP4"},
    {"weight_g_idx", "reordered input channels are not implemented"},
    {"blocks", "MXFP4 experts in the layout of gpt-oss, which has biases, are not implemented"},
};

// What the files hold of one layer.
struct Seen {
  std::map<std::string, std::string> routed_stems;  // stem -> a name under it
  std::map<std::string, std::string> shared_stems;
  std::set<TensorRole> roles;
  std::set<bool> words;
  std::set<bool> shared_words;
  std::map<int64_t, int> projections;        // expert -> bits of the projections whose codes are there
  std::map<std::string, std::string> parts;  // part -> a name with it
  std::map<std::string, std::string> shared_parts;
  std::map<std::string, int64_t> shared_patterns;  // for the case that it cannot be loaded
};

int bit(Projection projection) { return projection == Projection::kGateUp ? 3 : 1 << static_cast<int>(projection); }

bool is_codes(std::string_view part) { return part == "weight" || part == "weight_packed"; }

// The format of the tensors under one name: by which parts there are, then by their dtypes.
Result<FormatParts> detect(const TensorIndex& index, const ExpertNames& names, int64_t expert, Projection projection) {
  const auto part = [&](std::string_view p) { return index.find(names.name(expert, projection, p)).info; };
  const auto shown = [&](std::string_view p) { return printable(names.name(expert, projection, p), 400); };
  const TensorInfo* weight = part("weight");
  const TensorInfo* packed = part("weight_packed");
  const TensorInfo* scales = part("weight_scale");
  const auto is_e8m0 = [](const TensorInfo* t) {
    return t != nullptr && (t->dtype == DType::kF8E8M0 || t->dtype == DType::kU8);
  };
  if (packed != nullptr) {
    const bool global = part("weight_global_scale") != nullptr;
    return !global && is_e8m0(scales) ? mxfp4_parts("weight_packed", "weight_scale") : kCompressedParts;
  }
  if (weight == nullptr) return bad_input(fmt::format("{}: missing", shown("weight")));
  if (weight->dtype == DType::kF8E4M3 || weight->dtype == DType::kF8E5M2) {
    return unsupported(fmt::format("{}: FP8 experts are not NVFP4", shown("weight")));
  }
  if (part("weight_scale_2") != nullptr) return kModelOptParts;
  const bool bytes = weight->dtype == DType::kU8 || weight->dtype == DType::kI8 || weight->dtype == DType::kF4;
  if (bytes && is_e8m0(part("scale"))) return mxfp4_parts("weight", "scale");
  if (bytes && is_e8m0(scales)) return mxfp4_parts("weight", "weight_scale");
  if (bytes && scales != nullptr) return kModelOptParts;  // its weight_scale_2 is then reported as missing
  if (is_activation(weight->dtype) && scales == nullptr && part("scale") == nullptr) return kFloatParts;
  return bad_input(fmt::format("{}: {} is none of ModelOpt NVFP4, compressed-tensors NVFP4, MXFP4 and floats",
                               shown("weight"), describe(*weight)));
}

// Whether a layer may be stored as `found` where the config declares `model`.
Status check_declared(const ModelInfo& model, SourceFormat found, int64_t layer, const std::string& name,
                      FindingList& findings) {
  const bool declared = !model.quant_algo.empty();
  const SourceFormat claim = declared ? model.format : SourceFormat::kFloat;
  if (found == claim) return {};
  const std::string claimed = declared ? fmt::format("{} as the config declares ({} {})", to_string(claim),
                                                     printable(model.quant_method), printable(model.quant_algo))
                                       : "floats, since no config file declares a quantization";
  const bool legal = declared && (found == SourceFormat::kFloat ||
                                  (claim == SourceFormat::kModelOpt && found == SourceFormat::kMxfp4));
  if (!legal) {
    return bad_input(
        fmt::format("layer {} {}: expected {}, got {}", layer, printable(name, 400), claimed, to_string(found)));
  }
  findings.add({Severity::kWarning, "layer_in_other_format", layer, -1, name, claimed, to_string(found)});
  return {};
}

template <class Map>
const typename Map::key_type& first_key(const Map& map) {
  return map.begin()->first;
}

}  // namespace

std::string ExpertNames::name(int64_t expert, Projection projection, std::string_view part) const {
  switch (role) {
    case TensorRole::kExpert: return expert_tensor_name(stem, expert, projection, w_words, part);
    case TensorRole::kStacked: return stacked_tensor_name(stem, projection, part);
    case TensorRole::kShared: return shared_tensor_name(stem, projection, w_words, part);
  }
  return "";
}

const LayerEntry* LayerIndex::find(int64_t layer) const {
  const auto found = layers_.find(layer);
  return found == layers_.end() ? nullptr : &found->second;
}

namespace {

class Builder {
 public:
  Builder(const TensorIndex& index, ModelInfo& model, FindingList& findings)
      : index_(index), model_(model), findings_(findings), family_(*family_names(model.family)) {}

  Result<std::map<int64_t, LayerEntry>> build() {
    NVFP4_MOE_TRY(scan_names());
    const std::set<int64_t> declared(model_.layers.begin(), model_.layers.end());
    model_.layers.clear();
    for (const auto& [layer, seen] : seen_) {
      if (seen.routed_stems.empty()) continue;
      if (!declared.contains(layer)) {
        findings_.add({Severity::kWarning, "undeclared_layer", -1, -1, first_key(seen.routed_stems),
                       "no experts, since the config says that this layer is dense", "experts (not loaded)"});
        continue;
      }
      NVFP4_MOE_TRY(add_layer(layer, seen));
    }
    for (const int64_t layer : declared) {
      if (layers_.contains(layer)) continue;
      findings_.add({Severity::kWarning, "missing_layer", -1, -1, fmt::format("layer {}", layer),
                     "experts, since the config says that this is an MoE layer", "no expert tensor"});
    }
    if (layers_.empty()) {
      return bad_input(
          fmt::format("{}: no tensor is named like an expert of the family {} ([model.]layers.L.{}.experts...)",
                      printable(index_.directory(), 4096), model_.family, family_.blocks[0]));
    }
    for (const auto& [key, count] : ignored_) {
      findings_.add_always({Severity::kNote, "ignored_tensor", -1, -1, key.first, "", key.second, count});
    }
    model_.format = layers_.begin()->second.routed.parts.format;
    for (const auto& [layer, entry] : layers_) {
      if (entry.routed.parts.format == SourceFormat::kFloat) continue;
      model_.format = entry.routed.parts.format;
      if (model_.format == SourceFormat::kModelOpt && entry.routed.role == TensorRole::kStacked) {
        model_.format = SourceFormat::kModelOptStacked;
      }
      break;
    }
    return std::move(layers_);
  }

 private:
  void ignore(std::string_view name, std::string_view reason, int64_t count = 1) {
    ignored_[{name_pattern(name), std::string(reason)}] += count;
  }

  Status scan_names() {
    for (const auto& [name, ref] : index_.tensors()) {
      const std::optional<MoeTensorName> parsed = parse_moe_tensor_name(family_, name);
      if (!parsed) {
        ignore(name, ignored_reason(name));
        continue;
      }
      if (parsed->layer >= model_.num_hidden_layers) {
        ignore(name, "multi-token prediction: beyond num_hidden_layers");
        continue;
      }
      Seen& seen = seen_[parsed->layer];
      for (const RefusedPart& row : kRefusedParts) {
        if (row.part == parsed->part) {
          return unsupported(fmt::format("layer {} {}: {}", parsed->layer, printable(name, 400), row.reason));
        }
      }
      if (parsed->role == TensorRole::kShared) {
        seen.shared_stems.emplace(parsed->stem, name);
        seen.shared_words.insert(parsed->w_words);
        seen.shared_parts.emplace(parsed->part, name);
        ++seen.shared_patterns[name_pattern(name)];
        continue;
      }
      seen.routed_stems.emplace(parsed->stem, name);
      seen.roles.insert(parsed->role);
      seen.parts.emplace(parsed->part, name);
      if (parsed->role == TensorRole::kExpert) seen.words.insert(parsed->w_words);
      if (is_codes(parsed->part)) seen.projections[parsed->expert] |= bit(parsed->projection);
    }
    return {};
  }

  void unknown_parts(int64_t layer, const std::map<std::string, std::string>& parts, const FormatParts& known) {
    for (const auto& [part, name] : parts) {
      if (part == known.codes || part == known.scales || part == known.tensor_scale || part == known.input_scale) {
        continue;
      }
      findings_.add({Severity::kWarning, "unknown_expert_tensor", layer, -1, name,
                     fmt::format("only what {} has", to_string(known.format)), fmt::format("'{}'", printable(part))});
    }
  }

  Status add_layer(int64_t layer, const Seen& seen) {
    if (seen.routed_stems.size() > 1 || seen.roles.size() > 1 || seen.words.size() > 1) {
      return bad_input(fmt::format("layer {}: experts under several names, such as {} and {}", layer,
                                   printable(seen.routed_stems.begin()->second, 400),
                                   printable(seen.routed_stems.rbegin()->second, 400)));
    }
    LayerEntry entry;
    ExpertNames& names = entry.routed;
    names.stem = first_key(seen.routed_stems);
    names.role = *seen.roles.begin();
    names.w_words = !seen.words.empty() && *seen.words.begin();
    names.stacked_k_first = family_.stacked_k_first;
    if (seen.projections.empty()) {
      return bad_input(fmt::format("layer {} {}: there is no weight beside it", layer,
                                   printable(seen.routed_stems.begin()->second, 400)));
    }
    const auto [expert, bits] = *seen.projections.begin();
    const bool stacked = names.role == TensorRole::kStacked;
    const Projection probe = (bits & 1) != 0   ? (stacked ? Projection::kGateUp : Projection::kGate)
                             : (bits & 2) != 0 ? Projection::kUp
                                               : Projection::kDown;
    Result<FormatParts> parts = detect(index_, names, expert, probe);
    if (!parts.ok()) return parts.status().in(fmt::format("layer {}", layer));
    names.parts = *parts;
    NVFP4_MOE_TRY(
        check_declared(model_, names.parts.format, layer, names.name(expert, probe, names.parts.codes), findings_));
    unknown_parts(layer, seen.parts, names.parts);
    if (!stacked) check_experts(layer, seen, entry);
    add_shared(layer, seen, entry);
    layers_.emplace(layer, std::move(entry));
    model_.layers.push_back(layer);
    return {};
  }

  void check_experts(int64_t layer, const Seen& seen, LayerEntry& entry) {
    const int64_t experts = model_.options.num_experts;
    for (int64_t e = 0; e < experts; ++e) {
      const auto found = seen.projections.find(e);
      const int bits = found == seen.projections.end() ? 0 : found->second;
      if (bits == 7) continue;
      const Projection first = (bits & 1) == 0   ? Projection::kGate
                               : (bits & 2) == 0 ? Projection::kUp
                                                 : Projection::kDown;
      findings_.add({Severity::kError, "missing_expert", layer, e,
                     entry.routed.name(e, first, entry.routed.parts.codes), fmt::format("experts 0 to {}", experts - 1),
                     "no such tensor"});
    }
    for (const auto& [e, bits] : seen.projections) {
      if (e < experts) continue;
      Finding finding{Severity::kError,
                      "unexpected_expert",
                      layer,
                      e,
                      entry.routed.name(e, Projection::kGate, entry.routed.parts.codes),
                      fmt::format("experts 0 to {}", experts - 1),
                      fmt::format("expert {}", e)};
      // Numbers that begin at 1, or a config of another model: which tensor is which expert is then unknown.
      if (entry.refusal.ok()) entry.refusal = error_of(finding);
      findings_.add(std::move(finding));
    }
  }

  void add_shared(int64_t layer, const Seen& seen, LayerEntry& entry) {
    const bool declared = model_.options.shared_intermediate_size > 0;
    if (seen.shared_stems.empty()) {
      if (declared) {
        findings_.add({Severity::kWarning, "shared_expert_missing", -1, -1, fmt::format("layer {}", layer),
                       "a shared expert, as the config declares", "no such tensor"});
      }
      return;
    }
    ExpertNames names;
    names.stem = first_key(seen.shared_stems);
    names.role = TensorRole::kShared;
    names.w_words = *seen.shared_words.begin();
    Result<FormatParts> parts = bad_input("several spellings");
    if (seen.shared_words.size() == 1) parts = detect(index_, names, -1, Projection::kGate);
    if (!declared || !parts.ok()) {
      findings_.add({Severity::kWarning, "shared_expert_not_loaded", -1, -1, seen.shared_stems.begin()->second,
                     "a shared expert that the config declares, in a format of this library",
                     !declared ? "one that the config does not declare" : parts.status().message()});
      for (const auto& [pattern, count] : seen.shared_patterns) {
        ignore(pattern, "shared expert in a form that is not loaded here", count);
      }
      return;
    }
    // What the producer left in floats beside quantized experts, it left so on purpose: loading does not quantize it.
    if (parts->format == SourceFormat::kFloat && entry.routed.parts.format != SourceFormat::kFloat) {
      findings_.add({Severity::kNote, "shared_expert_in_floats", -1, -1,
                     names.name(-1, Projection::kGate, parts->codes), "the format of the routed experts",
                     "floats: the layer runs without it, the host adds it"});
      for (const auto& [pattern, count] : seen.shared_patterns)
        ignore(pattern, "shared expert that the producer left in floats", count);
      return;
    }
    names.parts = *parts;
    unknown_parts(layer, seen.shared_parts, names.parts);
    entry.shared = std::move(names);
  }

  const TensorIndex& index_;
  ModelInfo& model_;
  FindingList& findings_;
  const FamilyNames& family_;
  std::map<int64_t, Seen> seen_;
  std::map<int64_t, LayerEntry> layers_;
  std::map<std::pair<std::string, std::string>, int64_t> ignored_;  // (pattern, reason) -> count
};

}  // namespace

Result<LayerIndex> LayerIndex::build(const TensorIndex& index, ModelInfo& model, FindingList& findings) {
  if (family_names(model.family) == nullptr) return unsupported("no expert names are known for " + model.family);
  LayerIndex out;
  NVFP4_MOE_ASSIGN(out.layers_, Builder(index, model, findings).build());
  return out;
}

}  // namespace nvfp4_moe
