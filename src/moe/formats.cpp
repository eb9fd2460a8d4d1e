// Checks arguments and dispatches to host or device. The device's functions are looked up last, so
// that a wrong argument is reported as such in every build.
#include "moe/formats.h"

#include <cmath>
#include <string>

#include "core/dequantize.h"
#include "core/float_formats.h"
#include "core/scale_layout.h"
#include "moe/batch_check.h"
#include "moe/host_formats.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::formats {
namespace {

// Keeps every product of two sides, in elements and in bytes, within int64.
constexpr int64_t kMaxSide = int64_t{1} << 30;
constexpr int64_t kMaxScales = int64_t{1} << 40;  // of a call, including padding

using std::to_string;

std::string text(float value) { return std::to_string(value); }

Status check_pointer(const char* name, const void* pointer) {
  if (pointer != nullptr) return {};
  return invalid_argument(std::string(name) + ": expected a pointer, got null");
}

Status check_place(const Place& place) {
  if (place.is_host() || place.index() >= 0) return {};
  return invalid_argument("device: expected N of cuda:N, got " + to_string(place.index()));
}

Result<const DeviceFormats*> functions_of(const Place& place) {
  const DeviceFormats* const functions =
      place.functions() != nullptr ? place.functions() : device_formats(DeviceKind::kCuda);
  if (functions == nullptr)
    return unsupported(
        "device cuda:" + to_string(place.index()) +
        ": this build has no CUDA backend; build it with nvcc 12.9 or later on PATH");
  return functions;
}

bool is_side(int64_t size) { return size >= 0 && size <= kMaxSide; }

// name: the array that the sizes describe. side: the name of its row length.
Status check_matrix(const char* name, const char* side, int64_t rows, int64_t cols) {
  if (!is_side(rows) || !is_side(cols))
    return invalid_argument(std::string(name) + ": expected 0 to 2^30 rows and " + side +
                            " of 0 to 2^30, got (" + to_string(rows) + ", " + to_string(cols) +
                            ")");
  if (cols % kBlockElems == 0) return {};
  return invalid_argument(std::string(name) + ": expected " + side +
                          " to be a multiple of 16, got " + to_string(cols));
}

Status check_scale_matrix(int64_t rows, int64_t scale_cols) {
  if (is_side(rows) && is_side(scale_cols)) return {};
  return invalid_argument("(rows, scale_cols): expected 0 to 2^30 each, got (" + to_string(rows) +
                          ", " + to_string(scale_cols) + ")");
}

// Checks that all matrices together, including padding, fit into int64.
Status check_scale_matrices(int64_t matrices, int64_t rows, int64_t scale_cols) {
  NVFP4_MOE_TRY(check_scale_matrix(rows, scale_cols));
  const int64_t padded = (rows + 128) * (scale_cols + 4);
  if (is_side(matrices) && padded <= kMaxScales && matrices <= kMaxScales / padded) return {};
  return invalid_argument("matrices: expected 0 to 2^30 of at most 2^40 scales together, got " +
                          to_string(matrices) + " of (" + to_string(rows) + ", " +
                          to_string(scale_cols) + ")");
}

Status check_outputs(int64_t rows, int64_t cols, const void* codes, const void* block_scales) {
  if (rows == 0 || cols == 0) return {};
  NVFP4_MOE_TRY(check_pointer("codes", codes));
  return check_pointer("block_scales", block_scales);
}

Status check_tensor_scale(const Quantize& call) {
  const std::optional<float>& scale = call.tensor_scale;
  const auto expected = [&](const char* what) {
    return invalid_argument(std::string("tensor_scale: expected ") + what + ", got " +
                            text(*scale));
  };
  switch (call.mode) {
    case QuantizeMode::kDynamicToken:
      return scale ? expected("none, since dynamic_token chooses one per row") : Status();
    case QuantizeMode::kWeights:
      return !scale || (std::isfinite(*scale) && *scale > 0)
                 ? Status()
                 : expected("a positive finite float32, or none");
    case QuantizeMode::kStatic:
    case QuantizeMode::kVllmOrder: break;
  }
  if (!scale)
    return invalid_argument(std::string("tensor_scale: mode ") + to_string(call.mode) +
                            " needs one, got none");
  if (call.mode == QuantizeMode::kStatic && (!std::isfinite(*scale) || *scale <= 0))
    return expected("a positive finite float32");
  if (call.mode == QuantizeMode::kVllmOrder && !(*scale >= 0x1p-126f && *scale <= 0x1p126f))
    return expected("a positive float32 within [2^-126, 2^126]");
  return {};
}

Status check(const Quantize& call) {
  NVFP4_MOE_TRY(check_named(call.mode));
  NVFP4_MOE_TRY(check_named(call.search));
  if (call.search != ScaleSearch::kMax && call.mode != QuantizeMode::kWeights)
    return invalid_argument(std::string("search: ") + to_string(call.search) +
                            " is for mode weights, got mode " + to_string(call.mode));
  if (call.channel_weights != nullptr) {
    if (call.search == ScaleSearch::kMax)
      return invalid_argument(
          "channel_weights: expected search mse or sweep, since max compares no errors, got max");
    NVFP4_MOE_TRY(check_array({"channel_weights", call.channel_weights, DType::kF32, call.cols}));
  }
  NVFP4_MOE_TRY(check_matrix("x", "K (cols)", call.rows, call.cols));
  NVFP4_MOE_TRY(check_activation_dtype("x", call.dtype));
  NVFP4_MOE_TRY(check_tensor_scale(call));
  if (call.rows > 0 && call.cols > 0)
    NVFP4_MOE_TRY(check_array({"x", call.x, call.dtype, call.rows * call.cols}));
  NVFP4_MOE_TRY(check_outputs(call.rows, call.cols, call.codes, call.block_scales));
  const bool dynamic = call.mode == QuantizeMode::kDynamicToken;
  if (dynamic && call.rows == 0) return {};
  return check_array({"scales", call.scales, DType::kF32, dynamic ? call.rows : 1});
}

DeviceQuantizer quantizer_of(const Quantize& call) {
  switch (call.mode) {
    case QuantizeMode::kWeights:
      return call.search == ScaleSearch::kMse ? DeviceQuantizer::kWeightsMse
                                              : DeviceQuantizer::kWeights;
    case QuantizeMode::kDynamicToken: return DeviceQuantizer::kDynamicToken;
    case QuantizeMode::kStatic: return DeviceQuantizer::kPowerOfTwo;
    case QuantizeMode::kVllmOrder: break;
  }
  return DeviceQuantizer::kVllmOrder;
}

Status check(const SwigluQuantize& call) {
  NVFP4_MOE_TRY(check_named(call.activation));
  if (call.power_of_two && !is_power_of_two(*call.power_of_two))
    return invalid_argument("power_of_two: expected a normal power of two, got " +
                            text(*call.power_of_two));
  NVFP4_MOE_TRY(check_matrix("gate_up", "I, half a row,", call.rows, call.inner));
  NVFP4_MOE_TRY(check_activation_dtype("gate_up", call.dtype));
  if (call.rows == 0 || call.inner == 0) return {};
  NVFP4_MOE_TRY(check_array({"gate_up", call.gate_up, call.dtype, call.rows * call.inner * 2}));
  if (call.row_weights != nullptr)
    NVFP4_MOE_TRY(check_array({"row_weights", call.row_weights, DType::kF32, call.rows}));
  NVFP4_MOE_TRY(check_outputs(call.rows, call.inner, call.out.codes, call.out.block_scales));
  return check_array({"row_scales", call.out.row_scales, DType::kF32, call.rows});
}

Status check_codes_matrix(int64_t rows, int64_t cols, const void* codes, const void* block_scales) {
  NVFP4_MOE_TRY(check_matrix("codes", "K, two to a byte,", rows, cols));
  return check_outputs(rows, cols, codes, block_scales);
}

Status check_code_count(int64_t count) {
  if (count >= 0 && count % 2 == 0) return {};
  return invalid_argument("count: expected an even number of codes, got " + to_string(count));
}

}  // namespace

