// Experts in a caller's float arrays, quantized one at a time as they are packed.
#pragma once

#include <nanobind/nanobind.h>

#include "core/executor.h"
#include "layer_source.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// A stack of float matrices (E, rows, cols): on the host with any strides, on a GPU contiguous
// along the last dimension.
class FloatStack {
 public:
  FloatStack(nb::handle array, const char* name, int64_t rows, int64_t cols);
  int64_t experts() const { return array_.shape(0); }
  const Tensor& array() const { return array_; }
  void* stream() const { return stream_; }  // see Tensor::ready_stream
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

 private:
  Tensor array_;
  void* stream_;
  int64_t rows_, cols_;
};

// Quantizes each expert on request, each matrix with its own tensor scale: host arrays with the
// executor, arrays on the layer's device with its kernels. On the device the result is overwritten
// by the next expert. gate is null for experts without a gate. ValueError unless all stacks are in
// the same one of these two places. The stacks and the executor must outlive the result.
ExpertFn quantizing_source(const FloatStack* gate, const FloatStack& up, const FloatStack& down,
                           const ArrayOrder& order, const Device& layer_device, Executor& executor);

}  // namespace nvfp4_moe::internal::python
