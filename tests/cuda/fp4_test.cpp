// The backend of RTX Blackwell beyond the case table, whose layers are small: what it takes, and on such a GPU every
// compiled configuration on ragged shapes whose tiles are split along K, and sums that have one value.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "backend/cuda/gemm/scheduler.h"
#include "backend/sm120/config.h"
#include "cases/cases.h"
#include "core/float_formats.h"
#include "core/random.h"
#include "judge/judge.h"
#include "moe/layer.h"
#include "moe/linear.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

TEST(Sm120Backend, TakesItsArchitectureAloneAndGoesBeforeCuda) {
  const auto config = MoeConfig::make(case_table().front().options);
  ASSERT_OK(config);
  for (int capability : {75, 80, 89, 90, 100, 103, 110}) {
    const Status status = kSm120Backend.supports(*config, test::gpu_of(capability));
    EXPECT_EQ(status.code(), Code::kUnsupported) << capability;
  }
  EXPECT_NE(kSm120Backend.supports(*config, test::gpu_of(100)).message().find("12.x"), std::string::npos);
  EXPECT_OK(kSm120Backend.supports(*config, test::gpu_of(120)));
  // By nvcc 12.9 on also the other chip of the family; an older one's build says why not.
  const Status family = kSm120Backend.supports(*config, test::gpu_of(121));
  EXPECT_TRUE(family.ok() || family.message().find("12.9") != std::string::npos) << family.message();
  EXPECT_EQ(kSm120Backend.supports(*config, host_facts()).code(), Code::kUnsupported);
  const auto chosen = choose_backend(*config, test::gpu_of(120), "auto");
  ASSERT_OK(chosen);
  EXPECT_EQ(*chosen, &kSm120Backend);
  for (const BackendReport& report : explain(*config, test::gpu_of(120), "auto")) {
    if (report.chosen) {
      EXPECT_NE(report.reason.find("never yet on a GPU of this kind"), std::string::npos) << report.reason;
    }
  }
  MoeOptions int8 = config->options();
  int8.activation_format = ActivationFormat::kInt8Block;
  const Status declined = kSm120Backend.supports(*MoeConfig::make(int8), test::gpu_of(120));
  EXPECT_NE(declined.message().find("int8_block"), std::string::npos) << declined.message();
}

// plan is pure. nvfp4 goes to FP4 products, whose operands are a quarter as long as bf16's; bf16 to the plain kernels.
TEST(Sm120Backend, PlansWithoutADevice) {
  for (const Case& spec : case_table()) {
    if (spec.options.activation_format == ActivationFormat::kInt8Block) continue;
    SCOPED_TRACE(spec.name);
    const auto config = MoeConfig::make(spec.options);
    ASSERT_OK(config);
    size_t before = 0;
    for (int64_t tokens : {1, 2, 31, 32, 500, 100000}) {
      const LayerScales scales{5.0f / 2688, 12.0f / 2688};
      const auto plan = kSm120Backend.plan(*config, spec.range, scales, {tokens}, test::gpu_of(120));
      ASSERT_OK(plan);
      EXPECT_EQ(plan->backend, "sm120");
      EXPECT_GE(plan->workspace.total_bytes, before);
      before = plan->workspace.total_bytes;
      const bool fp4 = spec.options.activation_format == ActivationFormat::kNvfp4;
      EXPECT_EQ(plan->steps[2].kernel, fp4 ? "mma_m16n8k64_w4a4" : "mma_m16n8k16_w4a16");
      if (!fp4) {
        const auto plain = kCudaBackend.plan(*config, spec.range, scales, {tokens}, test::gpu_of(120));
        ASSERT_OK(plain);
        EXPECT_EQ(plan->workspace.total_bytes, plain->workspace.total_bytes);
      }
    }
  }
}

TEST(Sm120Backend, ConfigurationsGrowWithTheRowsOfAnExpert) {
  MoeOptions options;
  options.num_experts = 128;
  options.top_k = 8;
  options.hidden_size = 2048;
  options.intermediate_size = 768;
  const MoeConfig config = *MoeConfig::make(options);
  std::set<int> seen;
  int before = 0;
  for (int64_t tokens = 1; tokens <= 8192; ++tokens) {
    const int index = sm120::routed_config(config, {0, 128}, tokens);
    EXPECT_GE(index, before);
    before = index;
    seen.insert(index);
    const int shared = sm120::shared_config(tokens);
    EXPECT_TRUE(shared + 1 == static_cast<int>(sm120::kGemmConfigs.size()) ||
                tokens <= sm120::kGemmConfigs[static_cast<size_t>(shared)].tile_n);
  }
  EXPECT_EQ(seen.size(), sm120::kGemmConfigs.size());
}

struct Ragged {
  int64_t experts, top_k, tokens;
  Routing routing;
};

