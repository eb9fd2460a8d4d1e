// The lines of doctor, from planted facts: no CUDA, a missing or old driver, hidden and old GPUs.
#include "moe/readiness.h"

#include <filesystem>
#include <fstream>

#include "moe/tiny.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Readiness machine(CudaVersions cuda, int gpus, const std::string& gpu_error) {
  Readiness readiness;
  readiness.cuda = cuda;
  readiness.system = {gpus, "535.104.05"};
  readiness.devices = {{"cpu", "AMD EPYC", "cpu", "", {"cpu:portable", "reference"}, {}}};
  readiness.gpu_error = gpu_error;
  return readiness;
}

TEST(Readiness, ADriverIsOldIfItsMajorVersionOfCudaIs) {
  EXPECT_EQ(driver_problem({13000, 12020}, "535.104.05"),
            "the NVIDIA driver 535.104.05 supports CUDA up to 12.2, and this build's CUDA 13.0 "
            "needs driver 580 or later: update the driver");
  EXPECT_EQ(driver_problem({12090, 11080}),
            "the NVIDIA driver supports CUDA up to 11.8, and this build's CUDA 12.9 needs driver "
            "525 or later: update the driver");
  EXPECT_THAT(driver_problem({14010, 13020}), HasSubstr("a driver that supports CUDA 14.0"));
  EXPECT_THAT(driver_problem({13000, 0}), HasSubstr("no NVIDIA driver is found (libcuda.so.1)"));
  for (const CudaVersions fits : {CudaVersions{13020, 13000}, {12090, 12020}, {12090, 13000}, {}})
    EXPECT_EQ(driver_problem(fits), "") << fits.runtime << " " << fits.driver;
}

TEST(Readiness, NothingIsMissingWithoutAGpu) {
  const ScopedEnv visible("CUDA_VISIBLE_DEVICES", "0");
  EXPECT_THAT(missing_for_gpus(machine({}, 0, "no CUDA")), IsEmpty());
  EXPECT_THAT(missing_for_gpus(machine({13000, 0}, 0, "no driver")), IsEmpty());
  EXPECT_THAT(missing_for_gpus(machine({13000, 13010}, 0, "no CUDA-capable device")), IsEmpty());
}

TEST(Readiness, WhatKeepsAGpuFromBeingUsedIsOneSentence) {
  const ScopedEnv visible("CUDA_VISIBLE_DEVICES", "0");
  EXPECT_THAT(missing_for_gpus(machine({}, 1, "no CUDA")),
              ElementsAre(HasSubstr("this build has no GPU kernels")));
  EXPECT_THAT(missing_for_gpus(machine({13000, 0}, 1, "no driver")),
              ElementsAre(HasSubstr("start the container with its GPUs")));
  for (const int gpus : {0, 1})  // CUDA knows the driver, also if /dev has no GPU (WSL)
    EXPECT_THAT(missing_for_gpus(machine({13000, 12020}, gpus, "insufficient")),
                ElementsAre(HasSubstr("the NVIDIA driver 535.104.05 supports CUDA up to 12.2")));
  EXPECT_THAT(missing_for_gpus(machine({13000, 13000}, 1, "device cuda:0: broken")),
              ElementsAre("device cuda:0: broken"));
  Readiness old_gpu = machine({13000, 13000}, 1, "");
  old_gpu.devices.push_back(
      {"cuda:0", "Tesla V100", "", "expected compute capability 8.0", {}, {}});
  EXPECT_THAT(missing_for_gpus(old_gpu),
              ElementsAre("cuda:0 (Tesla V100): expected compute capability 8.0"));
}

TEST(Readiness, AFolderThatCannotKeepSelfChecksIsMissing) {
  Readiness readiness = machine({13000, 13000}, 1, "");
  readiness.checks_not_kept = "/cache/nvfp4-moe: cannot write: Read-only file system";
  EXPECT_THAT(missing_for_gpus(readiness),
              ElementsAre("results of self-checks are not kept, so each process checks again: "
                          "/cache/nvfp4-moe: cannot write: Read-only file system"));
}

