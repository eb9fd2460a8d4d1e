// Checks a stored tensor's shape against the config and the format. The shapes show which axis of a
// stack is K. If one tensor's shape fits both orders, the other tensor's shape decides.
#include "checkpoint/matrix_resolver.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace nvfp4_moe::internal {
namespace {

float reciprocal(float value) { return static_cast<float>(1.0 / static_cast<double>(value)); }

std::string expected_tensor(const std::vector<int64_t>& shape, DType dtype) {
  return fmt::format("{} {}", shape_string(shape), to_string(dtype));
}

// Whether the tensor has these dimensions.
bool has_shape(const TensorInfo& info, const std::vector<int64_t>& shape) {
  return info.shape == shape;
}

// Width of `info` along K, in codes (or floats).
int64_t stored_width(SourceFormat format, const TensorInfo& info, int64_t cols) {
  return format == SourceFormat::kFloat || info.dtype == DType::kF4
             ? cols
             : cols / 2;  // F4 counts elements
}

// File offset of the expert's bytes: in its own tensor, or in a stack of `stack` experts (0: no
// stack).
uint64_t expert_offset(const TensorIndex::Ref& tensor, int64_t stack, int64_t expert) {
  const uint64_t begin = tensor.file->offset(*tensor.info);
  if (stack == 0) return begin;
  return begin +
         static_cast<uint64_t>(expert) * (tensor.info->size_bytes() / static_cast<uint64_t>(stack));
}

}  // namespace

// The shapes that a matrix's tensors have in either order of their axes.
struct MatrixResolver::Shapes {
  int64_t stack = 0;  // experts in the stack, 0 for a tensor of one expert
  int64_t rows = 0;   // stored rows: gate above up if both are in one tensor

  // gpt-oss: 16 bytes of each 32 elements along K are an axis of their own
  bool in_blocks = false;

  std::vector<int64_t> of_codes(bool k_first, int64_t k) const {
    if (in_blocks) return {stack, rows, k / 16, 16};
    return of(k_first, k);
  }
  std::vector<int64_t> of(bool k_first, int64_t k) const {
    std::vector<int64_t> dims;
    if (stack > 0) dims.push_back(stack);
    dims.push_back(k_first ? k : rows);
    dims.push_back(k_first ? rows : k);
    return dims;
  }
};

const TensorInfo* MatrixResolver::find(const std::string& name, TensorIndex::Ref& ref) const {
  ref = index_.find(name);
  return ref.info;
}

// Reads a [] or [1] scalar; for stacked experts also one of [E]. A tensor of gate and up may have a
// scalar for each, in the order of their rows: [2], or [E, 2] for stacked experts. Returns false
// and sets `actual` for any other shape.
bool MatrixResolver::scalar(const ExpertNames& names, const std::string& name, int64_t expert,
                            Projection projection, TensorIndex::Ref& ref, float& out,
                            std::string& actual, bool& readable) const {
  readable = true;
  if (find(name, ref) == nullptr) {
    actual = index_.absence(name);
    return false;
  }
  const TensorInfo& info = *ref.info;
  const auto count = static_cast<int64_t>(info.size_bytes() / 4);
  const int64_t stack = names.role == TensorRole::kStacked ? num_experts_ : 1;
  const bool per_expert = stack > 1 && count == stack && info.shape.front() == stack;
  const bool pair = !per_expert && names.in_fused(projection) && count == 2 * stack &&
                    info.shape.back() == 2 && (stack == 1 || info.shape.front() == stack);
  if (info.dtype != DType::kF32 || (count != 1 && !per_expert && !pair)) {
    actual = describe(info);
    return false;
  }
  const int64_t at = pair ? 2 * std::max<int64_t>(expert, 0) + (names.is_second(projection) ? 1 : 0)
                     : per_expert ? expert
                                  : 0;
  const Status read =
      ref.file->read(ref.file->offset(info) + static_cast<uint64_t>(at * 4), &out, sizeof(out));
  readable = read.ok();
  actual = read.message();
  return readable;
}

