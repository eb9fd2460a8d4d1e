// Allocations, counted: run makes none, and packing holds one expert at a time. Counting replaces operator new for this
// whole executable; sanitizers bring their own, there these tests are skipped.
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "moe/linear.h"
#include "moe/tiny.h"
#include "nvfp4_moe/nvfp4_moe.h"
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

TEST_F(Allocation, RunMakesNone) {
  for (const ActivationFormat format :
       {ActivationFormat::kNvfp4, ActivationFormat::kBf16, ActivationFormat::kInt8Block, ActivationFormat::kFp8}) {
    MoeOptions options = tiny_options();
    options.activation_format = format;
    options.shared_intermediate_size = 32;
    const TinyLayer tiny(options);
    for (const Backend* backend : test::runnable_backends()) {
      for (const bool pool : {false, true}) {
        LayerOptions layer_options = tiny_layer_options();
        const auto threads = make_thread_pool(2);
        if (pool) layer_options.executor = threads.get();
        auto opened = MoeLayer::open_on(*backend, tiny.config(), tiny.source(), layer_options);
        ASSERT_OK(opened);
        const MoeLayer& layer = **opened;
        const Buffer workspace = workspace_of(layer);
        TinyBatch batch(options, 16);
        const Batch call = batch.batch();
        // From the very first run: there is no first-time work either.
        const int64_t before = allocations.load();
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(layer.run(call, workspace.data(), workspace.size_bytes()).ok());
        EXPECT_EQ(allocations.load() - before, 0)
            << backend->name << " " << to_string(format) << (pool ? " pool" : " serial");
      }
    }
  }
}

TEST_F(Allocation, LinearRunMakesNone) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  const std::vector<uint16_t> x(4 * 96, 0x3F80);
  std::vector<uint16_t> out(4 * 40);
  for (const ActivationFormat format :
       {ActivationFormat::kNvfp4, ActivationFormat::kBf16, ActivationFormat::kInt8Block, ActivationFormat::kFp8}) {
    for (const Backend* backend : test::runnable_backends()) {
      LinearOptions options{
          .backend = backend->name, .activation_format = format, .max_tokens = 4, .executor = &serial_executor()};
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
  for (const Backend* backend : test::runnable_backends()) {
    auto opened = MoeLayer::open_on(*backend, tiny.config(), tiny.source(), tiny_layer_options());
    ASSERT_OK(opened);
    const ExpertSource source = tiny.experts[3].source();
    const int64_t before = allocations.load();
    EXPECT_TRUE((*opened)->replace_expert(0, source).ok());
    EXPECT_EQ(allocations.load() - before, 0) << backend->name;
  }
}

TEST_F(Allocation, PackingHoldsOneExpertAtATime) {
  MoeOptions options = tiny_options();
  options.num_experts = 16;
  options.hidden_size = 256;
  options.intermediate_size = 256;
  const TinyLayer tiny(options);
  const int64_t expert_bytes = 3 * 256 * 256 / 16 * 9;
  LayerSource source = tiny.source();
  source.expert = [&](int64_t e) -> Result<LoadedExpert> {  // owns its bytes, as a converted expert does
    const Expert& expert = tiny.experts[static_cast<size_t>(e)];
    LoadedExpert loaded;
    const auto keep = [&](const Matrix& matrix) {
      loaded.storage.push_back(matrix.codes);
      loaded.storage.push_back(matrix.block_scales);
      const size_t n = loaded.storage.size();
      return Nvfp4View::contiguous(loaded.storage[n - 2].data(), loaded.storage[n - 1].data(), matrix.tensor_scale,
                                   matrix.rows, matrix.cols);
    };
    loaded.storage.reserve(6);
    loaded.source = {keep(expert.gate), keep(expert.up), keep(expert.down)};
    return loaded;
  };
  for (const Backend* backend : test::runnable_backends()) {
    const int64_t before = live_bytes.load();
    peak_bytes.store(before);
    auto layer = MoeLayer::open_on(*backend, tiny.config(), source, tiny_layer_options());
    ASSERT_OK(layer);
    // The packed bytes are pages of their own; beside one expert there is room for names and the plan.
    EXPECT_LT(peak_bytes.load() - before, 2 * expert_bytes) << backend->name;
    EXPECT_GE(peak_bytes.load() - before, expert_bytes) << backend->name;
  }
}

// What was read of an expert is the next one's memory: at no time are there two.
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
  for (const Backend* backend : test::runnable_backends()) {
    const auto checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    const auto config = MoeConfig::make(checkpoint->layer_options(0).value());
    ASSERT_OK(config);
    const auto source = layer_source(*checkpoint, 0);
    ASSERT_OK(source);
    const int64_t before = live_bytes.load();
    peak_bytes.store(before);
    ASSERT_OK(MoeLayer::open_on(*backend, *config, *source, tiny_layer_options()));
    // The packed bytes are pages of their own; beside one expert there is room for names and the plan.
    EXPECT_LT(peak_bytes.load() - before, expert_bytes * 3 / 2) << backend->name;
    EXPECT_GE(peak_bytes.load() - before, expert_bytes) << backend->name;
  }
}

TEST_F(Allocation, TheCInterfaceRunsWithoutAny) {
  const TinyLayer tiny;
  std::vector<const Expert*> experts;
  nvfp4_moe_config config{};
  config.struct_size = sizeof(config);
  config.num_experts = 1;
  config.top_k = 1;
  config.hidden_size = 64;
  config.intermediate_size = 48;
  const Expert& e = tiny.experts[0];
  nvfp4_moe_layer_tensors tensors{};
  tensors.struct_size = sizeof(tensors);
  tensors.gate_codes = e.gate.codes.data();
  tensors.gate_block_scales = e.gate.block_scales.data();
  tensors.gate_tensor_scales = &e.gate.tensor_scale;
  tensors.up_codes = e.up.codes.data();
  tensors.up_block_scales = e.up.block_scales.data();
  tensors.up_tensor_scales = &e.up.tensor_scale;
  tensors.down_codes = e.down.codes.data();
  tensors.down_block_scales = e.down.block_scales.data();
  tensors.down_tensor_scales = &e.down.tensor_scale;
  nvfp4_moe_layer_options options{};
  options.struct_size = sizeof(options);
  options.max_tokens = 2;
  options.threads = 1;
  nvfp4_moe_layer* layer = nullptr;
  ASSERT_EQ(nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &layer), NVFP4_MOE_STATUS_OK)
      << nvfp4_moe_last_error();
  size_t bytes = 0;
  ASSERT_EQ(nvfp4_moe_layer_workspace_bytes(layer, 2, &bytes), NVFP4_MOE_STATUS_OK);
  const Buffer workspace = allocate_pages(bytes).value();
  const std::vector<uint16_t> hidden(128, 0x3F80);
  std::vector<uint16_t> out(128);
  const int32_t ids[2] = {0, 0};
  const float weights[2] = {1, 1};
  nvfp4_moe_batch batch{};
  batch.struct_size = sizeof(batch);
  batch.tokens = 2;
  batch.hidden = hidden.data();
  batch.topk_ids = ids;
  batch.topk_weights = weights;
  batch.out = out.data();
  const int64_t before = allocations.load();
  EXPECT_EQ(nvfp4_moe_layer_run(layer, &batch, workspace.data(), bytes, nullptr), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(allocations.load() - before, 0);
  nvfp4_moe_layer_close(layer);
}

}  // namespace
}  // namespace nvfp4_moe::internal
