// Names of expert tensors, per model family, as one table.
//
//   <prefix>layers.<L>.<block>.experts.<E>.<projection>.<part>      one tensor per expert
//   <prefix>layers.<L>.<block>.experts.<projection>.<E>.<part>      the same, in ModelOpt's
//                                                                   Qwen3-VL-MoE exports
//   <prefix>layers.<L>.<block>.experts.<gate_up_proj|down_proj><_part>
//                                                                   all experts stacked in one
//                                                                   tensor; up_proj for
//                                                                   gate_up_proj in families
//                                                                   without a gate
//   <prefix>layers.<L>.<block>[.experts].<projection>.<part>        the same in families with
//                                                                   dotted stacks
//   <prefix>layers.<L>.[<block>.]<shared>.<projection>.<part>       the shared expert, or
//                                                                   gate_up_proj for gate and up
//
// A projection has a word in each of the spellings of `Words`.
//
// The family (from the config) determines the possible blocks, shared names and stacked axis
// orders. The names in the files determine which of them, which prefix and which projection words a
// layer uses. <part> determines the format:
//
//   format              codes           block scales   tensor scale         input scale
//   ModelOpt            weight          weight_scale   weight_scale_2       input_scale
//   compressed-tensors  weight_packed   weight_scale   weight_global_scale  input_global_scale
//   MXFP4               weight | weight_packed         scale | weight_scale  -  -
//   MXFP4 of gpt-oss    blocks (E, N, K/32, 16)        scales         -                    -
//   float               weight          -              -                    -
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace nvfp4_moe::internal {

enum class Projection : uint8_t {
  kGate,
  kUp,
  kDown,
  kGateUp
};  // kGateUp: gate and up in one tensor

// Names of gate, up, down, and of gate and up in one tensor.
enum class Words : uint8_t {
  kProj,    // gate_proj, up_proj, down_proj, gate_up_proj
  kW,       // w1, w3, w2; w13, the name of inference engines' parameters
  kLinear,  // output_linear, input_linear
  kFc,      // fc2, fc1
};

// How a family names its stacked tensors.
enum class Stacks : uint8_t {
  kExperts,  // experts.gate_up_proj, experts.down_proj_weight_scale: an underscore before the part
  kDotted,   // experts.fc1.weight too
  kDottedInBlock  // <block>.gate_proj.weight too, without the word `experts`
};

// Module of the shared expert. other: the name in files that were written from transformers'
// modules, if it differs from the published one.
struct SharedNames {
  std::string_view name, other;
  constexpr SharedNames(const char* published, const char* of_modules = "")
      : name(published), other(of_modules) {}
  bool operator==(const SharedNames&) const = default;
};

struct FamilyNames {
  std::string_view family;
  // module that holds the experts; empty = unused, "experts" = the layer itself
  std::array<std::string_view, 3> blocks;
  SharedNames shared;        // next to `experts`; empty = none
  bool stacked_k_first;      // stacked tensors are (E, K, N): K is axis 1; dotted ones always
  bool interleaved = false;  // gate and up alternate in a stack: g0 u0 g1 u1 ...
  Stacks stacks = Stacks::kExperts;
  bool shared_beside_block = false;  // layers.L.<shared> instead of layers.L.<block>.<shared>
  bool gated = true;                 // experts have a gate
  // rows of gate and up alternate in a tensor called w13 (otherwise: gate first)
  bool w13_interleaved = false;
  bool operator==(const FamilyNames&) const = default;
};
// nullptr for a family this library does not know.
const FamilyNames* family_names(std::string_view family);

enum class TensorRole : uint8_t { kExpert, kStacked, kShared };

// The parts of a tensor name. Views point into the name.
struct MoeTensorName {
  TensorRole role = TensorRole::kExpert;
  std::string_view
      stem;  // "model.layers.3.mlp.experts" (with the shared module's name for kShared)
  int64_t layer = 0;
  int64_t expert = -1;  // kExpert only
  Projection projection = Projection::kGate;
  Words words = Words::kProj;
  bool projection_first = false;  // kExpert: the projection precedes the expert's number
  bool dotted = false;            // kStacked: a dot precedes the part
  std::string_view part;  // "weight", "weight_scale", ...; for stacked: "weight" for the bare name,
                          // otherwise the rest of the name
};
// nullopt if the name is not one of the family's expert tensors.
std::optional<MoeTensorName> parse_moe_tensor_name(const FamilyNames& family,
                                                   std::string_view name);

// Any name in the module of a layer's experts: "<prefix>layers.3.mlp.experts...", or the shared
// expert's.
struct ExpertsModule {
  int64_t layer = 0;
  bool shared = false;
};
// Also accepts the prefix that PEFT adds (base_model.model.). A router's tensor is not an expert's,
// wherever it is.
std::optional<ExpertsModule> experts_module(const FamilyNames& family, std::string_view name);

// "gate_proj", "w3", "gate_up_proj"; empty if a spelling has no word for it.
std::string_view projection_word(Projection projection, Words words);
// Full names from their parts; the inverse of parse_moe_tensor_name.
std::string expert_tensor_name(const std::string& stem, int64_t expert, Projection projection,
                               Words words, bool projection_first, std::string_view part);
std::string stacked_tensor_name(const std::string& stem, Projection projection, Words words,
                                bool dotted, std::string_view part);
std::string shared_tensor_name(const std::string& stem, Projection projection, Words words,
                               std::string_view part);
// The stem under which the experts of a layer would be named one by one, given the stem of their
// stack.
std::string expert_stem(std::string_view stem);

// Why a tensor that is not an expert's is not read: "router", "attention", "multi-token
// prediction", ...
std::string_view ignored_reason(std::string_view name);
// The name with every number replaced by '*', so that similar tensors fold into one line.
std::string name_pattern(std::string_view name);

}  // namespace nvfp4_moe::internal