class Sm120Layer : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = test::why_not_here(kSm120Backend);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static Case spec(const Ragged& ragged) {
    Case spec;
    spec.name = "ragged";
    spec.options.num_experts = ragged.experts;
    spec.options.top_k = ragged.top_k;
    spec.options.hidden_size = 1040;
    spec.options.intermediate_size = 720;
    spec.options.activation_format = ActivationFormat::kNvfp4;
    spec.options.row_format = RowFormat::kFp32;
    spec.range = {0, ragged.experts};
    spec.tokens = ragged.tokens;
    spec.routing = ragged.routing;
    spec.out_dtype = DType::kF32;
    return spec;
  }
};

// K is no multiple of a tile or a k-block, and long enough that tiles are split.
TEST_F(Sm120Layer, EveryConfigurationAgreesWithThePlainKernels) {
  std::set<int> configs;
  for (const Ragged& ragged : {Ragged{4, 2, 1, Routing::kUniform}, Ragged{4, 2, 3, Routing::kUniform},
                               Ragged{16, 4, 30, Routing::kZipf}, Ragged{4, 2, 36, Routing::kUniform},
                               Ragged{4, 2, 150, Routing::kZipf}, Ragged{4, 2, 140, Routing::kOneExpert}}) {
    const Case spec = Sm120Layer::spec(ragged);
    SCOPED_TRACE(testing::Message() << "experts " << ragged.experts << " tokens " << ragged.tokens);
    const auto data = make_case(spec);
    ASSERT_OK(data);
    configs.insert(sm120::routed_config(data->config, spec.range, spec.tokens));
    test::CaseRun plain(kCudaBackend, *data), own(kSm120Backend, *data);
    ASSERT_TRUE(plain.ok() && own.ok());
    const auto expected = test::to_floats(plain.run(*data), spec.out_dtype);
    const std::vector<uint8_t> bytes = own.run(*data);
    const auto actual = test::to_floats(bytes, spec.out_dtype);
    EXPECT_EQ(broken_limit(compare(expected.data(), actual.data(), spec.tokens, spec.options.hidden_size),
                           layer_limits(data->config, spec.tokens)),
              "");
    EXPECT_EQ(own.broken_guard(), -1);
    ASSERT_EQ(own.run(*data), bytes) << "a repeat differs";
  }
  EXPECT_EQ(configs.size(), sm120::kGemmConfigs.size());
}

// Sizes for which both GEMMs split tiles on this very device: the second one finds the counters as the first one left them.
TEST_F(Sm120Layer, BothGemmsOfARunSplitTheirTiles) {
  const auto facts = device_facts("cuda:0");
  ASSERT_OK(facts);
  const int ctas = std::min(facts->compute_units, sm120::kMaxCtas);
  const sm120::GemmConfig& narrow = sm120::kGemmConfigs.front();
  const auto splits = [&](int64_t weight_rows, int64_t k) {
    const cuda::ScheduleParams params(static_cast<int32_t>(cuda::ceil_div(weight_rows, cuda::kTileRows)),
                                      static_cast<int32_t>(cuda::ceil_div(k, sm120::kBlockK)), ctas, true,
                                      sm120::min_saved_k_blocks(narrow), sm120::max_splits(narrow));
    return cuda::Schedule(params, 1).split_k_blocks > 0;
  };
  Case spec = Sm120Layer::spec({2, 1, 2, Routing::kOneExpert});
  int64_t& intermediate = spec.options.intermediate_size;
  while (intermediate < 2048 &&
         !(splits(2 * intermediate, spec.options.hidden_size) && splits(spec.options.hidden_size, intermediate))) {
    intermediate += 16;
    if (intermediate % 256 == 0) spec.options.hidden_size += 128;
  }
  ASSERT_LT(intermediate, 2048);
  const auto data = make_case(spec);
  ASSERT_OK(data);
  ASSERT_EQ(sm120::routed_config(data->config, spec.range, spec.tokens), 0);
  test::CaseRun plain(kCudaBackend, *data), own(kSm120Backend, *data);
  ASSERT_TRUE(plain.ok() && own.ok());
  const auto expected = test::to_floats(plain.run(*data), spec.out_dtype);
  const std::vector<uint8_t> bytes = own.run(*data);
  const auto actual = test::to_floats(bytes, spec.out_dtype);
  EXPECT_EQ(broken_limit(compare(expected.data(), actual.data(), spec.tokens, spec.options.hidden_size),
                         layer_limits(data->config, spec.tokens)),
            "");
  ASSERT_EQ(own.run(*data), bytes) << "a repeat differs";
}

// A run takes kernels together and leaves codes out; its bits and counts are those of the steps.
TEST_F(Sm120Layer, ARunIsItsSteps) {
  for (int64_t tokens : {1, 14, 36})
    for (IntermediateScale scale : {IntermediateScale::kDynamicToken, IntermediateScale::kFixed})
      for (DataKind values : {DataKind::kNormal, DataKind::kNan}) {
        SCOPED_TRACE(testing::Message() << tokens << " tokens, " << to_string(scale) << ", " << to_string(values));
        Case small = spec({4, 2, tokens, Routing::kUniform});
        small.options.hidden_size = 528;
        small.options.intermediate_size = 656;
        small.options.shared_intermediate_size = 144;
        small.options.intermediate_scale = scale;
        if (scale == IntermediateScale::kFixed) small.options.intermediate_fixed = 0x1p-9f;
        small.data = values;
        const auto data = make_case(small);
        ASSERT_OK(data);
        test::CaseRun whole(kSm120Backend, *data), parts(kSm120Backend, *data);
        ASSERT_TRUE(whole.ok() && parts.ok());
        const std::vector<uint8_t> out = parts.run_steps(*data);
        EXPECT_EQ(test::difference(out, whole.run(*data), small.out_dtype, small.options.hidden_size), "");
        EXPECT_EQ(std::memcmp(whole.buffers().status, parts.buffers().status, sizeof(RunStatus)), 0);
        EXPECT_EQ(whole.broken_guard(), -1);
      }
}

