// Long because one builder checks every name of the files against the config and reports each.
#include "checkpoint/layer_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <span>
#include <vector>

#include "checkpoint/declared_experts.h"
#include "checkpoint/gguf_names.h"
#include "checkpoint/matrix_resolver.h"
#include "checkpoint/other_tensors.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/row_order.h"
#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

// The files' tensors of one layer.
struct Seen {
  // Meaning of a routed expert's name -> the first such name.
  std::map<std::string, std::string> routed_stems;
  std::map<TensorRole, std::string> roles;
  std::map<Words, std::string> words;
  std::map<bool, std::string> dotted;
  std::map<bool, std::string> orders;  // projection_first
  std::map<bool, std::string> fused;   // whether gate and up are one tensor
  std::map<std::string, std::string> shared_stems;
  std::set<Words> shared_words;
  std::set<bool> shared_fused;
  uint64_t size_bytes = 0;
  std::map<int64_t, int> projections;  // expert -> bits of the projections whose codes exist
  std::map<std::string, std::vector<std::string_view>> parts;  // part -> names with it
  std::map<std::string, std::vector<std::string_view>> shared_parts;
  std::map<std::string, int64_t> shared_patterns;  // used if the shared expert cannot be loaded
  // Tensors of the modules that no format has.
  OtherTensors others, shared_others;
};

int bit(Projection projection) {
  return projection == Projection::kGateUp ? 3 : 1 << static_cast<int>(projection);
}

bool is_codes(std::string_view part) {
  return part == "weight" || part == "weight_packed" || part == "blocks";
}

template <class Map>
const typename Map::key_type& first_key(const Map& map) {
  return map.begin()->first;
}

// Two names of a layer's routed experts that do not follow one rule, and their difference. Empty if
// all names follow one rule.
std::string difference_of_names(const Seen& seen) {
  std::string difference;
  const auto compare = [&](const auto& names, std::string_view in_what) {
    if (!difference.empty() || names.size() <= 1) return;
    difference = fmt::format("{}: {} and {}", in_what, printable(names.begin()->second, 400),
                             printable(names.rbegin()->second, 400));
  };
  compare(seen.routed_stems, "in different places");
  compare(seen.roles, "some of one expert, some of a stack of all");
  compare(seen.orders, "some with the expert's number first, some with the projection first");
  compare(seen.words, "whose projections are called differently");
  compare(seen.fused, "some with gate and up apart, some with both in one tensor");
  compare(seen.dotted, "some with a dot before the part, some without");
  return difference;
}

}  // namespace

const LayerEntry* LayerIndex::find(int64_t layer) const {
  const auto found = layers_.find(layer);
  return found == layers_.end() ? nullptr : &found->second;
}

Status LayerIndex::refusal(int64_t layer) const {
  const auto found = refused_.find(layer);
  return found == refused_.end() ? Status() : found->second;
}

uint64_t LayerIndex::size_bytes() const {
  uint64_t total = 0;
  for (const auto& [layer, entry] : layers_) total += entry.size_bytes;
  return total;
}

namespace {

class Builder {
 public:
  Builder(const TensorIndex& index, const CheckpointOptions& options, ModelInfo& model,
          FindingList& findings)
      : index_(index),
        options_(options),
        model_(model),
        findings_(findings),
        family_(*family_names(model.family)) {}

  Status build() {
    NVFP4_MOE_TRY(scan_names());
    const std::set<int64_t> declared(model_.layers.begin(), model_.layers.end());
    model_.layers.clear();
    for (const auto& [layer, seen] : seen_) {
      if (seen.routed_stems.empty()) {
        add_other_tensors(layer, declared.contains(layer), seen.others);
        continue;
      }
      if (!declared.contains(layer)) {
        findings_.add({Severity::kWarning, "undeclared_layer", -1, -1, first_key(seen.routed_stems),
                       "no experts, since the config says that this layer is dense",
                       "experts (not loaded)"});
        continue;
      }
      NVFP4_MOE_TRY(add_layer(layer, seen));
    }
    for (const int64_t layer : declared) {
      if (layers_.contains(layer) || refused_.contains(layer)) continue;
      findings_.add({Severity::kWarning, "missing_layer", -1, -1, fmt::format("layer {}", layer),
                     "experts, since the config says that this is an MoE layer",
                     "no expert tensor"});
    }
    if (layers_.empty() && !refused_.empty()) return refused_.begin()->second;
    if (layers_.empty() && model_.quantization)
      NVFP4_MOE_TRY(model_.quantization->refusal_of_all());
    if (layers_.empty() && model_.gguf) {
      return bad_input(
          fmt::format("{}: no tensor is named like an expert of GGUF (blk.L.ffn_gate_exps.weight)",
                      printable(index_.files().front()->path(), 4096)));
    }
    if (layers_.empty()) {
      return bad_input(fmt::format(
          "{}: no tensor is named like an expert of the family {} ([model.]layers.L.{}.experts...)",
          printable(index_.directory(), 4096), model_.family, family_.blocks[0]));
    }
    for (const auto& [key, count] : ignored_) {
      findings_.add_always(
          {Severity::kNote, "ignored_tensor", -1, -1, key.first, "", key.second, count});
    }
    model_.format = layers_.begin()->second.routed.parts.format;
    for (const auto& [layer, entry] : layers_) model_.csf = model_.csf || entry.csf;
    for (const auto& [layer, entry] : layers_) {
      if (entry.routed.parts.format == SourceFormat::kFloat) continue;
      model_.format = entry.routed.parts.format;
      if (model_.format == SourceFormat::kModelOpt && entry.routed.role == TensorRole::kStacked) {
        model_.format = SourceFormat::kModelOptStacked;
      }
      break;
    }
    model_.options.activation_format = layers_.begin()->second.activations.format;
    return {};
  }

