// Ranks with devices that each have an all_to_all layer, and the check against one rank with all
// experts.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "backend/device_exchange.h"
#include "cuda/graph.h"
#include "cuda/ranks_case.h"
#include "support/case_run.h"

namespace nvfp4_moe::internal::test {

// A rank of a test: its layer, the whole case's batch on its device, its workspace and its stream.
struct Rank {
  const CaseData& data;
  Exchange& exchange;
  MoeLayer& layer;
  DeviceBatch& batch;
  const OnDevice<uint8_t, 16>& workspace;
  size_t workspace_bytes;
  cudaStream_t stream;

  // Tokens [first, first + count) of the batch.
  Status run(int64_t first, int64_t count) const {
    const MoeOptions& options = data.spec.options;
    Batch slice = batch.spec;
    slice.tokens = count;
    const auto at = [](const void* from, int64_t values, DType dtype) {
      return static_cast<const std::byte*>(from) + values * bits(dtype) / 8;
    };
    slice.hidden = at(slice.hidden, first * options.hidden_size, slice.hidden_dtype);
    slice.topk_ids = at(slice.topk_ids, first * options.top_k, slice.ids_dtype);
    slice.topk_weights += first * options.top_k;
    if (slice.shared_weights != nullptr) slice.shared_weights += first;
    slice.out = const_cast<std::byte*>(at(slice.out, first * options.hidden_size, slice.out_dtype));
    return layer.run(slice, workspace.data(), workspace_bytes, stream);
  }
  Result<RunStatus> status() const {
    return layer.status(workspace.data(), workspace_bytes, stream);
  }
  std::vector<uint8_t> out() const {
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return batch.out.back();
  }
};

inline void on_devices(const CaseData& data, int world, const ExpertParallelOptions& parallel,
                       const std::function<void(Rank&)>& body, Between between = Between::kNccl,
                       Timeout timeout = kCaseTimeout, bool leaves_together = true) {
  on_ranks(Over::kThreads, world, timeout, [&](Exchange& exchange) {
    ASSERT_EQ(cudaSetDevice(device_of(exchange.rank())), cudaSuccess);
    ASSERT_OK(connect_devices(exchange, between));
    const auto layer = must(open_on_device(exchange, data, parallel));
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes();
    const OnDevice<uint8_t, 16> workspace(std::vector<uint8_t>(bytes, 0xFF));
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    // The arrays must be ready: the rank's stream does not wait for other streams.
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Rank rank{data, exchange, **layer, batch, workspace, bytes, stream};
    body(rank);
    cudaStreamSynchronize(stream);
    if (leaves_together) (void)exchange.barrier();  // fails if a test breaks the exchange
    cudaStreamDestroy(stream);
  });
}

// A graph of a rank's run.
class Replay {
 public:
  Replay(const Rank& rank, int64_t first, int64_t count)
      : rank_(rank), graph_(rank.stream, [&] { return rank.run(first, count); }) {}
  const Status& status() const { return graph_.status(); }
  // Runs on the contents of another case of the same sizes. fill: every byte of out before the run.
  std::vector<uint8_t> run(const CaseData& data, int fill = 0xFF) const {
    const auto copy = [](void* to, const auto& from) {
      EXPECT_EQ(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
                cudaSuccess);
    };
    copy(rank_.batch.hidden.data(), data.hidden);
    copy(rank_.batch.ids.data(), data.topk_ids);
    copy(rank_.batch.weights.data(), data.topk_weights);
    EXPECT_EQ(cudaMemset(rank_.batch.out.data(), fill, data.out_bytes()), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    graph_.launch();
    return rank_.out();
  }

 private:
  const Rank& rank_;
  Graph graph_;
};

inline bool all_nan(const CaseData& data, const std::vector<uint8_t>& out) {
  const std::vector<float> values = to_floats(out, data.spec.out_dtype);
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

// The result of a layer of one rank with all experts on the same device.
struct OneRank {
  std::vector<uint8_t> out;
  RunStatus status;
  explicit OneRank(const CaseData& data) {
    const auto layer = must(MoeLayer::open(data.config, source_of(data), device_options(data)));
    const DeviceBatch batch(data);
    const OnDevice<uint8_t, 16> workspace((*layer)->workspace_bytes());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_OK((*layer)->run(batch.spec, workspace.data(), (*layer)->workspace_bytes()));
    status = *(*layer)->status(workspace.data(), (*layer)->workspace_bytes());
    out = batch.out.back();
  }
};

// A run's counts, each a uint64_t.
using Counts = std::array<uint64_t, sizeof(RunStatus) / sizeof(uint64_t)>;
inline Counts counts(const RunStatus& status) { return std::bit_cast<Counts>(status); }

// The part of `whole` that belongs to these tokens.
inline std::vector<uint8_t> part_of(const CaseData& data, const std::vector<uint8_t>& whole,
                                    int64_t first, int64_t count) {
  const size_t token = data.out_bytes() / static_cast<size_t>(data.spec.tokens);
  const auto begin = whole.begin() + static_cast<int64_t>(token) * first;
  return {begin, begin + static_cast<int64_t>(token) * count};
}

inline std::string difference_of(const CaseData& data, const std::vector<uint8_t>& expected,
                                 const std::vector<uint8_t>& actual) {
  return difference(expected, actual, data.spec.out_dtype, data.spec.options.hidden_size);
}

template <class Function>
Function of_double(const char* name) {
  return reinterpret_cast<Function>(dlsym(dlopen(kFakeNccl, RTLD_NOW), name));
}
inline void set_in_double(const char* name, long value) {
  of_double<void (*)(const char*, long)>("fake_nccl_set")(name, value);
}
// Bytes that all ranks have sent through NCCL's double since the last call.
inline int64_t sent_bytes() {
  std::istringstream log(of_double<const char* (*)()>("fake_nccl_log")());
  int64_t total = 0;
  for (std::string line; std::getline(log, line);)
    if (line.rfind("send ", 0) == 0) total += std::stoll(line.substr(5));
  return total;
}
// The bytes that all ranks have to send, both ways.
inline int64_t wire_bytes(const CaseData& data, const Placement& placement, int64_t capacity,
                          Tokens tokens) {
  const PacketFormat packet(data.config);
  const int64_t top_k = packet.top_k;
  int64_t bytes = 0;
  if (capacity > 0) {
    for (int source = 0; source < placement.world(); ++source) {
      const int64_t packets =
          std::min(capacity, tokens_of(tokens, data.spec.tokens, source, placement.world()).second);
      bytes += placement.world() * (16 + packets * (packet.bytes + top_k * packet.row_bytes));
    }
    return bytes;
  }
  for (int64_t token = 0; token < data.spec.tokens; ++token) {
    std::vector<bool> goes(static_cast<size_t>(placement.world()));
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t id = data.id(token, k);
      if (id < 0 || id >= placement.num_experts()) continue;
      bytes += packet.row_bytes;
      goes[static_cast<size_t>(placement.rank_of(placement.slot_of(id, 0)))] = true;
    }
    bytes += std::count(goes.begin(), goes.end(), true) * packet.bytes;
  }
  return bytes;
}

inline size_t free_bytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

inline void check_bits(const CaseData& data, int world, const ExpertParallelOptions& parallel,
                       Tokens tokens, Between between = Between::kNccl) {
  const OneRank one(data);
  std::vector<Counts> counted(static_cast<size_t>(world));
  on_devices(
      data, world, parallel,
      [&](Rank& rank) {
        const int me = rank.exchange.rank();
        const auto [first, count] = tokens_of(tokens, data.spec.tokens, me, world);
        ASSERT_OK(rank.run(first, count));  // a second run starts with the leftovers of the first
        ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
        ASSERT_EQ(cudaMemset(rank.batch.out.data(), 0xFF, data.out_bytes()), cudaSuccess);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        ASSERT_OK(rank.exchange.barrier());
        const size_t before = free_bytes();
        if (emulated() && me == 0) sent_bytes();
        ASSERT_OK(rank.exchange.barrier());
        ASSERT_OK(rank.run(first, count));
        const std::vector<uint8_t> out = rank.out();
        ASSERT_OK(rank.exchange.barrier());
        if (emulated()) {
          EXPECT_EQ(free_bytes(), before) << "a run allocates";
          if (me == 0 && !parallel.placement && between == Between::kNccl) {
            EXPECT_EQ(sent_bytes(), wire_bytes(data, ranks_of(rank.layer).placement(),
                                               parallel.capacity, tokens));
          }
        }
        EXPECT_EQ(difference_of(data, part_of(data, one.out, first, count),
                                part_of(data, out, first, count)),
                  "")
            << "rank " << me;
        const auto status = must(rank.status());
        counted[static_cast<size_t>(me)] = counts(*status);
      },
      between);
  Counts sum{};
  for (const Counts& of_rank : counted)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += of_rank[i];
  EXPECT_EQ(sum, counts(one.status));
}

inline Case dispatch_spec(int64_t tokens, Routing routing, ActivationFormat format,
                          int64_t shared = 0) {
  Case spec = sized_case(8, 2, 64, 32, tokens);
  spec.options.shared_intermediate_size = shared;
  spec.options.activation_format = format;
  spec.options.batch_invariant = true;
  spec.shared_weights = shared > 0;
  spec.routing = routing;
  return spec;
}

inline constexpr ActivationFormat kNvfp4 = ActivationFormat::kNvfp4,
                                  kBf16 = ActivationFormat::kBf16, kFp8 = ActivationFormat::kFp8;

// Each kind changes the bytes on the wire or the work on the source rank.
inline std::vector<std::pair<const char*, Case>> kinds_of_layers() {
  struct Kind {
    const char* name;
    ActivationFormat format;
    void (*change)(Case&);
  };
  const Kind kinds[] = {
      {"weights before down", kNvfp4,
       [](Case& c) {
         c.options.router_weight = RouterWeight::kBeforeDown;
         c.options.max_router_weight = 2.5f;
       }},
      {"weights on input", kNvfp4,
       [](Case& c) {
         c.options.router_weight = RouterWeight::kOnInput;
         c.options.top_k = 1;
       }},
      {"rows in fp32, 48 channels", kNvfp4,
       [](Case& c) {
         c.options.row_format = RowFormat::kFp32;
         c.options.hidden_size = 48;
       }},
      {"vllm_order scales", kNvfp4,
       [](Case& c) { c.options.activation_scale = ActivationScale::kVllmOrder; }},
      {"NaN in hidden", kNvfp4, [](Case& c) { c.data = DataKind::kNan; }},
      {"Inf in hidden that the activation clamps", kBf16,
       [](Case& c) {
         c.data = DataKind::kNan;
         c.options.activation = Activation::kSwigluClamped;
         c.options.swiglu_limit = 0.5f;
       }},
      {"fp32 in and out, ids of 64 bits", kNvfp4,
       [](Case& c) {
         c.hidden_dtype = c.out_dtype = DType::kF32;
         c.ids_dtype = DType::kI64;
       }},
  };
  std::vector<std::pair<const char*, Case>> made;
  for (const Kind& kind : kinds) {
    made.emplace_back(kind.name, dispatch_spec(6, Routing::kUniform, kind.format, 16));
    kind.change(made.back().second);
  }
  return made;
}

// sm100 and sm120 have no GEMMs for fp8.
inline bool runs_here(ActivationFormat format) {
  return choose_backend(made(dispatch_spec(1, Routing::kUniform, format)).config,
                        *device_facts("cuda:0"), "auto")
      .ok();
}

}  // namespace nvfp4_moe::internal::test
