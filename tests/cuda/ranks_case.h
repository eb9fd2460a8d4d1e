// Layers over ranks on devices: their batches and their devices.
//
// On the emulator of CUDA, ranks are threads that share its one device, over NCCL's double
// (tests/exchange/fake_nccl) or over each other's memory. On a machine with GPUs each rank has its
// own GPU.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <memory>
#include <string>
#include <vector>

#include "cuda/device_memory.h"
#include "exchange/parallel_case.h"
#include "moe/registry.h"
#include "parallel/connect.h"

namespace nvfp4_moe::internal::test {

inline constexpr const char* kFakeNccl = NVFP4_MOE_FAKE_NCCL ".so";

inline bool emulated() { return dlsym(RTLD_DEFAULT, "cudaMemcpy") != nullptr; }
// The number of usable GPUs, counted from cuda:0.
inline int gpus() {
  int count = 0;
  while (device_facts("cuda:" + std::to_string(count)).ok()) ++count;
  return count;
}
inline int device_of(int rank) { return emulated() ? 0 : rank; }
// The connection between the ranks' devices.
enum class Between { kNccl, kPeers };
inline const char* name_of(Between between) { return between == Between::kNccl ? "nccl" : "peers"; }
inline Status connect_devices(Exchange& exchange, Between between) {
  const std::string device = "cuda:" + std::to_string(device_of(exchange.rank()));
  if (between == Between::kPeers) return use_peers(exchange, device);
  return use_nccl(exchange, device, emulated() ? kFakeNccl : "");
}

// Why this machine cannot run this many ranks with a device each; empty if it can.
inline std::string why_no_world(int ranks, Between between = Between::kNccl) {
  const auto device = device_facts("cuda:0");
  if (!device.ok()) return device.status().message();
  if (emulated()) return "";
  if (gpus() < ranks)
    return "expected " + std::to_string(ranks) + " GPUs, got " + std::to_string(gpus());
  if (between == Between::kNccl && dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL) == nullptr)
    return "libnccl.so.2 is not on this host's library path";
  return "";
}

// A test of ranks over a connection.
struct Link {
  Between between;
  int ranks;
  friend void PrintTo(const Link& link, std::ostream* out) {
    *out << name_of(link.between) << "_" << link.ranks;
  }
};
inline std::string name_of_link(const testing::TestParamInfo<Link>& info) {
  return std::string(name_of(info.param.between)) + "_" + std::to_string(info.param.ranks);
}
inline std::vector<Link> links(const std::vector<int>& worlds) {
  std::vector<Link> all;
  for (const Between between : {Between::kNccl, Between::kPeers})
    for (const int ranks : worlds) all.push_back({between, ranks});
  return all;
}
class RanksTest : public testing::TestWithParam<Link> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_world(world(), between()); !why.empty()) GTEST_SKIP() << why;
  }
  static int world() { return GetParam().ranks; }
  static Between between() { return GetParam().between; }
};
// The same if only one connection is of interest; the parameter is the number of ranks.
template <Between kBetween>
class WorldTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_world(GetParam(), kBetween); !why.empty())
      GTEST_SKIP() << why;
  }
};

// The case's batch in device memory.
struct DeviceBatch {
  explicit DeviceBatch(const CaseData& data)
      : hidden(data.hidden),
        ids(data.topk_ids),
        weights(data.topk_weights),
        shared_weights(data.shared_weights),
        out(data.out_bytes()),
        spec(data.batch(out.data())) {
    spec.hidden = hidden.data();
    spec.topk_ids = ids.data();
    spec.topk_weights = weights.data();
    if (spec.shared_weights != nullptr) spec.shared_weights = shared_weights.data();
  }
  OnDevice<uint8_t, 16> hidden, ids;
  OnDevice<float, 16> weights, shared_weights;
  OnDevice<uint8_t, 16> out;
  Batch spec;
};

inline Case spec_of(int64_t tokens, int64_t hidden, int64_t intermediate) {
  Case spec = sized_case(6, 2, hidden, intermediate, tokens);
  spec.routing = Routing::kBadIds;
  return spec;
}

inline LayerOptions device_options(const CaseData& data) {
  LayerOptions options = options_of(data);
  options.device = "cuda:0";
  return options;
}

// A rank's layer on its device. The exchange must outlive it.
inline Result<std::unique_ptr<MoeLayer>> open_on_device(Exchange& exchange, const CaseData& data,
                                                        const ExpertParallelOptions& parallel) {
  LayerOptions options = device_options(data);
  options.device = "cuda:" + std::to_string(device_of(exchange.rank()));
  return open_layer(data.config, source_of(data), options,
                    internal::Parallel{borrowed(exchange), parallel});
}

inline CaseData made(const Case& spec) { return *must(make_case(spec)); }

}  // namespace nvfp4_moe::internal::test
