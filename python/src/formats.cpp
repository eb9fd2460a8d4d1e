// The format functions: quantize, dequantize, pack, unpack, the elementwise codecs and the conversion to FP8.
//
// Arrays are (..., K) with any leading dimensions, which are one list of rows here. Inputs are read a row at a time, so
// that a bfloat16 tensor is never widened as a whole. The interpreter lock is released around every loop.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "arrays.h"
#include "core/activation.h"
#include "core/dequantize.h"
#include "core/quantize.h"

namespace nvfp4_moe::python {

namespace {

// codes, scales, and one scale or one per row (to_fp8: per block)
using Quantized =
    nb::typed<nb::tuple, NumpyArray<uint8_t>, NumpyArray<uint8_t>, std::variant<double, NumpyArray<float>>>;
using Fp8 = nb::typed<nb::tuple, NumpyArray<uint8_t>, std::variant<double, NumpyArray<float>>>;
using Decoded = std::variant<NumpyArray<float>, NumpyArray<uint16_t>>;

struct Rows {
  Shape shape;    // of the array
  Shape leading;  // without the last dimension
  int64_t rows = 0;
  int64_t cols = 0;  // the last dimension
};

Rows rows_of(const Array& array, const char* name, int64_t multiple) {
  Rows r;
  r.shape = shape_of(array);
  if (r.shape.empty()) fail(std::string(name) + ": expected at least one dimension, got a scalar");
  r.leading.assign(r.shape.begin(), r.shape.end() - 1);
  r.cols = static_cast<int64_t>(r.shape.back());
  r.rows = static_cast<int64_t>(count_of(r.leading));
  if (r.cols <= 0 || r.cols % multiple != 0) {
    fail(std::string(name) + ": expected a last dimension that is a positive multiple of " + std::to_string(multiple) +
         ", got " + to_string(r.shape));
  }
  return r;
}

Shape with_last(const Shape& leading, int64_t last) {
  Shape shape = leading;
  shape.push_back(static_cast<size_t>(last));
  return shape;
}

// Widens row r; exact for the three dtypes quantize accepts.
void read_row(const void* data, DType dtype, int64_t r, int64_t cols, std::vector<float>& row) {
  row.resize(static_cast<size_t>(cols));
  to_floats(static_cast<const std::byte*>(data) + r * cols * (bits(dtype) / 8), dtype, cols, row.data());
}

[[noreturn]] void fail_nonfinite(int64_t row) {
  fail("x: expected finite values, row " + std::to_string(row) + " holds NaN or Inf");
}

Quantized quantize(const Array& x, const std::string& mode, std::optional<double> tensor_scale,
                   const std::string& search_name) {
  const DType dtype = dtype_of(x, "x");
  if (!is_activation(dtype)) {
    fail("x: expected float32, float16 or bfloat16 (or its bits as uint16), got " + describe(x));
  }
  const Rows r = rows_of(x, "x", kBlockElems);
  const bool weights = mode == "weights";
  const bool dynamic = mode == "dynamic_token";
  const bool compat = mode == "compat";
  if (!weights && !dynamic && !compat && mode != "static") {
    fail("mode: expected weights, dynamic_token, static or compat, got " + mode);
  }
  if (search_name != "max" && search_name != "mse") fail("scales: expected max or mse, got " + search_name);
  if (search_name == "mse" && !weights) fail("scales: mse is for mode weights, got mode " + mode);
  if (dynamic && tensor_scale) fail("tensor_scale: dynamic_token chooses one per row, expected None");
  if (!weights && !dynamic && !tensor_scale) fail("tensor_scale: mode " + mode + " needs one, got None");
  float scale = tensor_scale ? static_cast<float>(*tensor_scale) : 1.0f;
  if (!std::isfinite(scale) || scale <= 0) {
    fail("tensor_scale: expected a positive finite float32, got " + std::to_string(tensor_scale.value_or(0)));
  }
  if (mode == "static") scale = round_up_to_power_of_two(scale);
  const ScaleSearch search = search_name == "mse" ? ScaleSearch::kMse : ScaleSearch::kMax;

  Output<uint8_t> codes(with_last(r.leading, r.cols / 2));
  Output<uint8_t> block_scales(with_last(r.leading, r.cols / kBlockElems));
  Output<float> row_scales(dynamic ? r.leading : Shape{});
  const void* data = x.data();
  {
    nb::gil_scoped_release release;
    std::vector<float> row;
    QuantizeCounts counts;
    if (weights) {
      double amax = 0;
      for (int64_t i = 0; i < r.rows; ++i) {
        read_row(data, dtype, i, r.cols, row);
        const float row_max = row_amax(row);
        if (!std::isfinite(row_max)) fail_nonfinite(i);
        amax = std::max(amax, static_cast<double>(row_max));
      }
      if (!tensor_scale) scale = tensor_scale_from_amax(amax);
    }
    for (int64_t i = 0; i < r.rows; ++i) {
      read_row(data, dtype, i, r.cols, row);
      uint8_t* row_codes = codes.data + i * (r.cols / 2);
      uint8_t* row_blocks = block_scales.data + i * (r.cols / kBlockElems);
      if (weights) {
        check(quantize_weights(row, 1, r.cols, scale, search, row_codes, row_blocks, counts));
      } else if (dynamic) {
        const float amax = row_amax(row);
        const float row_scale = std::isfinite(amax) ? dynamic_token_scale(amax) : 1.0f;
        // Neither codes nor block scales can say NaN; the row's scale can.
        row_scales.data[i] = quantize_row_exact(row, row_scale, row_codes, row_blocks, counts)
                                 ? row_scale
                                 : std::numeric_limits<float>::quiet_NaN();
      } else if (!(compat ? quantize_row_compat(row, scale, row_codes, row_blocks, counts)
                          : quantize_row_exact(row, scale, row_codes, row_blocks, counts))) {
        fail_nonfinite(i);
      }
    }
  }
  const nb::object scale_out = dynamic ? nb::object(row_scales.array()) : nb::cast(static_cast<double>(scale));
  return nb::make_tuple(codes.array(), block_scales.array(), scale_out);
}

nb::typed<nb::tuple, NumpyArray<uint8_t>, NumpyArray<uint8_t>, NumpyArray<float>> silu_mul_quantize(
    const Array& gate_up, const std::string& activation_name, std::optional<double> limit, double alpha,
    bool interleaved, const std::optional<Array>& row_weights, std::optional<double> power_of_two) {
  const DType dtype = dtype_of(gate_up, "gate_up");
  if (!is_activation(dtype))
    fail("gate_up: expected float32, float16 or bfloat16 (or its bits as uint16), got " + describe(gate_up));
  const Rows r = rows_of(gate_up, "gate_up", 2 * kBlockElems);
  const std::optional<float> narrow_limit =
      limit ? std::optional<float>(static_cast<float>(*limit)) : std::optional<float>();
  const GatedActivation activation =
      take(GatedActivation::make(take(parse<Activation>(activation_name)), narrow_limit, static_cast<float>(alpha)));
  const float scale = power_of_two ? static_cast<float>(*power_of_two) : 0.0f;
  if (power_of_two && !is_power_of_two(scale))
    fail("power_of_two: expected a normal power of two, got " + std::to_string(*power_of_two));
  if (row_weights && (dtype_of(*row_weights, "row_weights") != DType::kF32 || shape_of(*row_weights) != r.leading))
    fail("row_weights: expected " + to_string(r.leading) + " float32, got " + describe(*row_weights));

  const GateUp input{gate_up.data(), dtype, r.rows, r.cols / 2, interleaved};
  Output<uint8_t> codes(with_last(r.leading, input.inner / 2));
  Output<uint8_t> block_scales(with_last(r.leading, input.inner / kBlockElems));
  Output<float> row_scales(r.leading);
  {
    const nb::gil_scoped_release release;
    QuantizeCounts counts;
    swiglu_quantize(activation, input, row_weights ? static_cast<const float*>(row_weights->data()) : nullptr, scale,
                    {codes.data, block_scales.data, row_scales.data}, counts);
  }
  return nb::make_tuple(codes.array(), block_scales.array(), row_scales.array());
}

struct Nvfp4Arrays {
  Rows codes;
  const uint8_t* code_bytes = nullptr;
  const uint8_t* scale_bytes = nullptr;
  int64_t cols = 0;
};

Nvfp4Arrays nvfp4_arrays(const Array& codes, const Array& scales) {
  Nvfp4Arrays a;
  a.code_bytes = bytes_of(codes, "codes");
  a.scale_bytes = bytes_of(scales, "scales");
  a.codes = rows_of(codes, "codes", kBlockElems / 2);
  a.cols = a.codes.cols * 2;
  const Shape expected = with_last(a.codes.leading, a.cols / kBlockElems);
  if (shape_of(scales) != expected) {
    fail("scales: expected " + to_string(expected) + " for codes " + to_string(a.codes.shape) + ", got " +
         to_string(shape_of(scales)));
  }
  return a;
}

DType output_dtype(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBf16;
  fail("dtype: expected float32, bfloat16 or float16, got " + name);
}

// tensor_scales: one float32, or one per row of codes.
Decoded dequantize_array(const Array& codes, const Array& scales, const Array& tensor_scales,
                         const std::string& dtype_name) {
  const Nvfp4Arrays a = nvfp4_arrays(codes, scales);
  const DType dtype = output_dtype(dtype_name);
  if (dtype_of(tensor_scales, "tensor_scale") != DType::kF32) {
    fail("tensor_scale: expected float32, got " + describe(tensor_scales));
  }
  const bool per_row = tensor_scales.ndim() > 0;
  if (per_row && shape_of(tensor_scales) != a.codes.leading) {
    fail("tensor_scale: expected one number or " + to_string(a.codes.leading) + ", got " +
         to_string(shape_of(tensor_scales)));
  }
  const float* row_scales = static_cast<const float*>(tensor_scales.data());
  const Shape shape = with_last(a.codes.leading, a.cols);
  const auto run = [&](auto* out) {
    nb::gil_scoped_release release;
    if (!per_row) {
      check(dequantize(Nvfp4View::contiguous(a.code_bytes, a.scale_bytes, *row_scales, a.codes.rows, a.cols), dtype,
                       out));
      return;
    }
    for (int64_t i = 0; i < a.codes.rows; ++i) {
      auto* row = out + i * a.cols;
      const Nvfp4View view = Nvfp4View::contiguous(a.code_bytes + i * a.codes.cols,
                                                   a.scale_bytes + i * (a.cols / kBlockElems), 1.0f, 1, a.cols);
      if (std::isnan(row_scales[i])) {  // how quantize marks a row that held NaN or Inf
        using T = std::remove_reference_t<decltype(*row)>;
        T nan{};
        if constexpr (std::is_same_v<T, float>) {
          nan = std::numeric_limits<float>::quiet_NaN();
        } else {
          nan = dtype == DType::kBf16 ? T{0x7FC0} : T{0x7E00};
        }
        std::fill_n(row, a.cols, nan);
        continue;
      }
      Nvfp4View scaled = view;
      scaled.tensor_scale = row_scales[i];
      check(dequantize(scaled, dtype, row));
    }
  };
  if (dtype == DType::kF32) {
    Output<float> out(shape);
    run(out.data);
    return out.array();
  }
  Output<uint16_t> out(shape);  // bits; the package views them as their type
  run(out.data);
  return out.array();
}

NumpyArray<uint8_t> pack(const Array& codes) {
  const uint8_t* in = bytes_of(codes, "codes");
  const Rows r = rows_of(codes, "codes", 2);
  Output<uint8_t> out(with_last(r.leading, r.cols / 2));
  const size_t count = count_of(out.shape);
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) {
    if ((in[2 * i] | in[2 * i + 1]) > 15) {
      const size_t at = in[2 * i] > 15 ? 2 * i : 2 * i + 1;
      fail("codes: expected 0..15, element " + std::to_string(at) + " is " + std::to_string(in[at]));
    }
    out.data[i] = pack_codes(in[2 * i], in[2 * i + 1]);
  }
  nb::gil_scoped_acquire acquire;
  return out.array();
}

NumpyArray<uint8_t> unpack(const Array& bytes) {
  const uint8_t* in = bytes_of(bytes, "bytes");
  const Rows r = rows_of(bytes, "bytes", 1);
  Output<uint8_t> out(with_last(r.leading, r.cols * 2));
  const size_t count = count_of(r.shape);
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) {
    out.data[2 * i] = low_code(in[i]);
    out.data[2 * i + 1] = high_code(in[i]);
  }
  nb::gil_scoped_acquire acquire;
  return out.array();
}