// With batch_invariant a token has the same bits in every configuration.
TEST_F(Sm120Layer, BatchInvariantBitsInEveryConfiguration) {
  Case spec = Sm120Layer::spec({4, 2, 150, Routing::kUniform});
  spec.options.batch_invariant = true;
  const auto data = make_case(spec);
  ASSERT_OK(data);
  test::CaseRun all(kSm120Backend, *data);
  ASSERT_TRUE(all.ok());
  const std::vector<uint8_t> expected = all.run(*data);
  for (int64_t tokens : {1, 14, 36}) {
    CaseData first = *data;
    first.spec.tokens = tokens;
    const std::vector<uint8_t> actual = all.run(first);
    ASSERT_EQ(actual.size(), static_cast<size_t>(tokens * spec.options.hidden_size) * sizeof(float));
    EXPECT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin())) << tokens;
  }
}

// Operands for which every partial sum is exact in fp32, in any order and however wide the tensor core adds: the bits are
// the reference's. Every output element has a value of its own, so that none can stand for another.
TEST_F(Sm120Layer, ExactSumsHaveTheReferencesBits) {
  for (const int64_t cols : {int64_t{1040}, int64_t{2048}})
    for (const int64_t tokens : {int64_t{1}, int64_t{9}, int64_t{40}, int64_t{150}}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, " << tokens << " tokens");
      constexpr int64_t kRows = 208;
      Random random(static_cast<uint64_t>(cols + tokens));
      std::vector<uint8_t> codes, scales;
      for (int64_t i = 0; i < kRows * cols / 2; ++i) codes.push_back(static_cast<uint8_t>(random.below(256)));
      for (int64_t i = 0; i < kRows * cols / 16; ++i)
        scales.push_back(static_cast<uint8_t>(0x38 + 8 * random.below(2)));
      // Each block has a 6, or twice that, so that its scale is a power of two and every code is what stands here.
      std::vector<uint16_t> x;
      for (int64_t i = 0, power = 1; i < tokens * cols; ++i) {
        if (i % 16 == 0) power = 1 + static_cast<int64_t>(random.below(2));
        const double value = i % 16 == 3 ? 6.0 : double{e2m1_to_float(static_cast<uint8_t>(random.below(16)))};
        x.push_back(bf16_from_double(value * static_cast<double>(power)));
      }
      const Nvfp4View view = Nvfp4View::contiguous(codes.data(), scales.data(), 0.0137f, kRows, cols);
      LinearOptions options;
      options.activation_format = ActivationFormat::kNvfp4;
      options.max_tokens = tokens;
      options.backend = "reference";
      options.device = "cpu";
      const auto host = NvfpLinear::open(view, options);
      options.backend = "sm120";
      options.device = "cuda:0";
      const auto gpu = NvfpLinear::open(view, options);
      ASSERT_OK(host);
      ASSERT_OK(gpu);
      std::vector<float> expected(static_cast<size_t>(tokens * kRows)), actual(expected.size());
      const auto space = allocate_pages((*host)->workspace_bytes());
      ASSERT_OK(space);
      LinearBatch batch{tokens, x.data(), DType::kBf16, expected.data(), DType::kF32};
      ASSERT_OK((*host)->run(batch, space->data(), space->size_bytes()));
      void *device_x = nullptr, *device_out = nullptr, *workspace = nullptr;
      ASSERT_EQ(cudaMalloc(&device_x, x.size() * 2), cudaSuccess);
      ASSERT_EQ(cudaMalloc(&device_out, actual.size() * 4), cudaSuccess);
      ASSERT_EQ(cudaMalloc(&workspace, (*gpu)->workspace_bytes()), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(device_x, x.data(), x.size() * 2, cudaMemcpyHostToDevice), cudaSuccess);
      batch.x = device_x;
      batch.out = device_out;
      ASSERT_OK((*gpu)->run(batch, workspace, (*gpu)->workspace_bytes(), nullptr));
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_EQ(cudaMemcpy(actual.data(), device_out, actual.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
      for (void* memory : {device_x, device_out, workspace}) ASSERT_EQ(cudaFree(memory), cudaSuccess);
      for (size_t i = 0; i < expected.size(); ++i)
        ASSERT_EQ(expected[i], actual[i]) << "token " << i / kRows << " feature " << i % kRows;
      EXPECT_GT(std::set<float>(expected.begin(), expected.end()).size(), expected.size() / 8);
    }
}

}  // namespace
}  // namespace nvfp4_moe
