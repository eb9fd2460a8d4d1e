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

namespace nvfp4_moe::python {

using ExpertFn = std::function<Result<LoadedExpert>(int64_t global_expert)>;  // LayerSource::expert

// A stack of NVFP4 matrices: (codes (E, rows, cols/2), scales (E, rows, cols/16), tensor_scale (E) or one number).
// Experts and rows may lie apart (a slice of a larger tensor); the last dimension may not. On the host or on a GPU;
// tensor scales on a GPU are read once, here.
class MatrixStack {
 public:
  // arrays: the tuple as Python gave it, which must outlive the stack. ValueError on shapes and dtypes.
  MatrixStack(nb::handle arrays, const char* name, int64_t rows, int64_t cols);
  MatrixStack(const MatrixStack&) = delete;  // its tensors point to its names
  int64_t experts() const { return codes_.shape(0); }
  bool lies_on(const Device& device) const { return codes_.device() == device && scales_.device() == device; }
  void* stream() const { return codes_stream_; }  // see Tensor::ready_stream
  bool is_in(const void* stream) const { return codes_stream_ == stream && scales_stream_ == stream; }
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

// Whether the layer has a gate; ValueError where it has none and one is given.
bool wants_gate(const MoeConfig& config, nb::handle gate);

// The experts of three stacks, two without a gate: where they lie if that is the layer's device for all arrays, else in
// host memory. The stacks must outlive it.
ExpertFn nvfp4_source(const MatrixStack* gate, const MatrixStack& up, const MatrixStack& down, int64_t first_expert,
                      const Device& layer_device);

// One expert's (codes (rows, cols/2), scales (rows, cols/16), tensor_scale), contiguous, all on `device`.
Nvfp4View read_matrix(nb::handle arrays, const char* name, int64_t rows, int64_t cols, const Device& device = {});
// The biases of E experts as Python's `_bias_arrays` gives them, or None: row-major float32 of the host.
class BiasStack {
 public:
  // biases: must outlive the stack. ValueError unless it is None, or (gate (E, inner), up (E, inner), down (E, hidden)),
  // gate's None in a layer without a gate.
  BiasStack(nb::handle biases, int64_t experts, const MoeConfig& config, int64_t inner);
  ExpertBiases of(int64_t local_expert) const;

 private:
  std::array<std::optional<Tensor>, 3> arrays_;  // gate, up, down
};

// gate and up (inner, hidden), down (hidden, inner), all on the host or all on the layer's device, where what writes them
// has to be waited for; gate None in a layer without one; biases as BiasStack's, of one expert.
ExpertSource read_expert(nb::handle gate, nb::handle up, nb::handle down, nb::handle biases, const MoeConfig& config,
                         int64_t inner, const Device& layer_device);

}  // namespace nvfp4_moe::python