template <class Encode>
NumpyArray<uint8_t> encode(const Array& x, Encode encode_one) {
  const DType dtype = dtype_of(x, "x");
  if (dtype == DType::kU8) fail("x: expected floating point, got " + describe(x));
  Output<uint8_t> out(shape_of(x));
  const size_t count = count_of(out.shape);
  const void* data = x.data();
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) out.data[i] = encode_one(data, dtype, i);
  nb::gil_scoped_acquire acquire;
  return out.array();
}

NumpyArray<uint8_t> encode_e2m1(const Array& x) {
  return encode(x, [](const void* data, DType dtype, size_t i) {
    const double value = element(data, dtype, i);
    return dtype == DType::kF64 ? e2m1_from_double(value) : e2m1_from_float(static_cast<float>(value));
  });
}
NumpyArray<uint8_t> encode_e4m3(const Array& x) {
  return encode(x, [](const void* data, DType dtype, size_t i) {
    const double value = element(data, dtype, i);
    return dtype == DType::kF64 ? e4m3_from_double(value) : e4m3_from_float(static_cast<float>(value));
  });
}

NumpyArray<float> decode(const Array& bytes, float (*decode_one)(uint8_t)) {
  const uint8_t* in = bytes_of(bytes, "bytes");
  Output<float> out(shape_of(bytes));
  const size_t count = count_of(out.shape);
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i) out.data[i] = decode_one(in[i]);
  nb::gil_scoped_acquire acquire;
  return out.array();
}