InputScale MatrixResolver::input_scale(const ExpertNames& names, int64_t expert,
                                       Projection projection) const {
  InputScale out;
  if (names.parts.input_scale.empty()) return out;
  out.name = names.name(expert, projection, names.parts.input_scale);
  TensorIndex::Ref ref;
  std::string actual;
  bool readable = true;
  if (!scalar(names, out.name, expert, projection, ref, out.stored, actual, readable)) {
    out.finding = readable ? "input_scale_missing" : "unreadable";
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

// Decides the order if this matrix's shape fits both (2 I = H, or I = H): uses the order of the
// layer's other stack, whose shape then fits only one. The family's order if that stack is missing
// or fits neither.
bool MatrixResolver::other_matrix_is_k_first(const ExpertNames& names, int64_t expert,
                                             Projection projection, int64_t rows,
                                             int64_t cols) const {
  const bool down = projection == Projection::kDown;
  const Projection other = down ? names.projections().front() : Projection::kDown;
  const TensorInfo* info = index_.find(names.name(expert, other, names.parts.codes)).info;
  if (info == nullptr) return names.stacked_k_first;
  const Shapes shapes{num_experts_, down && names.gate_up_fused ? 2 * cols : cols};
  const int64_t width = stored_width(names.parts.format, *info, rows);
  const bool plain = has_shape(*info, shapes.of(false, width));
  const bool turned = has_shape(*info, shapes.of(true, width));
  return plain == turned ? names.stacked_k_first : turned;
}

bool MatrixResolver::locate_blocks(const ExpertNames& names, const TensorIndex::Ref& tensor,
                                   Projection projection, MatrixSource& out,
                                   FindingList& findings) const {
  const BlockType& blocks = *names.parts.blocks;
  const int64_t stack = names.role == TensorRole::kStacked ? num_experts_ : 0;
  const bool fused = names.in_fused(projection);
  const std::vector<int64_t> shape =
      Shapes{stack, fused ? 2 * out.rows : out.rows}.of(false, out.cols);
  const bool alike = tensor.info->blocks == &blocks;
  if (!alike || !has_shape(*tensor.info, shape)) {
    findings.add({Severity::kError, alike ? "shape_mismatch" : "dtype_mismatch", out.layer,
                  out.expert, out.codes_name,
                  fmt::format("{} {}", shape_string(shape), blocks.name), describe(*tensor.info)});
    return false;
  }
  const int64_t row_bytes = out.cols / blocks.elems * blocks.size_bytes;
  const auto [first, step] = names.rows_of(projection, out.rows);
  const uint64_t offset =
      expert_offset(tensor, stack, out.expert) + static_cast<uint64_t>(first * row_bytes);
  out.codes_place = {tensor.file, offset, out.rows, row_bytes, step * row_bytes, 1};
  out.blocks = &blocks;
  out.scales_name = out.codes_name;
  return true;
}

bool MatrixResolver::locate_bias(const ExpertNames& names, Projection projection, MatrixSource& out,
                                 FindingList& findings) const {
  if (names.parts.bias.empty() || names.role == TensorRole::kShared) return true;
  out.bias_name = names.name(out.expert, projection, names.parts.bias);
  TensorIndex::Ref bias;
  const bool missing = find(out.bias_name, bias) == nullptr;
  const bool fused = names.in_fused(projection);
  std::vector<int64_t> shape;
  if (names.role == TensorRole::kStacked) shape.push_back(num_experts_);
  shape.push_back(fused ? 2 * out.rows : out.rows);
  if (missing || !is_activation(bias.info->dtype) || !has_shape(*bias.info, shape)) {
    findings.add(
        {Severity::kError, missing ? "missing_bias" : "shape_mismatch", out.layer, out.expert,
         out.bias_name,
         expected_tensor(
             shape, missing || !is_activation(bias.info->dtype) ? DType::kBf16 : bias.info->dtype),
         missing ? "no such tensor" : describe(*bias.info)});
    return false;
  }
  const int64_t bytes = bits(bias.info->dtype) / 8;
  const int64_t stack = names.role == TensorRole::kStacked ? num_experts_ : 0;
  const auto [first, step] = names.rows_of(projection, out.rows);
  out.bias_dtype = bias.info->dtype;
  out.bias_place = {
      bias.file,    expert_offset(bias, stack, out.expert) + static_cast<uint64_t>(first * bytes),
      out.rows,     1,
      step * bytes, bytes};
  return true;
}

bool MatrixResolver::locate(const ExpertNames& names, int64_t layer, int64_t expert,
                            Projection projection, int64_t rows, int64_t cols, MatrixSource& out,
                            FindingList& findings) const {
  return locate_weights(names, layer, expert, projection, rows, cols, out, findings) &&
         locate_bias(names, projection, out, findings);
}

bool MatrixResolver::locate_weights(const ExpertNames& names, int64_t layer, int64_t expert,
                                    Projection projection, int64_t rows, int64_t cols,
                                    MatrixSource& out, FindingList& findings) const {
  const FormatParts& parts = names.parts;
  out = MatrixSource{};
  out.format = parts.format;
  out.layer = layer;
  out.expert = expert;
  out.rows = rows;
  out.cols = cols;
  out.codes_name = names.name(expert, projection, parts.codes);
  const auto fail = [&](const char* id, const std::string& tensor, std::string expected,
                        std::string actual) {
    findings.add(
        {Severity::kError, id, layer, expert, tensor, std::move(expected), std::move(actual)});
    return false;
  };
  if (rows % 16 != 0 || cols % 16 != 0) {
    return fail("misaligned", out.codes_name, "dimensions that are multiples of 16",
                fmt::format("({}, {})", rows, cols));
  }
  TensorIndex::Ref codes;
  if (find(out.codes_name, codes) == nullptr) {
    return fail("missing_expert", out.codes_name, "a tensor",
                stored_instead(index_, names, expert, projection));
  }
  if (parts.blocks != nullptr) return locate_blocks(names, codes, projection, out, findings);
  const bool floats = parts.format == SourceFormat::kFloat;
  const bool mxfp4 = parts.format == SourceFormat::kMxfp4;
  out.dtype = codes.info->dtype;
  const DType want_dtype =
      floats ? (is_activation(out.dtype) ? out.dtype : DType::kBf16) : DType::kU8;
  const bool dtype_ok = floats ? is_activation(out.dtype)
                               : out.dtype == DType::kU8 || out.dtype == DType::kF4 ||
                                     (mxfp4 && out.dtype == DType::kI8);
  const int64_t width = stored_width(parts.format, *codes.info, cols);
  const int64_t bytes = floats ? bits(out.dtype) / 8 : 1;  // of one column step
  const int64_t byte_cols = floats ? cols : cols / 2;

  TensorIndex::Ref scales;
  const int64_t group = mxfp4 ? 32 : 16;
  const int64_t scale_cols = (cols + group - 1) / group;
  const bool coded = !floats && is_csf(index_, names, expert, projection);
  if (!floats) {
    out.scales_name = names.name(expert, projection, parts.scales);
    const bool plain = find(out.scales_name, scales) != nullptr;
    if (plain && coded)
      return fail("csf_invalid", out.scales_name, "the scales or their streams of CSF", "both");
    if (!plain && !coded) {
      return fail("missing_scale", out.scales_name, "a tensor",
                  std::string(index_.absence(out.scales_name)));
    }
  }

  const int64_t stack = names.role == TensorRole::kStacked ? num_experts_ : 0;
  const bool fused = names.in_fused(projection);
  const bool in_blocks = parts.codes == "blocks";
  if (in_blocks && cols % 32 != 0)
    return fail("misaligned", out.codes_name, "K, a multiple of 32",
                fmt::format("({}, {})", rows, cols));
  const Shapes shapes{stack, fused ? 2 * rows : rows, in_blocks};
  const auto fits = [&](bool order) {
    return has_shape(*codes.info, shapes.of_codes(order, width)) && !(in_blocks && order) &&
           (floats || coded || has_shape(*scales.info, shapes.of(order, scale_cols)));
  };
  bool k_first = stack > 0 && names.stacked_k_first && !in_blocks;
  if (stack > 0 && !names.gguf &&
      !names.dotted) {  // the shapes decide; dotted names have one order
    const bool plain = fits(false);
    const bool turned = fits(true);
    if (plain != turned) k_first = turned;
    if (plain && turned) k_first = other_matrix_is_k_first(names, expert, projection, rows, cols);
  }
  const std::vector<int64_t> codes_shape = shapes.of_codes(k_first, width);
  if (!dtype_ok) {
    return fail("dtype_mismatch", out.codes_name, expected_tensor(codes_shape, want_dtype),
                describe(*codes.info));
  }
  if (!has_shape(*codes.info, codes_shape)) {
    return fail("shape_mismatch", out.codes_name, expected_tensor(codes_shape, out.dtype),
                describe(*codes.info));
  }
  const int64_t inner = k_first ? shapes.rows : byte_cols;  // elements of one stored row
  const auto [row0, apart] = names.rows_of(projection, rows);
  const int64_t row_stride = (k_first ? 1 : inner) * bytes;
  const uint64_t codes_offset =
      expert_offset(codes, stack, expert) + static_cast<uint64_t>(row0 * row_stride);
  out.codes_place = {codes.file, codes_offset,       rows,
                     byte_cols,  apart * row_stride, (k_first ? inner : 1) * bytes};
  if (floats) return true;
  if (coded) {
    if (stack > 0)
      return fail("csf_invalid", out.scales_name, "streams of one expert",
                  "streams under the name of a stack, which CSF does not have");
    if (!locate_csf(names, shapes.rows, scale_cols, out, findings)) return false;
    out.scales_place = {out.csf->fixed_file,
                        static_cast<uint64_t>(row0 * scale_cols),
                        rows,
                        scale_cols,
                        apart * scale_cols,
                        1};
    return true;
  }

  const DType scale_dtype = mxfp4 ? DType::kF8E8M0 : DType::kF8E4M3;
  const std::vector<int64_t> scales_shape = shapes.of(k_first, scale_cols);
  if (scales.info->dtype != scale_dtype && !(mxfp4 && scales.info->dtype == DType::kU8)) {
    return fail("dtype_mismatch", out.scales_name, expected_tensor(scales_shape, scale_dtype),
                describe(*scales.info));
  }
  if (!has_shape(*scales.info, scales_shape)) {
    for (const int64_t other : {8, 16, 32, 64, 128}) {
      if (other == group || cols % other != 0 ||
          !has_shape(*scales.info, shapes.of(k_first, cols / other)))
        continue;
      return fail("group_size", out.scales_name,
                  fmt::format("{}: one scale per {} elements",
                              expected_tensor(scales_shape, scale_dtype), group),
                  fmt::format("{}: one per {}", describe(*scales.info), other));
    }
    return fail("shape_mismatch", out.scales_name, expected_tensor(scales_shape, scale_dtype),
                describe(*scales.info));
  }
  const int64_t scales_inner = k_first ? shapes.rows : scale_cols;
  const int64_t scale_stride = k_first ? 1 : scales_inner;  // stride of rows
  const uint64_t scales_offset =
      expert_offset(scales, stack, expert) + static_cast<uint64_t>(row0 * scale_stride);
  out.scales_place = {scales.file, scales_offset,        rows,
                      scale_cols,  apart * scale_stride, k_first ? scales_inner : 1};
  return true;
}

bool MatrixResolver::resolve(const ExpertNames& names, int64_t layer, int64_t expert,
                             Projection projection, int64_t rows, int64_t cols, MatrixSource& out,
                             FindingList& findings) const {
  if (!locate(names, layer, expert, projection, rows, cols, out, findings)) return false;
  const FormatParts& parts = names.parts;
  if (parts.tensor_scale.empty()) return true;
  const auto fail = [&](const char* id, const std::string& tensor, std::string expected,
                        std::string actual) {
    findings.add(
        {Severity::kError, id, layer, expert, tensor, std::move(expected), std::move(actual)});
    return false;
  };
  out.tensor_scale_name = names.name(expert, projection, parts.tensor_scale);
  TensorIndex::Ref scale;
  std::string actual;
  float stored = 0;
  bool readable = true;
  if (!scalar(names, out.tensor_scale_name, expert, projection, scale, stored, actual, readable)) {
    const char* id = !readable               ? "unreadable"
                     : scale.info == nullptr ? "missing_scale"
                                             : "shape_mismatch";
    return fail(id, out.tensor_scale_name, "() or (1) F32", actual);
  }
  out.tensor_scale_file = scale.file;
  const bool inverse = parts.format == SourceFormat::kCompressedTensors;
  if (stored == 0 || (std::isinf(stored) && stored > 0)) {  // see check_zeros
    out.unusable_scale = float_string(std::abs(stored));
    return true;
  }
  out.tensor_scale = inverse ? reciprocal(stored) : stored;
  const char* id = !std::isfinite(stored) ? "tensor_scale_nonfinite"
                   : stored < 0           ? "tensor_scale_negative"
                   : !std::isfinite(out.tensor_scale) || out.tensor_scale == 0
                       ? "tensor_scale_nonfinite"
                       : nullptr;
  if (id != nullptr)
    return fail(id, out.tensor_scale_name, "a finite number > 0", float_string(stored));
  return true;
}

}  // namespace nvfp4_moe::internal
