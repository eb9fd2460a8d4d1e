// Views of experts in a caller's NVFP4 arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moe/layer.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

using ExpertFn = std::function<Result<LoadedExpert>(int64_t global_expert)>;  // LayerSource::expert

// Maps an expert's global id to its index in a caller's arrays.
class ArrayOrder {
 public:
  explicit ArrayOrder(int64_t first_expert = 0)
      : first_expert_(first_expert) {}  // in the order of the ids
  // experts: the global id of each element, none twice.
  ArrayOrder(int64_t num_experts, const std::vector<int64_t>& experts)
      : of_expert_(static_cast<size_t>(num_experts), -1) {
    for (size_t i = 0; i < experts.size(); ++i)
      of_expert_[static_cast<size_t>(experts[i])] = static_cast<int64_t>(i);
  }
  int64_t operator()(int64_t global_expert) const {
    return of_expert_.empty() ? global_expert - first_expert_
                              : of_expert_[static_cast<size_t>(global_expert)];
  }

 private:
  int64_t first_expert_ = 0;
  std::vector<int64_t> of_expert_;  // (num_experts), -1 if the arrays lack the expert
};

// A stack of NVFP4 matrices: (codes (E, rows, cols/2), scales (E, rows, cols/16), tensor_scale (E)
// or one number). Experts and rows may have strides (a slice of a larger tensor); the last
// dimension is contiguous. On the host or on a GPU. The constructor reads tensor scales on a GPU.
class MatrixStack {
 public:
  // arrays: the tuple from Python, which must outlive the stack. ValueError on shapes and dtypes.
  MatrixStack(nb::handle arrays, const char* name, int64_t rows, int64_t cols);
  MatrixStack(const MatrixStack&) = delete;  // its tensors point to its names
  int64_t experts() const { return codes_.shape(0); }
  bool lies_on(const Device& device) const {
    return codes_.device() == device && scales_.device() == device;
  }
  void* stream() const { return codes_stream_; }  // see Tensor::ready_stream
  bool is_in(const void* stream) const {
    return codes_stream_ == stream && scales_stream_ == stream;
  }
  // One expert in the caller's memory.
  Nvfp4View view(int64_t local_expert) const;
  // One expert in host memory: the caller's, or a copy that `loaded` keeps.
  Result<Nvfp4View> host_view(int64_t local_expert, LoadedExpert& loaded) const;

 private:
  std::string codes_name_, scales_name_;
  Tensor codes_, scales_;
  void* codes_stream_ = nullptr;
  void* scales_stream_ = nullptr;
  std::vector<float> tensor_scales_;  // (E)
  int64_t rows_, cols_;
};

// Whether the layer has a gate; ValueError if it has none and one is given.
bool wants_gate(const MoeConfig& config, nb::handle gate);

// The experts of gate (null without a gate), up and down: in the caller's memory if all arrays are
// on the layer's device, else in host memory. The stacks must outlive the result.
ExpertFn nvfp4_source(const MatrixStack* gate, const MatrixStack& up, const MatrixStack& down,
                      const ArrayOrder& order, const Device& layer_device);

// One expert's (codes (rows, cols/2), scales (rows, cols/16), tensor_scale), contiguous, all on
// `device`. Adds to streams those in which writes to the arrays are queued (Tensor::ready_stream).
Nvfp4View read_matrix(nb::handle arrays, const char* name, int64_t rows, int64_t cols,
                      const Device& device = {}, std::vector<void*>* streams = nullptr);
// The biases of E experts from Python's `_bias_arrays`, or None: row-major float32 on the host.
class BiasStack {
 public:
  // biases: must outlive the stack. ValueError unless None or (gate (E, inner), up (E, inner), down
  // (E, hidden)). A layer without a gate has None for gate.
  BiasStack(nb::handle biases, int64_t experts, const MoeConfig& config, int64_t inner);
  ExpertBiases of(int64_t local_expert) const;

 private:
  std::array<std::optional<Tensor>, 3> arrays_;  // gate, up, down
};

// gate and up (inner, hidden), down (hidden, inner), all on the host or all on the layer's device.
// A layer without a gate has None for gate. biases: as in BiasStack, for one expert.
ExpertSource read_expert(nb::handle gate, nb::handle up, nb::handle down, nb::handle biases,
                         const MoeConfig& config, int64_t inner, const Device& layer_device);

}  // namespace nvfp4_moe::internal::python
