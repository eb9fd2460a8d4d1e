// NVFP4_MOE_CHECK on a GPU if it cannot check a token, and when a layer ends.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "cuda/check_case.h"
#include "cuda/graph.h"
#include "cuda/planted_kernels.h"

namespace {
std::atomic<bool> device_is_busy{false};    // as cudaStreamQuery reports
thread_local bool has_set_device = false;   // whether the calling thread has called cudaSetDevice
thread_local bool next_new_throws = false;  // in the calling thread
}  // namespace

// The linker redirects these calls of this executable to this file (room.cmake).
extern "C" {
cudaError_t __real_cudaStreamQuery(cudaStream_t stream);
cudaError_t __real_cudaSetDevice(int device);
cudaError_t __wrap_cudaStreamQuery(cudaStream_t stream) {
  return device_is_busy ? cudaErrorNotReady : __real_cudaStreamQuery(stream);
}
cudaError_t __wrap_cudaSetDevice(int device) {
  has_set_device = true;
  return __real_cudaSetDevice(device);
}
}

void* operator new(size_t size_bytes) {
  void* const memory = std::exchange(next_new_throws, false)
                           ? nullptr
                           : std::malloc(std::max<size_t>(size_bytes, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace nvfp4_moe::internal::test {
namespace {

// A backend whose experts are unpacked by `unpack`, which may call real_backend's function.
Backend backend_that_unpacks(const Backend& real, decltype(Backend::unpack_expert) unpack) {
  real_backend = &real;
  Backend backend = real;
  backend.unpack_expert = unpack;
  return backend;
}

TEST_P(CudaCheck, FailsIfItCannotCheck) {
  const Backend broken = backend_that_unpacks(
      backend(), [](const PackedWeights&, int64_t, const LentStaging&, ExpertBuffers&) -> Status {
        if (!has_set_device) return bad_input("another device may be current");
        static int calls = 0;
        if (++calls % 2 == 0) throw std::bad_alloc();
        return {Code::kIo, "planted"};
      });
  CheckedLayer checked(broken);
  Caller& caller = checked.caller;
  ASSERT_OK(caller.run());
  EXPECT_THAT(caller.status(),
              Refused(Code::kIo, "NVFP4_MOE_CHECK: could not check run 1: planted"));
  ASSERT_OK(caller.run());
  EXPECT_THAT(caller.status(),
              Refused(Code::kOutOfMemory, "NVFP4_MOE_CHECK: could not check run 2: "));
  EXPECT_OK(caller.status());  // reported once
  EXPECT_EQ(counts_of(*checked.layer).checked, 0);
  EXPECT_EQ(counts_of(*checked.layer).dropped, 2);
}

// Memory runs out while the reference packs an expert. The next token needs the same expert.
TEST_P(CudaCheck, DoesNotUseAnExpertThatIsHalfPacked) {
  static bool fails;
  const Backend backend_here =
      backend_that_unpacks(backend(), [](const PackedWeights& weights, int64_t expert,
                                         const LentStaging& lent, ExpertBuffers& out) {
        const Status status = real_backend->unpack_expert(weights, expert, lent, out);
        next_new_throws = std::exchange(fails, false);
        return status;
      });
  MoeOptions kind = tiny_options();
  kind.activation_format = ActivationFormat::kFp8;  // the only one that allocates there
  if (declines(backend(), *MoeConfig::make(kind))) GTEST_SKIP() << "no fp8 activations";
  const TinyLayer tiny(kind);
  const auto layer = open(backend_here, tiny);
  TinyBatch batch(kind, kCheckTokens);
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    batch.ids[i] = static_cast<int32_t>(i % 2);
    batch.weights[i] = i % 2 == 0 ? 0.9f : 0.1f;  // most of the output is of the failed expert
  }
  Caller caller(*layer, batch);
  fails = true;
  ASSERT_OK(caller.run());
  EXPECT_THAT(caller.status(), Refused(Code::kOutOfMemory, "could not check run 1: out of memory"));
  ASSERT_OK(caller.run());
  EXPECT_OK(caller.status());
  EXPECT_EQ(counts_of(*layer).checked, 1);
}

TEST_P(CudaCheck, EndsWhileSamplesAreInFlight) {
  const ScopedEnv log("NVFP4_MOE_LOG", "off");
  for (int i = 0; i < 20; ++i) {
    CheckedLayer checked(backend());
    for (int run = 0; run < i; ++run) ASSERT_OK(checked.caller.run());
    if (i % 2 == 0) checked.caller.stream.synchronize();
    checked.layer.reset();
  }
}

// A caller that never asks for the result. Replays do not return failures either.
TEST_P(CudaCheck, PrintsAFailureThatNoCallHasReturned) {
  wrong_token = -1;
  const Backend wrong = wrong_backend(backend());
  const auto print = [](const Backend& of) {
    CheckedLayer checked(of);
    Caller& caller = checked.caller;
    const Graph graph(caller.stream, [&] { return caller.run(); });
    EXPECT_OK(graph.status());
    for (int run = 0; run < kSampleSlots; ++run) graph.launch();
    caller.stream.synchronize();
    testing::internal::CaptureStderr();
    checked.layer.reset();
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(print(backend()), "");
  const std::string printed = print(wrong);
  EXPECT_TRUE(printed.starts_with("NVFP4_MOE_CHECK: backend wrong: run 1: ")) << printed;
  EXPECT_TRUE(printed.ends_with(" (no call returned this before the layer ended)\n")) << printed;

  {
    const ScopedEnv off("NVFP4_MOE_LOG", "off");
    EXPECT_EQ(print(wrong), "");
  }

  const KeptLog log;
  EXPECT_EQ(print(wrong), "");
  EXPECT_EQ(logged.size(), size_t{kSampleSlots + 1}) << "all that arrived are checked";
  EXPECT_EQ(logged.back() + "\n", printed);
}

// The tokens of runs in flight, and those that have arrived while the device is busy.
TEST_P(CudaCheck, PrintsHowManyTokensItHasNotChecked) {
  void* end = nullptr;
  ASSERT_CUDA(cudaHostAlloc(&end, sizeof(int), cudaHostAllocMapped));
  std::atomic_ref<int> ends(*static_cast<int*>(end));
  ends = 0;
  CheckedLayer checked(backend());
  Caller& caller = checked.caller;
  ASSERT_OK(caller.run());
  ASSERT_OK(caller.status());
  ASSERT_CUDA(wait_until_set(static_cast<int*>(end), caller.stream));
  for (int run = 0; run < 3; ++run) ASSERT_OK(caller.run());
  // The samples arrive after the check has begun to end, before or after its last poll.
  device_is_busy = true;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ends = 1;
  });
  testing::internal::CaptureStderr();
  checked.layer.reset();
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            std::string("NVFP4_MOE_CHECK: backend ") + backend().name +
                ": runs not checked when the layer ended: 3; call status() last\n");
  other.join();
  device_is_busy = false;
  cudaFreeHost(end);
}

TEST_P(CudaCheck, DoesNotWaitForABusyDevice) {
  wrong_token = -1;
  const Backend wrong = wrong_backend(backend());
  CheckedLayer checked(wrong);
  Caller& caller = checked.caller;
  KeptLog log(true);
  for (int run = 0; run < 3; ++run) ASSERT_OK(caller.run());
  caller.stream.synchronize();
  EXPECT_TRUE(log.has_line());
  device_is_busy = true;
  std::thread other([&] {  // run 1 is being checked when the layer begins to end
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    log.unblock();
  });
  checked.layer.reset();
  other.join();
  device_is_busy = false;
  ASSERT_EQ(logged.size(), 3u);
  EXPECT_THAT(logged[1], HasSubstr("run 1: "));
  EXPECT_THAT(logged[2], HasSubstr("not checked when the layer ended: 2; "));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
