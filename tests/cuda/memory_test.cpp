// Each allocation of device memory in turn fails: kOutOfMemory with sizes in its message, all
// memory is freed, and the device remains usable.
//
// The linker redirects every cudaMalloc, cudaMallocAsync and their frees of this executable to this
// file (room.cmake), so the memory need not be filled.
#include <cuda_runtime.h>

#include <atomic>
#include <functional>

#include "cuda/device_memory.h"
#include "moe/layer.h"
#include "moe/linear.h"
#include "moe/placed_batch.h"
#include "moe/tiny.h"
#include "support/attack.h"
#include "support/backends.h"
#include "support/support.h"

namespace {
std::atomic<int64_t> asked{0};
std::atomic<int64_t> fail_at{0};  // 0: none
std::atomic<bool> fail_all{false};
std::atomic<int64_t> live{0};
std::atomic<int64_t> frees{0};

template <class Allocate>
cudaError_t counted(const Allocate& allocate) {
  const int64_t number = asked.fetch_add(1) + 1, at = fail_at.load();
  if (at != 0 && (number == at || (fail_all.load() && number > at)))
    return cudaErrorMemoryAllocation;
  const cudaError_t error = allocate();
  if (error == cudaSuccess) live.fetch_add(1);
  return error;
}
}  // namespace

extern "C" {
cudaError_t __real_cudaMalloc(void** memory, size_t size_bytes);
cudaError_t __real_cudaFree(void* memory);
cudaError_t __real_cudaMallocAsync(void** memory, size_t size_bytes, cudaStream_t stream);
cudaError_t __real_cudaFreeAsync(void* memory, cudaStream_t stream);

cudaError_t __wrap_cudaMalloc(void** memory, size_t size_bytes) {
  return counted([&] { return __real_cudaMalloc(memory, size_bytes); });
}
cudaError_t __wrap_cudaMallocAsync(void** memory, size_t size_bytes, cudaStream_t stream) {
  return counted([&] { return __real_cudaMallocAsync(memory, size_bytes, stream); });
}
cudaError_t __wrap_cudaFree(void* memory) {
  if (memory != nullptr) live.fetch_sub(1), frees.fetch_add(1);
  return __real_cudaFree(memory);
}
cudaError_t __wrap_cudaFreeAsync(void* memory, cudaStream_t stream) {
  if (memory != nullptr) live.fetch_sub(1);
  return __real_cudaFreeAsync(memory, stream);
}
}

