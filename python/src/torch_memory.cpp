#include "torch_memory.h"

#include <nanobind/stl/string.h>

#include <string>

namespace nvfp4_moe::internal::python {

namespace {

nb::module_ helper() { return nb::module_::import_("nvfp4_moe._torch_memory"); }

Buffer owned(DlpackManagedTensor* managed, size_t size_bytes) {
  auto* const data = static_cast<std::byte*>(managed->tensor.data) + managed->tensor.byte_offset;
  return Buffer(data, size_bytes, [managed](std::byte*, size_t) { managed->deleter(managed); });
}

// Calls `function` of the helper and returns the tensor as bytes that keep it alive. Exceptions
// other than torch's out-of-memory, such as an interrupt, pass through unchanged.
Result<Buffer> made_by(const char* function, size_t size_bytes, int device, void* stream) {
  const WithLock lock;
  try {
    const nb::object tensor = in_python([&] {
      return helper().attr(function)(size_bytes, device, reinterpret_cast<uintptr_t>(stream));
    });
    const DlpackExchange* const exchange = Tensor(tensor, "workspace").exchange();
    if (exchange == nullptr)
      return Status(Code::kInternal, "torch: expected DLPack's exchange table, got none");
    DlpackManagedTensor* managed = nullptr;
    if (exchange->export_managed(tensor.ptr(), &managed) != 0) nb::raise_python_error();
    return owned(managed, size_bytes);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_MemoryError)) throw;
    return Status(Code::kOutOfMemory, nb::str(error.value()).c_str());
  }
}

void keep_text(void* context, const char*, const char* message) {
  *static_cast<std::string*>(context) = message;
}

}  // namespace

Result<Buffer> torch_kept(size_t size_bytes, int device, void* stream) {
  return made_by("kept", size_bytes, device, stream);
}

Result<Buffer> torch_captured(const DlpackExchange& torch, size_t size_bytes, int device,
                              void* stream) {
  void* current = nullptr;
  if (torch.current_stream(nb::device::cuda::value, device, &current) == 0 && current == stream) {
    auto size = static_cast<int64_t>(size_bytes);
    nb::dlpack::dltensor prototype{};
    prototype.device = {nb::device::cuda::value, device};
    prototype.ndim = 1;
    prototype.dtype = nb::dtype<uint8_t>();
    prototype.shape = &size;
    DlpackManagedTensor* managed = nullptr;
    std::string error;
    if (torch.allocate(&prototype, &managed, &error, keep_text) == 0)
      return owned(managed, size_bytes);
  }
  // Another stream, or a failed allocation, which the helper repeats and can explain.
  return made_by("captured", size_bytes, device, stream);
}

nb::object new_like_in(const Tensor& like, const std::vector<int64_t>& shape, nb::handle given,
                       void* stream) {
  if (given.is_none() || !like.is_torch() || like.device().is_host()) return like.new_like(shape);
  const nb::object scope =
      helper().attr("stream_of")(like.device().index, reinterpret_cast<uintptr_t>(stream));
  scope.attr("__enter__")();
  nb::object made;
  try {
    made = like.new_like(shape);
  } catch (...) {
    scope.attr("__exit__")(nb::none(), nb::none(), nb::none());
    throw;
  }
  scope.attr("__exit__")(nb::none(), nb::none(), nb::none());
  return made;
}

}  // namespace nvfp4_moe::internal::python
