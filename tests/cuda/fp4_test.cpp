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
struct BlackwellBackend {
  const Backend* backend;
  int (*routed)(const MoeConfig& config, const ExpertRange& range, int64_t tokens);
  // Whether a GEMM's narrowest configuration (index 0), with one tile of rows, is cut along K into
  // this many ctas.
  bool (*splits)(int64_t weight_rows, int64_t k, int ctas);
};

#define NVFP4_MOE_SPLITS(room)                                                                  \
  [](int64_t weight_rows, int64_t k, int ctas) {                                                \
    const room::GemmConfig& narrow = room::kGemmConfigs.front();                                \
    const cuda::ScheduleParams params(                                                          \
        static_cast<int32_t>(cuda::ceil_div(weight_rows, cuda::kTileRows)),                     \
        static_cast<int32_t>(cuda::ceil_div(k, room::kBlockK)), std::min(ctas, room::kMaxCtas), \
        true, room::min_saved_k_blocks(narrow), room::max_splits(narrow));                      \
    return cuda::Schedule(params, 1).split_k_blocks > 0;                                        \
  }
BlackwellBackend architecture(int index) {
  if (index == 0) return {&kSm100Backend, sm100::routed_config, NVFP4_MOE_SPLITS(sm100)};
  return {&kSm120Backend, sm120::routed_config, NVFP4_MOE_SPLITS(sm120)};
}
#undef NVFP4_MOE_SPLITS

class Fp4Layer : public testing::TestWithParam<int> {
 protected:
  BlackwellBackend of_ = architecture(GetParam());
  void SetUp() override {
    const std::string reason = why_not_here(*of_.backend);
    if (!reason.empty()) GTEST_SKIP() << of_.backend->name << ": " << reason;
  }
  // Activation formats for which the backend has its own kernels.
  std::vector<ActivationFormat> formats() const {
    if (of_.backend == &kSm120Backend) return {ActivationFormat::kNvfp4};
    return {ActivationFormat::kNvfp4, ActivationFormat::kBf16};
  }
};

// Sizes for which both GEMMs split tiles on this device: the second one reuses the counters that
// the first one left.
TEST_P(Fp4Layer, BothGemmsOfARunSplitTheirTiles) {
  const auto facts = must(device_facts("cuda:0"));
  const auto splits = [&](int64_t rows, int64_t k) {
    return of_.splits(rows, k, facts->compute_units);
  };
  Case spec = ragged_case({2, 1, 2, Routing::kOneExpert}, ActivationFormat::kNvfp4);
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
    Case spec = ragged_case({2, 1, 2, Routing::kOneExpert}, format);
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
      options.backend = of_.backend->name;
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

INSTANTIATE_TEST_SUITE_P(Backends, Fp4Layer, testing::Values(0, 1),
                         [](const auto& info) { return architecture(info.param).backend->name; });

}  // namespace
}  // namespace nvfp4_moe::internal::test
