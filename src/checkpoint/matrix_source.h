// One expert matrix where it lies in the mapped files: pointers, strides and scalars, as matrix_resolver.h finds them.
// Private to the room.
//
// Rows are output channels, columns run along K. Strides are bytes, so that one form covers tensors per expert
// (row-major), stacks of (N, K) and of (K, N), and slices of rows or columns.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/findings.h"
#include "checkpoint/scale_scan.h"

namespace nvfp4_moe {

// A byte matrix (rows, cols) with strides; one of the two strides is 1 (or the element's size for floats).
struct ByteMatrix {
  const uint8_t* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

struct MatrixSource {
  SourceFormat format = SourceFormat::kFloat;
  int64_t layer = -1;
  int64_t expert = -1;
  std::string codes_name;
  std::string scales_name;
  std::string tensor_scale_name;
  int64_t rows = 0;
  int64_t cols = 0;
  ByteMatrix codes;   // (rows, cols/2) bytes, or (rows, cols) floats of `dtype`
  ByteMatrix scales;  // (rows, cols/16) E4M3 or (rows, cols/32) E8M0; absent for floats
  int phase = 0;      // MXFP4: 1 where the first 16 columns are the second half of their scale's block
  DType dtype = DType::kU8;
  float tensor_scale = 1;  // to be multiplied, whatever the file holds

  struct Span {
    const SafetensorsFile* file = nullptr;
    const std::byte* data = nullptr;
    size_t size_bytes = 0;
  };
  std::vector<Span> spans;  // what release() gives back

  MatrixSource row_slice(int64_t first, int64_t count) const;
  MatrixSource col_slice(int64_t first, int64_t count) const;  // multiples of 16
  // The scales as a contiguous-along-memory matrix for scanning, whichever way the tensor lies.
  ByteMatrix scales_as_stored() const;
  // Asks for what is about to be read, of the slice that this is.
  void prefetch_codes() const;
  void prefetch_scales() const;
};

// Scans the matrix's block scales: NaN, negative, all zero, zero over nonzero codes, implausible magnitude. Adds what
// it finds; false where there is an error. `zero_blocks` counts blocks whose scale is 0 over nonzero codes.
bool check_scales(const MatrixSource& matrix, FindingList& findings, ScaleScan& scan, int64_t& zero_blocks);

// out (rows, cols) contiguous; cache-blocked where the source's columns are not contiguous.
void copy_matrix(const ByteMatrix& matrix, uint8_t* out);

}  // namespace nvfp4_moe
