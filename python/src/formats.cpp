// The format functions on arrays, on the host or on a GPU. Arrays become requests of moe/formats.h,
// which checks them and does the work. Results are new arrays of the input's framework.
//
// Arrays are (..., K); the leading dimensions are flattened to rows. On a GPU the work is enqueued
// in the framework's current stream and nothing is read back, so a graph can capture it. The
// interpreter lock is released while the library works.
#include "moe/formats.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <utility>

#include "core/float_formats.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

namespace {

using Three = nb::typed<nb::tuple, nb::any, nb::any, nb::any>;  // codes, scales, tensor scale
using Two = nb::typed<nb::tuple, nb::any, nb::any>;             // bytes, scales

formats::Place place_of(const Tensor& array) {
  const Device device = array.device();
  if (device.is_host()) return formats::Place::host();
  if (device.type != nb::device::cuda::value)
    throw Failure(unsupported("formats on " + to_string(device) + ": expected cpu or cuda"));
  return formats::Place::cuda(device.index, array.stream_or(nb::none()));
}

// (..., K), K at least 1.
struct Rows {
  Sizes leading;
  int64_t rows = 1;
  int64_t cols = 0;

  // multiple: K must be a multiple of it.
  Rows(const Tensor& array, bool right_dtype, const char* expected, int64_t multiple = 1) {
    const int32_t last = array.ndim() - 1;
    if (!right_dtype || last < 0 || array.shape(last) < 1 || array.shape(last) % multiple != 0)
      array.fail_expected(expected);
    leading = array.shape();
    cols = leading.back();
    leading.pop_back();
    for (const int64_t size : leading) rows *= size;
  }
  Sizes with_last(int64_t size) const {
    Sizes sizes = leading;
    sizes.push_back(size);
    return sizes;
  }
};

void check_shape(const Tensor& array, const Sizes& shape, bool right_dtype, const char* dtype,
                 const Tensor& beside) {
  if (right_dtype && array.device() == beside.device() && array.shape() == shape) return;
  array.fail_expected(to_string(shape) + " " + dtype + " on " + to_string(beside.device()));
}

Three quantize(nb::handle x_object, const std::string& mode, std::optional<double> tensor_scale,
               const std::string& search, nb::handle channel_weights) {
  const Tensor x = Tensor::contiguous(x_object, "x");
  const Rows rows(x, x.is_floating(),
                  "(..., K) bfloat16 (or its bits as uint16), float16 or float32");
  const formats::Place place = place_of(x);
  formats::Quantize call;
  call.mode = take(parse<QuantizeMode>(mode));
  call.search = take(parse<ScaleSearch>(search));
  call.x = x.data();
  call.dtype = x.dtype();
  call.rows = rows.rows;
  call.cols = rows.cols;
  if (tensor_scale) call.tensor_scale = static_cast<float>(*tensor_scale);
  std::optional<Tensor> weights;
  if (!channel_weights.is_none()) {
    weights.emplace(Tensor::contiguous(channel_weights, "channel_weights"));
    check_shape(*weights, {rows.cols}, weights->is_f32(), "float32", x);
    call.channel_weights = weights->as<float>();
  }
  const bool one_scale = call.mode != QuantizeMode::kDynamicToken;
  const Tensor codes = x.empty_like(rows.with_last(rows.cols / 2), DType::kU8);
  const Tensor block_scales = x.empty_like(rows.with_last(rows.cols / kBlockElems), DType::kU8);
  float host_scale = 0;
  std::optional<Tensor> scale_array;
  if (!one_scale || !place.is_host())
    scale_array.emplace(x.empty_like(one_scale ? Sizes{} : rows.leading, DType::kF32));
  call.codes = codes.as<uint8_t>();
  call.block_scales = block_scales.as<uint8_t>();
  call.scales = scale_array ? scale_array->as<float>() : &host_scale;
  {
    const WithoutLock unlocked;
    QuantizeCounts uncounted;
    check(formats::quantize(place, call, uncounted));
  }
  const nb::object scale =
      scale_array ? x.in_framework(*scale_array) : nb::cast(static_cast<double>(host_scale));
  return nb::make_tuple(x.in_framework(codes), x.in_framework(block_scales), scale);
}

Three swiglu_quantize(nb::handle gate_up_object, const std::string& activation,
                      std::optional<double> swiglu_limit, double swiglu_alpha, bool interleaved,
                      nb::handle row_weights, std::optional<double> power_of_two,
                      std::optional<double> situ_gate_limit, std::optional<double> situ_up_limit) {
  const Tensor gate_up = Tensor::contiguous(gate_up_object, "gate_up");
  const Rows rows(gate_up, gate_up.is_floating(),
                  "(..., 2 I) bfloat16 (or its bits as uint16), float16 or float32", 2);
  const formats::Place place = place_of(gate_up);
  formats::SwigluQuantize call;
  call.activation = take(parse<Activation>(activation));
  if (swiglu_limit) call.swiglu_limit = static_cast<float>(*swiglu_limit);
  call.swiglu_alpha = static_cast<float>(swiglu_alpha);
  if (situ_gate_limit) call.situ_gate_limit = static_cast<float>(*situ_gate_limit);
  if (situ_up_limit) call.situ_up_limit = static_cast<float>(*situ_up_limit);
  call.gate_up = gate_up.data();
  call.dtype = gate_up.dtype();
  call.rows = rows.rows;
  call.inner = rows.cols / 2;
  call.interleaved = interleaved;
  std::optional<Tensor> weights;
  if (!row_weights.is_none()) {
    weights.emplace(Tensor::contiguous(row_weights, "row_weights"));
    check_shape(*weights, rows.leading, weights->is_f32(), "float32", gate_up);
    call.row_weights = weights->as<float>();
  }
  if (power_of_two) call.power_of_two = static_cast<float>(*power_of_two);
  const Tensor codes = gate_up.empty_like(rows.with_last(call.inner / 2), DType::kU8);
  const Tensor block_scales =
      gate_up.empty_like(rows.with_last(call.inner / kBlockElems), DType::kU8);
  const Tensor row_scales = gate_up.empty_like(rows.leading, DType::kF32);
  call.out = {codes.as<uint8_t>(), block_scales.as<uint8_t>(), row_scales.as<float>()};
  {
    const WithoutLock unlocked;
    QuantizeCounts uncounted;
    check(formats::swiglu_quantize(place, call, uncounted));
  }
  return nb::make_tuple(gate_up.in_framework(codes), gate_up.in_framework(block_scales),
                        gate_up.in_framework(row_scales));
}

DType output_dtype(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBf16;
  fail("dtype: expected float32, bfloat16 or float16, got " + name);
}

// codes (..., K/2) and their block scales (..., K/16).
struct Nvfp4 {
  Tensor codes, scales;
  Rows rows;     // of codes
  int64_t cols;  // K