  std::map<int64_t, LayerEntry> take_layers() { return std::move(layers_); }
  std::map<int64_t, Status> take_refused() { return std::move(refused_); }

 private:
  void ignore(std::string_view name, std::string_view reason, int64_t count = 1) {
    ignored_[{name_pattern(name), std::string(reason)}] += count;
  }

  Status scan_names() {
    for (const auto& [name, ref] : index_.tensors()) {
      const std::optional<MoeTensorName> parsed =
          model_.gguf ? parse_gguf_tensor_name(name) : parse_moe_tensor_name(family_, name);
      const bool biased = model_.options.expert_biases;
      const bool of_format = parsed && (model_.gguf || is_format_part(parsed->part, biased));
      const std::optional<ExpertsModule> module =
          of_format || model_.gguf ? std::nullopt : experts_module(family_, name);
      if (module && module->layer < model_.num_hidden_layers) {
        Seen& seen = seen_[module->layer];
        (module->shared ? seen.shared_others : seen.others)
            .add(name, parsed ? parsed->part : name, options_);
        if (module->shared) ++seen.shared_patterns[name_pattern(name)];
        continue;
      }
      if (!parsed) {
        ignore(name, model_.gguf ? gguf_ignored_reason(name) : ignored_reason(name));
        continue;
      }
      if (parsed->layer >= model_.num_hidden_layers) {
        ignore(name, "multi-token prediction: beyond num_hidden_layers");
        continue;
      }
      if (!family_.gated &&
          (parsed->projection == Projection::kGate || parsed->projection == Projection::kGateUp)) {
        return unsupported(fmt::format("layer {} {}: a gate, which experts of {} have not",
                                       parsed->layer, printable(name, 400), model_.family));
      }
      Seen& seen = seen_[parsed->layer];
      if (model_.gguf && !biased && parsed->part == "bias")
        return unsupported(
            fmt::format("layer {} {}: experts with biases are implemented for gpt-oss only",
                        parsed->layer, printable(name, 400)));
      if (parsed->role == TensorRole::kShared) {
        seen.shared_stems.emplace(parsed->stem, name);
        seen.shared_words.insert(parsed->words);
        if (parsed->projection != Projection::kDown) {
          seen.shared_fused.insert(parsed->projection == Projection::kGateUp);
        }
        seen.shared_parts[std::string(parsed->part)].push_back(name);
        ++seen.shared_patterns[name_pattern(name)];
        continue;
      }
      seen.routed_stems.emplace(parsed->stem, name);
      seen.roles.emplace(parsed->role, name);
      seen.parts[std::string(parsed->part)].push_back(name);
      seen.size_bytes += ref.info->size_bytes();
      if (parsed->projection != Projection::kDown)
        seen.fused.emplace(parsed->projection == Projection::kGateUp, name);
      seen.words.emplace(parsed->words, name);
      if (parsed->role == TensorRole::kExpert) seen.orders.emplace(parsed->projection_first, name);
      if (parsed->role == TensorRole::kStacked) seen.dotted.emplace(parsed->dotted, name);
      if (is_codes(parsed->part)) seen.projections[parsed->expert] |= bit(parsed->projection);
    }
    return {};
  }

