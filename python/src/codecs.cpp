// Elementwise functions on the host: packing of E2M1 codes, and the E2M1 and E4M3 codecs; also the
// row where an expert's scale tiles begin. float64 is rounded only once.
#include "core/float_formats.h"
#include "core/scale_layout.h"
#include "moe/formats.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

namespace {

// Reads bytes on the host whose last dimension is a multiple of `multiple`.
Tensor bytes_of(nb::handle object, const char* name, int64_t multiple, const char* expected) {
  Tensor array = Tensor::contiguous(object, name);
  const int32_t last = array.ndim() - 1;
  const bool shaped =
      multiple == 0 || (last >= 0 && array.shape(last) > 0 && array.shape(last) % multiple == 0);
  if (!array.is_bytes() || !array.device().is_host() || !shaped) array.fail_expected(expected);
  return array;
}

nb::object pack(nb::handle codes_object) {
  const Tensor codes = bytes_of(codes_object, "codes", 2, "(..., K) uint8 on cpu, K even");
  Sizes shape = codes.shape();
  shape.back() /= 2;
  const Tensor out = codes.empty_like(shape, DType::kU8);
  {
    const WithoutLock unlocked;
    check(formats::pack_codes(codes.as<uint8_t>(), codes.count(), out.as<uint8_t>()));
  }
  return codes.in_framework(out);
}

nb::object unpack(nb::handle packed_object) {
  const Tensor packed = bytes_of(packed_object, "packed", 1, "(..., K/2) uint8 on cpu");
  Sizes shape = packed.shape();
  shape.back() *= 2;
  const Tensor out = packed.empty_like(shape, DType::kU8);
  {
    const WithoutLock unlocked;
    check(formats::unpack_codes(packed.as<uint8_t>(), out.count(), out.as<uint8_t>()));
  }
  return packed.in_framework(out);
}

// An element as a double, exact for every accepted dtype.
double element(const Tensor& array, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64: return array.as<double>()[i];
    case DType::kF32: return static_cast<double>(array.as<float>()[i]);
    case DType::kF16: return static_cast<double>(fp16_to_float(array.as<uint16_t>()[i]));
    default: return static_cast<double>(bf16_to_float(array.as<uint16_t>()[i]));
  }
}

nb::object encode(nb::handle x_object, uint8_t (*from_float)(float),
                  uint8_t (*from_double)(double)) {
  const Tensor x = Tensor::contiguous(x_object, "x");
  if (!(x.is_floating() || x.is_f64()) || !x.device().is_host())
    x.fail_expected("bfloat16 (or its bits as uint16), float16, float32 or float64 on cpu");
  const Tensor out = x.empty_like(x.shape(), DType::kU8);
  {
    const WithoutLock unlocked;
    const DType dtype = x.dtype();
    const int64_t count = x.count();
    for (int64_t i = 0; i < count; ++i) {
      const double value = element(x, dtype, i);
      out.as<uint8_t>()[i] =
          dtype == DType::kF64 ? from_double(value) : from_float(static_cast<float>(value));
    }
  }
  return x.in_framework(out);
}

nb::object decode(nb::handle object, const char* name, float (*decode_one)(uint8_t)) {
  const Tensor encoded = bytes_of(object, name, 0, "uint8 on cpu");
  const Tensor out = encoded.empty_like(encoded.shape(), DType::kF32);
  {
    const WithoutLock unlocked;
    const int64_t count = encoded.count();
    for (int64_t i = 0; i < count; ++i) out.as<float>()[i] = decode_one(encoded.as<uint8_t>()[i]);
  }
  return encoded.in_framework(out);
}

}  // namespace

void bind_codecs(nb::module_& m) {
  m.def("pack_codes", &pack, nb::arg("codes"));
  m.def("unpack_codes", &unpack, nb::arg("packed"));
  m.def(
      "encode_e2m1", [](nb::handle x) { return encode(x, e2m1_from_float, e2m1_from_double); },
      nb::arg("x"));
  m.def(
      "encode_e4m3", [](nb::handle x) { return encode(x, e4m3_from_float, e4m3_from_double); },
      nb::arg("x"));
  m.def(
      "decode_e2m1", [](nb::handle codes) { return decode(codes, "codes", e2m1_to_float); },
      nb::arg("codes"));
  m.def(
      "decode_e4m3", [](nb::handle encoded) { return decode(encoded, "encoded", e4m3_to_float); },
      nb::arg("encoded"));
  m.def(
      "expert_scale_row",
      [](int64_t row_offset, int64_t expert) { return expert_scale_row(row_offset, expert); },
      nb::arg("row_offset"), nb::arg("expert"));
}

}  // namespace nvfp4_moe::internal::python
