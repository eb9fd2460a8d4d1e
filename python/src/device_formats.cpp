// The format functions on arrays in a GPU's memory: checked here, enqueued in the framework's current stream, answered
// in fresh arrays of the same framework. Nothing is read back, so that they can be captured in a graph.
#include "backend/device_formats.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "core/scale_layout.h"
#include "moe/registry.h"
#include "tensor.h"

namespace nvfp4_moe::python {

namespace on_gpu {  // names of its own: a wheel compiles several files as one
namespace {

using Sizes = std::vector<int64_t>;
using Three = nb::typed<nb::tuple, nb::any, nb::any, nb::any>;  // codes, scales, tensor scale

struct OnDevice {
  const DeviceFormats* formats;
  int device;
  void* stream;

  explicit OnDevice(const Tensor& array) : device(array.device().index), stream(array.stream_or(nb::none())) {
    formats = array.device().type == nb::device::cuda::value ? device_formats(DeviceKind::kCuda) : nullptr;
    if (formats == nullptr)
      throw Failure(unsupported("formats on " + to_string(array.device()) + ": not in this build"));
  }
};

// (leading..., cols), contiguous.
struct Lines {
  Sizes leading;
  int64_t rows = 1, cols = 0;

  Lines(const Tensor& array, bool right_dtype, const char* dtypes, int64_t multiple) {
    const bool right = right_dtype && array.ndim() > 0 && array.is_contiguous() && array.shape(array.ndim() - 1) > 0 &&
                       array.shape(array.ndim() - 1) % multiple == 0;
    if (!right)
      array.fail_expected(std::string("(..., K) ") + dtypes + ", contiguous, K a positive multiple of " +
                          std::to_string(multiple));
    for (int32_t i = 0; i + 1 < array.ndim(); ++i) {
      leading.push_back(array.shape(i));
      rows *= array.shape(i);
    }
    cols = array.shape(array.ndim() - 1);
  }
  Sizes with_last(int64_t last) const {
    Sizes sizes = leading;
    sizes.push_back(last);
    return sizes;
  }
};
constexpr const char* kFloats = "bfloat16, float16 or float32";

void check_sizes(const Tensor& array, const Sizes& sizes, bool right_dtype, const char* dtype, const Tensor& beside) {
  bool right = right_dtype && array.is_contiguous() && array.device() == beside.device() &&
               array.ndim() == static_cast<int32_t>(sizes.size());
  for (size_t i = 0; right && i < sizes.size(); ++i) right = array.shape(static_cast<int32_t>(i)) == sizes[i];
  if (right) return;
  std::string text = "(";
  for (const int64_t size : sizes) text += (text.size() == 1 ? "" : ", ") + std::to_string(size);
  array.fail_expected(text + (sizes.size() == 1 ? ",) " : ") ") + dtype + " on " + to_string(beside.device()) +
                      ", contiguous");
}

struct Fresh {
  nb::object object;
  std::byte* data;
  Fresh(const Tensor& like, const Sizes& sizes, DType dtype)
      : object(like.new_like(sizes, dtype)), data(Tensor(object, "out").data()) {}
  uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(data); }
  float* floats() const { return reinterpret_cast<float*>(data); }
};

Three quantize(nb::handle x_object, const std::string& mode, std::optional<double> tensor_scale,
               const std::string& search) {
  const Tensor x(x_object, "x");
  const OnDevice on(x);
  const Lines lines(x, x.is_floating(), kFloats, kBlockElems);
  DeviceQuantize call;
  if (mode == "weights")
    call.how = search == "mse" ? DeviceQuantizer::kWeightsMse : DeviceQuantizer::kWeights;
  else if (mode == "dynamic_token")
    call.how = DeviceQuantizer::kDynamicToken;
  else if (mode == "static")
    call.how = DeviceQuantizer::kPowerOfTwo;
  else if (mode == "compat")
    call.how = DeviceQuantizer::kCompat;
  else
    fail("mode: expected weights, dynamic_token, static or compat, got " + mode);
  if (search != "max" && search != "mse") fail("scales: expected max or mse, got " + search);
  if (search == "mse" && mode != "weights") fail("scales: mse is for mode weights, got mode " + mode);
  const bool dynamic = call.how == DeviceQuantizer::kDynamicToken;
  if (dynamic && tensor_scale) fail("tensor_scale: dynamic_token chooses one per row, expected None");
  if (mode != "weights" && !dynamic && !tensor_scale) fail("tensor_scale: mode " + mode + " needs one, got None");
  if (tensor_scale) {
    call.tensor_scale = static_cast<float>(*tensor_scale);
    if (!std::isfinite(call.tensor_scale) || call.tensor_scale <= 0)
      fail("tensor_scale: expected a positive finite float32, got " + std::to_string(*tensor_scale));
    if (mode == "static") call.tensor_scale = round_up_to_power_of_two(call.tensor_scale);
  }
  const Fresh codes(x, lines.with_last(lines.cols / 2), DType::kU8);
  const Fresh block_scales(x, lines.with_last(lines.cols / kBlockElems), DType::kU8);
  const Fresh scales(x, dynamic ? lines.leading : Sizes{}, DType::kF32);
  call.x = x.data();
  call.dtype = x.dtype();
  call.rows = lines.rows;
  call.cols = lines.cols;
  call.codes = codes.bytes();
  call.block_scales = block_scales.bytes();
  call.scales = scales.floats();
  {
    const nb::gil_scoped_release release;
    check(on.formats->quantize(on.device, call, on.stream));
  }
  return nb::make_tuple(codes.object, block_scales.object, scales.object);
}

// tensor_scale: a number, or float32 on the device: one, or one per row.
nb::object dequantize(nb::handle codes_object, nb::handle scales_object, nb::handle tensor_scale,
                      const std::string& dtype_name) {
  const Tensor codes(codes_object, "codes"), scales(scales_object, "scales");
  const OnDevice on(codes);
  const Lines lines(codes, codes.is_bytes(), "uint8", kBlockElems / 2);
  DeviceDequantize call;
  call.rows = lines.rows;
  call.cols = 2 * lines.cols;
  check_sizes(scales, lines.with_last(call.cols / kBlockElems), scales.is_bytes(), "uint8", codes);
  double number = 0;
  std::optional<Tensor> numbers;
  if (nb::try_cast(tensor_scale, number, false)) {
    call.tensor_scale = static_cast<float>(number);
  } else {
    numbers.emplace(tensor_scale, "tensor_scale");
    int64_t count = 1;
    for (int32_t i = 0; i < numbers->ndim(); ++i) count *= numbers->shape(i);
    call.scale_of_row = count != 1;
    check_sizes(*numbers, call.scale_of_row ? lines.leading : Sizes(static_cast<size_t>(numbers->ndim()), 1),
                numbers->is_f32(), "float32", codes);
    call.scales = reinterpret_cast<const float*>(numbers->data());
  }
  if (dtype_name == "float32")
    call.out_dtype = DType::kF32;
  else if (dtype_name == "float16")
    call.out_dtype = DType::kF16;
  else if (dtype_name == "bfloat16")
    call.out_dtype = DType::kBf16;
  else
    fail("dtype: expected float32, bfloat16 or float16, got " + dtype_name);
  const Fresh out(codes, lines.with_last(call.cols), call.out_dtype);
  call.codes = reinterpret_cast<const uint8_t*>(codes.data());
  call.block_scales = reinterpret_cast<const uint8_t*>(scales.data());
  call.out = out.data;
  {
    const nb::gil_scoped_release release;
    check(on.formats->dequantize(on.device, call, on.stream));
  }
  return out.object;
}

Three silu_mul_quantize(nb::handle gate_up_object, const std::string& activation_name, std::optional<double> limit,
                        double alpha, bool interleaved, nb::handle row_weights, std::optional<double> power_of_two) {
  const Tensor gate_up(gate_up_object, "gate_up");
  const OnDevice on(gate_up);
  const Lines lines(gate_up, gate_up.is_floating(), kFloats, 2 * kBlockElems);
  DeviceSwigluQuantize call;
  call.activation = take(GatedActivation::make(
      take(parse<Activation>(activation_name)),
      limit ? std::optional<float>(static_cast<float>(*limit)) : std::optional<float>(), static_cast<float>(alpha)));
  if (power_of_two) {
    call.power_of_two = static_cast<float>(*power_of_two);
    if (!is_power_of_two(call.power_of_two))
      fail("power_of_two: expected a normal power of two, got " + std::to_string(*power_of_two));
  }
  call.input = {gate_up.data(), gate_up.dtype(), lines.rows, lines.cols / 2, interleaved};
  std::optional<Tensor> weights;
  if (!row_weights.is_none()) {
    weights.emplace(row_weights, "row_weights");
    check_sizes(*weights, lines.leading, weights->is_f32(), "float32", gate_up);
    call.row_weights = reinterpret_cast<const float*>(weights->data());
  }
  const Fresh codes(gate_up, lines.with_last(call.input.inner / 2), DType::kU8);
  const Fresh block_scales(gate_up, lines.with_last(call.input.inner / kBlockElems), DType::kU8);
  const Fresh row_scales(gate_up, lines.leading, DType::kF32);
  call.out = {codes.bytes(), block_scales.bytes(), row_scales.floats()};
  {
    const nb::gil_scoped_release release;
    check(on.formats->swiglu_quantize(on.device, call, on.stream));
  }
  return nb::make_tuple(codes.object, block_scales.object, row_scales.object);
}

nb::object swizzle(nb::handle scales_object) {
  const Tensor scales(scales_object, "scales");
  const OnDevice on(scales);
  if (!scales.is_bytes() || scales.ndim() < 2 || !scales.is_contiguous())
    scales.fail_expected("(..., rows, K/16) uint8, contiguous");
  Sizes sizes;
  int64_t matrices = 1;
  for (int32_t i = 0; i + 2 < scales.ndim(); ++i) {
    sizes.push_back(scales.shape(i));
    matrices *= scales.shape(i);
  }
  const int64_t rows = scales.shape(scales.ndim() - 2), cols = scales.shape(scales.ndim() - 1);
  sizes.push_back(swizzled_scale_bytes(rows, cols));
  const Fresh out(scales, sizes, DType::kU8);
  {
    const nb::gil_scoped_release release;
    check(on.formats->swizzle(on.device, reinterpret_cast<const uint8_t*>(scales.data()), matrices, rows, cols,
                              out.bytes(), on.stream));
  }
  return out.object;
}

nb::object unswizzle(nb::handle swizzled_object, int64_t rows, int64_t cols) {
  const Tensor swizzled(swizzled_object, "swizzled");
  const OnDevice on(swizzled);
  constexpr int64_t kLimit = int64_t{1} << 40;  // the products below stay inside int64
  if (rows < 0 || cols < 0 || rows > kLimit || cols > kLimit / (rows + 128))
    fail("rows, cols: expected sizes, got " + std::to_string(rows) + ", " + std::to_string(cols));
  const int64_t bytes = swizzled_scale_bytes(rows, cols);
  if (!swizzled.is_bytes() || swizzled.ndim() < 1 || !swizzled.is_contiguous() ||
      swizzled.shape(swizzled.ndim() - 1) != bytes)
    swizzled.fail_expected("(..., " + std::to_string(bytes) + ") uint8, contiguous");
  Sizes sizes;
  int64_t matrices = 1;
  for (int32_t i = 0; i + 1 < swizzled.ndim(); ++i) {
    sizes.push_back(swizzled.shape(i));
    matrices *= swizzled.shape(i);
  }
  sizes.push_back(rows);
  sizes.push_back(cols);
  const Fresh out(swizzled, sizes, DType::kU8);
  {
    const nb::gil_scoped_release release;
    check(on.formats->unswizzle(on.device, reinterpret_cast<const uint8_t*>(swizzled.data()), matrices, rows, cols,
                                out.bytes(), on.stream));
  }
  return out.object;
}

}  // namespace
}  // namespace on_gpu

void bind_device_formats(nb::module_& m) {
  m.def("device_quantize", &on_gpu::quantize, nb::arg("x"), nb::arg("mode"), nb::arg("tensor_scale").none(),
        nb::arg("scales"));
  m.def("device_dequantize", &on_gpu::dequantize, nb::arg("codes"), nb::arg("scales"), nb::arg("tensor_scale"),
        nb::arg("dtype"));
  m.def("device_silu_mul_quantize", &on_gpu::silu_mul_quantize, nb::arg("gate_up"), nb::arg("activation"),
        nb::arg("swiglu_limit").none(), nb::arg("swiglu_alpha"), nb::arg("interleaved"), nb::arg("row_weights").none(),
        nb::arg("power_of_two").none());
  m.def("device_swizzle", &on_gpu::swizzle, nb::arg("scales"));
  m.def("device_unswizzle", &on_gpu::unswizzle, nb::arg("swizzled"), nb::arg("rows"), nb::arg("cols"));
}

}  // namespace nvfp4_moe::python