  Nvfp4(nb::handle codes_object, nb::handle scales_object)
      : codes(Tensor::contiguous(codes_object, "codes")),
        scales(Tensor::contiguous(scales_object, "scales")),
        rows(codes, codes.is_bytes(), "(..., K/2) uint8"),
        cols(2 * rows.cols) {
    check_shape(scales, rows.with_last(cols / kBlockElems), scales.is_bytes(), "uint8", codes);
  }
};

// Reads one number, or an array on the codes' device with one number or one per row. A number in a
// GPU's memory is not read here.
void read_tensor_scale(nb::handle object, const Nvfp4& matrix, std::optional<Tensor>& array,
                       formats::Dequantize& call) {
  if (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr())) {
    call.tensor_scale = static_cast<float>(nb::cast<double>(object));
    return;
  }
  array.emplace(Tensor::contiguous(object, "tensor_scale"));
  const bool of_row = array->shape() == matrix.rows.leading;
  const bool here = array->device() == matrix.codes.device();
  const bool host = array->device().is_host();
  if ((!here && !host) || (!of_row && array->count() != 1) ||
      (of_row && array->count() != 1 && !here))
    array->fail_expected("one number or " + to_string(matrix.rows.leading) + " float32 on " +
                         to_string(matrix.codes.device()));
  if (host && !array->is_f32()) array.emplace(array->cast(DType::kF32));
  if (!array->is_f32()) array->fail_expected("float32");
  if (!here) {
    call.tensor_scale = *array->as<float>();
    return;
  }
  call.scale_of_row = of_row;
  call.scales = array->as<float>();
}

