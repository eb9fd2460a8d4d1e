// Long because every framework's arrays are read and made here.
#include "tensor.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string_view>
#include <utility>

#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::python {

namespace {

using Kind = nb::dlpack::dtype_code;

// Features of a type of arrays. There are few types and they live long, so they are kept in a small
// table that is searched linearly. The table holds a reference to each type.
struct KnownType {
  PyTypeObject* type;
  const DlpackExchange* table;  // null if it has none
  bool torch;                   // torch.Tensor, or a class derived from it
};
bool is_torch_type(PyTypeObject* type) {
  const nb::object torch = nb::module_::import_("sys").attr("modules").attr("get")("torch");
  if (torch.is_none() || !nb::hasattr(torch, "Tensor")) return false;
  return PyObject_IsSubclass(reinterpret_cast<PyObject*>(type),
                             nb::object(torch.attr("Tensor")).ptr()) == 1;
}
KnownType known_type(PyTypeObject* type) {
  constinit static std::array<KnownType, 16> known{};
  constinit static int count = 0;  // guarded by the interpreter lock
  for (int i = 0; i < count; ++i)
    if (known[static_cast<size_t>(i)].type == type) return known[static_cast<size_t>(i)];

  const DlpackExchange* table = nullptr;
  const nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), kExchangeAttribute, nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), kExchangeCapsule)) {
    table =
        static_cast<const DlpackExchange*>(PyCapsule_GetPointer(capsule.ptr(), kExchangeCapsule));
    while (table != nullptr && table->version.major > kDlpackMajor) table = table->previous;
    if (table != nullptr && (table->version.major != kDlpackMajor || table->borrow == nullptr))
      table = nullptr;
  }
  const KnownType found{type, table, is_torch_type(type)};
  if (count < static_cast<int>(known.size())) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known[static_cast<size_t>(count++)] = found;
  }
  return found;
}

std::string class_of(nb::handle object) { return nb::inst_name(object).c_str(); }

std::string dtype_name(const nb::dlpack::dtype& dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (static_cast<Kind>(dtype.code)) {
    case Kind::Int: return "int" + bits;
    case Kind::UInt: return "uint" + bits;
    case Kind::Float: return "float" + bits;
    case Kind::Bfloat: return "bfloat" + bits;
    case Kind::Complex: return "complex" + bits;
    case Kind::Bool: return "bool";
    case Kind::Float8_E4M3FN: return "float8_e4m3fn";
    default: return "DLPack dtype " + std::to_string(dtype.code) + " of " + bits + " bits";
  }
}

// Calls function(arguments...) of the package's _arrays.
template <class... Arguments>
nb::object call_arrays(const char* function, Arguments&&... arguments) {
  return in_python([&]() -> nb::object {
    return nb::module_::import_("nvfp4_moe._arrays")
        .attr(function)(std::forward<Arguments>(arguments)...);
  });
}

// The dtype's name in NumPy and torch.
const char* name_of_dtype(DType dtype) {
  switch (dtype) {
    case DType::kU8: return "uint8";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
    case DType::kF16: return "float16";
    case DType::kBf16: return "bfloat16";
    case DType::kF64: return "float64";
    default: return "float32";
  }
}

// Whether the framework marks the array read-only through DLPack. Capsules without a version have
// no such flag.
bool lent_read_only(const nb::object& object, const DlpackExchange* exchange) {
  constexpr uint64_t kReadOnly = 1;
  DlpackManagedTensor* managed = nullptr;
  if (exchange != nullptr) {
    if (exchange->export_managed(object.ptr(), &managed) != 0) nb::raise_python_error();
    const uint64_t flags = managed->flags;
    if (managed->deleter != nullptr) managed->deleter(managed);
    return (flags & kReadOnly) != 0;
  }
  try {
    const nb::object capsule =
        object.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(kDlpackMajor, 0));
    constexpr const char* kVersioned = "dltensor_versioned";
    if (PyCapsule_IsValid(capsule.ptr(), kVersioned) == 0) return false;
    return (static_cast<DlpackManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kVersioned))
                ->flags &
            kReadOnly) != 0;
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) throw;
    return false;  // no such method, or one that takes no version
  }
}

// Whether torch records gradients on this thread. torch has been imported.
bool records_gradients() {
  static PyObject* asks = nullptr;  // guarded by the interpreter lock, as an import may release it
  if (asks == nullptr)
    asks = nb::object(nb::module_::import_("torch").attr("is_grad_enabled")).release().ptr();
  const nb::object answer = nb::steal(PyObject_CallNoArgs(asks));
  if (!answer.is_valid()) nb::raise_python_error();
  return answer.is(nb::handle(Py_True));
}