Fp8 to_fp8(const Array& codes, const Array& scales, double tensor_scale,
           std::optional<std::pair<int64_t, int64_t>> block) {
  const Nvfp4Arrays a = nvfp4_arrays(codes, scales);
  if (a.codes.shape.size() != 2) fail("codes: expected two dimensions, got " + to_string(a.codes.shape));
  Fp8Scaling scaling;
  Shape scales_shape;
  if (block) {
    scaling = {block->first, block->second};
    if (scaling.block_rows <= 0 || scaling.block_cols <= 0) {
      fail("block: expected None or two positive sizes, got (" + std::to_string(block->first) + ", " +
           std::to_string(block->second) + ")");
    }
    scales_shape = {static_cast<size_t>((a.codes.rows + scaling.block_rows - 1) / scaling.block_rows),
                    static_cast<size_t>((a.cols + scaling.block_cols - 1) / scaling.block_cols)};
  }
  Output<uint8_t> out(with_last(a.codes.leading, a.cols));
  Output<float> out_scales(scales_shape);
  {
    nb::gil_scoped_release release;
    const Nvfp4View view =
        Nvfp4View::contiguous(a.code_bytes, a.scale_bytes, static_cast<float>(tensor_scale), a.codes.rows, a.cols);
    if (static_cast<size_t>(fp8_scale_count(view, scaling)) != count_of(scales_shape)) {
      throw Failure({Code::kInternal, "to_fp8: the number of scales is not that of the blocks"});
    }
    check(convert_to_fp8(view, scaling, out.data, out_scales.data));
  }
  const nb::object scale_out = block ? nb::object(out_scales.array()) : nb::cast(static_cast<double>(*out_scales.data));
  return nb::make_tuple(out.array(), scale_out);
}

}  // namespace