nb::object dequantize(nb::handle codes, nb::handle scales, nb::handle tensor_scale,
                      const std::string& dtype) {
  const Nvfp4 matrix(codes, scales);
  const formats::Place place = place_of(matrix.codes);
  formats::Dequantize call;
  call.codes = matrix.codes.as<uint8_t>();
  call.block_scales = matrix.scales.as<uint8_t>();
  call.rows = matrix.rows.rows;
  call.cols = matrix.cols;
  std::optional<Tensor> scale_array;
  read_tensor_scale(tensor_scale, matrix, scale_array, call);
  call.out_dtype = output_dtype(dtype);
  const Tensor out = matrix.codes.empty_like(matrix.rows.with_last(call.cols), call.out_dtype);
  call.out = out.data();
  {
    const WithoutLock unlocked;
    check(formats::dequantize(place, call));
  }
  return matrix.codes.in_framework(out);
}

Two to_fp8(nb::handle codes, nb::handle scales, double tensor_scale,
           std::optional<std::pair<int64_t, int64_t>> block) {
  const Nvfp4 matrix(codes, scales);
  if (matrix.codes.ndim() != 2 || !matrix.codes.device().is_host())
    matrix.codes.fail_expected("(rows, K/2) uint8 on cpu");
  formats::ToFp8 call;
  call.codes = matrix.codes.as<uint8_t>();
  call.block_scales = matrix.scales.as<uint8_t>();
  call.tensor_scale = static_cast<float>(tensor_scale);
  call.rows = matrix.rows.rows;
  call.cols = matrix.cols;
  call.block = block;
  const auto [scale_rows, scale_cols] = take(formats::fp8_scales(call.rows, call.cols, block));
  const Tensor out = matrix.codes.empty_like({call.rows, call.cols}, DType::kU8);
  const Tensor out_scales =
      matrix.codes.empty_like(block ? Sizes{scale_rows, scale_cols} : Sizes{}, DType::kF32);
  call.out = out.as<uint8_t>();
  call.scales = out_scales.as<float>();
  if (!block) *call.scales = 1.0f;  // stays so for a matrix without rows
  {
    const WithoutLock unlocked;
    check(formats::to_fp8(call));
  }
  const nb::object scale =
      block ? matrix.codes.in_framework(out_scales) : nb::cast(static_cast<double>(*call.scales));
  return nb::make_tuple(matrix.codes.in_framework(out), scale);
}

// (..., rows, S) uint8 to (..., bytes).
nb::object swizzle(nb::handle scales_object) {
  const Tensor scales = Tensor::contiguous(scales_object, "scales");
  if (!scales.is_bytes() || scales.ndim() < 2) scales.fail_expected("(..., rows, K/16) uint8");
  const formats::Place place = place_of(scales);
  Sizes shape = scales.shape();
  formats::ScaleMatrices call;
  call.from = scales.as<uint8_t>();
  call.scale_cols = shape.back();
  shape.pop_back();
  call.rows = shape.back();
  shape.pop_back();
  for (const int64_t size : shape) call.matrices *= size;
  shape.push_back(take(formats::swizzled_bytes(call.rows, call.scale_cols)));
  const Tensor out = scales.empty_like(shape, DType::kU8);
  call.to = out.as<uint8_t>();
  {
    const WithoutLock unlocked;
    check(formats::swizzle_scales(place, call));
  }
  return scales.in_framework(out);
}