namespace nvfp4_moe::internal::test {

int64_t calls_of_cuda_free() { return frees.load(); }

namespace {

class CudaMemory : public BackendTest {
 protected:
  // Runs the operation with its first allocation failing, then its second, and so on, until none is
  // left to fail. Then repeats that with all later allocations failing too. Returns the number of
  // allocations.
  static int64_t expect_out_of_memory(const std::function<Status()>& operation) {
    for (int i = 0; i < 2; ++i)
      EXPECT_OK(operation());  // modules are loaded and one-time allocations are made
    int64_t most = 0;
    for (const bool all : {false, true}) {
      for (int64_t at = 1;; ++at) {
        SCOPED_TRACE((all ? "all from " : "allocation ") + std::to_string(at));
        // of this process: the device's free memory depends on other processes too
        const int64_t live_before = live.load();
        asked = 0;
        fail_all = all;
        fail_at = at;
        const Status status = operation();
        fail_at = 0;
        EXPECT_EQ(live.load(), live_before);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_EQ(cudaGetLastError(),
                  cudaSuccess);  // no error is left for the next caller
        if (asked.load() < at) {
          EXPECT_OK(status);
          most = at - 1;
          break;
        }
        attacked();
        EXPECT_EQ(status.code(), Code::kOutOfMemory) << status.message();
        EXPECT_NE(status.message().find("bytes on cuda:0"), std::string::npos) << status.message();
        if (HasFailure()) return most;
      }
    }
    EXPECT_OK(operation());
    return most;
  }
  LayerOptions options() const {
    LayerOptions options;
    options.device = "cuda:0";
    options.limits.max_tokens = 16;
    options.executor = &serial_executor();
    return options;
  }
  static MoeOptions sizes() {
    MoeOptions sizes = tiny_options();
    sizes.shared_intermediate_size = 32;
    return sizes;
  }
};

ATTACK_TEST_P(kGpu, CudaMemory, OpenRunAndWarmUp) {
  const TinyLayer tiny(sizes());
  TinyBatch batch(tiny.options, 9);
  const auto operation = [&]() -> Status {
    NVFP4_MOE_ASSIGN(const auto layer,
                     MoeLayer::open_on(backend(), tiny.config(), tiny.source(), options()));
    NVFP4_MOE_TRY(run_from_host(*layer, batch.batch()).status());
    NVFP4_MOE_ASSIGN(const Buffer workspace,
                     backend().allocate(layer->workspace_bytes(), 0, "workspace"));
    return layer->warmup(workspace.data(), workspace.size_bytes());
  };
  const int64_t plain = expect_out_of_memory(operation);
  EXPECT_GE(plain, 6);  // two of them are of open: weights and staging
  const ScopedEnv check("NVFP4_MOE_CHECK", "1");
  EXPECT_EQ(expect_out_of_memory(operation), plain + 2);  // counters and staging
}

// A run requests no memory: if every allocation fails, it still gives the same bits. The check of
// its token requests none either.
ATTACK_TEST_P(kGpu, CudaMemory, RunAllocatesNothing) {
  for (const char* const checks : {"0", "1"}) {
    const ScopedEnv check("NVFP4_MOE_CHECK", checks);
    const TinyLayer tiny(sizes());
    TinyBatch batch(tiny.options, 9);
    const auto layer = must(MoeLayer::open_on(backend(), tiny.config(), tiny.source(), options()));
    const auto placed = must(PlacedBatch::place(**layer, batch.batch()));
    const auto workspace = must(backend().allocate((*layer)->workspace_bytes(), 0, "workspace"));
    const auto run = [&] {
      EXPECT_OK((*layer)->run(placed->batch(), workspace->data(), workspace->size_bytes()));
      EXPECT_OK((*layer)->status(workspace->data(), workspace->size_bytes()));
      EXPECT_OK(placed->fetch());
      return batch.out;
    };
    const std::vector<float> expected = run();
    asked = 0;
    fail_all = true;
    fail_at = 1;
    const std::vector<float> actual = run();
    attacked();
    fail_at = 0;
    EXPECT_EQ(asked.load(), 0);
    EXPECT_TRUE(same_bits(expected, actual));
  }
}

// If its memory fails, the expert is unchanged.
ATTACK_TEST_P(kGpu, CudaMemory, ReplaceAndUnpack) {
  const TinyLayer tiny(sizes());
  auto layer = must(MoeLayer::open_on(backend(), tiny.config(), tiny.source(), options()));
  const auto codes_of = [&](int64_t e) {
    ExpertBuffers out;
    EXPECT_OK((*layer)->unpack_expert(e, out));
    return out.down.codes;
  };
  const ExpertSource source = tiny.experts[1].source();
  const std::vector<uint8_t> before = codes_of(0);
  asked = 0;
  fail_all = false;
  fail_at = 1;
  const Status refused = (*layer)->replace_expert(0, source);
  attacked();
  fail_at = 0;
  EXPECT_EQ(refused.code(), Code::kOutOfMemory) << refused.message();
  EXPECT_EQ(codes_of(0), before);
  EXPECT_GE(expect_out_of_memory([&]() -> Status {
              NVFP4_MOE_TRY((*layer)->replace_expert(0, source));
              ExpertBuffers out;
              return (*layer)->unpack_expert(0, out);
            }),
            2);
  EXPECT_EQ(codes_of(0), tiny.experts[1].down.codes);
  for (const int64_t e : {int64_t{2}, kSharedExpert})
    EXPECT_GE(expect_out_of_memory([&] {
                return (*layer)->replace_expert_on_stream(
                    e, e == kSharedExpert ? tiny.shared[0].source() : source, nullptr);
              }),
              2);  // the expert and staging
  EXPECT_EQ(codes_of(2), tiny.experts[1].down.codes);
}

ATTACK_TEST_P(kGpu, CudaMemory, Linear) {
  const TinyLayer tiny;
  LinearOptions linear;
  linear.backend = backend().name;
  linear.device = "cuda:0";
  linear.max_tokens = 4;
  linear.executor = &serial_executor();
  EXPECT_GE(expect_out_of_memory([&]() -> Status {
              NVFP4_MOE_ASSIGN(const auto opened,
                               NvfpLinear::open(tiny.experts[0].gate.view(), linear));
              return backend().allocate(opened->workspace_bytes(), 0, "workspace").status();
            }),
            2);
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaMemory, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
