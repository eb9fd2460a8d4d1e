// Which layers hold experts, under which names, in which format: the names in the files against the config's claims.
// Private to the room. Reads headers only.
//
// Every tensor of the checkpoint ends up as one of: read for a layer of this index, refused (the checkpoint does not
// open), or reported as a finding "ignored_tensor" / "unknown_expert_tensor", folded by pattern.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "checkpoint/findings.h"
#include "checkpoint/names.h"

namespace nvfp4_moe {

// The parts of one matrix's name in one format; empty where the format has no such tensor.
struct FormatParts {
  SourceFormat format = SourceFormat::kFloat;
  std::string_view codes;
  std::string_view scales;
  std::string_view tensor_scale;
  std::string_view input_scale;
};

// How a layer's routed experts, or its shared expert, are stored.
struct ExpertNames {
  std::string stem;
  TensorRole role = TensorRole::kExpert;
  bool w_words = false;
  bool stacked_k_first = false;  // the family's order, where role is kStacked
  FormatParts parts;

  // The name of `part` of the projection that holds it (gate_up_proj where stacked).
  std::string name(int64_t expert, Projection projection, std::string_view part) const;
};

struct LayerEntry {
  ExpertNames routed;
  std::optional<ExpertNames> shared;
  Status refusal;  // why no expert of this layer may be loaded
};

class LayerIndex {
 public:
  // Completes `model` with the layers and the format found. Errors: nothing can be loaded, or must not be.
  static Result<LayerIndex> build(const TensorIndex& index, ModelInfo& model, FindingList& findings);
  const LayerEntry* find(int64_t layer) const;

 private:
  std::map<int64_t, LayerEntry> layers_;
};

}  // namespace nvfp4_moe