  // Refuses a part that GGUF has under another name. Otherwise it would be missed silently, since
  // its scalars are all optional.
  Status check_gguf_parts(const std::map<std::string, std::vector<std::string_view>>& parts,
                          const FormatParts& known) const {
    if (!model_.gguf) return {};
    for (const auto& [part, names] : parts) {
      if (known.has(part)) continue;
      return unsupported(fmt::format("{}: '{}' is no part of {} experts",
                                     printable(names.front(), 400), printable(part),
                                     to_string(known.format)));
    }
    return {};
  }

  // Adds findings for tensors that belong to another format, or to none. Returns the error for
  // those that are refused.
  Status report_others(int64_t layer,
                       const std::map<std::string, std::vector<std::string_view>>& parts,
                       const FormatParts& known, OtherTensors others) {
    for (const auto& [part, names] : parts) {
      if (known.has(part)) continue;
      for (const std::string_view name : names) others.add(name, part, options_);
    }
    return others.report(layer, findings_);
  }

  // Handles a layer that has such tensors, and none of a known format.
  void add_other_tensors(int64_t layer, bool declared, const OtherTensors& others) {
    if (!declared) {
      for (const std::string_view name : others.names()) ignore(name, ignored_reason(name));
      return;
    }
    if (const Status refused = others.report(layer, findings_); !refused.ok())
      refused_.emplace(layer, refused);
  }

  // Refuses a layer whose format this library does not decode. Other layers are not affected.
  void refuse_layer(int64_t layer, const std::string& name, const Status& reason) {
    findings_.add({Severity::kWarning, "layer_not_supported", layer, -1, name,
                   "experts in a format that is loaded here", reason.message()});
    refused_.emplace(layer, reason.in(printable(name, 400)).in(fmt::format("layer {}", layer)));
  }

  Status add_layer(int64_t layer, const Seen& seen) {
    if (const std::string difference = difference_of_names(seen); !difference.empty())
      return bad_input(fmt::format("layer {}: experts under several names, {}", layer, difference));
    LayerEntry entry;
    ExpertNames& names = entry.routed;
    names.stem = first_key(seen.routed_stems);
    names.role = first_key(seen.roles);
    names.words = first_key(seen.words);
    names.dotted = seen.dotted.contains(true);
    names.projection_first = !seen.orders.empty() && first_key(seen.orders);
    names.gguf = model_.gguf;
    names.gated = family_.gated;
    const bool stack_alone =
        seen.fused.empty() && names.role == TensorRole::kStacked && names.gated && !names.gguf;
    names.gate_up_fused = seen.fused.contains(true) || stack_alone;
    names.stacked_k_first = family_.stacked_k_first && !names.gguf;
    if (seen.projections.empty() && seen.others.has_refused()) {
      refused_.emplace(layer, seen.others.report(layer, findings_));
      return {};
    }
    if (seen.projections.empty()) {
      return bad_input(fmt::format("layer {} {}: there is no weight beside it", layer,
                                   printable(seen.routed_stems.begin()->second, 400)));
    }
    const auto [expert, bits] = *seen.projections.begin();
    const bool stacked = names.role == TensorRole::kStacked;
    const Projection probe = (bits & 1) != 0
                                 ? (names.gate_up_fused ? Projection::kGateUp : Projection::kGate)
                             : (bits & 2) != 0 ? Projection::kUp
                                               : Projection::kDown;
    Result<FormatParts> parts = detect_format(index_, names, expert, probe);
    const bool floats = parts.ok() && parts->format == SourceFormat::kFloat;
    std::vector<int64_t> experts(1, 0);  // a stack is represented by its first expert
    if (!stacked) {
      experts.clear();
      for (const auto& [e, unused] : seen.projections) experts.push_back(e);
    }
    NVFP4_MOE_ASSIGN(const DeclaredExperts declared, declared_experts(model_, names, experts));
    if (const Status& refusal = declared.refusal_of(floats); !refusal.ok()) {
      refuse_layer(layer, first_key(seen.routed_stems), refusal);
      return {};
    }
    if (parts.ok()) {
      if (Status two = check_one_format(index_, names, expert, *parts); !two.ok())
        parts = std::move(two);
    }
    if (parts.status().code() == Code::kUnsupported) {
      refuse_layer(layer, names.name(expert, probe, "weight"), parts.status());
      return {};
    }
    if (!parts.ok()) return parts.status().in(fmt::format("layer {}", layer));
    names.parts = *parts;
    if (model_.options.expert_biases) names.parts.bias = "bias";
    if (const Status known = check_gguf_parts(seen.parts, names.parts); !known.ok()) {
      refuse_layer(layer, names.name(expert, probe, "weight"), known);
      return {};
    }
    if (names.parts.format == SourceFormat::kGgufNvfp4 && names.parts.tensor_scale.empty()) {
      findings_.add({Severity::kNote, "tensor_scale_absent", layer, -1,
                     names.name(expert, probe, "scale"), "one tensor scale an expert, or none",
                     "none: 1, as llama.cpp reads it"});
    }
    entry.size_bytes = seen.size_bytes;
    NVFP4_MOE_TRY(check_declared(model_, declared, names.parts.format, layer,
                                 names.name(expert, probe, names.parts.codes), findings_));
    entry.activations = declared.activations_of(names.parts);
    entry.csf = is_csf(index_, names, expert, probe);
    if (declared.csf && !entry.csf && !floats)
      findings_.add({Severity::kWarning, "scale_coding_mismatch", layer, -1,
                     names.name(expert, probe, names.parts.scales),
                     "scales coded as CSF, as weight_scale_encoding declares",
                     "plain ones, which are read as they are"});
    entry.refusal = report_others(layer, seen.parts, names.parts, seen.others);
    if (Status unknown =
            set_row_order(options_, model_, layer, names.name(expert, probe, names.parts.codes),
                          names, findings_);
        entry.refusal.ok() && !unknown.ok()) {
      entry.refusal = std::move(unknown);
    }
    const std::string block = names.stem.substr(0, names.stem.rfind(".experts"));
    const TensorInfo* router = index_.find(block + ".gate.weight").info;
    if (router != nullptr && router->shape.size() == 2) entry.router_rows = router->shape.front();
    if (!stacked) check_experts(layer, seen, entry);
    check_first_expert(layer, entry);
    add_shared(layer, seen, entry);
    layers_.emplace(layer, std::move(entry));
    model_.layers.push_back(layer);
    return {};
  }

