#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/ptx/mma.cuh"

namespace nvfp4_moe::internal::cuda {
namespace {

// Resources that are freed at the end of a scope.
struct Stream {
  cudaStream_t stream = nullptr;
  ~Stream() {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};
struct Event {
  cudaEvent_t event = nullptr;
  ~Event() {
    if (event != nullptr) cudaEventDestroy(event);
  }
};
struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  ~Graph() {
    if (replay != nullptr) cudaGraphExecDestroy(replay);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
};

constexpr int kMeasureThreads = 256;
constexpr int kMeasureLoads = 8;  // 16-byte loads in flight together

// count: 16-byte vectors, a multiple of kMeasureThreads * kMeasureLoads.
__global__ void __launch_bounds__(kMeasureThreads)
    read_all(const uint4* data, int64_t count, uint32_t* seen) {
  uint32_t any = 0;
  const int64_t stride = int64_t{gridDim.x} * kMeasureThreads * kMeasureLoads;
  for (int64_t at = int64_t{blockIdx.x} * kMeasureThreads * kMeasureLoads + threadIdx.x; at < count;
       at += stride) {
    uint4 values[kMeasureLoads];
#pragma unroll
    for (int i = 0; i < kMeasureLoads; ++i) values[i] = __ldcs(data + at + i * kMeasureThreads);
#pragma unroll
    for (const uint4& value : values) any |= value.x | value.y | value.z | value.w;
  }
  // never true: the buffer holds zeros and ones; keeps the loads alive
  if (any == 0x12345678u) *seen = any;
}

// Operands for which zeros save no power: magnitudes near 1, signs and low bits from a hash.
__device__ uint32_t operand(uint32_t seed) {
  seed = (seed ^ 61u ^ seed >> 16) * 0x9E3779B1u;
  seed ^= seed >> 15;
  return (seed & 0x807F807Fu) | 0x3F003F00u;
}

constexpr int kAccumulators = 8;
constexpr int kRounds = 2048;
__global__ void __launch_bounds__(kMeasureThreads) multiply_registers(float* out) {
  uint32_t a[2][4], b[4];
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = operand(threadIdx.x * 8 + i);
  for (int i = 0; i < 4; ++i) b[i] = operand(threadIdx.x * 4 + i + 77777);
  float accumulators[kAccumulators][4] = {};
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i)
      mma_bf16(accumulators[i], a[i % 2], b[i % 4], b[(i + 1) % 4]);
  }
  float sum = 0;
  for (const auto& four : accumulators)
    for (float value : four) sum += value;
  if (sum == 0.12345f) *out = sum;
}

Result<int> multiprocessors(int device) {
  int count = 0;
  NVFP4_MOE_TRY(check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
                      "multiprocessors"));
  return count;
}

}  // namespace

Result<std::vector<double>> time_graph(int device,
                                       const std::function<Status(void* stream)>& enqueue,
                                       double seconds, int64_t most_replays) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  Stream stream;
  NVFP4_MOE_TRY(check(cudaStreamCreateWithFlags(&stream.stream, cudaStreamNonBlocking), "stream"));
  Graph graph;
  NVFP4_MOE_TRY(
      check(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal), "capture"));
  const Status captured = enqueue(stream.stream);
  const cudaError_t ended = cudaStreamEndCapture(stream.stream, &graph.graph);
  NVFP4_MOE_TRY(captured);
  NVFP4_MOE_TRY(check(ended, "capture"));
  NVFP4_MOE_TRY(check(cudaGraphInstantiate(&graph.replay, graph.graph, 0), "graph"));
  Event begin, end;
  NVFP4_MOE_TRY(check(cudaEventCreate(&begin.event), "event"));
  NVFP4_MOE_TRY(check(cudaEventCreate(&end.event), "event"));
  constexpr int64_t kUntimed = 2, kLeast = 5;
  std::vector<double> times;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = -kUntimed; i < std::max(most_replays, kLeast); ++i) {
    NVFP4_MOE_TRY(check(cudaEventRecord(begin.event, stream.stream), "event"));
    NVFP4_MOE_TRY(check(cudaGraphLaunch(graph.replay, stream.stream), "graph"));
    NVFP4_MOE_TRY(check(cudaEventRecord(end.event, stream.stream), "event"));
    NVFP4_MOE_TRY(check(cudaEventSynchronize(end.event), "graph"));
    float ms = 0;
    NVFP4_MOE_TRY(check(cudaEventElapsedTime(&ms, begin.event, end.event), "event"));
    if (i >= 0) times.push_back(double{ms} * 1e3);
    const double elapsed =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i + 1 >= kLeast && elapsed > seconds) break;
  }
  return times;
}

