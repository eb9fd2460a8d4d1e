// State of a Checkpoint. Private to src/checkpoint: checkpoint.cpp loads with it, validate.cpp
// reads it.
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/expert_memory.h"
#include "checkpoint/findings.h"
#include "checkpoint/layer_index.h"
#include "checkpoint/matrix_resolver.h"

namespace nvfp4_moe::internal {

struct Checkpoint::Impl {
  TensorIndex index;
  ModelInfo model;
  CheckpointOptions options;
  LayerIndex layers;
  std::vector<Finding> findings;
  std::shared_ptr<ExpertMemory> memory = std::make_shared<ExpertMemory>();
  int64_t shared_intermediate = 0;  // as in the config, even if it is not stored

  Result<const LayerEntry*> layer_entry(int64_t layer) const;
  // The range; {0, 0} means all experts.
  Result<ExpertRange> checked_range(const ExpertRange& range) const;
  // Locates a projection of a routed expert, or of the shared one (expert -1). Reads headers only.
  bool locate(const ExpertNames& names, int64_t layer, int64_t expert, Projection projection,
              MatrixSource& out, FindingList& found) const;
  Result<const LayerEntry*> expert_entry(int64_t layer, int64_t expert) const;
  Status check_unchanged() const;  // kIo if a file was written to since it was opened
  // expert -1: the shared expert.
  bool resolve(const ExpertNames& names, int64_t layer, int64_t expert, Projection projection,
               MatrixSource& out, FindingList& found) const;
  Result<LoadedExpert> load(const ExpertNames& names, int64_t layer, int64_t expert,
                            const IntermediateSlice& slice) const;
  // Findings about the input scales of the experts in range. Their maximum too, if `scales` is
  // given.
  void add_input_scales(const LayerEntry& entry, int64_t layer, const ExpertRange& range,
                        FindingList& found, LayerScales* scales) const;
};

}  // namespace nvfp4_moe::internal