  void check_experts(int64_t layer, const Seen& seen, LayerEntry& entry) {
    const int64_t experts = model_.options.num_experts;
    for (const auto& [e, bits] : seen.projections) {
      if (e < experts) entry.stored.push_back(e);
    }
    entry.add_missing(layer, {0, experts}, findings_);
    for (const int64_t e : entry.stored) {
      const std::span<const Projection> wanted = entry.routed.projections();
      const auto first = std::find_if(wanted.begin(), wanted.end(), [&](Projection p) {
        return index_.find(entry.routed.name(e, p, entry.routed.parts.codes)).info == nullptr;
      });
      if (first == wanted.end()) continue;
      findings_.add({Severity::kError, "missing_expert", layer, e,
                     entry.routed.name(e, *first, entry.routed.parts.codes),
                     fmt::format("experts 0 to {}", experts - 1),
                     stored_instead(index_, entry.routed, e, *first)});
    }
    for (const auto& [e, bits] : seen.projections) {
      if (e < experts) continue;
      Finding finding{
          Severity::kError,
          "unexpected_expert",
          layer,
          e,
          entry.routed.name(e, entry.routed.projections().front(), entry.routed.parts.codes),
          fmt::format("experts 0 to {}", experts - 1),
          fmt::format("expert {}", e)};
      // The numbers begin at 1, or the config is of another model. It is then unknown which tensor
      // is which expert.
      if (entry.refusal.ok()) entry.refusal = error_of(finding);
      findings_.add(std::move(finding));
    }
  }

  // Checks one expert's shapes against the config's sizes, so that code that plans for those sizes
  // gets the error first.
  void check_first_expert(int64_t layer, LayerEntry& entry) {
    const bool stacked = entry.routed.role == TensorRole::kStacked;
    if (!stacked && entry.stored.empty()) return;
    const int64_t expert = stacked ? 0 : entry.stored.front();
    const int64_t hidden = model_.options.hidden_size;
    const int64_t intermediate = model_.options.intermediate_size;
    const MatrixResolver resolver(index_, model_.options.num_experts);
    FindingList found;
    for (const Projection projection : entry.routed.projections()) {
      const bool down = projection == Projection::kDown;
      MatrixSource unused;
      resolver.locate(entry.routed, layer, expert, projection, down ? hidden : intermediate,
                      down ? intermediate : hidden, unused, found);
    }
    entry.stack_fits = stacked && !found.has_error();
    for (Finding& finding : found.take()) {
      const bool known = !stacked && finding.id == "missing_expert";  // check_experts reports it
      if (!known) findings_.add(std::move(finding));
    }
  }

