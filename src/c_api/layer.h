// The C structs of a layer as the library's own types; shared by the C interface's files of checkpoints and layers.
#pragma once

#include <memory>
#include <optional>

#include "c_api/common.h"
#include "checkpoint/checkpoint.h"
#include "moe/layer.h"
#include "parallel/expert_parallel.h"

struct nvfp4_moe_checkpoint {
  nvfp4_moe::Checkpoint checkpoint;
};

struct nvfp4_moe_layer {
  std::unique_ptr<nvfp4_moe::Executor> executor;  // null: the layer's own
  // One of the two, destroyed before the executor.
  std::unique_ptr<nvfp4_moe::MoeLayer> layer;
  std::unique_ptr<nvfp4_moe::ExpertParallelLayer> parallel;

  // The experts that this process has.
  const nvfp4_moe::MoeLayer& local() const { return parallel ? parallel->layer() : *layer; }
  int64_t max_tokens() const { return parallel ? parallel->max_tokens() : layer->plan().limits.max_tokens; }
  size_t workspace_bytes(int64_t tokens) const {
    return parallel ? parallel->workspace_bytes(tokens) : layer->workspace_bytes(tokens);
  }
  nvfp4_moe::Status run(const nvfp4_moe::Batch& batch, void* workspace, size_t workspace_bytes, void* stream) const {
    if (!parallel) return layer->run(batch, workspace, workspace_bytes, stream);
    return parallel->run(batch, workspace, workspace_bytes, stream);
  }
  nvfp4_moe::Result<nvfp4_moe::RunStatus> status(const void* workspace, size_t workspace_bytes) const {
    return parallel ? parallel->status(workspace, workspace_bytes) : layer->status(workspace, workspace_bytes);
  }
};

struct nvfp4_moe_exchange {
  std::shared_ptr<nvfp4_moe::Exchange> exchange;
};

namespace nvfp4_moe::c_api {

Result<MoeOptions> read_config(const nvfp4_moe_config* config);
nvfp4_moe_config to_c(const MoeOptions& options);
// options without executor; progress as a ProgressFn.
Result<LayerOptions> layer_options(const nvfp4_moe_layer_options& options);
// An expert's arrays, in sizes that the layer has; `name` is how messages call it.
Result<ExpertSource> read_expert(const char* name, const nvfp4_moe_expert* expert, const MoeConfig& config,
                                 int64_t inner);
Result<Batch> read_batch(const nvfp4_moe_batch* batch);
// The exchange and how the layer is divided over it; null where options have none. kInvalidArgument beside options that
// an exchange leaves no room for.
struct Parallel {
  std::shared_ptr<Exchange> exchange;
  ExpertParallelOptions options;
};
Result<std::optional<Parallel>> read_parallel(const nvfp4_moe_layer_options& options, int64_t num_experts);
// Of a layer that is one over an exchange.
Result<ExpertParallelLayer*> parallel_of(const nvfp4_moe_layer* layer);
// Whether so many slots are what the layer has, before as many are read.
Status check_slots(const ExpertParallelLayer& layer, const int64_t* expert_of_slot, int64_t slots);
// The exchange alone, so that a rank whose other arguments are wrong can tell the others; null where there is none.
Exchange* exchange_of(const nvfp4_moe_layer_options& options);
// Runs open(&reported) and, where it fails before the ranks of an exchange have spoken, says so to all of them, who wait.
template <class Open>
Status report_to_ranks(const nvfp4_moe_layer_options& options, const Open& open) {
  bool reported = false;
  const Status status = open(&reported);
  Exchange* const exchange = status.ok() || reported ? nullptr : exchange_of(options);
  return exchange == nullptr ? status : exchange->agree(status);
}
ProgressFn progress_fn(const nvfp4_moe_layer_options& options);

}  // namespace nvfp4_moe::c_api
