// The float matrices of an expert as stored in a bf16/fp16/fp32 checkpoint, unquantized.
//
// Covers per-expert tensors (rows, cols) and stacked ones: gate_up [E, 2I, H] with gate first,
// separate [E, I, H], down [E, H, I], and the same with K on axis 1 (llama4: [E, H, 2I], [E, I,
// H]). fetch() reads the values.
#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"

namespace nvfp4_moe::internal {

struct FloatWeights {
  std::string tensor;  // its name in the files
  const TensorFile* file = nullptr;
  uint64_t offset = 0;         // file offset of element (0, 0)
  DType dtype = DType::kBf16;  // BF16, F16 or F32
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements
  int64_t col_stride = 1;  // elements; not 1 if K is not the last axis
  bool stacked = false;    // the tensor holds other experts too

  uint64_t size_bytes() const;    // of this matrix
  Status fetch();                 // before read_row; kIo if the file was cut or written to
  void release() { bytes = {}; }  // frees the memory
  void read_row(int64_t row, float* out) const;  // (cols)
  std::vector<std::byte> bytes;                  // from element (0, 0) to the last, once fetched
};

struct FloatExpert {
  FloatWeights gate;  // (intermediate, hidden)
  FloatWeights up;    // (intermediate, hidden)
  FloatWeights down;  // (hidden, intermediate)
};

// kUnsupported if the checkpoint's format is not kFloat; kBadInput, naming the tensor, if one is
// missing or misshapen.
Result<FloatExpert> float_expert(const Checkpoint& checkpoint, int64_t layer, int64_t expert);

}  // namespace nvfp4_moe::internal