nb::object unswizzle(nb::handle swizzled_object, int64_t rows, int64_t cols) {
  const Tensor swizzled = Tensor::contiguous(swizzled_object, "swizzled");
  const int64_t bytes = take(formats::swizzled_bytes(rows, cols));
  if (!swizzled.is_bytes() || swizzled.ndim() < 1 || swizzled.shape(swizzled.ndim() - 1) != bytes)
    swizzled.fail_expected("(..., " + std::to_string(bytes) + ") uint8 for (" +
                           std::to_string(rows) + ", " + std::to_string(cols) + ") scales");
  const formats::Place place = place_of(swizzled);
  Sizes shape = swizzled.shape();
  shape.pop_back();
  formats::ScaleMatrices call;
  call.from = swizzled.as<uint8_t>();
  for (const int64_t size : shape) call.matrices *= size;
  call.rows = rows;
  call.scale_cols = cols;
  shape.push_back(rows);
  shape.push_back(cols);
  const Tensor out = swizzled.empty_like(shape, DType::kU8);
  call.to = out.as<uint8_t>();
  {
    const WithoutLock unlocked;
    check(formats::unswizzle_scales(place, call));
  }
  return swizzled.in_framework(out);
}

nb::object swizzle_experts(nb::handle scales_object, nb::handle offsets_object) {
  const Tensor scales = Tensor::contiguous(scales_object, "scales");
  if (!scales.is_bytes() || scales.ndim() != 2 || !scales.device().is_host())
    scales.fail_expected("(rows, K/16) uint8 on cpu");
  const Tensor offsets = Tensor::contiguous(offsets_object, "row_offsets").cast(DType::kI64);
  if (offsets.ndim() != 1 || offsets.count() < 1) offsets.fail_expected("(experts + 1,) integers");
  formats::ExpertScales call;
  call.from = scales.as<uint8_t>();
  call.rows = scales.shape(0);
  call.scale_cols = scales.shape(1);
  call.row_offsets = offsets.as<int64_t>();
  call.experts = offsets.count() - 1;
  const int64_t bytes =
      take(formats::expert_swizzled_bytes(call.rows, call.scale_cols, call.experts));
  const Tensor out = scales.empty_like({bytes}, DType::kU8);
  call.to = out.as<uint8_t>();
  {
    const WithoutLock unlocked;
    check(formats::swizzle_expert_scales(call));
  }
  return scales.in_framework(out);
}

}  // namespace

void bind_formats(nb::module_& m) {
  m.def("quantize", &quantize, nb::arg("x"), nb::arg("mode"), nb::arg("tensor_scale").none(),
        nb::arg("search"), nb::arg("channel_weights").none());
  m.def("swiglu_quantize", &swiglu_quantize, nb::arg("gate_up"), nb::arg("activation"),
        nb::arg("swiglu_limit").none(), nb::arg("swiglu_alpha"), nb::arg("interleaved"),
        nb::arg("row_weights").none(), nb::arg("power_of_two").none(),
        nb::arg("situ_gate_limit").none(), nb::arg("situ_up_limit").none());
  m.def("dequantize", &dequantize, nb::arg("codes"), nb::arg("scales"), nb::arg("tensor_scale"),
        nb::arg("dtype"));
  m.def("convert_to_fp8", &to_fp8, nb::arg("codes"), nb::arg("scales"), nb::arg("tensor_scale"),
        nb::arg("block").none());
  m.def("swizzle_scales", &swizzle, nb::arg("scales"));
  m.def("unswizzle_scales", &unswizzle, nb::arg("swizzled"), nb::arg("rows"), nb::arg("cols"));
  m.def("swizzle_experts", &swizzle_experts, nb::arg("scales"), nb::arg("row_offsets"));
}

}  // namespace nvfp4_moe::internal::python
