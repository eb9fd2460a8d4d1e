// The backends with FP4 tensor cores, B200's and RTX Blackwell's, on larger layers than those of
// the case table.
#include <cuda_runtime.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/gemm/scheduler.h"
#include "backend/sm100/config.h"
#include "backend/sm120/config.h"
#include "cases/cases.h"
#include "core/float_formats.h"
#include "core/random.h"
#include "cuda/device_memory.h"
#include "moe/layer.h"
#include "moe/linear.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// A backend's properties for these tests; each backend has its own type of configuration.
struct Architecture {
  const Backend* backend;
  const char* name;
  int capability, other;  // of the chip itself and of its family's other one: 120 for 12.0
  const char* expected;   // part of the error for another device
  const char* gemm;       // of nvfp4 activations, in a plan
  const char* bf16_gemm;  // of bf16 activations
  int configs;
  int (*routed)(const MoeConfig& config, const ExpertRange& range, int64_t tokens);
  int (*shared)(int64_t tokens);
  int64_t (*tile_n)(int config);
  int bf16_configs;  // under bf16 activations, if the kernels are its own; 0: the plain ones
  int (*bf16_routed)(const MoeConfig& config, const ExpertRange& range, int64_t tokens);
  // Whether a GEMM's narrowest configuration (index 0), with one tile of rows, is cut along K into
  // this many ctas.
  bool (*splits)(int64_t weight_rows, int64_t k, int ctas);
  int64_t hidden;  // of ragged layers: long enough that some tiles of every configuration are split
                   // on 6 or 8 ctas
};

template <const auto& kConfigs>
int64_t tile_n(int config) {
  return kConfigs[static_cast<size_t>(config)].tile_n;
}
#define NVFP4_MOE_SPLITS(room)                                                                  \
  [](int64_t weight_rows, int64_t k, int ctas) {                                                \
    const room::GemmConfig& narrow = room::kGemmConfigs.front();                                \
    const cuda::ScheduleParams params(                                                          \
        static_cast<int32_t>(cuda::ceil_div(weight_rows, cuda::kTileRows)),                     \
        static_cast<int32_t>(cuda::ceil_div(k, room::kBlockK)), std::min(ctas, room::kMaxCtas), \
        true, room::min_saved_k_blocks(narrow), room::max_splits(narrow));                      \
    return cuda::Schedule(params, 1).split_k_blocks > 0;                                        \
  }
std::vector<Architecture> architectures() {
  return {{.backend = find_backend("sm100"),
           .name = "sm100",
           .capability = 100,
           .other = 103,
           .expected = "10.x",
           .gemm = "tcgen05_m128k64_w4a4",
           .bf16_gemm = "tcgen05_m128k16_w4a16",
           .configs = static_cast<int>(sm100::kGemmConfigs.size()),
           .routed = sm100::routed_config,
           .shared = sm100::shared_config,
           .tile_n = tile_n<sm100::kGemmConfigs>,
           .bf16_configs = static_cast<int>(sm100::kBf16GemmConfigs.size()),
           .bf16_routed = sm100::routed_config_of<sm100::kBf16GemmConfigs>,
           .splits = NVFP4_MOE_SPLITS(sm100),
           .hidden = 3088},
          {.backend = find_backend("sm120"),
           .name = "sm120",
           .capability = 120,
           .other = 121,
           .expected = "12.x",
           .gemm = "mma_m16n8k64_w4a4",
           .bf16_gemm = "mma_m16n8k16_w4a16",
           .configs = static_cast<int>(sm120::kGemmConfigs.size()),
           .routed = sm120::routed_config,
           .shared = sm120::shared_config,
           .tile_n = tile_n<sm120::kGemmConfigs>,
           .bf16_configs = 0,
           .bf16_routed = nullptr,
           .splits = NVFP4_MOE_SPLITS(sm120),
           .hidden = 1040}};
}
#undef NVFP4_MOE_SPLITS

class Fp4Backend : public testing::TestWithParam<int> {
 protected:
  Architecture of_ = architectures()[static_cast<size_t>(GetParam())];
};

