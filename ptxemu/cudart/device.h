// The device of the CUDA run time: queues of launches, captures, and the modules that programs
// have registered.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cudart/queues.h"
#include "runtime/machine.h"

// These are functions here, even if the headers define macros of these names.
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPoint

namespace ptxemu {

// One operation of a graph: a launch, or what the host does.
struct Operation {
  std::unique_ptr<Launch> launch;
  std::function<void()> host;
};
struct Graph {
  std::vector<Operation> operations;
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  cudaStream_t origin;
  std::thread::id thread;
  std::shared_ptr<Graph> graph;
  bool invalid = false;
};

struct Device {
  DeviceMutex mutex;
  std::vector<std::unique_ptr<Queue>>
      queues;  // of the host threads that have launches, the oldest first
  std::chrono::steady_clock::time_point last_work{};
  std::map<cudaStream_t, std::shared_ptr<Capture>> captures;
  std::map<cudaEvent_t, std::shared_ptr<Capture>> captured_events;
  unsigned long long captures_begun = 0;
  cudaError_t broken = cudaSuccess;  // of a launch that failed, until the device is reset
  std::string failure;

  // Runs waiting launches, other threads' as far as possible, until this thread's launches and
  // those of the named stream have ended. Returns the error of a launch that failed, now or before.
  cudaError_t drain(cudaStream_t stream = nullptr);
  // Runs waiting launches as far as possible.
  void settle();
  // Whether drain would have nothing to wait for.
  bool is_done(cudaStream_t stream);
  // Whether launches of other threads wait in this stream.
  bool others_use(cudaStream_t stream);
  // The state to wait for until this thread's launches have ended; null if they have.
  std::shared_ptr<Mark> mark();
  cudaError_t wait_for(const std::shared_ptr<Mark>& mark);
  // No later launch overlaps with earlier ones.
  void close_chain();
  // Runs in stream order, or records it if the stream is captured.
  cudaError_t enqueue(cudaStream_t stream, std::function<void()> host);
  cudaError_t enqueue(cudaStream_t stream, Launch launch);
  // An allocation has been freed.
  void forget_allocations();
  Capture* capture_of(cudaStream_t stream);
  // Whether a call that may wait must be refused because it would break a running capture.
  bool capture_forbids();

 private:
  enum class Outcome { kPolls, kWaits, kWorked };
  Queue* own_queue();
  // Run launches as far as possible. patient: launches that wait for others may keep waiting.
  Outcome advance(Queue& queue, bool patient);
  Outcome advance(bool patient);
  cudaError_t wait(const std::function<bool()>& over);
  void fail(const char* report);
};
Device& device();

// ---- the device's properties (PTXEMU_CC, PTXEMU_SMS)
int compute_capability();  // 90 for 9.0
int multiprocessors();
int attribute(cudaDeviceAttr which);
// Ctas of a kernel that fit on a multiprocessor, by threads and shared memory.
int resident_ctas(uint32_t threads, uint64_t shared_bytes);

// ---- errors
// Notes the error for cudaGetLastError.
cudaError_t noted(cudaError_t error);
// Reports why a module or a launch is refused; the device stays usable. Returns the error.
cudaError_t refused(cudaError_t error, const std::string& kernel, const std::string& why);
bool forked();

// ---- kernels
struct Module;
Module* add_module(const void* fatbin);
Module* add_module_text(const char* ptx);
void add_kernel(Module* module, const void* host_function, const char* name);
struct KernelFacts {
  uint32_t static_shared_bytes, max_threads;
  int ptx_version;
};
struct Kernel;  // a kernel of a module by name; translated when it is first launched
Kernel* find_kernel(const void* host_function);
Kernel* find_kernel(Module* module, const char* name);
cudaError_t kernel_facts(Kernel* kernel, KernelFacts* facts);
cudaError_t set_dynamic_shared(Kernel* kernel, int bytes);
void allow_non_portable_clusters(Kernel* kernel, bool allowed);
struct LaunchShape {
  uint32_t grid[3], block[3], cluster[3] = {0, 0, 0};
  uint64_t dynamic_shared_bytes = 0;
  bool programmatic = false, cooperative = false;
};
cudaError_t launch(Kernel* kernel, const LaunchShape& shape, void** arguments, cudaStream_t stream);
CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                           void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                           const cuuint32_t* box, const cuuint32_t* element_strides,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

}  // namespace ptxemu
