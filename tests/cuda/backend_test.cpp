// The layers that the cuda backend accepts and declines, from device facts only, and the device
// string.
#include "backend/backend.h"

#include "cases/cases.h"
#include "moe/layer.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(CudaBackend, TakesEveryCaseButThoseOfHosts) {
  for (const Case& spec : case_table()) {
    const auto config = must(MoeConfig::make(spec.options));
    const Status status = kCudaBackend.supports(*config, gpu_of(80));
    if (!is_of_hosts(spec.options)) {
      EXPECT_OK(status);
      continue;
    }
    EXPECT_EQ(status.code(), Code::kUnsupported);
    const std::string name =
        std::string("activation_format ") + to_string(spec.options.activation_format);
    EXPECT_EQ(status.message().rfind(name + ": ", 0), 0u) << status.message();
  }
}

TEST(CudaBackend, DeclinesHostsAndOlderDevicesByName) {
  const auto config = must(MoeConfig::make(case_table().front().options));
  EXPECT_EQ(kCudaBackend.supports(*config, host_facts()).code(), Code::kUnsupported);
  const Status old = kCudaBackend.supports(*config, gpu_of(75));
  EXPECT_EQ(old.code(), Code::kUnsupported);
  EXPECT_NE(old.message().find("7.5"), std::string::npos) << old.message();
  EXPECT_OK(kCudaBackend.supports(*config, gpu_of(120)));
}

TEST(CudaBackend, IsChosenOnADeviceAndNeverOnAHost) {
  const auto config = must(MoeConfig::make(case_table().front().options));
  for (const auto& [capability, backend] : {std::pair(80, &kCudaBackend),
                                            {89, &kCudaBackend},
                                            {90, &kSm90Backend},
                                            {100, &kSm100Backend},
                                            {103, &kSm100Backend},
                                            {110, &kCudaBackend},
                                            {120, &kSm120Backend}}) {
    const auto on_device = must(choose_backend(*config, gpu_of(capability), "auto"));
    EXPECT_EQ(*on_device, backend) << capability;
  }
  EXPECT_EQ(*choose_backend(*config, gpu_of(90), "cuda"), &kCudaBackend);
  EXPECT_EQ(choose_backend(*config, gpu_of(80), "sm90").status().code(), Code::kUnsupported);
  const auto on_host = must(choose_backend(*config, host_facts(), "auto"));
  EXPECT_EQ(*on_host, &kCpuBackend);
  EXPECT_EQ(choose_backend(*config, host_facts(), "cuda").status().code(), Code::kUnsupported);
}

TEST(CudaBackend, ExplainWarnsOfWhatNoChipRanAndOfShortSums) {
  MoeOptions options = case_table().front().options;
  const auto reason = [&](int capability, ActivationFormat format, const char* forced) {
    options.activation_format = format;
    for (const BackendReport& report :
         explain(*MoeConfig::make(options), gpu_of(capability), forced))
      if (report.chosen) return report.reason;
    return std::string();
  };
  for (const int capability : {100, 120})
    EXPECT_NE(reason(capability, ActivationFormat::kNvfp4, "auto").find("never run on a chip"),
              std::string::npos);
  EXPECT_EQ(reason(90, ActivationFormat::kNvfp4, "auto").find("13 bits"), std::string::npos);
  const std::string fp8 = reason(90, ActivationFormat::kFp8, "auto");
  EXPECT_NE(fp8.find("13 bits"), std::string::npos) << fp8;
  EXPECT_NE(fp8.find("backend \"cuda\""), std::string::npos) << fp8;
  EXPECT_EQ(reason(90, ActivationFormat::kFp8, "cuda").find("13 bits"), std::string::npos);
}

// plan is pure: it needs no device, and a larger limit never needs less.
TEST(CudaBackend, PlansWithoutADevice) {
  for (const Case& spec : case_table()) {
    if (is_of_hosts(spec.options)) continue;
    const auto config = must(MoeConfig::make(spec.options));
    size_t before = 0;
    for (int64_t tokens : {1, 2, 31, 32, 500, 100000}) {
      const auto plan = must(kCudaBackend.plan(*config, spec.range, {5.0f / 2688, 12.0f / 2688},
                                               {tokens}, gpu_of(90)));
      EXPECT_EQ(plan->steps.size(), 6u);
      EXPECT_GE(plan->workspace.total_bytes, before);
      before = plan->workspace.total_bytes;
    }
  }
}

TEST(Device, NamesAreCheckedBeforeTheMachineIsAsked) {
  for (const char* name :
       {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:00001", "CUDA:0", "cpu:0"})
    EXPECT_EQ(device_facts(name).status().code(), Code::kInvalidArgument) << name;
  const auto host = must(device_facts("cpu"));
  EXPECT_EQ(*host, host_facts());
  // No machine has a thousand devices.
  EXPECT_EQ(device_facts("cuda:999").status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
