// llama.cpp's importance matrices in their first format (imatrix.dat): for each weight tensor, sums
// of squares of the inputs of its columns. Newer ones are GGUF files, with NAME.in_sum2 and
// NAME.counts.
//
// Format, little-endian: int32 entries; each: int32 length, name, int32 calls, int32 values, values
// x F32. These are the sums over calls, relative to the rows that the tensor multiplied. Stacked
// experts follow one another, and an expert without rows has all 1. Then, in most files: int32
// chunks, int32 length, the data set's name.
//
// The reader refuses the following, with a message that names the fault and its place: counts and
// lengths beyond the file, names that occur twice, bytes after the end.
#pragma once

#include <string>

#include "core/status.h"
#include "safetensors/tensor_file.h"

namespace nvfp4_moe::internal {

// Its tensors are F32 of one dimension, under the names of the weights:
// "blk.0.ffn_down_exps.weight".
class ImatrixFile : public TensorFile {
 public:
  static Result<ImatrixFile> open(const std::string& path);

 private:
  ImatrixFile() = default;
  const TensorTable& table() const override { return table_; }
  TensorTable table_;
};

}  // namespace nvfp4_moe::internal
