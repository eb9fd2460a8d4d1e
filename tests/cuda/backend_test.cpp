// The layers and devices that the CUDA backends accept, their plans and their configurations, from
// device facts only.
#include "backend/backend.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "backend/cuda/layer.h"
#include "backend/sm100/config.h"
#include "backend/sm120/config.h"
#include "cases/cases.h"
#include "moe/layer.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// A backend before others on the same device comes first.
struct Architecture {
  const Backend* backend;
  std::vector<int> capabilities;
  const char* expected;  // part of the error for another device
  bool fp8;
};
std::vector<Architecture> architectures() {
  std::vector<Architecture> all = {{&kSm90Backend, {90}, "9.x", true},
                                   {&kSm100Backend, {100, 103}, "10.x", false},
                                   {&kSm120Backend, {120, 121}, "12.x", true},
                                   {&kCudaBackend, {80, 89, 90, 100, 103, 120, 121}, "8.0", true}};
  // Thor (11.0) has code only if the build was configured for it.
  if (cuda::has_code_for_thor()) all[1].capabilities.push_back(110);
  if (cuda::has_code_for_11()) all[3].capabilities.push_back(110);
  return all;
}
MoeConfig first_config() { return *MoeConfig::make(case_table().front().options); }

TEST(CudaBackends, TakeTheirDevicesAndAreChosenThere) {
  const MoeConfig config = first_config();
  for (const int capability : {75, 80, 89, 90, 100, 103, 110, 120, 121}) {
    SCOPED_TRACE(capability);
    const Backend* first = nullptr;
    for (const Architecture& of : architectures()) {
      const Status status = of.backend->supports(config, gpu_of(capability));
      if (std::count(of.capabilities.begin(), of.capabilities.end(), capability) != 0) {
        EXPECT_OK(status);
        if (first == nullptr) first = of.backend;
      } else {
        const bool no_code = capability == 110 && !cuda::has_code_for_11();
        EXPECT_THAT(status, Refused(Code::kUnsupported, capability < 80 ? "got 7.5"
                                                        : no_code ? "for compute capability 11.x"
                                                                  : of.expected));
      }
      EXPECT_EQ(of.backend->supports(config, host_facts()).code(), Code::kUnsupported);
    }
    const auto chosen = choose_backend(config, gpu_of(capability), "auto");
    EXPECT_EQ(chosen.ok() ? *chosen : nullptr, first);
  }
  EXPECT_EQ(*choose_backend(config, gpu_of(90), "cuda"), &kCudaBackend);
  EXPECT_EQ(choose_backend(config, gpu_of(80), "sm90").status().code(), Code::kUnsupported);
  EXPECT_EQ(*choose_backend(config, host_facts(), "auto"), &kCpuBackend);
  EXPECT_EQ(choose_backend(config, host_facts(), "cuda").status().code(), Code::kUnsupported);
}

// plan is pure: it needs no device, and a larger limit never needs less.
TEST(CudaBackends, PlanEveryCaseButFormatsThatTheyDecline) {
  const LayerScales scales{5.0f / 2688, 12.0f / 2688};
  for (const Architecture& of : architectures())
    for (const Case& spec : case_table()) {
      SCOPED_TRACE(std::string(of.backend->name) + " " + spec.name);
      const ActivationFormat format = spec.options.activation_format;
      const auto config = must(MoeConfig::make(spec.options));
      const DeviceFacts device = gpu_of(of.capabilities.front());
      const Status status = of.backend->supports(*config, device);
      if (is_of_hosts(spec.options) || (format == ActivationFormat::kFp8 && !of.fp8)) {
        const std::string named = std::string("activation_format ") + to_string(format) + ": ";
        EXPECT_THAT(status, Refused(Code::kUnsupported, named));
        continue;
      }
      EXPECT_OK(status);
      size_t before = 0;
      for (const int64_t tokens : {1, 2, 31, 32, 33, 64, 150, 400, 500, 1000, 2500, 100000}) {
        const auto plan = must(of.backend->plan(*config, spec.range, scales, {tokens}, device));
        EXPECT_EQ(plan->backend, of.backend->name);
        EXPECT_EQ(plan->steps.size(), 6u);
        EXPECT_GE(plan->workspace.total_bytes, before);
        before = plan->workspace.total_bytes;
        if (of.backend != &kSm120Backend || format == ActivationFormat::kNvfp4) continue;
        const auto plain = must(kCudaBackend.plan(*config, spec.range, scales, {tokens}, device));
        EXPECT_EQ(before, plain->workspace.total_bytes) << "its GEMMs are the plain ones";
      }
    }
  const auto gemm = [&](const Backend& backend, int capability, ActivationFormat format) {
    MoeOptions options = case_table().front().options;
    options.activation_format = format;
    const MoeConfig config = *MoeConfig::make(options);
    const ExpertRange range{0, options.num_experts};
    return backend.plan(config, range, scales, {32}, gpu_of(capability))->steps[2].kernel;
  };
  EXPECT_EQ(gemm(kSm100Backend, 100, ActivationFormat::kNvfp4), "tcgen05_m128k64_w4a4");
  EXPECT_EQ(gemm(kSm100Backend, 100, ActivationFormat::kBf16), "tcgen05_m128k16_w4a16");
  EXPECT_EQ(gemm(kSm120Backend, 120, ActivationFormat::kNvfp4), "mma_m16n8k64_w4a4");
  EXPECT_EQ(gemm(kSm120Backend, 120, ActivationFormat::kBf16), "mma_m16n8k16_w4a16");
  EXPECT_EQ(gemm(kSm120Backend, 120, ActivationFormat::kFp8), "mma_m16n8k16_w4a8_as_bf16");
}