Result<double> best_rate(int device, double work, const std::function<void(void* stream)>& launch) {
  constexpr int kLaunches = 8;
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  Stream stream;
  NVFP4_MOE_TRY(check(cudaStreamCreateWithFlags(&stream.stream, cudaStreamNonBlocking), "stream"));
  Event begin, end;
  NVFP4_MOE_TRY(check(cudaEventCreate(&begin.event), "event"));
  NVFP4_MOE_TRY(check(cudaEventCreate(&end.event), "event"));
  double best = 0;
  for (int i = 0; i <= kLaunches; ++i) {
    NVFP4_MOE_TRY(check(cudaEventRecord(begin.event, stream.stream), "event"));
    launch(stream.stream);
    NVFP4_MOE_TRY(check_launch("rate"));
    NVFP4_MOE_TRY(check(cudaEventRecord(end.event, stream.stream), "event"));
    NVFP4_MOE_TRY(check(cudaEventSynchronize(end.event), "rate"));
    float ms = 0;
    NVFP4_MOE_TRY(check(cudaEventElapsedTime(&ms, begin.event, end.event), "event"));
    if (i > 0) best = std::max(best, work / (double{ms} * 1e-3));
  }
  return best;
}

Result<double> read_rate(int device) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  NVFP4_MOE_ASSIGN(const int count, multiprocessors(device));
  size_t free_bytes = 0, total_bytes = 0;
  NVFP4_MOE_TRY(check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
  constexpr size_t kTurnBytes = size_t{kMeasureThreads} * kMeasureLoads * sizeof(uint4);
  const size_t size_bytes =
      std::min<size_t>(size_t{4} << 30, free_bytes / 2) / kTurnBytes * kTurnBytes;
  NVFP4_MOE_ASSIGN(const Buffer buffer,
                   allocate(size_bytes + 256, device, "a buffer beyond every cache"));
  NVFP4_MOE_TRY(check(cudaMemset(buffer.data(), 1, size_bytes + 256), "cudaMemset"));
  NVFP4_MOE_TRY(check(cudaDeviceSynchronize(), "cudaMemset"));
  return best_rate(device, static_cast<double>(size_bytes), [&](void* stream) {
    read_all<<<static_cast<unsigned>(count * 8), kMeasureThreads, 0,
               static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<const uint4*>(buffer.data()),
        static_cast<int64_t>(size_bytes / sizeof(uint4)),
        reinterpret_cast<uint32_t*>(buffer.data() + size_bytes));
  });
}

Result<double> product_rate(int device) {
  NVFP4_MOE_ASSIGN(const int count, multiprocessors(device));
  NVFP4_MOE_ASSIGN(const Buffer out, allocate(256, device, "a measure's output"));
  const unsigned ctas = static_cast<unsigned>(count) * 4;
  const double flop = 2.0 * 16 * 8 * 16 * kAccumulators * kRounds * (kMeasureThreads / 32) * ctas;
  return best_rate(device, flop, [&](void* stream) {
    multiply_registers<<<ctas, kMeasureThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<float*>(out.data()));
  });
}

}  // namespace nvfp4_moe::internal::cuda
