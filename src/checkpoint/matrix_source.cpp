#include "checkpoint/matrix_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/float_formats.h"

namespace nvfp4_moe {
namespace {

float load_float(const std::byte* at) {
  float value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

float reciprocal(float value) { return static_cast<float>(1.0 / static_cast<double>(value)); }

std::string expected_tensor(const std::vector<int64_t>& shape, DType dtype) {
  return fmt::format("{} {}", shape_string(shape), to_string(dtype));
}

// Whether the tensor has these dimensions.
bool has_shape(const TensorInfo& info, const std::vector<int64_t>& shape) { return info.shape == shape; }

}  // namespace

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

// The bytes from the first element to the last; elem_bytes is 1 but for floats.
void prefetch(const SafetensorsFile& file, const ByteMatrix& m, int64_t elem_bytes) {
  if (m.data == nullptr || m.rows == 0 || m.cols == 0) return;
  const int64_t bytes = (m.rows - 1) * m.row_stride + (m.cols - 1) * m.col_stride + elem_bytes;
  file.prefetch(reinterpret_cast<const std::byte*>(m.data), static_cast<size_t>(bytes));
}

}  // namespace

void MatrixSource::prefetch_codes() const {
  if (!spans.empty()) prefetch(*spans[0].file, codes, format == SourceFormat::kFloat ? bits(dtype) / 8 : 1);
}

void MatrixSource::prefetch_scales() const {
  if (spans.size() > 1) prefetch(*spans[1].file, scales, 1);
}

const TensorInfo* MatrixResolver::find(const std::string& name, TensorIndex::Ref& ref) const {
  ref = index_.find(name);
  return ref.info;
}

// A [] or [1] scalar; for stacked experts also one of E. False with `actual` where it is not.
bool MatrixResolver::scalar(const ExpertNames& names, const std::string& name, int64_t expert, TensorIndex::Ref& ref,
                            float& out, std::string& actual) const {
  if (find(name, ref) == nullptr) {
    actual = "no such tensor";
    return false;
  }
  const TensorInfo& info = *ref.info;
  const uint64_t count = info.size_bytes() / 4;
  const bool per_expert = names.role == TensorRole::kStacked && count == static_cast<uint64_t>(num_experts_) &&
                          count > 1 && info.shape.front() == num_experts_;
  if (info.dtype != DType::kF32 || (count != 1 && !per_expert)) {
    actual = describe(info);
    return false;
  }
  out = load_float(ref.data() + (per_expert ? expert * 4 : 0));
  return true;
}

InputScale MatrixResolver::input_scale(const ExpertNames& names, int64_t expert, Projection projection) const {
  InputScale out;
  if (names.parts.input_scale.empty()) return out;
  out.name = names.name(expert, projection, names.parts.input_scale);
  TensorIndex::Ref ref;
  std::string actual;
  if (!scalar(names, out.name, expert, ref, out.stored, actual)) {
    out.finding = "input_scale_missing";
    return out;
  }
  const bool inverse = names.parts.format == SourceFormat::kCompressedTensors;
  out.value = inverse ? reciprocal(out.stored) : out.stored;
  if (std::isnan(out.stored)) {
    out.finding = "input_scale_nan";
  } else if (std::isinf(out.stored)) {
    out.finding = "input_scale_infinite";
  } else if (out.stored == 0) {
    out.finding = "input_scale_zero";
  } else if (out.stored < 0) {
    out.finding = "input_scale_negative";
  } else if (!std::isnormal(out.stored) || !std::isnormal(out.value)) {
    out.finding = "input_scale_denormal";
  } else {
    out.usable = true;
    if (out.stored == 1) out.finding = "input_scale_one";
  }
  return out;
}

bool MatrixResolver::resolve(const ExpertNames& names, int64_t layer, int64_t expert, Projection projection,
                             int64_t rows, int64_t cols, MatrixSource& out, FindingList& findings) const {
  const FormatParts& parts = names.parts;
  out = MatrixSource{};
  out.format = parts.format;
  out.layer = layer;
  out.expert = expert;
  out.rows = rows;
  out.cols = cols;
  out.codes_name = names.name(expert, projection, parts.codes);
  const auto fail = [&](const char* id, const std::string& tensor, std::string expected, std::string actual) {
    findings.add({Severity::kError, id, layer, expert, tensor, std::move(expected), std::move(actual)});
    return false;
  };
  if (rows % 16 != 0 || cols % 16 != 0) {
    return fail("misaligned", out.codes_name, "dimensions that are multiples of 16",
                fmt::format("({}, {})", rows, cols));
  }
  TensorIndex::Ref codes;
  if (find(out.codes_name, codes) == nullptr) {
    return fail("missing_expert", out.codes_name, "a tensor", "no such tensor");
  }
  const bool floats = parts.format == SourceFormat::kFloat;
  const bool mxfp4 = parts.format == SourceFormat::kMxfp4;
  out.dtype = codes.info->dtype;
  const DType want_dtype = floats ? (is_activation(out.dtype) ? out.dtype : DType::kBf16) : DType::kU8;
  const bool dtype_ok = floats
                            ? is_activation(out.dtype)
                            : out.dtype == DType::kU8 || out.dtype == DType::kF4 || (mxfp4 && out.dtype == DType::kI8);
  // F4 counts elements, bytes count pairs.
  const int64_t width = floats || out.dtype == DType::kF4 ? cols : cols / 2;
  const int64_t bytes = floats ? bits(out.dtype) / 8 : 1;  // of one column step
  const int64_t byte_cols = floats ? cols : cols / 2;

  TensorIndex::Ref scales;
  const int64_t group = mxfp4 ? 32 : 16;
  const int64_t scale_cols = (cols + group - 1) / group;
  if (!floats) {
    out.scales_name = names.name(expert, projection, parts.scales);
    if (find(out.scales_name, scales) == nullptr) {
      return fail("missing_scale", out.scales_name, "a tensor", "no such tensor");
    }
  }

  const int64_t stack = names.role == TensorRole::kStacked ? num_experts_ : 0;
  const int64_t stacked_rows = stack > 0 && projection != Projection::kDown ? 2 * rows : rows;  // gate above up
  const auto shape = [&](bool k_first, int64_t k) {
    std::vector<int64_t> dims;
    if (stack > 0) dims.push_back(stack);
    dims.push_back(k_first ? k : stacked_rows);
    dims.push_back(k_first ? stacked_rows : k);
    return dims;
  };
  bool k_first = stack > 0 && names.stacked_k_first;
  const auto fits = [&](bool order) {
    return has_shape(*codes.info, shape(order, width)) && (floats || has_shape(*scales.info, shape(order, scale_cols)));
  };
  if (stack > 0 && !fits(k_first) && fits(!k_first)) k_first = !k_first;  // the shapes say it
  const std::vector<int64_t> codes_shape = shape(k_first, width);
  if (!dtype_ok) {
    return fail("dtype_mismatch", out.codes_name, expected_tensor(codes_shape, want_dtype), describe(*codes.info));
  }
  if (!has_shape(*codes.info, codes_shape)) {
    return fail("shape_mismatch", out.codes_name, expected_tensor(codes_shape, out.dtype), describe(*codes.info));
  }
  const int64_t inner = k_first ? stacked_rows : byte_cols;  // elements of one stored row
  out.codes = {reinterpret_cast<const uint8_t*>(codes.data()), rows, byte_cols, (k_first ? 1 : inner) * bytes,
               (k_first ? inner : 1) * bytes};
  const int64_t row0 = stack > 0 && projection == Projection::kUp ? rows : 0;
  const uint64_t per_expert = codes.info->size_bytes() / static_cast<uint64_t>(std::max<int64_t>(stack, 1));
  const std::byte* codes_begin = codes.data() + (stack > 0 ? static_cast<uint64_t>(expert) * per_expert : 0);
  out.codes.data = reinterpret_cast<const uint8_t*>(codes_begin) + row0 * out.codes.row_stride;
  out.spans.push_back({codes.file, codes_begin, per_expert});
  if (floats) return true;

  const DType scale_dtype = mxfp4 ? DType::kF8E8M0 : DType::kF8E4M3;
  const std::vector<int64_t> scales_shape = shape(k_first, scale_cols);
  if (scales.info->dtype != scale_dtype && !(mxfp4 && scales.info->dtype == DType::kU8)) {
    return fail("dtype_mismatch", out.scales_name, expected_tensor(scales_shape, scale_dtype), describe(*scales.info));
  }
  if (!has_shape(*scales.info, scales_shape)) {
    for (const int64_t other : {8, 16, 32, 64, 128}) {
      if (other == group || cols % other != 0 || !has_shape(*scales.info, shape(k_first, cols / other))) continue;
      return fail("group_size", out.scales_name,
                  fmt::format("{}: one scale per {} elements", expected_tensor(scales_shape, scale_dtype), group),
                  fmt::format("{}: one per {}", describe(*scales.info), other));
    }
    return fail("shape_mismatch", out.scales_name, expected_tensor(scales_shape, scale_dtype), describe(*scales.info));
  }
  const int64_t scales_inner = k_first ? stacked_rows : scale_cols;
  out.scales = {nullptr, rows, scale_cols, k_first ? 1 : scales_inner, k_first ? scales_inner : 1};
  const uint64_t scales_per_expert = scales.info->size_bytes() / static_cast<uint64_t>(std::max<int64_t>(stack, 1));
  const std::byte* scales_begin = scales.data() + (stack > 0 ? static_cast<uint64_t>(expert) * scales_per_expert : 0);
  out.scales.data = reinterpret_cast<const uint8_t*>(scales_begin) + row0 * out.scales.row_stride;
  out.spans.push_back({scales.file, scales_begin, scales_per_expert});
  if (mxfp4) return true;

  out.tensor_scale_name = names.name(expert, projection, parts.tensor_scale);
  TensorIndex::Ref scale;
  std::string actual;
  float stored = 0;
  if (!scalar(names, out.tensor_scale_name, expert, scale, stored, actual)) {
    return fail(scale.info == nullptr ? "missing_scale" : "shape_mismatch", out.tensor_scale_name, "() or (1) F32",
                actual);
  }
  out.spans.push_back({scale.file, scale.data(), static_cast<size_t>(scale.info->size_bytes())});
  const bool inverse = parts.format == SourceFormat::kCompressedTensors;
  out.tensor_scale = inverse ? reciprocal(stored) : stored;
  const char* id = !std::isfinite(stored)                                      ? "tensor_scale_nonfinite"
                   : stored == 0                                               ? "tensor_scale_zero"
                   : stored < 0                                                ? "tensor_scale_negative"
                   : !std::isfinite(out.tensor_scale) || out.tensor_scale == 0 ? "tensor_scale_nonfinite"
                                                                               : nullptr;
  if (id != nullptr) return fail(id, out.tensor_scale_name, "a finite number > 0", float_string(stored));
  return true;
}

bool check_scales(const MatrixSource& matrix, FindingList& findings, ScaleScan& scan, int64_t& zero_blocks) {
  zero_blocks = 0;
  scan = ScaleScan{};
  matrix.prefetch_scales();
  if (matrix.format == SourceFormat::kFloat) return true;
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