Status quantize(const Place& place, const Quantize& asked, QuantizeCounts& counts) {
  NVFP4_MOE_TRY(check_place(place));
  NVFP4_MOE_TRY(check(asked));
  Quantize call = asked;
  if (call.mode == QuantizeMode::kStatic) {
    NVFP4_MOE_ASSIGN(call.tensor_scale, static_row_scale(ActivationFormat::kNvfp4, "tensor_scale",
                                                         *call.tensor_scale, 1.0f));
  }
  if (place.is_host()) return host::quantize(call, counts);
  // Weights are converted once, from files that a host reads.
  if (call.search == ScaleSearch::kSweep)
    return unsupported("search: sweep is for arrays of the host; a device has max and mse");
  if (call.channel_weights != nullptr)
    return unsupported("channel_weights: expected arrays of the host");
  const bool dynamic = call.mode == QuantizeMode::kDynamicToken;
  if (dynamic && (call.rows == 0 || call.cols == 0)) return {};
  NVFP4_MOE_ASSIGN(const DeviceFormats* const functions, functions_of(place));
  DeviceQuantize on_device;
  on_device.how = quantizer_of(call);
  on_device.x = call.x;
  on_device.dtype = call.dtype;
  on_device.rows = call.cols == 0 ? 0 : call.rows;
  on_device.cols = call.cols;
  on_device.tensor_scale = call.tensor_scale.value_or(0.0f);
  on_device.codes = call.codes;
  on_device.block_scales = call.block_scales;
  on_device.scales = call.scales;
  return functions->quantize(place.index(), on_device, place.stream());
}

