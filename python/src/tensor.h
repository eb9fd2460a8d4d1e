// The array type of the binding: an array of any framework and device. It is either borrowed
// without a copy (pointer, shape, strides, dtype, device; the Python object is kept alive), or new,
// for a result, in the framework of an input.
//
// Borrowing costs some tens of nanoseconds for a type with DLPack's exchange table (torch 2.10 and
// later). Everything else goes through the buffer protocol or `__dlpack__`, and if those refuse
// (ml_dtypes, older torch) through the package's `_arrays`. uint16 is read as the bits of bfloat16,
// because NumPy has no bfloat16. FP8 E4M3 and packed E2M1 are read as bytes if bytes are expected.
// Every function here except the accessors of the view needs the interpreter lock.
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
// Parses "cpu", "cuda" or "cuda:N". ValueError for another name, Unsupported if this build or
// machine has no such device.
Device device_named(const std::string& name);
// Access to the device's memory; null for the host and if this build has no access.
const DeviceMemory* memory_of(const Device& device);
// The address of a stream: an integer, or an object with cuda_stream. Raises ValueError for
// anything else.
void* stream_address(nb::handle given);

using Sizes = std::vector<int64_t>;
std::string to_string(const Sizes& shape);  // "(2, 16)", "(3,)", "()"

class Tensor {
 public:
  // Borrows the array of a Python object with its strides. name, for messages, must outlive the
  // Tensor. TypeError if it is not an array, ValueError if its values differ from its memory
  // (torch's lazy negation).
  Tensor(nb::handle object, const char* name) : Tensor(object, name, LazyNegation::kRefused) {}
  // The same for callers that accept only contiguous arrays. It asks torch about lazy negation only
  // if the array has a single element. A lazily negated tensor is an imaginary part, with a stride
  // of two elements, so it is not contiguous otherwise. Asking costs a call into torch; everything
  // else costs some tens of nanoseconds.
  static Tensor of_run(nb::handle object, const char* name) {
    return Tensor(object, name, LazyNegation::kRefusedOfOneElement);
  }
  // Unsupported, naming the tensor, if torch records gradients and an input requires one: the
  // result has none, so backward would stop here without a word.
  static void refuse_gradients(std::initializer_list<const Tensor*> inputs);
  // The same, but accepts numbers and lists too, and copies arrays that are not row-major and
  // aligned to their elements.
  static Tensor contiguous(nb::handle object, const char* name);
  // A new NumPy array with undefined contents.
  static Tensor numpy(const Sizes& shape, DType dtype);
  // A new row-major array to write: in this array's framework and device, or a NumPy array for a
  // framework without an exchange table. dtype: U8, I32, I64, F32, F16 or BF16. ValueError if the
  // framework has no table and this array is not on the host.
  Tensor empty_like(const Sizes& shape, DType dtype) const;
  // Converts a written array from empty_like or new_like to this array's framework, as a call's
  // result.
  nb::object in_framework(const nb::object& made) const;
  nb::object in_framework(const Tensor& made) const { return in_framework(made.object()); }
  // Converts this array to row-major F32, F64 or I64 in host memory.
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
  // InvalidArgument "NAME: expected an array that can be written, ..." if the framework forbids
  // writing: a read-only or immutable (JAX) array, or a tensor whose gradient is being recorded.
  void check_writable() const;
  bool is_contiguous() const;
  // Whether the strides keep every element inside the address space.
  bool lies_in_memory() const;

  bool is_floating() const;  // BF16, F16 or F32; uint16 is BF16
  bool is_index() const;     // int32 or int64
  bool is_bytes() const;     // uint8, float8_e4m3fn, or pairs of float4_e2m1fn
  bool is_f32() const;
  bool is_f64() const;
  bool is_u8() const;
  DType dtype() const;  // of one of the kinds above

  // Whether this is a tensor of torch 2.10 or later, whose exchange table gives access to its
  // allocator and current stream.
  bool is_torch() const { return exchange_ != nullptr && torch_; }
  const DlpackExchange* exchange() const { return exchange_; }  // null if the type has none

  std::string describe() const;  // "(4, 64) float32 on cpu"
  // ValueError "NAME: expected EXPECTED, got (4, 64) float32 on cpu".
  [[noreturn]] void fail_expected(const std::string& expected) const;

  // The stream for work on this array: `given` (an integer, or an object with cuda_stream), or
  // without it the framework's current stream on the device. Null on the host, and if the
  // framework does not report its stream.
  void* stream_or(nb::handle given) const;
  // Like empty_like, with this array's dtype; returns the plain Python object.
  nb::object new_like(const Sizes& shape) const;
  // The stream in which writes to this array are queued: the framework's current stream. If the
  // framework does not report it, this waits for all work of the device, so that any stream will
  // do. Null on the host.
  void* ready_stream() const;

 private:
  enum class LazyNegation { kRefused, kRefusedOfOneElement, kAllowed };
  Tensor(nb::handle object, const char* name, LazyNegation lazy_negation);
  nb::object new_array(const Sizes& shape, const nb::dlpack::dtype& dtype) const;
  bool borrow_fast(PyTypeObject* type);
  void borrow_slow();
  bool is_aligned() const;
  bool is_negated() const;
  bool requires_grad() const;  // only for torch tensors

  nb::object object_;
  const char* name_;
  nb::dlpack::dltensor view_{};
  const DlpackExchange* exchange_ = nullptr;  // null: the slow path
  bool torch_ = false;
  nb::ndarray<nb::ro> owned_;     // slow: keeps view_'s shape alive
  std::vector<int64_t> strides_;  // slow: if the array has no strides
};

}  // namespace nvfp4_moe::internal::python