void set_error(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

}  // namespace

std::string to_string(const Sizes& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string to_string(const Device& device) {
  if (device.is_host()) return "cpu";
  const std::string index = ":" + std::to_string(device.index);
  if (device.type == nb::device::cuda::value) return "cuda" + index;
  return "DLPack device " + std::to_string(device.type) + index;
}

Device device_named(const std::string& name) {
  const DeviceFacts facts = take(device_facts(name));
  if (facts.kind == DeviceKind::kCpu) return {};
  return {nb::device::cuda::value, facts.index};
}

const DeviceMemory* memory_of(const Device& device) {
  return device.type == nb::device::cuda::value ? device_memory(DeviceKind::kCuda) : nullptr;
}

Tensor::Tensor(nb::handle object, const char* name, LazyNegation lazy_negation)
    : object_(nb::borrow(object)), name_(name) {
  if (!borrow_fast(Py_TYPE(object.ptr()))) borrow_slow();
  if (!torch_ || lazy_negation == LazyNegation::kAllowed) return;
  if ((lazy_negation == LazyNegation::kRefused || count() == 1) && is_negated())
    fail(std::string(name_) +
         ": expected a tensor whose memory holds its numbers, got one that is lazily negated (" +
         describe() + "); .resolve_neg() makes it one");
}

Tensor Tensor::contiguous(nb::handle object, const char* name) {
  const bool known = known_type(Py_TYPE(object.ptr())).table != nullptr;
  Tensor array(known ? nb::borrow(object) : call_arrays("as_array", object), name,
               LazyNegation::kAllowed);
  if (array.is_contiguous() && array.is_aligned() && !(array.torch_ && array.is_negated()))
    return array;
  return Tensor(call_arrays("contiguous", array.object_), name);
}

Tensor Tensor::numpy(const Sizes& shape, DType dtype) {
  return Tensor(call_arrays("empty_like", nb::none(), shape, name_of_dtype(dtype)), "out");
}

Tensor Tensor::empty_like(const Sizes& shape, DType dtype) const {
  if (exchange_ != nullptr) {
    const Kind kind = dtype == DType::kU8                            ? Kind::UInt
                      : dtype == DType::kI32 || dtype == DType::kI64 ? Kind::Int
                      : dtype == DType::kBf16                        ? Kind::Bfloat
                                                                     : Kind::Float;
    return Tensor(
        new_array(shape, {static_cast<uint8_t>(kind), static_cast<uint8_t>(bits(dtype)), 1}),
        "out");
  }
  Tensor made(call_arrays("empty_like", object_, shape, name_of_dtype(dtype)), "out");
  if (made.device() != device())
    fail(std::string(name_) + ": expected an array in host memory, or a torch tensor, got " +
         class_of(object_) + " on " + to_string(device()));
  return made;
}

Tensor Tensor::cast(DType dtype) const {
  return Tensor(call_arrays("cast", object_, name_of_dtype(dtype)), name_);
}

bool Tensor::borrow_fast(PyTypeObject* type) {
  const KnownType known = known_type(type);
  exchange_ = known.table;
  torch_ = known.torch;
  if (exchange_ == nullptr) return false;
  if (exchange_->borrow(object_.ptr(), &view_) !=
      0) {  // no memory (meta, fake), or a layout that DLPack cannot describe
    nb::python_error error;
    std::string reason = error.what();
    reason = reason.substr(0, reason.find('\n'));
    fail(std::string(name_) +
         ": expected an array with memory that DLPack can lend, got one of which " +
         class_of(object_) + " says: " + reason);
  }
  return view_.ndim == 0 || view_.strides != nullptr;
}

void Tensor::borrow_slow() {
  exchange_ = nullptr;
  if (!nb::try_cast(object_, owned_, false)) {
    const nb::object lent = call_arrays("view", object_);
    if (lent.is_none() || !nb::try_cast(lent, owned_, false)) {
      throw nb::type_error(
          (std::string(name_) + ": expected an array, got " + class_of(object_)).c_str());
    }
  }
  view_.data = const_cast<void*>(owned_.data());
  view_.device = {owned_.device_type(), owned_.device_id()};
  view_.ndim = static_cast<int32_t>(owned_.ndim());
  view_.dtype = owned_.dtype();
  view_.shape = const_cast<int64_t*>(owned_.shape_ptr());
  view_.strides = const_cast<int64_t*>(owned_.stride_ptr());
  if (view_.strides == nullptr) {
    strides_.resize(owned_.ndim());
    int64_t stride = 1;
    for (size_t i = owned_.ndim(); i-- > 0;) {
      strides_[i] = stride;
      stride *= view_.shape[i];
    }
    view_.strides = strides_.data();
  }
}

void Tensor::refuse_gradients(std::initializer_list<const Tensor*> inputs) {
  // Engines run without gradients, so the usual call asks torch once.
  if (!(*inputs.begin())->torch_ || !records_gradients()) return;
  for (const Tensor* input : inputs)
    if (input->torch_ && input->requires_grad())
      throw Failure(unsupported(std::string(input->name_) +
                                ": expected a tensor that needs no gradient, since NVFP4 layers "
                                "have none, got one that requires grad; run under "
                                "torch.no_grad() or torch.inference_mode()"));
}

bool Tensor::requires_grad() const {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  const nb::object wanted = nb::steal(PyObject_GetAttr(object_.ptr(), name));
  if (!wanted.is_valid()) nb::raise_python_error();
  return wanted.is(nb::handle(Py_True));
}

void Tensor::check_writable() const {
  const auto refuse = [this](const char* got) {
    fail(std::string(name_) + ": expected an array that can be written, got " + got);
  };
  if (torch_) {
    if (!requires_grad() || !records_gradients()) return;
    refuse("a tensor that requires grad, which autograd would not see change");
  }
  const nb::object writeable =
      nb::getattr(nb::getattr(object_, "flags", nb::none()), "writeable", nb::none());
  if (writeable.is(nb::handle(Py_True))) return;  // NumPy: no further check
  if (writeable.is(nb::handle(Py_False)) || lent_read_only(object_, exchange_))
    refuse("a read-only one");
  if (const nb::object why = call_arrays("immutable", object_); !why.is_none())
    refuse(nb::str(why).c_str());
}

nb::object Tensor::in_framework(const nb::object& made) const {
  const bool is_made_so = exchange_ != nullptr || Py_TYPE(object_.ptr()) == Py_TYPE(made.ptr());
  return is_made_so ? made : call_arrays("in_framework", made, object_);
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  bool contiguous = true;
  for (int32_t i = view_.ndim; i-- > 0;) {
    if (view_.shape[i] == 0) return true;
    contiguous = contiguous && (view_.shape[i] == 1 || view_.strides[i] == expected);
    expected *= view_.shape[i];
  }
  return contiguous;
}

int64_t Tensor::count() const {
  int64_t count = 1;
  for (int32_t i = 0; i < view_.ndim; ++i) count *= view_.shape[i];
  return count;
}

bool Tensor::lies_in_memory() const {
  int64_t before = 0;  // offset of the lowest byte from the first element, not positive
  int64_t after = view_.dtype.bits / 8 * view_.dtype.lanes;  // offset of the end
  for (int32_t i = 0; i < view_.ndim; ++i) {
    if (view_.shape[i] == 0) return true;
    int64_t reach = 0;
    if (__builtin_mul_overflow(view_.shape[i] - 1, view_.strides[i], &reach) ||
        __builtin_mul_overflow(reach, view_.dtype.bits / 8, &reach) ||
        __builtin_add_overflow(reach < 0 ? before : after, reach, reach < 0 ? &before : &after))
      return false;
  }
  const auto first = reinterpret_cast<uintptr_t>(data());
  return uint64_t{0} - static_cast<uint64_t>(before) <= first &&
         static_cast<uint64_t>(after) <= UINTPTR_MAX - first;
}

bool Tensor::is_negated() const {
  return in_python([&] {
    const nb::object answer = object_.attr("is_neg")();
    return answer.is(nb::handle(Py_True));
  });
}

bool Tensor::is_aligned() const {
  const auto bytes = static_cast<uintptr_t>(view_.dtype.bits / 8);
  return bytes == 0 || reinterpret_cast<uintptr_t>(data()) % bytes == 0;
}

bool Tensor::is_floating() const {
  const int bits = view_.dtype.bits;
  if (view_.dtype.lanes != 1) return false;
  switch (static_cast<Kind>(view_.dtype.code)) {
    case Kind::Bfloat: return bits == 16;
    case Kind::Float: return bits == 16 || bits == 32;
    case Kind::UInt: return bits == 16;
    default: return false;
  }
}
bool Tensor::is_index() const {
  return view_.dtype.lanes == 1 && static_cast<Kind>(view_.dtype.code) == Kind::Int &&
         (view_.dtype.bits == 32 || view_.dtype.bits == 64);
}
bool Tensor::is_bytes() const {
  const auto kind = static_cast<Kind>(view_.dtype.code);
  if (kind == Kind::Float4_E2M1FN) return view_.dtype.lanes == 2 && view_.dtype.bits == 4;
  return view_.dtype.lanes == 1 && view_.dtype.bits == 8 &&
         (kind == Kind::UInt || kind == Kind::Float8_E4M3FN);
}
bool Tensor::is_u8() const {
  return view_.dtype.lanes == 1 && view_.dtype.bits == 8 &&
         static_cast<Kind>(view_.dtype.code) == Kind::UInt;
}
bool Tensor::is_f32() const {
  return view_.dtype.lanes == 1 && static_cast<Kind>(view_.dtype.code) == Kind::Float &&
         view_.dtype.bits == 32;
}
bool Tensor::is_f64() const {
  return view_.dtype.lanes == 1 && static_cast<Kind>(view_.dtype.code) == Kind::Float &&
         view_.dtype.bits == 64;
}

DType Tensor::dtype() const {
  const int bits = view_.dtype.bits;
  switch (static_cast<Kind>(view_.dtype.code)) {
    case Kind::Int: return bits == 32 ? DType::kI32 : DType::kI64;
    case Kind::UInt: return bits == 16 ? DType::kBf16 : DType::kU8;
    case Kind::Bfloat: return DType::kBf16;
    case Kind::Float: return bits == 16 ? DType::kF16 : bits == 64 ? DType::kF64 : DType::kF32;
    default: return DType::kU8;
  }
}

std::string Tensor::describe() const {
  return to_string(shape()) + " " + dtype_name(view_.dtype) + " on " + to_string(device()) +
         (is_contiguous() ? "" : ", not contiguous");
}

void Tensor::fail_expected(const std::string& expected) const {
  fail(std::string(name_) + ": expected " + expected + ", got " + describe());
}

void* stream_address(nb::handle given) {
  uintptr_t address = 0;
  if (!nb::try_cast(nb::getattr(given, "cuda_stream", nb::borrow(given)), address))
    fail("stream: expected an integer or a stream object, got " + class_of(given));
  return reinterpret_cast<void*>(address);
}

void* Tensor::stream_or(nb::handle given) const {
  if (device().is_host()) {
    if (!given.is_none()) fail("stream: expected None for arrays in host memory, got a stream");
    return nullptr;
  }
  if (!given.is_none()) return stream_address(given);
  void* stream = nullptr;
  if (exchange_ != nullptr &&
      exchange_->current_stream(view_.device.device_type, view_.device.device_id, &stream) != 0)
    nb::raise_python_error();
  return stream;
}

void* Tensor::ready_stream() const {
  const DeviceMemory* const memory = memory_of(device());
  if (exchange_ == nullptr && memory != nullptr) check(memory->synchronize(device().index));
  return stream_or(nb::none());
}

nb::object Tensor::new_like(const Sizes& shape) const {
  if (exchange_ == nullptr) {
    if (!device().is_host())
      fail("out: expected an array, since none is made in memory of " + to_string(device()) +
           " for " + class_of(object_) + ", got None");
    const nb::module_ numpy = nb::module_::import_("numpy");
    const nb::tuple sizes = nb::tuple(nb::cast(shape));
    if (nb::isinstance(object_, numpy.attr("ndarray")))
      return numpy.attr("empty")(sizes, nb::arg("dtype") = object_.attr("dtype"));
    const DType type = dtype();
    return numpy.attr("empty")(sizes, nb::arg("dtype") = type == DType::kF32   ? "float32"
                                                         : type == DType::kF16 ? "float16"
                                                                               : "uint16");
  }
  return new_array(shape, view_.dtype);
}

nb::object Tensor::new_array(const Sizes& shape, const nb::dlpack::dtype& dtype) const {
  nb::dlpack::dltensor prototype = view_;
  prototype.dtype = dtype;
  prototype.data = nullptr;
  prototype.byte_offset = 0;
  prototype.ndim = static_cast<int32_t>(shape.size());
  prototype.shape = const_cast<int64_t*>(shape.data());
  prototype.strides = nullptr;
  DlpackManagedTensor* made = nullptr;
  std::string error;
  if (exchange_->allocate(&prototype, &made, &error, set_error) != 0)
    throw std::runtime_error(error);
  void* object = nullptr;
  if (exchange_->import_managed(made, &object) != 0) nb::raise_python_error();
  return nb::steal(static_cast<PyObject*>(object));
}

}  // namespace nvfp4_moe::internal::python