Status quantize_int8_block(const QuantizeInt8Block& call, QuantizeCounts& counts) {
  NVFP4_MOE_TRY(check_matrix("x", "K (cols)", call.rows, call.cols));
  NVFP4_MOE_TRY(check_activation_dtype("x", call.dtype));
  if (call.rows == 0 || call.cols == 0) return {};
  NVFP4_MOE_TRY(check_array({"x", call.x, call.dtype, call.rows * call.cols}));
  NVFP4_MOE_TRY(check_pointer("codes", call.codes));
  NVFP4_MOE_TRY(check_array(
      {"block_scales", call.block_scales, DType::kF32, call.rows * (call.cols / kBlockElems)}));
  return host::quantize_int8_block(call, counts);
}

Status dequantize(const Place& place, const Dequantize& call) {
  NVFP4_MOE_TRY(check_place(place));
  NVFP4_MOE_TRY(check_codes_matrix(call.rows, call.cols, call.codes, call.block_scales));
  NVFP4_MOE_TRY(check_activation_dtype("out", call.out_dtype));
  if (call.rows == 0 || call.cols == 0) return {};
  if (call.scales != nullptr || call.scale_of_row)
    NVFP4_MOE_TRY(
        check_array({"scales", call.scales, DType::kF32, call.scale_of_row ? call.rows : 1}));
  NVFP4_MOE_TRY(check_array({"out", call.out, call.out_dtype, call.rows * call.cols}));
  if (place.is_host()) return host::dequantize(call);
  NVFP4_MOE_ASSIGN(const DeviceFormats* const functions, functions_of(place));
  DeviceDequantize on_device;
  on_device.codes = call.codes;
  on_device.block_scales = call.block_scales;
  on_device.scales = call.scales;
  on_device.scale_of_row = call.scale_of_row;
  on_device.tensor_scale = call.tensor_scale;
  on_device.rows = call.rows;
  on_device.cols = call.cols;
  on_device.out_dtype = call.out_dtype;
  on_device.out = call.out;
  return functions->dequantize(place.index(), on_device, place.stream());
}

