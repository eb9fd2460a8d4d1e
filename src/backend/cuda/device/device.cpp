#include "backend/cuda/device/device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "backend/cuda/device/outside_captures.h"
#include "backend/cuda_driver.h"
#include "core/fork.h"

namespace nvfp4_moe::internal {
namespace cuda {

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  status_ = check(cudaGetDevice(&current), "cudaGetDevice");
  if (!status_.ok() || current == device) return;
  status_ = check(cudaSetDevice(device), "cudaSetDevice");
  if (status_.ok()) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

namespace {

thread_local cudaStream_t pool_stream = nullptr;  // null: `allocate` uses cudaMalloc

// The memory that a call of CUDA has returned, or why it has returned none. free: frees it while
// its device is current.
template <class Free>
Result<Buffer> as_buffer(cudaError_t error, void* data, size_t size_bytes, int device,
                         const char* purpose, Free free) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // a failed allocation leaves the context usable
    const std::string where = "cuda:" + std::to_string(device);
    size_t free_bytes = 0, total_bytes = 0;
    if (error == cudaErrorMemoryAllocation &&
        cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess)
      return out_of_memory(purpose, size_bytes, where, free_bytes, total_bytes);
    return check(
        error,
        (std::string(purpose) + ": " + std::to_string(size_bytes) + " bytes on " + where).c_str());
  }
  return Buffer(static_cast<std::byte*>(data), size_bytes,
                [device, free = std::move(free), process = fork_count()](std::byte* bytes, size_t) {
                  if (process != fork_count())
                    return;  // CUDA does not work in a forked child, and the memory is its parent's
                  const DeviceGuard release(device);
                  const OutsideCaptures outside;
                  free(bytes);
                });
}

}  // namespace

Result<Buffer> allocate(size_t size_bytes, int device, const char* purpose) {
  if (pool_stream != nullptr)
    return allocate_pooled(size_bytes, device, purpose, pool_stream,
                           std::make_shared<void*>(pool_stream));
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, std::max<size_t>(size_bytes, 1));
  return as_buffer(error, data, size_bytes, device, purpose, cudaFree);
}

Result<Buffer> allocate_pooled(size_t size_bytes, int device, const char* purpose,
                               cudaStream_t stream, std::shared_ptr<void*> release_in) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  void* data = nullptr;
  const cudaError_t error = cudaMallocAsync(&data, std::max<size_t>(size_bytes, 1), stream);
  NVFP4_MOE_ASSIGN(Buffer buffer, as_buffer(error, data, size_bytes, device, purpose,
                                            [release_in = std::move(release_in)](std::byte* bytes) {
                                              cudaFreeAsync(bytes,
                                                            static_cast<cudaStream_t>(*release_in));
                                            }));
  NVFP4_MOE_TRY(check(cudaStreamSynchronize(stream), purpose));
  return Result<Buffer>(std::move(buffer));
}

void use_pool_in_this_thread(cudaStream_t stream) { pool_stream = stream; }

namespace {

Status copy(int device, void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
            void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  auto* const queue = static_cast<cudaStream_t>(stream);
  if (size_bytes != 0)
    NVFP4_MOE_TRY(check(cudaMemcpyAsync(to, from, size_bytes, kind, queue), "copy"));
  return check(cudaStreamSynchronize(queue), "copy");
}

}  // namespace

Status to_device(int device, void* to, const void* from, size_t size_bytes, void* stream) {
  return copy(device, to, from, size_bytes, cudaMemcpyHostToDevice, stream);
}

Status to_host(int device, void* to, const void* from, size_t size_bytes, void* stream) {
  return copy(device, to, from, size_bytes, cudaMemcpyDeviceToHost, stream);
}

Status gather_rows(int device, void* to, const void* from, int64_t rows, int64_t row_bytes,
                   int64_t stride_bytes, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const auto width = static_cast<size_t>(row_bytes);
  return check(cudaMemcpy2DAsync(to, width, from, static_cast<size_t>(stride_bytes), width,
                                 static_cast<size_t>(rows), cudaMemcpyDeviceToDevice,
                                 static_cast<cudaStream_t>(stream)),
               "gather_rows");
}

Status synchronize(int device) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Result<uint64_t> capture_id(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error =
      cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id);
  // The legacy stream cannot be queried while another stream is captured, and is never captured
  // itself.
  if (error == cudaErrorStreamCaptureImplicit) {
    cudaGetLastError();
    return uint64_t{0};
  }
  NVFP4_MOE_TRY(check(error, "cudaStreamGetCaptureInfo"));
  return uint64_t{status == cudaStreamCaptureStatusActive ? id : 0};
}

}  // namespace cuda

CudaVersions cuda_versions() {
  CudaVersions versions;
  cudaRuntimeGetVersion(&versions.runtime);
  cudaDriverGetVersion(&versions.driver);  // 0 without a driver
  return versions;
}

Result<DeviceFacts> cuda_device_facts(int index) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    const bool forked = error == cudaErrorInitializationError && fork_count() > 0;
    // CUDA's own text of this error is the same if there is no driver.
    const std::string driver =
        error == cudaErrorInsufficientDriver ? driver_problem(cuda_versions()) : "";
    return unsupported(
        "device cuda:" + std::to_string(index) + ": " +
        (driver.empty() ? cudaGetErrorString(error) : driver) +
        (forked
             ? " (a child forked from a process that used CUDA cannot use it: start it with spawn)"
             : ""));
  }
  if (index < 0 || index >= count)
    return unsupported("device cuda:" + std::to_string(index) + ": this machine has " +
                       std::to_string(count) +
                       " CUDA devices, numbered from 0 (CUDA_VISIBLE_DEVICES may hide some)");
  cudaDeviceProp properties{};
  NVFP4_MOE_TRY(
      cuda::check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties"));
  DeviceFacts facts;
  facts.kind = DeviceKind::kCuda;
  facts.index = index;
  facts.name = properties.name;
  facts.compute_capability = properties.major * 10 + properties.minor;
  facts.compute_units = properties.multiProcessorCount;
  facts.cta_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  facts.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  bool known = false;
  for (const char byte : properties.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    facts.uuid +=
        {kDigits[static_cast<uint8_t>(byte) / 16], kDigits[static_cast<uint8_t>(byte) % 16]};
    known = known || byte != 0;
  }
  if (!known) facts.uuid.clear();  // an emulated device
  return facts;
}

}  // namespace nvfp4_moe::internal