TEST(Readiness, GpusThatTheUserHidesAreNamedAsHidden) {
  for (const char* none : {"", "-1"}) {
    const ScopedEnv visible("CUDA_VISIBLE_DEVICES", none);
    EXPECT_THAT(missing_for_gpus(machine({}, 1, "no CUDA")), IsEmpty());
    EXPECT_THAT(missing_for_gpus(machine({13000, 13000}, 1, "no CUDA-capable device")),
                ElementsAre(HasSubstr("CUDA_VISIBLE_DEVICES hides all of them")));
  }
}

TEST(Readiness, BackendsAreNamedByDeviceAndEqualGpusOnce) {
  Readiness readiness = machine({13000, 13000}, 3, "");
  EXPECT_THAT(backends_text(readiness), testing::MatchesRegex("cpu will be used on the host "
                                                              "\\(runs cpu:[a-z0-9]+\\); "
                                                              "cpu:portable, reference would work "
                                                              "too"));
  for (const char* gpu : {"cuda:0", "cuda:1"})
    readiness.devices.push_back({gpu, "NVIDIA H100", "sm90", "", {"cuda"}, {}});
  readiness.devices.push_back({"cuda:2", "RTX", "sm120", "executed on an emulator", {"cuda"}, {}});
  const std::string text = backends_text(readiness);
  EXPECT_THAT(text, testing::StartsWith("sm90 will be used on cuda:0 to cuda:1 (NVIDIA H100), "
                                        "sm120 on cuda:2 (RTX), cpu on the host ("));
  EXPECT_THAT(text, testing::EndsWith("; cuda, cpu:portable, reference would work too; "
                                      "sm120: executed on an emulator"));
  readiness.devices.assign(1, {"cpu", "AMD EPYC", "", "", {}, {}});
  EXPECT_EQ(backends_text(readiness), "none of this build's backends runs here");
}

TEST(Readiness, AFailedSelfCheckIsOneSentence) {
  Readiness readiness = machine({13000, 13000}, 3, "");
  const std::string bad = "the self-check of sm100 nvfp4 swiglu failed: tile: row 3 differs";
  for (const char* gpu : {"cuda:0", "cuda:1"})
    readiness.devices.push_back({gpu, "NVIDIA B200", "cuda", "", {}, {bad, "another"}});
  EXPECT_THAT(backends_text(readiness),
              testing::EndsWith("would work too; " + bad +
                                " (and 1 more); `nvfp4-moe doctor --self-check` checks again"));
  EXPECT_EQ(backends_text(readiness).find(bad), backends_text(readiness).rfind(bad));
}

TEST(Readiness, TheSystemIsReadWithoutCuda) {
  const TempDir root;
  EXPECT_EQ(read_nvidia_system(root.path().string()).gpus, 0);
  EXPECT_EQ(read_nvidia_system(root.path().string()).driver, "");
  std::filesystem::create_directories(root.file("dev"));
  std::filesystem::create_directories(root.file("proc/driver/nvidia"));
  for (const char* name : {"nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia", "null"})
    std::ofstream(root.file(std::string("dev/") + name)) << "";
  std::ofstream(root.file("proc/driver/nvidia/version"))
      << "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
         "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n";
  const NvidiaSystem system = read_nvidia_system(root.path().string());
  EXPECT_EQ(system.gpus, 2);
  EXPECT_EQ(system.driver, "580.65.06");
}

TEST(Readiness, ThisMachineHasABackendForItsHost) {
  const Result<Readiness> readiness = read_readiness("auto");
  ASSERT_OK(readiness);
  EXPECT_EQ(readiness->devices.front().chosen, "cpu");
  EXPECT_THAT(readiness->devices.front().others, testing::Contains("reference"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