Status swiglu_quantize(const Place& place, const SwigluQuantize& call, QuantizeCounts& counts) {
  NVFP4_MOE_TRY(check_place(place));
  NVFP4_MOE_TRY(check(call));
  MoeOptions options;
  options.activation = call.activation;
  options.swiglu_limit = call.swiglu_limit;
  options.swiglu_alpha = call.swiglu_alpha;
  options.situ_gate_limit = call.situ_gate_limit;
  options.situ_up_limit = call.situ_up_limit;
  NVFP4_MOE_ASSIGN(const GatedActivation activation, GatedActivation::make(options));
  if (call.rows == 0 || call.inner == 0) return {};
  const GateUp input{call.gate_up, call.dtype, call.rows, call.inner, call.interleaved};
  const float power_of_two = call.power_of_two.value_or(0.0f);
  if (place.is_host()) {
    nvfp4_moe::internal::swiglu_quantize(activation, input, call.row_weights, power_of_two,
                                         call.out, counts);
    return {};
  }
  NVFP4_MOE_ASSIGN(const DeviceFormats* const functions, functions_of(place));
  return functions->swiglu_quantize(
      place.index(), {activation, input, call.row_weights, power_of_two, call.out}, place.stream());
}

Result<int64_t> swizzled_bytes(int64_t rows, int64_t scale_cols) {
  NVFP4_MOE_TRY(check_scale_matrices(1, rows, scale_cols));
  return swizzled_scale_bytes(rows, scale_cols);
}

Status swizzle_scales(const Place& place, const ScaleMatrices& call) {
  NVFP4_MOE_TRY(check_place(place));
  NVFP4_MOE_TRY(check_scale_matrices(call.matrices, call.rows, call.scale_cols));
  if (call.matrices == 0 || call.rows == 0 || call.scale_cols == 0) return {};
  NVFP4_MOE_TRY(check_pointer("linear", call.from));
  NVFP4_MOE_TRY(check_pointer("swizzled", call.to));
  if (place.is_host()) {
    const int64_t bytes = swizzled_scale_bytes(call.rows, call.scale_cols);
    for (int64_t i = 0; i < call.matrices; ++i)
      nvfp4_moe::internal::swizzle_scales(call.from + i * call.rows * call.scale_cols,
                                          call.scale_cols, call.rows, call.scale_cols,
                                          call.to + i * bytes);
    return {};
  }
  NVFP4_MOE_ASSIGN(const DeviceFormats* const functions, functions_of(place));
  return functions->swizzle(place.index(), call.from, call.matrices, call.rows, call.scale_cols,
                            call.to, place.stream());
}

Status unswizzle_scales(const Place& place, const ScaleMatrices& call) {
  NVFP4_MOE_TRY(check_place(place));
  NVFP4_MOE_TRY(check_scale_matrices(call.matrices, call.rows, call.scale_cols));
  if (call.matrices == 0 || call.rows == 0 || call.scale_cols == 0) return {};
  NVFP4_MOE_TRY(check_pointer("swizzled", call.from));
  NVFP4_MOE_TRY(check_pointer("linear", call.to));
  if (place.is_host()) {
    const int64_t bytes = swizzled_scale_bytes(call.rows, call.scale_cols);
    for (int64_t i = 0; i < call.matrices; ++i)
      nvfp4_moe::internal::unswizzle_scales(call.from + i * bytes, call.rows, call.scale_cols,
                                            call.to + i * call.rows * call.scale_cols,
                                            call.scale_cols);
    return {};
  }
  NVFP4_MOE_ASSIGN(const DeviceFormats* const functions, functions_of(place));
  return functions->unswizzle(place.index(), call.from, call.matrices, call.rows, call.scale_cols,
                              call.to, place.stream());
}

Result<int64_t> expert_swizzled_bytes(int64_t rows, int64_t scale_cols, int64_t experts) {
  NVFP4_MOE_TRY(check_scale_matrix(rows, scale_cols));
  if (!is_side(experts))
    return invalid_argument("experts: expected 0 to 2^30, got " + to_string(experts));
  const int64_t padded_rows = expert_scale_rows_bound(rows, experts);
  if (padded_rows > kMaxScales / (scale_cols + 4))
    return invalid_argument("scales: expected at most 2^40 with their padding, got " +
                            to_string(padded_rows) + " rows of " + to_string(scale_cols));
  return padded_rows * round_up(scale_cols, 4);
}

