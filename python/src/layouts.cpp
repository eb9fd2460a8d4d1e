// The 128x4 block-scale layout, both ways, and its per-expert form for activations.
#include <string>

#include "arrays.h"
#include "core/scale_layout.h"

namespace nvfp4_moe::python {

namespace {

using Offsets = nb::ndarray<nb::array_api, const int64_t, nb::ndim<1>, nb::c_contig>;

// (..., rows, S) -> (..., bytes): each matrix by itself, experts consecutive.
NumpyArray<uint8_t> swizzle(const Array& scales) {
  const uint8_t* in = bytes_of(scales, "scales");
  const Shape shape = shape_of(scales);
  if (shape.size() < 2) fail("scales: expected (..., rows, K/16), got " + to_string(shape));
  const int64_t rows = static_cast<int64_t>(shape[shape.size() - 2]);
  const int64_t cols = static_cast<int64_t>(shape.back());
  Shape out_shape(shape.begin(), shape.end() - 2);
  const size_t matrices = count_of(out_shape);
  const int64_t bytes = swizzled_scale_bytes(rows, cols);
  out_shape.push_back(static_cast<size_t>(bytes));
  Output<uint8_t> out(out_shape);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < matrices; ++i) {
      const int64_t matrix = static_cast<int64_t>(i);
      swizzle_scales(in + matrix * rows * cols, cols, rows, cols, out.data + matrix * bytes);
    }
  }
  return out.array();
}

NumpyArray<uint8_t> unswizzle(const Array& swizzled, int64_t rows, int64_t cols) {
  const uint8_t* in = bytes_of(swizzled, "swizzled");
  const Shape shape = shape_of(swizzled);
  constexpr int64_t kLimit = int64_t{1} << 40;  // the products below stay inside int64
  if (rows < 0 || cols < 0 || rows > kLimit || cols > kLimit / (rows + 128)) {
    fail("rows, cols: expected sizes, got " + std::to_string(rows) + ", " + std::to_string(cols));
  }
  const int64_t bytes = swizzled_scale_bytes(rows, cols);
  if (shape.empty() || static_cast<int64_t>(shape.back()) != bytes) {
    fail("swizzled: expected a last dimension of " + std::to_string(bytes) + " bytes for (" + std::to_string(rows) +
         ", " + std::to_string(cols) + ") scales, got " + to_string(shape));
  }
  Shape out_shape(shape.begin(), shape.end() - 1);
  const size_t matrices = count_of(out_shape);
  out_shape.push_back(static_cast<size_t>(rows));
  out_shape.push_back(static_cast<size_t>(cols));
  Output<uint8_t> out(out_shape);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < matrices; ++i) {
      const int64_t matrix = static_cast<int64_t>(i);
      unswizzle_scales(in + matrix * bytes, rows, cols, out.data + matrix * rows * cols, cols);
    }
  }
  return out.array();
}

// row_offsets: (experts + 1) int64, from 0 to rows, not decreasing.
NumpyArray<uint8_t> swizzle_experts(const Array& scales, const Offsets& offsets) {
  const uint8_t* in = bytes_of(scales, "scales");
  const Shape shape = shape_of(scales);
  if (shape.size() != 2) fail("scales: expected (rows, K/16), got " + to_string(shape));
  if (offsets.device_type() != nb::device::cpu::value) fail("row_offsets: expected an array in host memory");
  const int64_t rows = static_cast<int64_t>(shape[0]);
  const int64_t cols = static_cast<int64_t>(shape[1]);
  const int64_t experts = static_cast<int64_t>(offsets.shape(0)) - 1;
  if (experts < 0 || offsets.data()[0] != 0 || offsets.data()[experts] != rows) {
    fail("row_offsets: expected offsets from 0 to " + std::to_string(rows));
  }
  for (int64_t e = 0; e < experts; ++e) {
    if (offsets.data()[e] > offsets.data()[e + 1]) {
      fail("row_offsets: expected not to decrease, does after expert " + std::to_string(e));
    }
  }
  Output<uint8_t> out(
      {static_cast<size_t>(expert_scale_rows_bound(rows, experts)) * static_cast<size_t>(round_up(cols, 4))});
  {
    nb::gil_scoped_release release;
    swizzle_expert_scales(in, offsets.data(), experts, cols, out.data);
  }
  return out.array();
}

}  // namespace

void bind_layouts(nb::module_& m) {
  m.def("swizzle", &swizzle, nb::arg("scales"));
  m.def("unswizzle", &unswizzle, nb::arg("swizzled"), nb::arg("rows"), nb::arg("cols"));
  m.def("swizzle_experts", &swizzle_experts, nb::arg("scales"), nb::arg("row_offsets"));
  m.def(
      "expert_scale_row", [](int64_t row_offset, int64_t expert) { return expert_scale_row(row_offset, expert); },
      nb::arg("row_offset"), nb::arg("expert"));
}

}  // namespace nvfp4_moe::python