  void add_shared(int64_t layer, const Seen& seen, LayerEntry& entry) {
    const bool declared = model_.options.shared_intermediate_size > 0;
    // Here routed experts work in a latent space and the shared one does not. A layer has only one
    // width.
    if (declared && model_.model_hidden_size != model_.options.hidden_size) {
      if (seen.shared_stems.empty()) return;
      findings_.add({Severity::kNote, "shared_expert_of_other_width", -1, -1,
                     seen.shared_stems.begin()->second,
                     fmt::format("one of the experts' hidden size {}", model_.options.hidden_size),
                     fmt::format("the model's {}: the layer runs without it, the host adds it",
                                 model_.model_hidden_size)});
      for (const auto& [pattern, count] : seen.shared_patterns)
        ignore(pattern, "shared expert of the model's width, beside experts of another", count);
      return;
    }
    if (seen.shared_stems.empty()) {
      for (const auto& [pattern, count] : seen.shared_patterns)
        ignore(pattern, "shared expert without weights", count);
      if (declared) {
        findings_.add({Severity::kWarning, "shared_expert_missing", -1, -1,
                       fmt::format("layer {}", layer), "a shared expert, as the config declares",
                       "no such tensor"});
      }
      return;
    }
    ExpertNames names;
    names.stem = first_key(seen.shared_stems);
    names.role = TensorRole::kShared;
    names.words = *seen.shared_words.begin();
    names.gate_up_fused = seen.shared_fused.contains(true);
    names.gguf = model_.gguf;
    names.gated = family_.gated;
    const Projection probe = names.projections().front();
    Result<FormatParts> parts = bad_input("several spellings");
    if (seen.shared_stems.size() == 1 && seen.shared_words.size() == 1 &&
        seen.shared_fused.size() <= 1) {
      parts = detect_format(index_, names, -1, probe);
      if (parts.ok()) {
        if (Status known = check_gguf_parts(seen.shared_parts, *parts); !known.ok())
          parts = std::move(known);
      }
    }
    // The host runs a shared expert that is quantized in another way, like one in floats.
    if (parts.ok() && !seen.shared_others.unsupported_format().empty())
      parts = unsupported(seen.shared_others.unsupported_format());
    if (parts.ok()) {
      if (Status own = check_shared_declaration(model_, names, *parts, entry.activations);
          !own.ok())
        parts = std::move(own);
    }
    if (!declared || !parts.ok()) {
      findings_.add(
          {Severity::kWarning, "shared_expert_not_loaded", -1, -1,
           seen.shared_stems.begin()->second,
           "a shared expert that the config declares, in a format of this library",
           !declared ? "one that the config does not declare" : parts.status().message()});
      for (const auto& [pattern, count] : seen.shared_patterns) {
        ignore(pattern, "shared expert in a form that is not loaded here", count);
      }
      return;
    }
    // If other experts are quantized, the producer left this one in floats on purpose. Loading does
    // not quantize it.
    if (parts->format == SourceFormat::kFloat &&
        entry.routed.parts.format != SourceFormat::kFloat) {
      findings_.add({Severity::kNote, "shared_expert_in_floats", -1, -1,
                     names.name(-1, probe, parts->codes), "the format of the routed experts",
                     "floats: the layer runs without it, the host adds it"});
      for (const auto& [pattern, count] : seen.shared_patterns)
        ignore(pattern, "shared expert that the producer left in floats", count);
      return;
    }
    names.parts = *parts;
    for (Status refused :
         {report_others(layer, seen.shared_parts, names.parts, seen.shared_others),
          set_row_order(options_, model_, layer, names.name(-1, probe, names.parts.codes), names,
                        findings_)}) {
      if (entry.refusal.ok()) entry.refusal = std::move(refused);
    }
    entry.shared = std::move(names);
  }

  const TensorIndex& index_;
  const CheckpointOptions& options_;
  ModelInfo& model_;
  FindingList& findings_;
  const FamilyNames& family_;
  std::map<int64_t, Seen> seen_;
  std::map<int64_t, LayerEntry> layers_;
  std::map<int64_t, Status> refused_;
  std::map<std::pair<std::string, std::string>, int64_t> ignored_;  // (pattern, reason) -> count
};

}  // namespace

Result<LayerIndex> LayerIndex::build(const TensorIndex& index, const CheckpointOptions& options,
                                     ModelInfo& model, FindingList& findings) {
  if (family_names(model.family) == nullptr)
    return unsupported("no expert names are known for " + model.family);
  LayerIndex out;
  Builder builder(index, options, model, findings);
  NVFP4_MOE_TRY(builder.build());
  out.layers_ = builder.take_layers();
  out.refused_ = builder.take_refused();
  return out;
}

}  // namespace nvfp4_moe::internal
