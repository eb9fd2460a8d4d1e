// Experts that lie in a caller's arrays, as the library's views: NVFP4 as it is, floats to be quantized.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>
#include <vector>

#include "core/executor.h"
#include "moe/layer.h"
#include "tensor.h"

namespace nvfp4_moe::python {

// A stack of NVFP4 matrices: (codes (E, rows, cols/2), scales (E, rows, cols/16), tensor_scale (E) or one number).
// Experts and rows may lie apart (a slice of a larger tensor); the last dimension may not. On the host, or on a GPU,
// from where one expert at a time is copied.
class MatrixStack {
 public:
  // arrays: the tuple as Python gave it, which must outlive the stack. ValueError on shapes and dtypes.
  MatrixStack(nb::handle arrays, const char* name, int64_t rows, int64_t cols);
  MatrixStack(const MatrixStack&) = delete;  // its tensors point to its names
  int64_t experts() const { return codes_.shape(0); }
  // One expert in host memory: where it is, or a copy that `loaded` keeps.
  Result<Nvfp4View> expert(int64_t local_expert, LoadedExpert& loaded) const;

 private:
  std::string codes_name_, scales_name_;
  Tensor codes_, scales_;
  std::vector<float> tensor_scales_;  // (E)
  int64_t rows_, cols_;
};

// A stack of float matrices (E, rows, cols) of any strides.
class FloatStack {
 public:
  FloatStack(nb::handle array, const char* name, int64_t rows, int64_t cols);
  int64_t experts() const { return array_.shape(0); }
  const Tensor& array() const { return array_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

 private:
  Tensor array_;
  int64_t rows_, cols_;
};

// One expert's (codes (rows, cols/2), scales (rows, cols/16), tensor_scale), contiguous.
Nvfp4View read_matrix(nb::handle arrays, const char* name, int64_t rows, int64_t cols);

// Quantizes each expert when it is asked for, each matrix under a tensor scale of its own. The stacks and the executor
// must outlive it.
std::function<Result<LoadedExpert>(int64_t global_expert)> quantizing_source(const FloatStack& gate,
                                                                             const FloatStack& up,
                                                                             const FloatStack& down,
                                                                             int64_t first_expert, Executor& executor);

}  // namespace nvfp4_moe::python
