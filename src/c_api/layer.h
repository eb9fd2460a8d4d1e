// Converts the C structs of a layer to the library's own types. Shared by the C interface's files
// for checkpoints and layers.
#pragma once

#include <memory>
#include <optional>

#include "c_api/common.h"
#include "checkpoint/checkpoint.h"
#include "moe/layer.h"
#include "parallel/open.h"

struct nvfp4_moe_checkpoint {
  nvfp4_moe::internal::Checkpoint checkpoint;
};

struct nvfp4_moe_layer {
  std::unique_ptr<nvfp4_moe::internal::Executor> executor;  // null: the layer's own
  std::unique_ptr<nvfp4_moe::internal::MoeLayer> layer;     // destroyed before the executor
};

struct nvfp4_moe_exchange {
  std::shared_ptr<nvfp4_moe::internal::Exchange> exchange;
};

namespace nvfp4_moe::internal::c_api {

Result<MoeOptions> read_config(const nvfp4_moe_config* config);
nvfp4_moe_config to_c(const MoeOptions& options);
// The options without their executor; progress as a ProgressFn.
Result<LayerOptions> layer_options(const nvfp4_moe_layer_options& options);
// Reads an expert's arrays, in the sizes of the layer. Messages call it `name`.
Result<ExpertSource> read_expert(const char* name, const nvfp4_moe_expert* expert,
                                 const MoeConfig& config, int64_t inner);
Result<Batch> read_batch(const nvfp4_moe_batch* batch);
// Reads the exchange and how the layer is divided over it; empty if options have no exchange.
// kInvalidArgument for other options that cannot be combined with an exchange.
Result<std::optional<Parallel>> read_parallel(const nvfp4_moe_layer_options& options,
                                              int64_t num_experts);
// The ranks of a layer over an exchange.
Result<RankCombine*> ranks_in(const nvfp4_moe_layer* layer);
// Checks that the layer has this many slots, before they are read.
Status check_slots(const RankCombine& ranks, const int64_t* expert_of_slot, int64_t slots);
// Reads only the exchange, so that a rank whose other arguments are wrong can inform the others.
// Null if there is no exchange.
Exchange* exchange_of(const nvfp4_moe_layer_options& options);
// Runs open(&reported). If it fails before the ranks of an exchange have communicated, sends the
// failure to all of them, since they wait.
template <class Open>
Status report_to_ranks(const nvfp4_moe_layer_options& options, const Open& open) {
  bool reported = false;
  const Status status = open(&reported);
  Exchange* const exchange = status.ok() || reported ? nullptr : exchange_of(options);
  return exchange == nullptr ? status : exchange->agree(status);
}
ProgressFn progress_fn(const nvfp4_moe_layer_options& options);

}  // namespace nvfp4_moe::internal::c_api