TEST_P(Fp4Backend, TakesItsArchitectureAloneAndGoesBeforeCuda) {
  const Backend& backend = *of_.backend;
  const auto config = must(MoeConfig::make(case_table().front().options));
  for (int capability : {75, 80, 89, 90, 100, 103, 110, 120, 121}) {
    if (capability / 10 == of_.capability / 10) continue;
    const Status status = backend.supports(*config, gpu_of(capability));
    EXPECT_EQ(status.code(), Code::kUnsupported) << capability;
    if (capability >= 80) {
      EXPECT_NE(status.message().find(of_.expected), std::string::npos) << status.message();
    }
  }
  EXPECT_OK(backend.supports(*config, gpu_of(of_.capability)));
  EXPECT_OK(backend.supports(*config, gpu_of(of_.other)));  // the other chip of the family
  EXPECT_EQ(backend.supports(*config, host_facts()).code(), Code::kUnsupported);
  const auto chosen = must(choose_backend(*config, gpu_of(of_.capability), "auto"));
  EXPECT_EQ(*chosen, &backend);
  for (const BackendReport& report : explain(*config, gpu_of(of_.capability), "auto")) {
    if (report.chosen) {
      EXPECT_NE(report.reason.find("never run on a chip of this kind"), std::string::npos)
          << report.reason;
    }
  }
  for (const ActivationFormat format : {ActivationFormat::kInt8Block, ActivationFormat::kFp8}) {
    MoeOptions other = config->options();
    other.activation_format = format;
    const Status status = backend.supports(*MoeConfig::make(other), gpu_of(of_.capability));
    if (format == ActivationFormat::kFp8 && of_.bf16_configs == 0) {  // the plain GEMMs have it
      EXPECT_OK(status);
      continue;
    }
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_NE(status.message().find(to_string(format)), std::string::npos) << status.message();
  }
}

// plan is pure. nvfp4 uses FP4 products; their operands are a quarter as long as bf16's.
TEST_P(Fp4Backend, PlansWithoutADevice) {
  for (const Case& spec : case_table()) {
    SCOPED_TRACE(spec.name);
    const auto config = must(MoeConfig::make(spec.options));
    if (!of_.backend->supports(*config, gpu_of(of_.capability)).ok()) continue;
    size_t before = 0;
    for (int64_t tokens : {1, 2, 31, 32, 500, 100000}) {
      const LayerScales scales{5.0f / 2688, 12.0f / 2688};
      const auto plan =
          must(of_.backend->plan(*config, spec.range, scales, {tokens}, gpu_of(of_.capability)));
      EXPECT_EQ(plan->backend, of_.name);
      EXPECT_GE(plan->workspace.total_bytes, before);
      before = plan->workspace.total_bytes;
      const bool fp4 = spec.options.activation_format == ActivationFormat::kNvfp4;
      const bool fp8 = spec.options.activation_format == ActivationFormat::kFp8;
      EXPECT_EQ(plan->steps[2].kernel, fp4   ? of_.gemm
                                       : fp8 ? "mma_m16n8k16_w4a8_as_bf16"
                                             : of_.bf16_gemm);
      if (!fp4 && of_.bf16_configs == 0) {
        const auto plain =
            must(kCudaBackend.plan(*config, spec.range, scales, {tokens}, gpu_of(of_.capability)));
        EXPECT_EQ(plan->workspace.total_bytes, plain->workspace.total_bytes);
      }
    }
  }
}

TEST_P(Fp4Backend, ConfigurationsGrowWithTheRowsOfAnExpert) {
  MoeOptions options;
  set_sizes(options, 128, 8, 2048, 768);
  const MoeConfig config = *MoeConfig::make(options);
  std::set<int> seen;
  int before = 0;
  for (int64_t tokens = 1; tokens <= 8192; ++tokens) {
    const int index = of_.routed(config, {0, 128}, tokens);
    EXPECT_GE(index, before);
    before = index;
    seen.insert(index);
    const int shared = of_.shared(tokens);
    EXPECT_TRUE(shared + 1 == of_.configs || tokens <= of_.tile_n(shared));
  }
  EXPECT_EQ(static_cast<int>(seen.size()), of_.configs);
}

