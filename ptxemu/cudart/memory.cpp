// Memory: allocations between guard pages, and copies that check their device side.
#include <unistd.h>

#include <cstring>

#include "cudart/device.h"
#include "order/hooks.h"
#include "runtime/memory_map.h"

using namespace ptxemu;

namespace {

cudaError_t allocate_into(void** pointer, size_t bytes, const char* what) {
  const Lock lock(device().mutex);
  if (!pointer) return noted(cudaErrorInvalidValue);
  if (forked()) return noted(cudaErrorInitializationError);
  if (device().capture_forbids()) return noted(cudaErrorStreamCaptureUnsupported);
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  *pointer = allocate(bytes, what);
  return noted(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t release_from(void* pointer) {
  const Lock lock(device().mutex);
  if (forked()) return noted(cudaErrorInitializationError);
  if (!pointer) return cudaSuccess;
  if (device().capture_forbids()) return noted(cudaErrorStreamCaptureUnsupported);
  const cudaError_t error = device().drain();
  uint64_t low = 0, high = 0;
  allocated(reinterpret_cast<uint64_t>(pointer), 1, &low, &high);
  if (!release(pointer)) return noted(cudaErrorInvalidValue);
  check_freed(low, high - low);
  device().forget_allocations();
  return noted(error);
}

bool on_device(const void* pointer, size_t bytes) {
  return bytes == 0 || allocated(reinterpret_cast<uint64_t>(pointer), bytes);
}

// Whether the side that the copy's kind calls device memory is device memory.
bool valid_copy(const void* to, size_t to_bytes, const void* from, size_t from_bytes,
                cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return (!to_device || on_device(to, to_bytes)) && (!from_device || on_device(from, from_bytes));
}

cudaError_t copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t rows, cudaMemcpyKind kind, cudaStream_t stream, bool wait) {
  const Lock lock(device().mutex);
  if (rows == 0 || width == 0) return noted(device().drain());
  const size_t to_bytes = to_pitch * (rows - 1) + width,
               from_bytes = from_pitch * (rows - 1) + width;
  if (width > to_pitch || width > from_pitch) return noted(cudaErrorInvalidValue);
  if (!valid_copy(to, to_bytes, from, from_bytes, kind)) return noted(cudaErrorInvalidValue);
  if (wait && device().capture_of(stream)) return noted(cudaErrorStreamCaptureUnsupported);
  return noted(device().enqueue(stream, [=] {
    for (size_t row = 0; row < rows; ++row)
      std::memmove(static_cast<char*>(to) + row * to_pitch,
                   static_cast<const char*>(from) + row * from_pitch, width);
  }));
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                 bool wait) {
  const Lock lock(device().mutex);
  if (forked()) return noted(cudaErrorInitializationError);
  if (!valid_copy(to, bytes, from, bytes, kind)) return noted(cudaErrorInvalidValue);
  if (wait && device().capture_forbids()) return noted(cudaErrorStreamCaptureUnsupported);
  return noted(device().enqueue(stream, [=] { std::memmove(to, from, bytes); }));
}

cudaError_t fill(void* to, int value, size_t bytes, cudaStream_t stream) {
  const Lock lock(device().mutex);
  if (!on_device(to, bytes)) return noted(cudaErrorInvalidValue);
  return noted(device().enqueue(stream, [=] { std::memset(to, value, bytes); }));
}

constexpr const char* kRegistered = "registered host memory";

// The result of cudaIpcGetMemHandle: a process's allocation by number, because addresses are
// reused.
struct SharedAllocation {
  char name[8];
  uint64_t address, bytes, number;
  pid_t process;
};
static_assert(sizeof(SharedAllocation) <= sizeof(cudaIpcMemHandle_t));
constexpr char kShared[8] = "ptxemu:";
// How often memory was opened through a handle.
std::map<void*, uint32_t>& opened() {
  static auto* all = new std::map<void*, uint32_t>;
  return *all;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return allocate_into(pointer, bytes, "device memory");
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return allocate_into(pointer, bytes, "device memory");
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return allocate_into(pointer, bytes, "pinned host memory");
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return allocate_into(pointer, bytes, "pinned host memory");
}
// Host and device share addresses, so the device pointer is the same.
cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* pointer, unsigned) {
  const Lock lock(device().mutex);
  if (!allocated(reinterpret_cast<uint64_t>(pointer), 1)) return noted(cudaErrorInvalidValue);
  *device_pointer = pointer;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  const Lock lock(device().mutex);
  if (forked()) return noted(cudaErrorInitializationError);
  if (!pointer || bytes == 0) return noted(cudaErrorInvalidValue);
  if (allocated(reinterpret_cast<uint64_t>(pointer), 1))
    return noted(cudaErrorHostMemoryAlreadyRegistered);
  register_memory(reinterpret_cast<uint64_t>(pointer), bytes, kRegistered);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  const Lock lock(device().mutex);
  uint64_t low = 0;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (!allocated(address, 1, &low) || low != address ||
      describe_address(address).find(kRegistered) == std::string::npos)
    return noted(cudaErrorHostMemoryNotRegistered);
  const cudaError_t error = device().drain();
  unregister_memory(address);
  device().forget_allocations();
  return noted(error);
}
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
  return allocate_into(pointer, bytes, "managed memory");
}
cudaError_t cudaFree(void* pointer) { return release_from(pointer); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release_from(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return release_from(pointer); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false);
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t rows, cudaMemcpyKind kind) {
  return copy_rows(to, to_pitch, from, from_pitch, width, rows, kind, nullptr, true);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy_rows(to, to_pitch, from, from_pitch, width, rows, kind, stream, false);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fill(to, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill(to, value, bytes, stream);
}

// Within the process the memory is opened at its own address. Another process cannot open it.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  const Lock lock(device().mutex);
  SharedAllocation shared{};
  uint64_t high = 0;
  if (!handle || !allocated(reinterpret_cast<uint64_t>(pointer), 1, &shared.address, &high))
    return noted(cudaErrorInvalidValue);
  std::memcpy(shared.name, kShared, sizeof shared.name);
  shared.bytes = high - shared.address;
  shared.number = allocation_number(shared.address);
  shared.process = getpid();
  *handle = {};
  std::memcpy(handle, &shared, sizeof shared);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  const Lock lock(device().mutex);
  SharedAllocation shared;
  std::memcpy(&shared, &handle, sizeof shared);
  if (!pointer || flags != cudaIpcMemLazyEnablePeerAccess) return noted(cudaErrorInvalidValue);
  if (std::memcmp(shared.name, kShared, sizeof shared.name) != 0)
    return noted(cudaErrorInvalidResourceHandle);
  if (shared.process != getpid() || shared.number != allocation_number(shared.address))
    return noted(cudaErrorMapBufferObjectFailed);
  *pointer = reinterpret_cast<void*>(shared.address);
  ++opened()[*pointer];
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  const Lock lock(device().mutex);
  const auto found = opened().find(pointer);
  if (found == opened().end()) return noted(cudaErrorInvalidValue);
  if (--found->second == 0) opened().erase(found);
  return noted(device().drain());
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const Lock lock(device().mutex);
  *total_bytes = kDeviceBytes;
  *free_bytes = kDeviceBytes - allocated_bytes();
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(device().mutex);
  *attributes = {};
  const bool known = allocated(reinterpret_cast<uint64_t>(pointer), 1);
  // "N bytes into pinned host memory #3 (...), M bytes before ...": only the first is its own.
  const std::string text = describe_address(reinterpret_cast<uint64_t>(pointer));
  const bool pinned = known && text.substr(0, text.find('#')).find("host memory") != text.npos;
  attributes->type = pinned  ? cudaMemoryTypeHost
                     : known ? cudaMemoryTypeDevice
                             : cudaMemoryTypeUnregistered;
  attributes->device = known ? 0 : -2;
  attributes->devicePointer = known ? const_cast<void*>(pointer) : nullptr;
  attributes->hostPointer = !known || pinned ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}

}  // extern "C"
