// Experts that lie in a caller's NVFP4 arrays, as the library's views.
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

// Where a caller's arrays have an expert, by its global id.
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
  std::vector<int64_t> of_expert_;  // (num_experts), -1 if the arrays have none of it
};

// A stack of NVFP4 matrices: (codes (E, rows, cols/2), scales (E, rows, cols/16), tensor_scale (E)
// or one number). Experts and rows may lie apart (a slice of a larger tensor); the last dimension
// may not. On the host or on a GPU; tensor scales on a GPU are read once, here.
class MatrixStack {
 public:
  // arrays: the tuple as Python gave it, which must outlive the stack. ValueError on shapes and
  // dtypes.
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
  // One expert where it lies.
  Nvfp4View view(int64_t local_expert) const;
  // One expert in host memory: where it is, or a copy that `loaded` keeps.
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

// The experts of three stacks, two without a gate: where they lie if that is the layer's device for
// all arrays, else in host memory. The stacks must outlive it.
ExpertFn nvfp4_source(const MatrixStack* gate, const MatrixStack& up, const MatrixStack& down,
                      const ArrayOrder& order, const Device& layer_device);

// One expert's (codes (rows, cols/2), scales (rows, cols/16), tensor_scale), contiguous, all on
// `device`. streams gets those in which what writes the arrays is queued (Tensor::ready_stream).
Nvfp4View read_matrix(nb::handle arrays, const char* name, int64_t rows, int64_t cols,
                      const Device& device = {}, std::vector<void*>* streams = nullptr);
// The biases of E experts as Python's `_bias_arrays` gives them, or None: row-major float32 of the
// host.
class BiasStack {
 public:
  // biases: must outlive the stack. ValueError unless it is None, or (gate (E, inner), up (E,
  // inner), down (E, hidden)), gate's None in a layer without a gate.
  BiasStack(nb::handle biases, int64_t experts, const MoeConfig& config, int64_t inner);
  ExpertBiases of(int64_t local_expert) const;

 private:
  std::array<std::optional<Tensor>, 3> arrays_;  // gate, up, down
};

// gate and up (inner, hidden), down (hidden, inner), all on the host or all on the layer's device;
// gate None in a layer without one; biases as BiasStack's, of one expert.
ExpertSource read_expert(nb::handle gate, nb::handle up, nb::handle down, nb::handle biases,
                         const MoeConfig& config, int64_t inner, const Device& layer_device);

}  // namespace nvfp4_moe::internal::python
