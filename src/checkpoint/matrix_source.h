// One expert matrix and its location in the files: places, strides and scalars, as
// matrix_resolver.h finds them. Private to src/checkpoint.
//
// A matrix is a place in its file until read_codes and read_scales copy its bytes
// (TensorFile::read). From then on it is a matrix in memory. These are separate types, because a
// place has no bytes to read.
//
// Rows are output channels, columns run along K. Strides are bytes, so one form covers tensors per
// expert (row-major), stacks of (N, K) and of (K, N), and slices of rows or columns. ggml's blocks
// hold codes and scales: they have one place, and reading either reads both.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/findings.h"
#include "checkpoint/scale_scan.h"
#include "core/csf.h"

namespace nvfp4_moe::internal {

// A byte matrix (rows, cols) in a file; one of the two strides is 1 (or the element's size for
// floats).
struct MatrixPlace {
  const TensorFile* file = nullptr;  // null: there is no such matrix
  uint64_t offset = 0;               // of element (0, 0), from the file's first byte
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

// The same in memory.
struct ByteMatrix {
  const uint8_t* data = nullptr;  // element (0, 0); null: not read
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

// Scales that are stored as two streams (core/csf.h): those of a whole matrix (rows, cols).
struct CsfPlace {
  CsfCodec codec = CsfCodec::kNvfp4;
  int64_t rows = 0;
  int64_t cols = 0;
  const TensorFile* fixed_file = nullptr;
  uint64_t fixed_offset = 0;
  const TensorFile* exceptions_file = nullptr;
  uint64_t exceptions_offset = 0;
  int64_t exceptions = 0;  // 32-bit words

  uint64_t size_bytes() const {
    return static_cast<uint64_t>(csf_fixed_bytes(codec, rows, cols) + 4 * exceptions);
  }
};

using Storage = std::vector<std::vector<uint8_t>>;  // as in LoadedExpert

struct MatrixSource {
  SourceFormat format = SourceFormat::kFloat;
  int64_t layer = -1;
  int64_t expert = -1;
  std::string codes_name;
  std::string scales_name;
  std::string tensor_scale_name;
  int64_t rows = 0;
  int64_t cols = 0;
  MatrixPlace codes_place;  // (rows, cols/2) bytes, (rows, cols) floats of `dtype`, or (rows, ...)
                            // bytes of `blocks`
  MatrixPlace
      scales_place;  // (rows, cols/16) E4M3 or (rows, cols/32) E8M0; unused for floats and blocks
  // If set, the scales are coded. scales_place is then in decoded bytes: its offset is that of
  // element (0, 0) among the decoded scales of the whole matrix.
  std::optional<CsfPlace> csf;
  ByteMatrix codes;   // filled by read_codes from codes_place
  ByteMatrix scales;  // filled by read_scales from scales_place
  int phase = 0;      // MXFP4: 1 if the first 16 columns are the second half of their scale's block
  DType dtype = DType::kU8;
  const BlockType* blocks = nullptr;  // ggml's block type of codes_place
  int64_t skipped = 0;     // columns of the first of these blocks that precede the matrix
  float tensor_scale = 1;  // a factor, also if the file has its reciprocal
  std::string
      unusable_scale;  // the stored scale if it is 0 or Inf, which is legal over zero codes only
  bool zeros = false;  // such a matrix; check_zeros has found its codes to be 0
  const TensorFile* tensor_scale_file = nullptr;  // null if it is not in a file
  std::string bias_name;
  MatrixPlace bias_place;  // (rows, 1) numbers of bias_dtype; no file if the matrix has no bias
  DType bias_dtype = DType::kBf16;
  // columns do not begin at 0: another rank adds the bias, and this one adds zeros
  bool bias_elsewhere = false;

  MatrixSource row_slice(int64_t first, int64_t count) const;
  MatrixSource col_slice(int64_t first, int64_t count) const;  // multiples of 16
  // Bytes of the slice's codes (or floats) and of its block scales, in a file or in memory.
  uint64_t codes_bytes() const;
  uint64_t scales_bytes() const;
  // Bytes that the scales of a whole matrix take in the files: fewer if they are coded.
  uint64_t stored_scales_bytes() const { return csf ? csf->size_bytes() : scales_bytes(); }
  // The scales that were read, as a matrix whose columns are contiguous in memory, for scanning.
  // Rows and columns are swapped if the tensor is stored that way.
  ByteMatrix scales_as_stored() const;
  // Copies this slice from the file to `storage`, so that codes or scales point there. Does nothing
  // if that was done. `storage` must outlive the matrix and its copies. kBadInput if the
  // scales are coded and the streams are not sound.
  Status read_codes(Storage& storage);
  Status read_scales(Storage& storage);
  // The bias (rows) in fp32, finite; empty if the matrix has no bias. kBadInput, naming the tensor,
  // if it is not finite.
  Result<std::vector<float>> read_bias() const;
  // kIo if a file of the matrix was written to since it was opened.
  Status check_unchanged() const;

  ExpertMemory* memory = nullptr;  // source of the copies' memory; may be null

 private:
  int64_t scale_elems() const {
    return format == SourceFormat::kMxfp4 ? 32 : 16;
  }  // columns that share a scale
  Status read_blocks(Storage& storage);
  Status read_csf(Storage& storage);
};

// Checks the codes of a whole matrix with an unusable tensor scale. Producers write 0, or its
// reciprocal Inf, for an expert that no token trained. Adds a warning and sets `zeros`, or returns
// false with an error if a code is not 0.
Result<bool> check_zeros(MatrixSource& matrix, Storage& storage, FindingList& findings);

// Scans the matrix's block scales: NaN, negative, all zero, zero over nonzero codes, implausible
// magnitude. Adds findings and returns false if there is an error. `zero_blocks` counts blocks
// whose scale is 0 over nonzero codes. Reads the scales, and the codes if a scale is 0, unless they
// have been read.
Result<bool> check_scales(MatrixSource& matrix, Storage& storage, FindingList& findings,
                          ScaleScan& scan, int64_t& zero_blocks);

// Copies to out (rows, cols), contiguous. Cache-blocked if the source's columns are not contiguous.
void copy_matrix(const ByteMatrix& matrix, uint8_t* out);

}  // namespace nvfp4_moe::internal
