// How ranks identify each other's devices, by addresses that are the same in every process, and
// whether they have peer access.
#include <cuda_runtime.h>

#include <memory>
#include <set>
#include <string>

#include "cuda/ranks_case.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::MatchesRegex;

class CudaTopology : public testing::Test {
 protected:
  void SetUp() override {
    if (const auto device = device_facts("cuda:0"); !device.ok())
      GTEST_SKIP() << device.status().message();
  }
  static std::unique_ptr<PeerDevice> at(int device) {
    return device_peers(DeviceKind::kCuda)->make_device(device);
  }
};

TEST_F(CudaTopology, EachDeviceReachesItselfAndItsPeers) {
  std::set<std::string> addresses;
  for (int other = 0; other < gpus(); ++other) {
    const auto address = must(at(other)->pci_address());
    EXPECT_THAT(*address, MatchesRegex("[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\\.[0-9A-F]"));
    addresses.insert(*address);
    for (int device = 0; device < gpus(); ++device) {
      const auto reach = must(at(device)->reach(*address));
      int peers = 0;
      ASSERT_EQ(cudaDeviceCanAccessPeer(&peers, device, other), cudaSuccess);
      EXPECT_EQ(*reach, device == other || peers != 0 ? PeerReach::kYes : PeerReach::kNoAccess)
          << device << " " << other;
    }
  }
  EXPECT_EQ(addresses.size(), static_cast<size_t>(gpus()));
}

TEST_F(CudaTopology, WhatIsNotThereIsNotVisible) {
  for (const char* address : {"FFFF:FF:1F.0", "", "cuda:0"}) {
    const auto reach = must(at(0)->reach(address));
    EXPECT_EQ(*reach, PeerReach::kNotVisible) << address;
  }
  EXPECT_THAT(at(gpus())->pci_address().status().message(), HasSubstr("cudaDeviceGetPCIBusId: "));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "left for whoever asks next";
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
