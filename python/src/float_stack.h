// Experts that lie in a caller's float arrays, quantized one at a time as they are packed.
#pragma once

#include <nanobind/nanobind.h>

#include "core/executor.h"
#include "layer_source.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// A stack of float matrices (E, rows, cols): of any strides on the host; on a GPU, contiguous along
// the last dimension.
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

// Quantizes each expert when it is asked for, each matrix under a tensor scale of its own: on the
// host with the executor, on the layer's device with its kernels, into memory there that the next
// expert takes over. gate: null without one. ValueError unless all lie in one of these places. The
// stacks and the executor must outlive it.
ExpertFn quantizing_source(const FloatStack* gate, const FloatStack& up, const FloatStack& down,
                           const ArrayOrder& order, const Device& layer_device, Executor& executor);

}  // namespace nvfp4_moe::internal::python