// route counts the rows of an expert in shared memory.
TEST(CudaBackends, RefuseMoreExpertsThanRouteCanCount) {
  MoeOptions options = case_table().front().options;
  for (const int64_t experts : {12032, 12033}) {
    options.num_experts = experts;
    const MoeConfig config = *MoeConfig::make(options);
    const auto plan = kCudaBackend.plan(config, {0, experts}, {}, {16}, gpu_of(80));
    if (experts == 12032) {
      EXPECT_OK(plan);
    } else {
      EXPECT_THAT(plan.status(), Refused(Code::kUnsupported, "at most 12032, got 12033"));
    }
  }
}

TEST(CudaBackends, ExplainWarnsOfWhatNoChipRanAndOfShortSums) {
  MoeOptions options = case_table().front().options;
  const auto reason = [&](int capability, ActivationFormat format, const char* forced) {
    options.activation_format = format;
    for (const BackendReport& report :
         explain(*MoeConfig::make(options), gpu_of(capability), forced))
      if (report.chosen) return report.reason;
    return std::string();
  };
  using testing::Not;
  for (const int capability : {100, 120})
    EXPECT_THAT(reason(capability, ActivationFormat::kNvfp4, "auto"),
                HasSubstr("never run on a chip"));
  EXPECT_THAT(reason(90, ActivationFormat::kNvfp4, "auto"), Not(HasSubstr("13 bits")));
  EXPECT_THAT(reason(90, ActivationFormat::kFp8, "auto"), HasSubstr("13 bits"));
  EXPECT_THAT(reason(90, ActivationFormat::kFp8, "auto"), HasSubstr("backend \"cuda\""));
  EXPECT_THAT(reason(90, ActivationFormat::kFp8, "cuda"), Not(HasSubstr("13 bits")));
}

TEST(Device, NamesAreCheckedBeforeTheMachineIsAsked) {
  for (const char* name :
       {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:00001", "CUDA:0", "cpu:0"})
    EXPECT_EQ(device_facts(name).status().code(), Code::kInvalidArgument) << name;
  EXPECT_EQ(*must(device_facts("cpu")), host_facts());
  // No machine has a thousand devices.
  EXPECT_EQ(device_facts("cuda:999").status().code(), Code::kUnsupported);
}

// Every configuration is chosen for some batch, wider ones for more rows. A k-block is one of a row
// and whole tiles of weights.
template <class Configs>
void expect_grow(const Configs& configs, int block_k,
                 int (*routed)(const MoeConfig&, const ExpertRange&, int64_t),
                 int (*shared)(int64_t)) {
  EXPECT_EQ(block_k % cuda::kTileK, 0);
  for (size_t i = 0; i < configs.size(); ++i) {
    EXPECT_EQ(configs[i].tile_n % 8, 0) << configs[i].name;
    if (i == 0) continue;
    EXPECT_GT(configs[i].tile_n, configs[i - 1].tile_n);
    EXPECT_GT(configs[i].max_rows_per_expert, configs[i - 1].max_rows_per_expert);
  }
  MoeOptions options;
  set_sizes(options, 128, 8, 2048, 768);
  const MoeConfig config = *MoeConfig::make(options);
  std::set<int> seen;
  for (int64_t tokens = 1; tokens <= 8192; ++tokens) {
    const int index = routed(config, {0, 128}, tokens);
    EXPECT_TRUE(seen.empty() || index >= *seen.rbegin());
    seen.insert(index);
    const auto of_shared = static_cast<size_t>(shared(tokens));
    EXPECT_TRUE(of_shared + 1 == configs.size() || tokens <= configs[of_shared].tile_n);
  }
  EXPECT_EQ(seen.size(), configs.size());
}
TEST(Fp4Configurations, GrowWithTheRowsOfAnExpert) {
  expect_grow(sm100::kGemmConfigs, sm100::kBlockK, sm100::routed_config, sm100::shared_config);
  expect_grow(sm120::kGemmConfigs, sm120::kBlockK, sm120::routed_config, sm120::shared_config);
  for (const sm120::GemmConfig& gemm : sm120::kGemmConfigs)
    EXPECT_EQ(gemm.tile_n % (8 * gemm.warps_n), 0) << gemm.name;
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
