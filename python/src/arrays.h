// Arrays that cross into Python: borrowed inputs of any framework in host memory, and fresh NumPy outputs.
//
// uint16 stands for bfloat16 bits wherever a floating-point input is expected: NumPy has no bfloat16 of its own.
// The FP8 dtypes of other frameworks stand for their bytes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/float_formats.h"
#include "errors.h"

namespace nvfp4_moe::python {

namespace nb = nanobind;

// Any exporter of DLPack or the buffer protocol, any dtype, any device; the checks below say what is wrong.
using Array = nb::ndarray<nb::array_api, nb::ro, nb::c_contig>;
template <class T>  // a NumPy array that a signature, and so the stub, knows the dtype of
using NumpyArray = decltype(std::declval<nb::ndarray<nb::numpy, T>>().cast());
using Shape = std::vector<size_t>;

inline Shape shape_of(const Array& array) {
  Shape shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  return shape;
}
inline size_t count_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>());
}
std::string to_string(const Shape& shape);  // "(2, 16)"
std::string describe(const Array& array);   // "(2, 16) float32"
void expect_host(const Array& array, const char* name);

// kU8 for bytes (FP8 included), kBf16 for bfloat16 and uint16, kF16, kF32, kF64; any other dtype is an error.
DType dtype_of(const Array& array, const char* name);
// Bytes of shape (..., last): checks host memory and dtype. last < 0 accepts any.
const uint8_t* bytes_of(const Array& array, const char* name);
// Floating-point elements as a reader: element i as double, exact for every accepted dtype.
inline double element(const void* data, DType dtype, size_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[i];
    case DType::kF32: return static_cast<double>(static_cast<const float*>(data)[i]);
    case DType::kF16: return static_cast<double>(fp16_to_float(static_cast<const uint16_t*>(data)[i]));
    default: return static_cast<double>(bf16_to_float(static_cast<const uint16_t*>(data)[i]));
  }
}

using Dict = nb::typed<nb::dict, nb::str, nb::any>;

// A JSON object of the library as Python objects.
inline Dict parse_json(const std::string& text) {
  return nb::cast<nb::dict>(nb::module_::import_("json").attr("loads")(text));
}

// A fresh C-contiguous NumPy array, contents undefined.
template <class T>
struct Output {
  explicit Output(Shape s) : shape(std::move(s)) {
    auto owned = std::make_unique<T[]>(std::max<size_t>(count_of(shape), 1));
    data = owned.get();
    owner = nb::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    static_cast<void>(owned.release());
  }
  NumpyArray<T> array() const {
    return nb::ndarray<nb::numpy, T>(data, shape.size(), shape.data(), owner).cast(nb::rv_policy::reference);
  }
  Shape shape;
  T* data = nullptr;
  nb::capsule owner;
};

}  // namespace nvfp4_moe::python
