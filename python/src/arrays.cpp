// Checks of borrowed arrays, with messages that name the argument, what was expected and what came.
#include "arrays.h"

namespace nvfp4_moe::python {

namespace {

using Kind = nb::dlpack::dtype_code;

Kind kind_of(const Array& array) { return static_cast<Kind>(array.dtype().code); }

}  // namespace

std::string to_string(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string describe(const Array& array) {
  const int bits = array.dtype().bits;
  std::string dtype = "dtype code " + std::to_string(array.dtype().code);
  switch (kind_of(array)) {
    case Kind::Int: dtype = "int"; break;
    case Kind::UInt: dtype = "uint"; break;
    case Kind::Float: dtype = "float"; break;
    case Kind::Bfloat: dtype = "bfloat"; break;
    case Kind::Complex: dtype = "complex"; break;
    case Kind::Bool: return to_string(shape_of(array)) + " bool";
    default: return to_string(shape_of(array)) + " " + dtype;
  }
  return to_string(shape_of(array)) + " " + dtype + std::to_string(bits);
}

void expect_host(const Array& array, const char* name) {
  if (array.device_type() != nb::device::cpu::value) {
    fail(std::string(name) + ": expected an array in host memory, got one on DLPack device type " +
         std::to_string(array.device_type()));
  }
}

DType dtype_of(const Array& array, const char* name) {
  expect_host(array, name);
  const int bits = array.dtype().bits;
  if (array.dtype().lanes == 1) {
    switch (kind_of(array)) {
      case Kind::Bfloat: return DType::kBf16;
      case Kind::Float:
        if (bits == 16) return DType::kF16;
        if (bits == 32) return DType::kF32;
        if (bits == 64) return DType::kF64;
        break;
      case Kind::UInt:
        if (bits == 8) return DType::kU8;
        if (bits == 16) return DType::kBf16;
        break;
      case Kind::Float8_E4M3FN: return DType::kU8;
      default: break;
    }
  }
  fail(std::string(name) + ": expected float32, float16, bfloat16 (or its bits as uint16) or bytes, got " +
       describe(array));
}

const uint8_t* bytes_of(const Array& array, const char* name) {
  expect_host(array, name);
  const bool is_bytes = array.dtype().lanes == 1 && array.dtype().bits == 8 &&
                        (kind_of(array) == Kind::UInt || kind_of(array) == Kind::Float8_E4M3FN);
  if (!is_bytes) fail(std::string(name) + ": expected bytes (uint8 or float8_e4m3fn), got " + describe(array));
  return static_cast<const uint8_t*>(array.data());
}

}  // namespace nvfp4_moe::python