class Fp4Layer : public Fp4Backend {
 protected:
  void SetUp() override {
    const std::string reason = why_not_here(*of_.backend);
    if (!reason.empty()) GTEST_SKIP() << of_.name << ": " << reason;
  }
  // Activation formats for which the backend has its own kernels.
  std::vector<ActivationFormat> formats() const {
    if (of_.bf16_configs == 0) return {ActivationFormat::kNvfp4};
    return {ActivationFormat::kNvfp4, ActivationFormat::kBf16};
  }
  Case spec(const Ragged& ragged, ActivationFormat format = ActivationFormat::kNvfp4) const {
    Case spec = ragged_case(ragged, format);
    spec.options.hidden_size = of_.hidden;
    return spec;
  }
};

// K is not a multiple of a tile or a k-block, and is long enough that tiles are split.
TEST_P(Fp4Layer, EveryConfigurationAgreesWithThePlainKernels) {
  for (ActivationFormat format : formats()) {
    const bool fp4 = format == ActivationFormat::kNvfp4;
    std::set<int> configs;
    for (const Ragged& ragged :
         {Ragged{4, 2, 1, Routing::kUniform}, Ragged{4, 2, 3, Routing::kUniform},
          Ragged{16, 4, 30, Routing::kZipf}, Ragged{4, 2, 36, Routing::kUniform},
          Ragged{4, 2, 150, Routing::kZipf}, Ragged{4, 2, 140, Routing::kOneExpert}}) {
      const Case spec = Fp4Layer::spec(ragged, format);
      SCOPED_TRACE(testing::Message() << "experts " << ragged.experts << " tokens " << ragged.tokens
                                      << " " << to_string(format));
      const auto data = must(make_case(spec));
      configs.insert((fp4 ? of_.routed : of_.bf16_routed)(data->config, spec.range, spec.tokens));
      expect_agrees_with_plain(*of_.backend, *data);
    }
    EXPECT_EQ(static_cast<int>(configs.size()), fp4 ? of_.configs : of_.bf16_configs);
  }
}

// Sizes for which both GEMMs split tiles on this device: the second one reuses the counters that
// the first one left.
TEST_P(Fp4Layer, BothGemmsOfARunSplitTheirTiles) {
  const auto facts = must(device_facts("cuda:0"));
  const auto splits = [&](int64_t rows, int64_t k) {
    return of_.splits(rows, k, facts->compute_units);
  };
  Case spec = Fp4Layer::spec({2, 1, 2, Routing::kOneExpert});
  spec.options.hidden_size = 1040;
  int64_t& intermediate = spec.options.intermediate_size;
  while (intermediate < 4096 && !(splits(2 * intermediate, spec.options.hidden_size) &&
                                  splits(spec.options.hidden_size, intermediate))) {
    intermediate += 16;
    if (intermediate % 256 == 0) spec.options.hidden_size += 128;
  }
  ASSERT_LT(intermediate, 4096);
  const auto data = must(make_case(spec));
  ASSERT_EQ(of_.routed(data->config, spec.range, spec.tokens), 0);
  expect_agrees_with_plain(*of_.backend, *data);
}

// Many tiles of few rows: on a device with few multiprocessors, a cta goes through its stages and
// its halves of tensor memory several times.
TEST_P(Fp4Layer, NarrowTilesFollowEachOther) {
  for (ActivationFormat format : formats()) {
    Case spec = Fp4Layer::spec({2, 1, 2, Routing::kOneExpert}, format);
    spec.options.hidden_size = 1040;
    spec.options.intermediate_size = 528;
    const auto data = must(make_case(spec));
    expect_agrees_with_plain(*of_.backend, *data);
  }
}

// A run takes kernels together and leaves codes out; its bits and counts are those of the steps.
TEST_P(Fp4Layer, ARunIsItsSteps) {
  for (int64_t tokens : {1, 14, 36})
    for (IntermediateScale scale : {IntermediateScale::kDynamicToken, IntermediateScale::kFixed})
      for (DataKind values : {DataKind::kNormal, DataKind::kNan})
        for (ActivationFormat format : formats())
          expect_run_is_its_steps(*of_.backend, tokens, scale, values, format);
}