Status swizzle_expert_scales(const ExpertScales& call) {
  NVFP4_MOE_ASSIGN(const int64_t bytes,
                   expert_swizzled_bytes(call.rows, call.scale_cols, call.experts));
  NVFP4_MOE_TRY(check_array({"row_offsets", call.row_offsets, DType::kI64, call.experts + 1}));
  if (call.row_offsets[0] != 0 || call.row_offsets[call.experts] != call.rows)
    return invalid_argument("row_offsets: expected offsets from 0 to " + to_string(call.rows) +
                            ", got " + to_string(call.row_offsets[0]) + " to " +
                            to_string(call.row_offsets[call.experts]));
  for (int64_t e = 0; e < call.experts; ++e)
    if (call.row_offsets[e] > call.row_offsets[e + 1])
      return invalid_argument("row_offsets: expected not to decrease, does after expert " +
                              to_string(e));
  if (bytes == 0) return {};
  if (call.rows > 0) NVFP4_MOE_TRY(check_pointer("scales", call.from));
  NVFP4_MOE_TRY(check_pointer("swizzled", call.to));
  nvfp4_moe::internal::swizzle_expert_scales(call.from, call.row_offsets, call.experts,
                                             call.scale_cols, call.to);
  return {};
}

Result<std::pair<int64_t, int64_t>> fp8_scales(
    int64_t rows, int64_t cols, const std::optional<std::pair<int64_t, int64_t>>& block) {
  NVFP4_MOE_TRY(check_matrix("codes", "K, two to a byte,", rows, cols));
  if (!block) return std::pair<int64_t, int64_t>(1, 1);
  const auto [block_rows, block_cols] = *block;
  if (block_rows < 1 || block_rows > kMaxSide || block_cols < 1 || block_cols > kMaxSide)
    return invalid_argument("block: expected none, or 1 to 2^30 rows and columns, got (" +
                            to_string(block_rows) + ", " + to_string(block_cols) + ")");
  return std::pair<int64_t, int64_t>((rows + block_rows - 1) / block_rows,
                                     (cols + block_cols - 1) / block_cols);
}

Status to_fp8(const ToFp8& call) {
  NVFP4_MOE_TRY(check_codes_matrix(call.rows, call.cols, call.codes, call.block_scales));
  NVFP4_MOE_ASSIGN(const auto scales, fp8_scales(call.rows, call.cols, call.block));
  if (call.rows == 0 || call.cols == 0) return {};
  NVFP4_MOE_TRY(check_pointer("out", call.out));
  NVFP4_MOE_TRY(check_array({"scales", call.scales, DType::kF32, scales.first * scales.second}));
  const auto [block_rows, block_cols] = call.block.value_or(std::pair<int64_t, int64_t>(0, 0));
  return convert_to_fp8(
      Nvfp4View::contiguous(call.codes, call.block_scales, call.tensor_scale, call.rows, call.cols),
      {block_rows, block_cols}, call.out, call.scales);
}

Status pack_codes(const uint8_t* codes, int64_t count, uint8_t* packed) {
  NVFP4_MOE_TRY(check_code_count(count));
  if (count == 0) return {};
  NVFP4_MOE_TRY(check_pointer("codes", codes));
  NVFP4_MOE_TRY(check_pointer("packed", packed));
  for (int64_t i = 0; i < count; ++i)
    if (codes[i] > 15)
      return invalid_argument("codes: expected 0 to 15, element " + to_string(i) + " is " +
                              to_string(codes[i]));
  for (int64_t i = 0; i < count / 2; ++i)
    packed[i] = nvfp4_moe::internal::pack_codes(codes[2 * i], codes[2 * i + 1]);
  return {};
}

Status unpack_codes(const uint8_t* packed, int64_t count, uint8_t* codes) {
  NVFP4_MOE_TRY(check_code_count(count));
  if (count == 0) return {};
  NVFP4_MOE_TRY(check_pointer("packed", packed));
  NVFP4_MOE_TRY(check_pointer("codes", codes));
  for (int64_t i = 0; i < count / 2; ++i) {
    codes[2 * i] = low_code(packed[i]);
    codes[2 * i + 1] = high_code(packed[i]);
  }
  return {};
}

}  // namespace nvfp4_moe::internal::formats