void bind_formats(nb::module_& m) {
  m.def("silu_mul_quantize", &silu_mul_quantize, nb::arg("gate_up"), nb::arg("activation"),
        nb::arg("swiglu_limit").none(), nb::arg("swiglu_alpha"), nb::arg("interleaved"), nb::arg("row_weights").none(),
        nb::arg("power_of_two").none());
  m.def("quantize", &quantize, nb::arg("x"), nb::arg("mode"), nb::arg("tensor_scale").none(), nb::arg("scales"));
  m.def("dequantize", &dequantize_array, nb::arg("codes"), nb::arg("scales"), nb::arg("tensor_scale"),
        nb::arg("dtype"));
  m.def("pack", &pack, nb::arg("codes"));
  m.def("unpack", &unpack, nb::arg("bytes"));
  m.def("encode_e2m1", &encode_e2m1, nb::arg("x"));
  m.def("encode_e4m3", &encode_e4m3, nb::arg("x"));
  m.def(
      "decode_e2m1", [](const Array& a) { return decode(a, e2m1_to_float); }, nb::arg("codes"));
  m.def(
      "decode_e4m3", [](const Array& a) { return decode(a, e4m3_to_float); }, nb::arg("bytes"));
  m.def("to_fp8", &to_fp8, nb::arg("codes"), nb::arg("scales"), nb::arg("tensor_scale"), nb::arg("block").none());
}

}  // namespace nvfp4_moe::python
