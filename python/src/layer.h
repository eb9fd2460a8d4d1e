// An open layer as Python holds it, and the call that runs it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_options.h"
#include "core/batch.h"
#include "handles.h"
#include "host.h"
#include "moe/layer.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// Owned by its Layer object and by calls in flight. A layer dropped during a run is closed after
// the run.
struct OpenLayer {
  Device device;
  std::shared_ptr<Host> host;
  std::unique_ptr<MoeLayer> layer;
  Workspaces* workspaces = nullptr;  // host's, of the layer's device
  int64_t handle = 0;
  ForkMutex status_mutex;
  RunStatus status;      // on the host: of the last run that ended
  Buffer device_status;  // on a device: a RunStatus that runs write

  // stream: nullopt if no run is in flight.
  Status replace_expert(int64_t local_expert, const ExpertSource& source,
                        const std::optional<void*>& stream) {
    return stream ? layer->replace_expert_on_stream(local_expert, source, *stream)
                  : layer->replace_expert(local_expert, source);
  }

  // Inputs of every run in addition to the layer and a workspace.
  Status prepare();
  ~OpenLayer();
};
HandleTable<OpenLayer>& layer_handles();

// The arrays of a call. shared_weights, out and workspace may be None. hidden's framework makes a
// missing out.
struct LayerArrays {
  nb::handle hidden;          // (T, H) bf16, fp16 or fp32
  nb::handle topk_ids;        // (T, k) int32 or int64
  nb::handle topk_weights;    // (T, k) float32
  nb::handle shared_weights;  // (T) float32
  nb::handle out;             // (T, H) bf16, fp16 or fp32
  nb::handle stream;  // an integer or an object with cuda_stream; None: the framework's current one
  nb::handle
      workspace;  // (bytes) uint8, of at least what the run's tokens need; None: one of open's
  // writes topk_ids and topk_weights first; null: they are given
  const SelectExperts* selection = nullptr;
};
nb::object run_layer(OpenLayer& open, const LayerArrays& arrays);
// Called in a handler, if a run fails before it begins. Raises the error; over an exchange on all
// ranks, because they wait for this one.
[[noreturn]] void decline_run(const OpenLayer& open, const std::exception& raised);
// The checkpoint of an nvfp4_moe.Checkpoint object.
const Checkpoint& checkpoint_of(nb::handle object);
CheckpointOptions reading_options(const std::optional<std::string>& gate_up_order,
                                  std::vector<std::string> accept_tensors,
                                  const std::string& family);
// A checked batch that has only the inputs, for calls without an output.
Batch batch_of(const OpenLayer& open, const Tensor& hidden, const Tensor& topk_ids,
               const Tensor& topk_weights);

}  // namespace nvfp4_moe::internal::python
