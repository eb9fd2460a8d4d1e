// One array of a call, borrowed from any framework without a copy: pointer, shape, strides, dtype and device, and fresh
// arrays of the same framework for outputs.
//
// A type with DLPack's exchange table (torch 2.10 and later) costs some tens of nanoseconds; everything else goes
// through the buffer protocol, `__dlpack__`, and for what those refuse (ml_dtypes, older torch) the package's
// `_arrays`. uint16 stands for bfloat16 bits, as in arrays.h; FP8 E4M3 stands for its bytes where bytes are wanted.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/dtype.h"
#include "dlpack_exchange.h"
#include "errors.h"

namespace nvfp4_moe::python {

namespace nb = nanobind;

struct Device {
  int32_t type = nb::device::cpu::value;  // DLPack's
  int32_t index = 0;
  bool is_host() const { return type == nb::device::cpu::value; }
  bool operator==(const Device&) const = default;
};
std::string to_string(const Device& device);  // "cpu", "cuda:0"
// Of "cpu", "cuda" or "cuda:N": ValueError for another name, Unsupported where this build or machine has no such
// device.
Device device_named(const std::string& name);
// How this build reads memory of that device; null on the host and where it cannot.
const DeviceMemory* memory_of(const Device& device);

class Tensor {
 public:
  // The array behind a Python object, which must outlive the Tensor. TypeError where it is no array.
  Tensor(nb::handle object, const char* name);

  const char* name() const { return name_; }
  int32_t ndim() const { return view_.ndim; }
  int64_t shape(int32_t i) const { return view_.shape[i]; }
  int64_t stride(int32_t i) const { return view_.strides[i]; }  // elements
  Device device() const { return {view_.device.device_type, view_.device.device_id}; }
  std::byte* data() const { return static_cast<std::byte*>(view_.data) + view_.byte_offset; }
  bool is_writable() const;
  bool is_contiguous() const;

  bool is_floating() const;  // BF16, F16 or F32; uint16 is BF16
  bool is_index() const;     // int32 or int64
  bool is_bytes() const;     // uint8 or float8_e4m3fn
  bool is_f32() const;
  DType dtype() const;  // of one of the four kinds above

  std::string describe() const;  // "(4, 64) float32 on cpu"
  // ValueError "NAME: expected EXPECTED, got (4, 64) float32 on cpu".
  [[noreturn]] void fail_expected(const std::string& expected) const;

  // The stream that work on this array belongs to: `given` (an integer, or an object with cuda_stream), or where that
  // is None the framework's current one of the device; null on the host and where the framework does not tell.
  void* stream_or(nb::handle given) const;
  // An uninitialized contiguous array of this one's framework, device and dtype (NumPy where the framework has no way
  // to make one).
  nb::object new_like(const std::vector<int64_t>& shape) const;
  // The same with another dtype: uint8, or one of floats. ValueError where the framework has no way to make one.
  nb::object new_like(const std::vector<int64_t>& shape, DType dtype) const;

 private:
  nb::object new_array(const std::vector<int64_t>& shape, const nb::dlpack::dtype& dtype) const;
  bool borrow_fast(PyTypeObject* type);
  void borrow_slow();

  nb::handle object_;
  const char* name_;
  nb::dlpack::dltensor view_{};
  const DlpackExchange* exchange_ = nullptr;  // null: the slow way
  nb::ndarray<nb::ro> owned_;                 // slow: keeps view_'s shape alive
  std::vector<int64_t> strides_;              // slow: where the array tells none
};

}  // namespace nvfp4_moe::python
