// The self-check of a GPU backend: it passes on right kernels, names a wrong one, and ends although
// a kernel does not.
#include "moe/self_check.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/cuda/gemm/scheduler.h"
#include "backend/layer_steps.h"
#include "backend/sm100/config.h"
#include "backend/sm120/config.h"
#include "core/config.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "cuda/planted_kernels.h"
#include "moe/backend_selection.h"
#include "moe/kept_checks.h"
#include "moe/layer.h"
#include "moe/self_check_session.h"
#include "support/backends.h"
#include "support/sizes.h"
#include "support/support.h"

namespace {
// The call of cudaPointerGetAttributes that blocks while this is its number in its thread. From 0.
std::atomic<int> blocked_call{-1};
std::atomic<bool> has_blocked{false};
}  // namespace

// The linker redirects these calls of this executable to this file (room.cmake). Packing checks its
// six arrays with them before it launches a kernel.
extern "C" {
cudaError_t __real_cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);
cudaError_t __wrap_cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                            const void* pointer) {
  thread_local int calls = 0;
  const int call = calls++;
  for (; blocked_call == call; std::this_thread::yield()) has_blocked = true;
  return __real_cudaPointerGetAttributes(attributes, pointer);
}
}

namespace nvfp4_moe::internal::test {
namespace {

using Verdict = CheckOutcome::Verdict;

// The emulator compiles each kernel at its first launch.
constexpr std::chrono::minutes kPlenty{20};

enum class Planted { kNothing, kCombine, kGemm2, kGemm1, kError, kHang, kNoMemory };
// A fault in the runs of one configuration.
struct Plant {
  const Backend* real = nullptr;
  Planted fault = Planted::kNothing;
  int configuration = 0;
  int* end = nullptr;  // ends kHang; in mapped host memory
  std::atomic<bool> reached{false};
};
Plant plant;

Status run_with_fault(const PackedWeights& weights, const Plan& plan, const Batch& batch,
                      std::byte* workspace, const RunContext& context) {
  const bool here = plan.limits.gemm_config == plant.configuration;
  if (here && plant.fault == Planted::kError)
    return {Code::kInternal, "gemm1_swiglu: planted error"};
  NVFP4_MOE_TRY(plant.real->run(weights, plan, batch, workspace, context));
  if (!here || plant.fault == Planted::kNothing) return {};
  const auto stream = static_cast<cudaStream_t>(context.stream);
  plant.reached = true;
  if (plant.fault == Planted::kHang)
    return wait_until_set(plant.end, stream) == cudaSuccess ? Status() : bad_input("planted");
  Arena arena(workspace);
  const PartBuffers part = layer_buffers(weights.config, weights.range, batch.tokens, arena).routed;
  std::vector<void*> values = {batch.out};  // a step's fault also shows in later steps
  if (plant.fault != Planted::kCombine) values.push_back(part.rows_out);
  if (plant.fault == Planted::kGemm1) values.push_back(part.intermediate.bf16 + 3);
  for (void* value : values)
    if (flip_bit(static_cast<uint8_t*>(value) + 1, stream) != cudaSuccess)
      return bad_input("planted");
  return {};
}

Result<Buffer> allocate_with_fault(size_t size_bytes, int device, const char* purpose) {
  if (plant.fault == Planted::kNoMemory)
    return Status{Code::kOutOfMemory, "planted: out of memory"};
  return plant.real->allocate(size_bytes, device, purpose);
}

class SelfCheck : public BackendTest {
 protected:
  DeviceFacts device() const { return *must(device_facts("cuda:0")); }
  // The formats that the backend takes.
  std::vector<ActivationFormat> formats() const {
    std::vector<ActivationFormat> list;
    for (const ActivationFormat format : kActivationFormats) {
      MoeOptions options = sizes_of(4, 2, 144, 80);
      options.activation_format = format;
      if (!declines(backend(), *MoeConfig::make(options))) list.push_back(format);
    }
    return list;
  }
  void expect_passes(const CheckScope& scope) const {
    const int64_t frees_before = calls_of_cuda_free();
    const CheckOutcome outcome = run_self_check(scope, device(), kPlenty);
    // cudaFree waits for the kernels of all streams, and until then no other thread can launch any:
    // the check would hold up a server, and not end if a kernel waits for its caller.
    EXPECT_EQ(calls_of_cuda_free(), frees_before);
    EXPECT_EQ(outcome.verdict, Verdict::kPassed)
        << scope.name() << ": " << outcome.kernel << ": " << outcome.difference;
    EXPECT_GE(outcome.step_variants, 2) << scope.name();
    std::printf("  %s: %d step variants, %.0f ms\n", scope.name().c_str(), outcome.step_variants,
                outcome.milliseconds);
  }
  // The backend with a fault in the last of its configurations.
  CheckScope planted(Planted fault) {
    static Backend copy;  // a check that timed out may still read it
    if (plant.real != &backend()) {
      plant.real = &backend();
      copy = backend();
      copy.run = run_with_fault;
      copy.allocate = allocate_with_fault;
      copy.self_check = internal::SelfCheck::kBeforeUse;
    }
    plant.fault = fault;
    plant.configuration =
        static_cast<int>(backend().gemm_tile_rows(ActivationFormat::kNvfp4).size()) - 1;
    plant.reached = false;
    return {&copy};
  }
  void TearDown() override { plant.fault = Planted::kNothing; }
};

TEST_P(SelfCheck, RightKernelsPass) { expect_passes({&backend()}); }

TEST_P(SelfCheck, RightKernelsPassInEveryScope) {
  for (const ActivationFormat format : formats())
    for (size_t i = 0; i < EnumNames<Activation>::kAll.size(); ++i)
      for (const bool batch_invariant : {false, true})
        expect_passes({&backend(), format, static_cast<Activation>(i), batch_invariant});
}

TEST_P(SelfCheck, AWrongKernelIsNamed) {
  const std::pair<Planted, const char*> faults[] = {
      {Planted::kCombine, "combine, token 0"},
      {Planted::kGemm2, "gemm2, row 0 channel 0"},
      {Planted::kGemm1, "gemm1_swiglu, row 0 channel 3"}};
  for (const auto& [fault, place] : faults) {
    const CheckOutcome outcome = run_self_check(planted(fault), device(), kPlenty);
    EXPECT_EQ(outcome.verdict, Verdict::kFailed) << place;
    EXPECT_EQ(outcome.difference.rfind(place, 0), 0u) << outcome.difference;
    EXPECT_NE(outcome.difference.find(": cuda has "), std::string::npos) << outcome.difference;
    // the widest configuration, by the name that describe_run has for it
    const MoeConfig config = *MoeConfig::make(sizes_of(4, 2, 1936, 80));
    Limits limits{.max_tokens = 2, .gemm_config = plant.configuration};
    const auto plan = must(backend().plan(config, {0, 4}, {}, limits, device()));
    std::string expected;
    for (const StepPlan& step : describe_run(backend(), config, {0, 4}, *plan, 2))
      if (outcome.difference.rfind(step.step + ",", 0) == 0) expected = step.kernel;
    EXPECT_EQ(outcome.kernel, expected);
  }
}

TEST_P(SelfCheck, AnErrorIsReportedWithTheKernel) {
  const CheckOutcome outcome = run_self_check(planted(Planted::kError), device(), kPlenty);
  EXPECT_EQ(outcome.verdict, Verdict::kError);
  EXPECT_EQ(outcome.difference, "gemm1_swiglu: planted error");
  EXPECT_NE(outcome.kernel, "");
}

// So that it is not kept as a failure of the kernels.
TEST_P(SelfCheck, ALackOfMemoryNamesNoKernel) {
  const CheckOutcome outcome = run_self_check(planted(Planted::kNoMemory), device(), kPlenty);
  EXPECT_EQ(outcome.verdict, Verdict::kError);
  EXPECT_EQ(outcome.difference, "planted: out of memory");
  EXPECT_EQ(outcome.kernel, "");
}

TEST_P(SelfCheck, AHangingKernelTimesOut) {
  void* end = nullptr;
  ASSERT_CUDA(cudaHostAlloc(&end, sizeof(int), cudaHostAllocMapped));
  plant.end = static_cast<int*>(end);
  std::atomic_ref<int> ends(*plant.end);
  ends = 0;
  // The limit may be over before the planted kernel is reached: the emulator is slow.
  std::chrono::milliseconds limit{2000};
  CheckOutcome outcome;
  do {
    const auto start = std::chrono::steady_clock::now();
    outcome = run_self_check(planted(Planted::kHang), device(), limit);
    EXPECT_LT(std::chrono::steady_clock::now() - start, limit + std::chrono::seconds(1));
    EXPECT_EQ(outcome.verdict, Verdict::kTimedOut);
    limit *= 2;
  } while (!plant.reached && limit < kPlenty && !HasFailure());
  EXPECT_TRUE(plant.reached);
  EXPECT_NE(outcome.kernel, "");
  EXPECT_EQ(outcome.difference,
            "it did not end within " + std::to_string(limit.count() / 2) + " ms");
  ends = 1;
  ASSERT_CUDA(cudaDeviceSynchronize());
}

// A call that blocks in packing the first expert, as if CUDA loaded its kernels, names none. So the
// time-out is not kept as a failure of the kernels.
TEST_P(SelfCheck, ATimeoutBeforeTheFirstKernelNamesNone) {
  const CheckScope scope = planted(Planted::kNothing);
  // The second expert comes first, since a thread that has blocked in the first goes on to it.
  for (const auto& [call, kernel] : {std::pair(6, "cuda: pack"), std::pair(0, "")}) {
    std::chrono::milliseconds limit{500};
    CheckOutcome outcome;
    blocked_call = call;
    has_blocked = false;
    do {  // the limit may be over before that call: the emulator is slow
      outcome = run_self_check(scope, device(), limit);
      EXPECT_EQ(outcome.verdict, Verdict::kTimedOut);
      limit *= 2;
    } while (!(has_blocked && outcome.kernel == kernel) && limit < std::chrono::minutes(1));
    blocked_call = -1;
    EXPECT_TRUE(has_blocked);
    EXPECT_EQ(outcome.kernel, kernel);
    EXPECT_EQ(outcome.difference.find("CUDA may still load kernels") != std::string::npos,
              outcome.kernel.empty());
  }
  ASSERT_CUDA(cudaDeviceSynchronize());
}

// "auto" takes the plain kernels in place of a backend whose kernel is wrong or hangs, and warns
// once.
TEST_P(SelfCheck, AutoTakesCudaIfAKernelIsWrongOrHangs) {
  void* end = nullptr;
  ASSERT_CUDA(cudaHostAlloc(&end, sizeof(int), cudaHostAllocMapped));
  plant.end = static_cast<int*>(end);
  std::atomic_ref<int> ends(*plant.end);
  ends = 0;
  const MoeConfig config = *MoeConfig::make(sizes_of(4, 2, 144, 80));
  std::vector<std::string> warnings;
  set_log_callback(
      [](int level, const char* text, void* user) {
        if (level == static_cast<int>(LogLevel::kWarning))
          static_cast<std::vector<std::string>*>(user)->push_back(text);
      },
      &warnings);
  const auto expect_cuda = [&](Planted fault, std::chrono::milliseconds limit) {
    const CheckScope scope = planted(fault);
    KeptChecks checks({.folder = "", .driver = "", .library = "", .limit = limit});
    const Backend* const list[] = {scope.backend, &kCudaBackend};
    const BackendSelector selector(
        list, [&]() -> KeptChecks& { return checks; }, SelfCheckMode::kAuto);
    warnings.clear();
    const auto start = std::chrono::steady_clock::now();
    for (int layer = 0; layer < 3; ++layer) {
      const auto selected = must(selector.choose_checked(config, device(), "auto"));
      EXPECT_EQ(selected->backend, &kCudaBackend);
      EXPECT_EQ(selected->check->failed(), true);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, limit + std::chrono::seconds(2));
    ASSERT_EQ(warnings.size(), 1u);
    const CheckOutcome outcome = checks.kept(scope, device())->outcome;
    EXPECT_EQ(outcome.verdict, fault == Planted::kHang ? Verdict::kTimedOut : Verdict::kFailed);
    EXPECT_NE(warnings[0].find(outcome.kernel + ": " + outcome.difference), std::string::npos)
        << warnings[0];
    EXPECT_NE(warnings[0].find("cuda is used instead"), std::string::npos) << warnings[0];
  };
  expect_cuda(Planted::kGemm2, kPlenty);
  EXPECT_TRUE(plant.reached);
  // The limit may be over before the planted kernel is reached: the emulator is slow.
  std::chrono::milliseconds limit{1000};
  do {
    limit *= 2;
    expect_cuda(Planted::kHang, limit);
  } while (!plant.reached && limit < kPlenty && !HasFailure());
  EXPECT_TRUE(plant.reached);
  set_log_callback(nullptr, nullptr);
  ends = 1;
  ASSERT_CUDA(cudaDeviceSynchronize());
}

TEST_P(SelfCheck, NeitherWaitsForAStreamNorDisturbsACapture) {
  const CheckScope scope{&backend()};
  expect_passes(scope);  // loads the kernels, for which CUDA may wait
  void* end = nullptr;
  ASSERT_CUDA(cudaHostAlloc(&end, sizeof(int), cudaHostAllocMapped));
  std::atomic_ref<int> ends(*static_cast<int*>(end));
  ends = 0;
  OnDevice<uint8_t> byte(2);
  const OwnStream busy, captured;
  {
    const Graph graph(
        captured,
        [&] {
          const bool before = flip_bit(byte.data(), captured) == cudaSuccess &&
                              wait_until_set(static_cast<int*>(end), busy) == cudaSuccess;
          const CheckOutcome outcome = run_self_check(scope, device(), kPlenty);
          EXPECT_EQ(outcome.verdict, Verdict::kPassed) << outcome.kernel << outcome.difference;
          const bool after = flip_bit(byte.data() + 1, captured) == cudaSuccess;
          return before && after ? Status() : bad_input("planted");
        },
        cudaStreamCaptureModeGlobal);
    EXPECT_OK(graph.status());
    EXPECT_EQ(cudaStreamQuery(busy), cudaErrorNotReady);
    cudaGetLastError();  // CUDA keeps that answer as an error
    ends = 1;
    graph.launch();
    captured.synchronize();
  }
  busy.synchronize();
  cudaFreeHost(end);
}

// In the check's full batches each configuration of the kernels that no chip has run has CTAs with
// whole tiles, and tiles that several CTAs split, however many multiprocessors there are.
template <class Config>
void expect_splits(const Config& config, int k_blocks, int32_t min_saved, int widest) {
  int64_t tiles = 0;
  for (const int64_t rows : {widest, 41, 1}) tiles += cuda::ceil_div(rows, config.tile_n);
  for (const int units : {8, 20, 108, 148, 188}) {
    const int ctas = ctas_that_split(2 * tiles, units);
    const cuda::ScheduleParams params(2, k_blocks, ctas, true, min_saved, max_splits(config));
    const cuda::Schedule schedule(params, static_cast<int32_t>(tiles));
    EXPECT_GT(schedule.split_k_blocks, 0) << config.name << ", " << units << " multiprocessors";
    EXPECT_GE(schedule.whole_tiles, ctas) << config.name << ", " << units << " multiprocessors";
  }
}

TEST(SelfCheckPlans, EveryConfigurationHasWholeTilesAndSplitOnes) {
  constexpr int kLongK = 1936;
  for (const auto& config : sm100::kGemmConfigs)
    expect_splits(config, cuda::ceil_div(kLongK, sm100::kBlockK), sm100::min_saved_k_blocks(config),
                  sm100::kGemmConfigs.back().tile_n);
  for (const auto& config : sm100::kBf16GemmConfigs)
    expect_splits(config, cuda::ceil_div(kLongK, sm100::kBf16BlockK),
                  2 * sm100::min_saved_k_blocks(config), sm100::kBf16GemmConfigs.back().tile_n);
  for (const auto& config : sm120::kGemmConfigs)
    expect_splits(config, cuda::ceil_div(kLongK, sm120::kBlockK), sm120::min_saved_k_blocks(config),
                  sm120::kGemmConfigs.back().tile_n);
}

INSTANTIATE_TEST_SUITE_P(Backends, SelfCheck, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