// With batch_invariant a token has the same bits in every configuration.
TEST_P(Fp4Layer, BatchInvariantBitsInEveryConfiguration) {
  for (ActivationFormat format : formats()) {
    Case spec = Fp4Layer::spec({4, 2, 150, Routing::kUniform}, format);
    spec.options.batch_invariant = true;
    const auto data = must(make_case(spec));
    CaseRun all(*of_.backend, *data);
    ASSERT_TRUE(all.ok());
    const std::vector<uint8_t> expected = all.run(*data);
    for (int64_t tokens : {1, 14, 36}) {
      CaseData first = *data;
      first.spec.tokens = tokens;
      const std::vector<uint8_t> actual = all.run(first);
      ASSERT_EQ(actual.size(),
                static_cast<size_t>(tokens * spec.options.hidden_size) * sizeof(float));
      EXPECT_TRUE(std::equal(actual.begin(), actual.end(), expected.begin())) << tokens;
    }
  }
}

// Operands for which every partial sum is exact in fp32, in any order and however wide the tensor
// core adds: the bits are the reference's. Every output element differs from every other, so that
// swapped elements are detected.
TEST_P(Fp4Layer, ExactSumsHaveTheReferencesBits) {
  for (const int64_t cols : {int64_t{1040}, int64_t{2048}})
    for (const int64_t tokens : {int64_t{1}, int64_t{9}, int64_t{40}, int64_t{150}}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, " << tokens << " tokens");
      constexpr int64_t kRows = 208;
      Random random(static_cast<uint64_t>(cols + tokens));
      std::vector<uint8_t> codes, scales;
      for (int64_t i = 0; i < kRows * cols / 2; ++i)
        codes.push_back(static_cast<uint8_t>(random.below(256)));
      for (int64_t i = 0; i < kRows * cols / 16; ++i)
        scales.push_back(static_cast<uint8_t>(0x38 + 8 * random.below(2)));
      // The largest element of each block is 6 or twice that, so that its scale is a power of two
      // and every code is exactly the value given here.
      std::vector<uint16_t> x;
      for (int64_t i = 0, power = 1; i < tokens * cols; ++i) {
        if (i % 16 == 0) power = 1 + static_cast<int64_t>(random.below(2));
        const double value =
            i % 16 == 3 ? 6.0 : double{e2m1_to_float(static_cast<uint8_t>(random.below(16)))};
        x.push_back(bf16_from_double(value * static_cast<double>(power)));
      }
      const Nvfp4View view =
          Nvfp4View::contiguous(codes.data(), scales.data(), 0.0137f, kRows, cols);
      LinearOptions options;
      options.activation_format = ActivationFormat::kNvfp4;
      options.max_tokens = tokens;
      options.backend = "reference";
      options.device = "cpu";
      const auto host = must(NvfpLinear::open(view, options));
      options.backend = of_.name;
      options.device = "cuda:0";
      const auto gpu = must(NvfpLinear::open(view, options));
      std::vector<float> expected(static_cast<size_t>(tokens * kRows));
      const auto space = must(allocate_pages((*host)->workspace_bytes()));
      LinearBatch batch{tokens, x.data(), DType::kBf16, expected.data(), DType::kF32};
      ASSERT_OK((*host)->run(batch, space->data(), space->size_bytes()));
      const OnDevice<uint16_t> device_x(x);
      const OnDevice<float> device_out(expected.size());
      const OnDevice<uint8_t> workspace((*gpu)->workspace_bytes());
      batch.x = device_x.data();
      batch.out = device_out.data();
      ASSERT_OK((*gpu)->run(batch, workspace.data(), (*gpu)->workspace_bytes(), nullptr));
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<float> actual = device_out.back();
      for (size_t i = 0; i < expected.size(); ++i)
        ASSERT_EQ(expected[i], actual[i]) << "token " << i / kRows << " feature " << i % kRows;
      EXPECT_GT(std::set<float>(expected.begin(), expected.end()).size(), expected.size() / 8);
    }
}

std::string name_of(const testing::TestParamInfo<int>& info) {
  return architectures()[static_cast<size_t>(info.param)].name;
}
INSTANTIATE_TEST_SUITE_P(Backends, Fp4Backend, testing::Values(0, 1), name_of);
INSTANTIATE_TEST_SUITE_P(Backends, Fp4Layer, testing::Values(0, 1), name_of);

}  // namespace
}  // namespace nvfp4_moe::internal::test
