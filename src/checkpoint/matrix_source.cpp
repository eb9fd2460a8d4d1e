#include "checkpoint/matrix_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/expert_memory.h"
#include "checkpoint/float_source.h"
#include "core/float_formats.h"
#include "core/printable.h"
#include "gguf/blocks.h"

namespace nvfp4_moe::internal {

namespace {

// Keeps rows [first, first + count), or such columns.
void cut_rows(MatrixPlace& m, int64_t first, int64_t count) {
  m.offset += static_cast<uint64_t>(first * m.row_stride);
  m.rows = count;
}
void cut_rows(ByteMatrix& m, int64_t first, int64_t count) {
  m.data += first * m.row_stride;
  m.rows = count;
}
void cut_cols(MatrixPlace& m, int64_t first, int64_t count) {
  m.offset += static_cast<uint64_t>(first * m.col_stride);
  m.cols = count;
}
void cut_cols(ByteMatrix& m, int64_t first, int64_t count) {
  m.data += first * m.col_stride;
  m.cols = count;
}

std::vector<uint8_t>& take_bytes(Storage& storage, ExpertMemory* memory, int64_t size_bytes) {
  const auto size = static_cast<size_t>(size_bytes);
  return storage.emplace_back(memory != nullptr ? memory->take(size) : std::vector<uint8_t>(size));
}

// Copies the bytes from the first element to the last. elem_bytes is 1 except for floats.
Status read_matrix(const MatrixPlace& place, int64_t elem_bytes, Storage& storage,
                   ExpertMemory* memory, ByteMatrix& out) {
  if (out.data != nullptr || place.file == nullptr || place.rows == 0 || place.cols == 0) return {};
  std::vector<uint8_t>& to = take_bytes(
      storage, memory,
      (place.rows - 1) * place.row_stride + (place.cols - 1) * place.col_stride + elem_bytes);
  NVFP4_MOE_TRY(place.file->read(place.offset, to.data(), to.size()));
  out = {to.data(), place.rows, place.cols, place.row_stride, place.col_stride};
  return {};
}

}  // namespace

MatrixSource MatrixSource::row_slice(int64_t first, int64_t count) const {
  MatrixSource out = *this;
  out.rows = count;
  cut_rows(out.codes_place, first, count);
  if (codes.data != nullptr) cut_rows(out.codes, first, count);
  if (scales_place.file != nullptr) cut_rows(out.scales_place, first, count);
  if (scales.data != nullptr) cut_rows(out.scales, first, count);
  if (bias_place.file != nullptr) cut_rows(out.bias_place, first, count);
  return out;
}

MatrixSource MatrixSource::col_slice(int64_t first, int64_t count) const {
  MatrixSource out = *this;
  out.cols = count;
  out.bias_elsewhere = bias_elsewhere || first > 0;
  const bool floats = format == SourceFormat::kFloat;
  const int64_t per_byte = floats ? 1 : 2;
  if (blocks != nullptr) {
    const int64_t first_block = (skipped + first) / blocks->elems;
    const int64_t end_block = (skipped + first + count + blocks->elems - 1) / blocks->elems;
    cut_cols(out.codes_place, first_block * blocks->size_bytes,
             (end_block - first_block) * blocks->size_bytes);
    out.skipped = skipped + first - first_block * blocks->elems;
  } else {
    cut_cols(out.codes_place, first / per_byte, count / per_byte);
  }
  if (codes.data != nullptr) cut_cols(out.codes, first / per_byte, count / per_byte);
  if (floats) return out;
  const int64_t begin = first / scale_elems();
  const int64_t end = (first + count + scale_elems() - 1) / scale_elems();
  out.phase = format == SourceFormat::kMxfp4 ? static_cast<int>(first / 16 % 2) : 0;
  if (blocks == nullptr) cut_cols(out.scales_place, begin, end - begin);
  if (scales.data != nullptr) cut_cols(out.scales, begin, end - begin);
  return out;
}

ByteMatrix MatrixSource::scales_as_stored() const {
  if (scales.col_stride == 1) return scales;
  return {scales.data, scales.cols, scales.rows, scales.col_stride, 1};
}

uint64_t MatrixSource::codes_bytes() const {
  const int64_t elem_bits = format == SourceFormat::kFloat ? bits(dtype) : 4;
  return static_cast<uint64_t>(rows * cols * elem_bits / 8);
}

uint64_t MatrixSource::scales_bytes() const {
  if (format == SourceFormat::kFloat) return 0;
  return static_cast<uint64_t>(rows * ((cols + scale_elems() - 1) / scale_elems()));
}

// Reads blocks a few rows at a time, so memory beyond the result stays small for any matrix.
Status MatrixSource::read_blocks(Storage& storage) {
  if (codes.data != nullptr || rows == 0 || cols == 0) return {};
  const int64_t row_blocks = codes_place.cols / blocks->size_bytes;
  const int64_t codes_stride = row_blocks * blocks->elems / 2;
  const int64_t scales_stride = row_blocks * (blocks->elems / scale_elems());
  uint8_t* to_codes = take_bytes(storage, memory, rows * codes_stride).data();
  uint8_t* to_scales = take_bytes(storage, memory, rows * scales_stride).data();
  const int64_t chunk = std::clamp<int64_t>((int64_t{1} << 20) / codes_place.row_stride, 1, rows);
  std::vector<uint8_t> bytes(
      static_cast<size_t>((chunk - 1) * codes_place.row_stride + codes_place.cols));
  for (int64_t r0 = 0; r0 < rows; r0 += chunk) {
    const int64_t count = std::min(chunk, rows - r0);
    NVFP4_MOE_TRY(codes_place.file->read(
        codes_place.offset + static_cast<uint64_t>(r0 * codes_place.row_stride), bytes.data(),
        static_cast<size_t>((count - 1) * codes_place.row_stride + codes_place.cols)));
    for (int64_t r = 0; r < count; ++r) {
      const auto unpack =
          format == SourceFormat::kMxfp4 ? unpack_mxfp4_blocks : unpack_nvfp4_blocks;
      unpack(bytes.data() + r * codes_place.row_stride, row_blocks,
             to_codes + (r0 + r) * codes_stride, to_scales + (r0 + r) * scales_stride);
    }
  }
  codes = {to_codes + skipped / 2, rows, cols / 2, codes_stride, 1};
  scales = {to_scales + skipped / scale_elems(), rows,
            (skipped % scale_elems() + cols + scale_elems() - 1) / scale_elems(), scales_stride, 1};
  return {};
}

Status MatrixSource::read_codes(Storage& storage) {
  if (blocks != nullptr) return read_blocks(storage);
  return read_matrix(codes_place, format == SourceFormat::kFloat ? bits(dtype) / 8 : 1, storage,
                     memory, codes);
}

Status MatrixSource::read_scales(Storage& storage) {
  if (blocks != nullptr) return read_blocks(storage);
  if (csf) return read_csf(storage);
  return read_matrix(scales_place, 1, storage, memory, scales);
}

Result<std::vector<float>> MatrixSource::read_bias() const {
  if (bias_place.file == nullptr) return std::vector<float>();
  std::vector<float> bias(static_cast<size_t>(rows));
  Storage storage;
  ByteMatrix bytes;
  NVFP4_MOE_TRY(read_matrix(bias_place, bits(bias_dtype) / 8, storage, nullptr, bytes));
  rows_to_float({bytes.data, bias_dtype, rows, 1, bytes.row_stride, bytes.col_stride}, 0, rows,
                bias.data());
  for (size_t i = 0; i < bias.size(); ++i)
    if (!std::isfinite(bias[i]))
      return bad_input(fmt::format("{}: expected finite biases, got {} of row {}",
                                   printable(bias_name, 400), bias[i], i));
  if (bias_elsewhere) std::fill(bias.begin(), bias.end(), 0.0f);
  return bias;
}

Status MatrixSource::check_unchanged() const {
  for (const TensorFile* file : {codes_place.file, scales_place.file, tensor_scale_file,
                                 bias_place.file, csf ? csf->exceptions_file : nullptr})
    if (file != nullptr) NVFP4_MOE_TRY(file->check_unchanged());
  return {};
}

Result<bool> check_zeros(MatrixSource& matrix, Storage& storage, FindingList& findings) {
  if (matrix.unusable_scale.empty()) return true;
  NVFP4_MOE_TRY(matrix.read_codes(storage));
  const ByteMatrix& codes = matrix.codes;
  matrix.zeros = true;
  for (int64_t r = 0; r < codes.rows; ++r) {
    for (int64_t c = 0; c < codes.cols; ++c)
      matrix.zeros =
          matrix.zeros && (codes.data[r * codes.row_stride + c * codes.col_stride] & 0x77) == 0;
  }
  const bool zero = matrix.unusable_scale == "0";
  findings.add({matrix.zeros ? Severity::kWarning : Severity::kError,
                matrix.zeros ? "dead_matrix"
                : zero       ? "tensor_scale_zero"
                             : "tensor_scale_nonfinite",
                matrix.layer, matrix.expert, matrix.tensor_scale_name, "a finite number > 0",
                matrix.unusable_scale +
                    (matrix.zeros ? " over codes that are all 0: a matrix of zeros" : "")});
  return matrix.zeros;
}

Result<bool> check_scales(MatrixSource& matrix, Storage& storage, FindingList& findings,
                          ScaleScan& scan, int64_t& zero_blocks) {
  zero_blocks = 0;
  scan = ScaleScan{};
  if (matrix.format == SourceFormat::kFloat || matrix.zeros) return true;
  if (const Status read = matrix.read_scales(storage); read.code() == Code::kBadInput) {
    findings.add({Severity::kError, "csf_invalid", matrix.layer, matrix.expert, matrix.scales_name,
                  "streams of CSF", read.message()});
    return false;
  } else if (!read.ok()) {
    return read;
  }
  const ByteMatrix stored = matrix.scales_as_stored();
  scan_scales(stored.data, stored.rows, stored.cols, stored.row_stride, scan);
  const auto place = [&](Severity severity, const char* id, const std::string& tensor,
                         std::string expected, std::string actual, int64_t count) {
    findings.add({severity, id, matrix.layer, matrix.expert, tensor, std::move(expected),
                  std::move(actual), count});
  };
  if (matrix.format == SourceFormat::kMxfp4) {
    if (scan.max != 0xFF) return true;
    place(Severity::kError, "block_scale_nan", matrix.scales_name, "E8M0 scales below 0xFF",
          "NaN (0xFF)", 1);
    return false;
  }
  if (!scan.valid()) {
    const InvalidScales bad =
        find_invalid_scales(stored.data, stored.rows, stored.cols, stored.row_stride);
    const bool turned = matrix.scales.col_stride != 1;
    const std::string at =
        fmt::format("0x{:02X} at ({}, {})", bad.first_byte, turned ? bad.first_col : bad.first_row,
                    turned ? bad.first_row : bad.first_col);
    if (bad.nan > 0) {
      place(Severity::kError, "block_scale_nan", matrix.scales_name, "bytes 0x00 to 0x7E",
            fmt::format("{} NaN, first invalid byte {}", bad.nan, at),
            static_cast<int64_t>(bad.nan));
    }
    if (bad.negative > 0) {
      place(Severity::kError, "block_scale_negative", matrix.scales_name, "bytes 0x00 to 0x7E",
            fmt::format("{} with the sign bit, first invalid byte {}", bad.negative, at),
            static_cast<int64_t>(bad.negative));
    }
    return false;
  }
  if (scan.has_zero()) {
    NVFP4_MOE_TRY(matrix.read_codes(storage));
    for (int64_t r = 0; r < matrix.rows; ++r) {
      for (int64_t b = 0; b < matrix.cols / 16; ++b) {
        if (matrix.scales.data[r * matrix.scales.row_stride + b * matrix.scales.col_stride] != 0)
          continue;
        const uint8_t* codes =
            matrix.codes.data + r * matrix.codes.row_stride + b * 8 * matrix.codes.col_stride;
        bool nonzero = false;
        for (int64_t i = 0; i < 8; ++i)
          nonzero = nonzero || (codes[i * matrix.codes.col_stride] & 0x77) != 0;
        zero_blocks += nonzero ? 1 : 0;
      }
    }
    if (scan.max == 0) {
      const bool lost = zero_blocks > 0;
      place(lost ? Severity::kError : Severity::kWarning, "all_zero_block_scales",
            matrix.scales_name, "at least one block scale above 0",
            lost ? "all 0, over nonzero codes" : "all 0: a matrix of zeros", 1);
      return !lost;
    }
    if (zero_blocks > 0) {
      place(Severity::kWarning, "zero_scale_nonzero_codes", matrix.codes_name,
            "codes 0 where the block scale is 0", "nonzero codes (loading sets them to 0)",
            zero_blocks);
    }
  }
  // The largest weight that these scales can represent. A reciprocal tensor scale turns an amax of
  // a into about 2688^2 / a. So 2688 separates the two interpretations of any plausible matrix, and
  // no trained weight comes near it.
  const double largest =
      6.0 * static_cast<double>(e4m3_to_float(scan.max)) * static_cast<double>(matrix.tensor_scale);
  if (largest > kNvfp4Range) {
    const bool inverse = matrix.format == SourceFormat::kCompressedTensors;
    place(
        Severity::kError, "reciprocal_scale_direction", matrix.tensor_scale_name,
        inverse ? "2688/amax, as compressed-tensors stores it" : "amax/2688, as ModelOpt stores it",
        fmt::format("a scale under which weights reach {:.3g}: it seems to be the reciprocal",
                    largest),
        1);
    return false;
  }
  return true;
}

void copy_matrix(const ByteMatrix& matrix, uint8_t* out) {
  if (matrix.col_stride == 1) {
    for (int64_t r = 0; r < matrix.rows; ++r) {
      std::memcpy(out + r * matrix.cols, matrix.data + r * matrix.row_stride,
                  static_cast<size_t>(matrix.cols));
    }
    return;
  }
  constexpr int64_t kTile = 64;  // a tile's rows of both sides stay in the first level of cache
  for (int64_t r0 = 0; r0 < matrix.rows; r0 += kTile) {
    const int64_t r1 = std::min(matrix.rows, r0 + kTile);
    for (int64_t c0 = 0; c0 < matrix.cols; c0 += kTile) {
      const int64_t c1 = std::min(matrix.cols, c0 + kTile);
      for (int64_t r = r0; r < r1; ++r) {
        for (int64_t c = c0; c < c1; ++c) {
          out[r * matrix.cols + c] = matrix.data[r * matrix.row_stride + c * matrix.col_stride];
        }
      }
    }
  }
}

}  // namespace nvfp4_moe::internal
