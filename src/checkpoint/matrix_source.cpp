#include "checkpoint/matrix_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/expert_memory.h"
#include "core/float_formats.h"

namespace nvfp4_moe {

MatrixSource MatrixSource::row_slice(int64_t first, int64_t count) const {
  MatrixSource out = *this;
  out.rows = out.codes.rows = count;
  out.codes.data += first * codes.row_stride;
  if (scales.data != nullptr) {
    out.scales.rows = count;
    out.scales.data += first * scales.row_stride;
  }
  return out;
}

MatrixSource MatrixSource::col_slice(int64_t first, int64_t count) const {
  MatrixSource out = *this;
  out.cols = count;
  if (format == SourceFormat::kFloat) {
    out.codes.cols = count;
    out.codes.data += first * codes.col_stride;
    return out;
  }
  out.codes.cols = count / 2;
  out.codes.data += first / 2 * codes.col_stride;
  const int64_t block = format == SourceFormat::kMxfp4 ? 32 : 16;
  const int64_t begin = first / block;
  out.phase = format == SourceFormat::kMxfp4 ? static_cast<int>(first / 16 % 2) : 0;
  out.scales.data += begin * scales.col_stride;
  out.scales.cols = (first + count + block - 1) / block - begin;
  return out;
}

ByteMatrix MatrixSource::scales_as_stored() const {
  if (scales.col_stride == 1) return scales;
  return {scales.data, scales.cols, scales.rows, scales.col_stride, 1};
}

namespace {

// The bytes from the first element to the last, copied; elem_bytes is 1 but for floats.
Status read_matrix(const SafetensorsFile& file, int64_t elem_bytes, ByteMatrix& m, Storage& storage,
                   ExpertMemory* memory) {
  if (m.data == nullptr || m.rows == 0 || m.cols == 0) return {};
  const int64_t bytes = (m.rows - 1) * m.row_stride + (m.cols - 1) * m.col_stride + elem_bytes;
  const TensorInfo origin;  // begins where the data section does
  const auto from = reinterpret_cast<const std::byte*>(m.data) - file.data(origin);
  const auto size = static_cast<size_t>(bytes);
  std::vector<uint8_t>& to = storage.emplace_back(memory != nullptr ? memory->take(size) : std::vector<uint8_t>(size));
  NVFP4_MOE_TRY(file.read(file.offset(origin) + static_cast<uint64_t>(from), to.data(), to.size()));
  m.data = to.data();
  return {};
}

}  // namespace

Status MatrixSource::read_codes(Storage& storage) {
  if (codes_read || spans.empty()) return {};
  codes_read = true;
  return read_matrix(*spans[0].file, format == SourceFormat::kFloat ? bits(dtype) / 8 : 1, codes, storage, memory);
}

Status MatrixSource::read_scales(Storage& storage) {
  if (scales_read || spans.size() < 2) return {};
  scales_read = true;
  return read_matrix(*spans[1].file, 1, scales, storage, memory);
}

Status MatrixSource::check_unchanged() const {
  for (const Span& span : spans) NVFP4_MOE_TRY(span.file->check_unchanged());
  return {};
}

Result<bool> check_scales(MatrixSource& matrix, Storage& storage, FindingList& findings, ScaleScan& scan,
                          int64_t& zero_blocks) {
  zero_blocks = 0;
  scan = ScaleScan{};
  if (matrix.format == SourceFormat::kFloat) return true;
  NVFP4_MOE_TRY(matrix.read_scales(storage));
  const ByteMatrix stored = matrix.scales_as_stored();
  scan_scales(stored.data, stored.rows, stored.cols, stored.row_stride, scan);
  const auto place = [&](Severity severity, const char* id, const std::string& tensor, std::string expected,
                         std::string actual, int64_t count) {
    findings.add({severity, id, matrix.layer, matrix.expert, tensor, std::move(expected), std::move(actual), count});
  };
  if (matrix.format == SourceFormat::kMxfp4) {
    if (scan.max != 0xFF) return true;
    place(Severity::kError, "block_scale_nan", matrix.scales_name, "E8M0 scales below 0xFF", "NaN (0xFF)", 1);
    return false;
  }
  if (!scan.valid()) {
    const InvalidScales bad = find_invalid_scales(stored.data, stored.rows, stored.cols, stored.row_stride);
    const bool turned = matrix.scales.col_stride != 1;
    const std::string at = fmt::format("0x{:02X} at ({}, {})", bad.first_byte, turned ? bad.first_col : bad.first_row,
                                       turned ? bad.first_row : bad.first_col);
    if (bad.nan > 0) {
      place(Severity::kError, "block_scale_nan", matrix.scales_name, "bytes 0x00 to 0x7E",
            fmt::format("{} NaN, first invalid byte {}", bad.nan, at), static_cast<int64_t>(bad.nan));
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
        if (matrix.scales.data[r * matrix.scales.row_stride + b * matrix.scales.col_stride] != 0) continue;
        const uint8_t* codes = matrix.codes.data + r * matrix.codes.row_stride + b * 8 * matrix.codes.col_stride;
        bool nonzero = false;
        for (int64_t i = 0; i < 8; ++i) nonzero = nonzero || (codes[i * matrix.codes.col_stride] & 0x77) != 0;
        zero_blocks += nonzero ? 1 : 0;
      }
    }
    if (scan.max == 0) {
      const bool lost = zero_blocks > 0;
      place(lost ? Severity::kError : Severity::kWarning, "all_zero_block_scales", matrix.scales_name,
            "at least one block scale above 0", lost ? "all 0, over nonzero codes" : "all 0: a matrix of zeros", 1);
      return !lost;
    }
    if (zero_blocks > 0) {
      place(Severity::kWarning, "zero_scale_nonzero_codes", matrix.codes_name, "codes 0 where the block scale is 0",
            "nonzero codes (loading sets them to 0)", zero_blocks);
    }
  }
  // The largest weight these scales can express. A reciprocal tensor scale turns an amax of a into about 2688^2 / a: so
  // 2688 divides the two readings of any plausible matrix, and no trained weight comes near it.
  const double largest = 6.0 * static_cast<double>(e4m3_to_float(scan.max)) * static_cast<double>(matrix.tensor_scale);
  if (largest > kNvfp4Range) {
    const bool inverse = matrix.format == SourceFormat::kCompressedTensors;
    place(Severity::kError, "reciprocal_scale_direction", matrix.tensor_scale_name,
          inverse ? "2688/amax, as compressed-tensors stores it" : "amax/2688, as ModelOpt stores it",
          fmt::format("a scale under which weights reach {:.3g}: it looks like the reciprocal", largest), 1);
    return false;
  }
  return true;
}

void copy_matrix(const ByteMatrix& matrix, uint8_t* out) {
  if (matrix.col_stride == 1) {
    for (int64_t r = 0; r < matrix.rows; ++r) {
      std::memcpy(out + r * matrix.cols, matrix.data + r * matrix.row_stride, static_cast<size_t>(matrix.cols));
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

}  // namespace nvfp4_moe
