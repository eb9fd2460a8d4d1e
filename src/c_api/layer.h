// The C structs of a layer as the library's own types; shared by the C interface's files of checkpoints and layers.
#pragma once

#include <memory>

#include "c_api/common.h"
#include "checkpoint/checkpoint.h"
#include "moe/layer.h"

struct nvfp4_moe_checkpoint {
  nvfp4_moe::Checkpoint checkpoint;
};

struct nvfp4_moe_layer {
  std::unique_ptr<nvfp4_moe::Executor> executor;  // null: the layer's own
  std::unique_ptr<nvfp4_moe::MoeLayer> layer;     // destroyed before the executor
};

namespace nvfp4_moe::c_api {

Result<MoeOptions> read_config(const nvfp4_moe_config* config);
nvfp4_moe_config to_c(const MoeOptions& options);
// options without executor; progress as a ProgressFn.
Result<LayerOptions> layer_options(const nvfp4_moe_layer_options& options);
// An expert's arrays, in sizes that the layer has; `name` is how messages call it.
Result<ExpertSource> read_expert(const char* name, const nvfp4_moe_expert* expert, int64_t hidden, int64_t inner);
Result<Batch> read_batch(const nvfp4_moe_batch* batch);
ProgressFn progress_fn(const nvfp4_moe_layer_options& options);

}  // namespace nvfp4_moe::c_api
