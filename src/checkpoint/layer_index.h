// Which layers have experts, under which names, in which format: compares the names in the files
// with the config. Private to src/checkpoint. Reads headers only.
//
// Every tensor of the checkpoint is one of: read for a layer of this index, refused (the layer or
// the checkpoint does not open), or reported by a finding (ignored_tensor, harmless_expert_tensor,
// accepted_tensor), folded by pattern.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/expert_names.h"
#include "checkpoint/findings.h"

namespace nvfp4_moe::internal {

struct LayerEntry {
  ExpertNames routed;
  std::optional<ExpertNames> shared;
  DeclaredActivations activations;
  Status refusal;  // why no expert of this layer may be loaded
  std::vector<int64_t>
      stored;  // experts with tensors of their own, ascending; empty if they are stacked
  bool stack_fits = false;  // the stack has the shapes that the config implies
  uint64_t size_bytes = 0;  // the routed experts' tensors
  bool csf = false;         // block scales are coded as CSF
  int64_t router_rows = 0;  // rows of the router's weight; 0 if its name is not `gate.weight`

  // Experts of the range for which the files have some tensor. For a stack: all, or only the first
  // if the shape does not fit, so that the error is reported once.
  std::vector<int64_t> stored_in(const ExpertRange& range) const;
  // Adds one finding for all experts of the range without a tensor. The count comes from the config
  // and is not iterated over, since a file may declare any number.
  void add_missing(int64_t layer, const ExpertRange& range, FindingList& findings) const;
};

class LayerIndex {
 public:
  // Completes `model` with the layers and the format found. An error means that nothing can be
  // loaded, or must not be.
  static Result<LayerIndex> build(const TensorIndex& index, const CheckpointOptions& options,
                                  ModelInfo& model, FindingList& findings);
  const LayerEntry* find(int64_t layer) const;
  // Why a layer with experts is not among those above; ok if there is no such layer.
  Status refusal(int64_t layer) const;
  uint64_t size_bytes() const;  // the tensors of all routed experts that can be loaded

 private:
  std::map<int64_t, LayerEntry> layers_;
  std::map<int64_t, Status> refused_;
};

}  // namespace nvfp4_moe::internal
