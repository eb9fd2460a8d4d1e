// Allocations, counted: run makes none (tests/memory has layers), and packing holds one expert at a
// time.
//
// Counting replaces operator new for this whole executable. Sanitizers bring their own, and these
// tests are then skipped.
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "moe/c_layer.h"
#include "moe/linear.h"
#include "support/backends.h"
#include "support/checkpoint_builder.h"

#ifdef NVFP4_MOE_SANITIZED
#define NVFP4_MOE_COUNTING 0
#else
#define NVFP4_MOE_COUNTING 1
#endif

namespace {
std::atomic<int64_t> allocations{0};
std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};
}  // namespace

#if NVFP4_MOE_COUNTING
// GCC sees free() of memory from operator new and does not know that this operator new is malloc.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

static void* counted(std::size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  allocations.fetch_add(1);
  const int64_t now = live_bytes.fetch_add(static_cast<int64_t>(malloc_usable_size(memory))) +
                      static_cast<int64_t>(malloc_usable_size(memory));
  int64_t peak = peak_bytes.load();
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
  return memory;
}
static void uncounted(void* memory) noexcept {
  if (memory == nullptr) return;
  live_bytes.fetch_sub(static_cast<int64_t>(malloc_usable_size(memory)));
  std::free(memory);
}
void* operator new(std::size_t size) { return counted(size); }
void* operator new[](std::size_t size) { return counted(size); }
void operator delete(void* memory) noexcept { uncounted(memory); }
void operator delete[](void* memory) noexcept { uncounted(memory); }
void operator delete(void* memory, std::size_t) noexcept { uncounted(memory); }
void operator delete[](void* memory, std::size_t) noexcept { uncounted(memory); }
#endif

namespace nvfp4_moe::internal {
namespace {

using namespace test;

class Allocation : public testing::Test {
 protected:
  void SetUp() override {
    if (!NVFP4_MOE_COUNTING) GTEST_SKIP() << "a sanitizer owns operator new";
  }
};

TEST_F(Allocation, TheCounterCounts) {
  const int64_t before = allocations.load();
  auto value = std::make_unique<int>(3);
  EXPECT_EQ(allocations.load(), before + 1);
  EXPECT_EQ(*value, 3);
}

TEST_F(Allocation, LinearRunMakesNone) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  const std::vector<uint16_t> x(4 * 96, 0x3F80);
  std::vector<uint16_t> out(4 * 40);
  for (const ActivationFormat format : kActivationFormats) {
    for (const Backend* backend : runnable_backends()) {
      LinearOptions options{.backend = backend->name,
                            .activation_format = format,
                            .max_tokens = 4,
                            .executor = &serial_executor()};
      auto linear = NvfpLinear::open(weight.view(), options);
      ASSERT_OK(linear);
      const Buffer workspace = allocate_pages((*linear)->workspace_bytes()).value();
      const LinearBatch batch{4, x.data(), DType::kBf16, out.data(), DType::kBf16};
      const int64_t before = allocations.load();
      EXPECT_TRUE((*linear)->run(batch, workspace.data(), workspace.size_bytes()).ok());
      EXPECT_EQ(allocations.load() - before, 0) << backend->name << " " << to_string(format);
    }
  }
}

TEST_F(Allocation, ReplacingAnExpertMakesNone) {
  const TinyLayer tiny;
  for (const Backend* backend : runnable_backends()) {
    const auto layer = open_tiny(tiny, tiny_layer_options(), backend);
    const ExpertSource source = tiny.experts[3].source();
    const int64_t before = allocations.load();
    EXPECT_TRUE(layer->replace_expert(0, source).ok());
    EXPECT_EQ(allocations.load() - before, 0) << backend->name;
  }
}

// Each expert reuses the memory of the one before: two are never loaded at once.
TEST_F(Allocation, LoadingACheckpointHoldsOneExpertAtATime) {
  const TempDir dir;
  CheckpointBuilder builder({.model_type = "qwen3_moe",
                             .layers = 1,
                             .num_experts = 6,
                             .hidden_size = 512,
                             .intermediate_size = 512,
                             .random_codes = true});
  ASSERT_OK(builder.write(dir.path().string()));
  const int64_t expert_bytes = 3 * 512 * 512 / 16 * 9;
  for (const Backend* backend : runnable_backends()) {
    const auto checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    const auto config = MoeConfig::make(checkpoint->layer_options(0).value());
    ASSERT_OK(config);
    const auto source = layer_source(*checkpoint, 0);
    ASSERT_OK(source);
    const int64_t before = live_bytes.load();
    peak_bytes.store(before);
    ASSERT_OK(MoeLayer::open_on(*backend, *config, *source, tiny_layer_options()));
    // The packed bytes have their own pages. In addition to one expert there is room for names and
    // the plan.
    EXPECT_LT(peak_bytes.load() - before, expert_bytes * 3 / 2) << backend->name;
    EXPECT_GE(peak_bytes.load() - before, expert_bytes) << backend->name;
  }
}

TEST_F(Allocation, TheCInterfaceRunsWithoutAny) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(2));
  TinyBatch batch(c.tiny.options, 2);
  const nvfp4_moe_batch call = c_batch(batch);
  const int64_t before = allocations.load();
  EXPECT_EQ(
      nvfp4_moe_layer_run(layer.get(), &call, workspace.data(), workspace.size_bytes(), nullptr),
      NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(allocations.load() - before, 0);
}

}  // namespace
}  // namespace nvfp4_moe::internal
