// The one array type of the binding: an array of any framework and device, in and out. Borrowed
// without a copy (pointer, shape, strides, dtype, device; the Python object is kept alive), or
// fresh, for a result, in the framework of an input.
//
// A type with DLPack's exchange table (torch 2.10 and later) costs some tens of nanoseconds;
// everything else goes through the buffer protocol, `__dlpack__`, and for what those refuse
// (ml_dtypes, older torch) the package's
// `_arrays`. uint16 stands for bfloat16 bits, since NumPy has no bfloat16; FP8 E4M3 (and packed
// E2M1) stands for its bytes if bytes are wanted. Every function here needs the interpreter lock
// but the accessors of the view.
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
#include "interpreter.h"

namespace nvfp4_moe::internal::python {

namespace nb = nanobind;

struct Device {
  int32_t type = nb::device::cpu::value;  // DLPack's
  int32_t index = 0;
  bool is_host() const { return type == nb::device::cpu::value; }
  bool operator==(const Device&) const = default;
};
std::string to_string(const Device& device);  // "cpu", "cuda:0"
// Of "cpu", "cuda" or "cuda:N": ValueError for another name, Unsupported if this build or machine
// has no such device.
Device device_named(const std::string& name);
// How this build reads memory of that device; null on the host and if it cannot.
const DeviceMemory* memory_of(const Device& device);
// The address of a stream: an integer, or an object with cuda_stream. Raises ValueError for
// anything else.
void* stream_address(nb::handle given);

using Sizes = std::vector<int64_t>;
std::string to_string(const Sizes& shape);  // "(2, 16)", "(3,)", "()"

class Tensor {
 public:
  // The array behind a Python object, as it lies. name, for messages, must outlive the Tensor.
  // TypeError if it is no array, ValueError if its memory holds other numbers than it stands for
  // (torch's lazy negation).
  Tensor(nb::handle object, const char* name) : Tensor(object, name, LazyNegation::kRefused) {}
  // The same for arrays that the caller refuses unless they are contiguous, without the question
  // that this leaves out: a tensor that is lazily negated is an imaginary part, whose elements lie
  // two apart, so that it is contiguous with a single one only. The question costs a call into
  // torch, the whole rest some tens of nanoseconds.
  static Tensor of_run(nb::handle object, const char* name) {
    return Tensor(object, name, LazyNegation::kRefusedOfOneElement);
  }
  // The same, but numbers and lists are arrays too, and what is not row-major and aligned to its
  // elements is copied.
  static Tensor contiguous(nb::handle object, const char* name);
  // A fresh NumPy array, contents undefined.
  static Tensor numpy(const Sizes& shape, DType dtype);
  // A fresh row-major array to be written: of this one's framework and device, or a NumPy array for
  // a framework that has no exchange table. dtype: U8, I32, I64, F32, F16 or BF16. ValueError if
  // such an array is on no host.
  Tensor empty_like(const Sizes& shape, DType dtype) const;
  // Turns an array that empty_like or new_like made into one of this array's framework, once it is
  // written: a call's result.
  nb::object in_framework(const nb::object& made) const;
  nb::object in_framework(const Tensor& made) const { return in_framework(made.object()); }
  // This array's numbers in host memory, row-major, as F32, F64 or I64.
  Tensor cast(DType dtype) const;

  Tensor(Tensor&&) = default;  // not copied: the view points to what it owns
  Tensor& operator=(Tensor&&) = default;

  const nb::object& object() const { return object_; }

  const char* name() const { return name_; }
  int32_t ndim() const { return view_.ndim; }
  int64_t shape(int32_t i) const { return view_.shape[i]; }
  int64_t stride(int32_t i) const { return view_.strides[i]; }  // elements
  Device device() const { return {view_.device.device_type, view_.device.device_id}; }
  std::byte* data() const { return static_cast<std::byte*>(view_.data) + view_.byte_offset; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  Sizes shape() const { return Sizes(view_.shape, view_.shape + view_.ndim); }
  int64_t count() const;  // of elements
  // InvalidArgument "NAME: expected an array that can be written, ..." for memory that its
  // framework does not let be written: read-only, immutable (JAX), or of a tensor whose gradient is
  // being recorded.
  void check_writable() const;
  bool is_contiguous() const;
  // Whether every element, by the strides, lies inside the address space.
  bool lies_in_memory() const;

  bool is_floating() const;  // BF16, F16 or F32; uint16 is BF16
  bool is_index() const;     // int32 or int64
  bool is_bytes() const;     // uint8, float8_e4m3fn, or pairs of float4_e2m1fn
  bool is_f32() const;
  bool is_f64() const;
  bool is_u8() const;
  DType dtype() const;  // of one of the kinds above

  // A tensor of torch 2.10 or later, whose allocator and current stream the exchange table reaches.
  bool is_torch() const { return exchange_ != nullptr && torch_; }
  const DlpackExchange* exchange() const { return exchange_; }  // null if the type has none

  std::string describe() const;  // "(4, 64) float32 on cpu"
  // ValueError "NAME: expected EXPECTED, got (4, 64) float32 on cpu".
  [[noreturn]] void fail_expected(const std::string& expected) const;

  // The stream that work on this array belongs to: `given` (an integer, or an object with
  // cuda_stream), or if that is None the framework's current one of the device; null on the host
  // and if the framework does not tell.
  void* stream_or(nb::handle given) const;
  // As empty_like, of this array's own dtype, and by itself.
  nb::object new_like(const Sizes& shape) const;
  // The stream in which work that writes this array is queued: the framework's current one; if the
  // framework does not tell, all work of the device is waited for, and any stream will do. Null on
  // the host.
  void* ready_stream() const;

 private:
  enum class LazyNegation { kRefused, kRefusedOfOneElement, kAllowed };
  Tensor(nb::handle object, const char* name, LazyNegation lazy_negation);
  nb::object new_array(const Sizes& shape, const nb::dlpack::dtype& dtype) const;
  bool borrow_fast(PyTypeObject* type);
  void borrow_slow();
  bool is_aligned() const;
  bool is_negated() const;

  nb::object object_;
  const char* name_;
  nb::dlpack::dltensor view_{};
  const DlpackExchange* exchange_ = nullptr;  // null: the slow way
  bool torch_ = false;
  nb::ndarray<nb::ro> owned_;     // slow: keeps view_'s shape alive
  std::vector<int64_t> strides_;  // slow: if the array tells none
};

}  // namespace nvfp4_moe::internal::python
