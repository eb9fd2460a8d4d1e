// all_to_all on devices: the bits and counts of one rank with all experts, whatever the world, the routing and how the
// tokens fall on the ranks; graphs that are replayed with other contents; and every way in which a run does not go well.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "backend/wire_record.h"
#include "cuda/ranks_case.h"
#include "support/case_run.h"

namespace nvfp4_moe {
namespace {

using test::device_of;
using test::DeviceBatch;
using test::kFakeNccl;
using test::made;
using test::OnDevice;
using test::Tokens;
using ::testing::HasSubstr;

// A rank of a test: its layer, the whole case's batch on its device, and where it runs.
struct Rank {
  const CaseData& data;
  Exchange& exchange;
  ExpertParallelLayer& layer;
  DeviceBatch& batch;
  const OnDevice<uint8_t>& workspace;
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
  Result<RunStatus> status() const { return layer.status(workspace.data(), workspace_bytes, stream); }
  std::vector<uint8_t> out() const {
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return batch.out.back();
  }
};

void on_devices(const CaseData& data, int world, const ExpertParallelOptions& parallel,
                const std::function<void(Rank&)>& body) {
  test::on_ranks(test::Over::kThreads, world, test::kCaseTimeout, [&](Exchange& exchange) {
    const int device = device_of(exchange.rank());
    ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
    LayerOptions options = test::device_options(data);
    options.device = "cuda:" + std::to_string(device);
    ASSERT_OK(use_nccl(exchange, options.device, test::emulated() ? kFakeNccl : ""));
    const std::shared_ptr<Exchange> borrowed(&exchange, [](Exchange*) {});
    const LayerSource source = test::source_of(data);
    const auto layer = ExpertParallelLayer::open(data.config, source, options, parallel, borrowed);
    ASSERT_OK(layer);
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes();
    const OnDevice<uint8_t> workspace(std::vector<uint8_t>(bytes, 0xFF));
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    Rank rank{data, exchange, **layer, batch, workspace, bytes, stream};
    body(rank);
    cudaStreamSynchronize(stream);
    (void)exchange.barrier();  // broken where a test breaks it
    cudaStreamDestroy(stream);
  });
}

// What a layer of one rank with all experts gives on the same device.
struct OneRank {
  std::vector<uint8_t> out;
  RunStatus status;
  explicit OneRank(const CaseData& data) {
    const auto layer = MoeLayer::open(data.config, test::source_of(data), test::device_options(data));
    EXPECT_OK(layer);
    const DeviceBatch batch(data);
    const OnDevice<uint8_t> workspace((*layer)->workspace_bytes());
    EXPECT_OK((*layer)->run(batch.spec, workspace.data(), (*layer)->workspace_bytes()));
    status = *(*layer)->status(workspace.data(), (*layer)->workspace_bytes());
    out = batch.out.back();
  }
};

std::array<uint64_t, 11> counts(const RunStatus& s) {
  return {s.bad_expert_ids,      s.nonfinite_tokens,  s.nonfinite_rows,      s.hidden_blocks,
          s.hidden_saturated,    s.hidden_zeroed,     s.intermediate_blocks, s.intermediate_saturated,
          s.intermediate_zeroed, s.nonfinite_weights, s.nonfinite_outputs};
}

// The part of `whole` that the tokens are.
std::vector<uint8_t> tokens_of(const CaseData& data, const std::vector<uint8_t>& whole, int64_t first, int64_t count) {
  const size_t token = data.out_bytes() / static_cast<size_t>(data.spec.tokens);
  const auto begin = whole.begin() + static_cast<int64_t>(token) * first;
  return {begin, begin + static_cast<int64_t>(token) * count};
}

std::string difference(const CaseData& data, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& actual) {
  return test::difference(expected, actual, data.spec.out_dtype, data.spec.options.hidden_size);
}

// Bytes that all ranks have sent by NCCL's double since the last call.
int64_t sent_bytes() {
  void* const handle = dlopen(kFakeNccl, RTLD_NOW);
  std::istringstream log(reinterpret_cast<const char* (*)()>(dlsym(handle, "fake_nccl_log"))());
  int64_t total = 0;
  for (std::string line; std::getline(log, line);)
    if (line.rfind("send ", 0) == 0) total += std::stoll(line.substr(5));
  return total;
}
// What they have to send, there and back.
int64_t wire_bytes(const CaseData& data, const Placement& placement, int64_t capacity) {
  const WireRecord record(data.config);
  const int64_t top_k = record.top_k, pairs = int64_t{placement.world()} * placement.world();
  if (capacity > 0) return pairs * (16 + capacity * (record.bytes + top_k * record.row_bytes));
  int64_t bytes = 0;
  for (int64_t token = 0; token < data.spec.tokens; ++token) {
    std::vector<bool> goes(static_cast<size_t>(placement.world()));
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t id = data.id(token, k);
      if (id < 0 || id >= placement.num_experts()) continue;
      bytes += record.row_bytes;
      goes[static_cast<size_t>(placement.rank_of(placement.slot_of(id, 0)))] = true;
    }
    bytes += std::count(goes.begin(), goes.end(), true) * record.bytes;
  }
  return bytes;
}

size_t free_bytes() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

void check_bits(const CaseData& data, int world, const ExpertParallelOptions& parallel, Tokens tokens) {
  const OneRank one(data);
  std::vector<std::array<uint64_t, 11>> counted(static_cast<size_t>(world));
  on_devices(data, world, parallel, [&](Rank& rank) {
    const int me = rank.exchange.rank();
    const auto [first, count] = test::tokens_of(tokens, data.spec.tokens, me, world);
    ASSERT_OK(rank.run(first, count));  // a second run is after what the first one left
    ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
    ASSERT_EQ(cudaMemset(rank.batch.out.data(), 0xFF, data.out_bytes()), cudaSuccess);
    ASSERT_OK(rank.exchange.barrier());
    const size_t before = free_bytes();
    if (test::emulated() && me == 0) sent_bytes();
    ASSERT_OK(rank.exchange.barrier());
    ASSERT_OK(rank.run(first, count));
    const std::vector<uint8_t> out = rank.out();
    ASSERT_OK(rank.exchange.barrier());
    if (test::emulated()) {
      EXPECT_EQ(free_bytes(), before) << "a run allocates";
      if (me == 0 && !parallel.placement) {
        EXPECT_EQ(sent_bytes(), wire_bytes(data, rank.layer.placement(), parallel.capacity));
      }
    }
    EXPECT_EQ(difference(data, tokens_of(data, one.out, first, count), tokens_of(data, out, first, count)), "")
        << "rank " << me;
    const auto status = rank.status();
    ASSERT_OK(status);
    counted[static_cast<size_t>(me)] = counts(*status);
  });
  std::array<uint64_t, 11> sum{};
  for (const auto& of_rank : counted)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += of_rank[i];
  EXPECT_EQ(sum, counts(one.status));
}

Case spec_of(int64_t tokens, Routing routing, ActivationFormat format, int64_t shared = 0) {
  Case spec;
  spec.options.num_experts = 8;
  spec.options.top_k = 2;
  spec.options.hidden_size = 64;
  spec.options.intermediate_size = 32;
  spec.options.shared_intermediate_size = shared;
  spec.options.activation_format = format;
  spec.options.batch_invariant = true;
  spec.shared_weights = shared > 0;
  spec.range = {0, 8};
  spec.tokens = tokens;
  spec.routing = routing;
  return spec;
}

constexpr ActivationFormat kNvfp4 = ActivationFormat::kNvfp4, kBf16 = ActivationFormat::kBf16,
                           kFp8 = ActivationFormat::kFp8;

// sm100 and sm120 have no GEMMs for fp8.
bool runs_here(ActivationFormat format) {
  return choose_backend(made(spec_of(1, Routing::kUniform, format)).config, *device_facts("cuda:0"), "auto").ok();
}

class CudaDispatch : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (const std::string why = test::why_no_world(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
};

// Few tokens, and yet every format with and without a capacity: on an emulator each run takes its time.
TEST_P(CudaDispatch, GivesTheBitsAndCountsOfOneRank) {
  struct {
    ActivationFormat format;
    Routing routing;
    int64_t capacity, shared;
    Tokens tokens;
  } const cases[] = {
      {kNvfp4, Routing::kBadIds, 0, 16, Tokens::kEven},    {kBf16, Routing::kZipf, 0, 0, Tokens::kEven},
      {kFp8, Routing::kUniform, 0, 0, Tokens::kAllOnLast}, {kNvfp4, Routing::kOneExpert, 9, 0, Tokens::kAllOnLast},
      {kBf16, Routing::kPartlyNone, 9, 16, Tokens::kEven}, {kFp8, Routing::kUniform, 9, 0, Tokens::kEven},
  };
  for (const auto& one : cases) {
    if (!runs_here(one.format)) continue;
    SCOPED_TRACE(std::string(to_string(one.format)) + " " + to_string(one.routing) + ", capacity " +
                 std::to_string(one.capacity));
    ExpertParallelOptions options;
    options.capacity = one.capacity;
    check_bits(made(spec_of(9, one.routing, one.format, one.shared)), GetParam(), options, one.tokens);
    if (HasFailure()) return;
  }
}

TEST_P(CudaDispatch, OneToManyTokensOfEveryRouting) {
  size_t turn = 0;
  for (const int64_t tokens : {1, 2, 33, 1100, 8192}) {
    for (const Routing routing : {Routing::kUniform, Routing::kZipf, Routing::kOneExpert, Routing::kEmptyExperts,
                                  Routing::kPartlyNone, Routing::kAllNone, Routing::kBadIds}) {
      constexpr std::array kFormats = {kNvfp4, kBf16, kFp8};
      const ActivationFormat format = kFormats[turn++ % kFormats.size()];
      // An emulator is done with one large batch in the time of many small ones.
      if (!runs_here(format) || (test::emulated() && tokens > (routing == Routing::kZipf ? 1100 : 33))) continue;
      SCOPED_TRACE(std::string(to_string(routing)) + " of " + std::to_string(tokens) + ", " + to_string(format));
      ExpertParallelOptions options;
      options.capacity = turn % 2 == 0 ? tokens : 0;
      check_bits(made(spec_of(tokens, routing, format, turn % 5 == 0 ? 16 : 0)), GetParam(), options, Tokens::kEven);
      if (HasFailure()) return;
    }
  }
}

// What else a layer may be: each of them changes what is on the wire, or what is done at home.
TEST_P(CudaDispatch, ChoicesOfALayer) {
  const auto with = [](ActivationFormat format, const std::function<void(Case&)>& change) {
    Case spec = spec_of(6, Routing::kUniform, format, 16);
    change(spec);
    return spec;
  };
  const std::pair<const char*, Case> cases[] = {
      {"weights before down", with(kNvfp4,
                                   [](Case& c) {
                                     c.options.router_weight = RouterWeight::kBeforeDown;
                                     c.options.max_router_weight = 2.5f;
                                   })},
      {"weights on input", with(kNvfp4,
                                [](Case& c) {
                                  c.options.router_weight = RouterWeight::kOnInput;
                                  c.options.top_k = 1;
                                })},
      {"rows in fp32, 48 channels", with(kNvfp4,
                                         [](Case& c) {
                                           c.options.row_format = RowFormat::kFp32;
                                           c.options.hidden_size = 48;
                                         })},
      {"compat scales", with(kNvfp4, [](Case& c) { c.options.activation_scale = ActivationScale::kCompat; })},
      {"NaN in hidden", with(kNvfp4, [](Case& c) { c.data = DataKind::kNan; })},
      {"NaN in hidden, bf16", with(kBf16, [](Case& c) { c.data = DataKind::kNan; })},
      {"fp32 in and out, ids of 64 bits", with(kNvfp4,
                                               [](Case& c) {
                                                 c.hidden_dtype = c.out_dtype = DType::kF32;
                                                 c.ids_dtype = DType::kI64;
                                               })},
  };
  for (const auto& [name, spec] : cases) {
    SCOPED_TRACE(name);
    for (const int64_t capacity : {0, 6}) {
      ExpertParallelOptions options;
      options.capacity = capacity;
      check_bits(made(spec), GetParam(), options, Tokens::kEven);
    }
    if (HasFailure()) return;
  }
}

TEST_P(CudaDispatch, AnyPlacementNowAndOnceRearranged) {
  const int world = GetParam();
  const CaseData data = made(spec_of(8, Routing::kUniform, kNvfp4));
  ExpertParallelOptions options;
  options.placement = test::redundant(8, world);
  check_bits(data, world, options, Tokens::kEven);
  const OneRank one(data);
  std::vector<uint64_t> load(8);
  for (int64_t at = 0; at < 16; ++at)
    load[static_cast<size_t>(data.id(at / 2, at % 2))] += static_cast<uint64_t>(world);
  on_devices(data, world, {}, [&](Rank& rank) {
    ASSERT_OK(rank.layer.rearrange(*Placement::round_robin(8, world), test::source_of(data)));
    ASSERT_OK(rank.run(0, 8));  // every rank brings all tokens
    EXPECT_EQ(difference(data, one.out, rank.out()), "");
    const auto counted = rank.layer.gather_load();
    ASSERT_OK(counted);
    EXPECT_EQ(*counted, load);
  });
}

// A graph of a run.
class Replay {
 public:
  Replay(const Rank& rank, int64_t first, int64_t count) : rank_(rank) {
    EXPECT_EQ(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    status_ = rank.run(first, count);
    EXPECT_EQ(cudaStreamEndCapture(rank.stream, &graph_), cudaSuccess);
    if (graph_ == nullptr) return;
    EXPECT_EQ(cudaGraphInstantiate(&replay_, graph_, 0), cudaSuccess);
  }
  ~Replay() {
    if (replay_ != nullptr) cudaGraphExecDestroy(replay_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  const Status& status() const { return status_; }
  // With the contents of another case of the same sizes.
  std::vector<uint8_t> run(const CaseData& data) const {
    const auto copy = [](void* to, const auto& from) {
      EXPECT_EQ(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice), cudaSuccess);
    };
    copy(rank_.batch.hidden.data(), data.hidden);
    copy(rank_.batch.ids.data(), data.topk_ids);
    copy(rank_.batch.weights.data(), data.topk_weights);
    EXPECT_EQ(cudaMemset(rank_.batch.out.data(), 0xFF, data.out_bytes()), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(replay_, rank_.stream), cudaSuccess);
    return rank_.out();
  }

 private:
  const Rank& rank_;
  Status status_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

bool all_nan(const CaseData& data, const std::vector<uint8_t>& out) {
  const std::vector<float> values = test::to_floats(out, data.spec.out_dtype);
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

std::string too_many(int64_t tokens, int64_t owner, int64_t capacity, int runs) {
  return "capacity: expected at least " + std::to_string(tokens) + " tokens, which rank 0 has for rank " +
         std::to_string(owner) + ", got " + std::to_string(capacity) + "; out is NaN on every rank in " +
         std::to_string(runs) + " runs since status was last asked for";
}

// One graph for any routing; where it does not fit, every rank has NaN and hears of it, and the next replay goes on.
TEST_P(CudaDispatch, AGraphIsReplayedWithOtherContents) {
  const int world = GetParam();
  constexpr int64_t kTokens = 6;
  const auto of = [](Routing routing, uint64_t seed) {
    Case spec = spec_of(kTokens, routing, kNvfp4, 16);
    spec.seed = seed;
    return made(spec);
  };
  const CaseData uniform = of(Routing::kUniform, 1), partly = of(Routing::kPartlyNone, 1),
                 hot = of(Routing::kOneExpert, 1);
  // The layer's weights and factors of the shared expert follow from the seed alone.
  const OneRank uniform_one(uniform), partly_one(partly), hot_one(hot);
  ExpertParallelOptions options;
  options.capacity = kTokens;
  on_devices(uniform, world, options, [&](Rank& rank) {
    ASSERT_OK(rank.run(0, kTokens));  // what a first call loads, no graph can
    rank.out();
    ASSERT_OK(rank.exchange.barrier());
    const Replay replay(rank, 0, kTokens);
    ASSERT_OK(replay.status());
    ASSERT_OK(rank.exchange.barrier());
    EXPECT_EQ(difference(partly, partly_one.out, replay.run(partly)), "");
    EXPECT_EQ(difference(hot, hot_one.out, replay.run(hot)), "");
    EXPECT_EQ(difference(uniform, uniform_one.out, replay.run(uniform)), "");
    EXPECT_OK(rank.status());
  });
  if (world == 1) return;  // all tokens of one rank always fit
  const int64_t expert = hot.id(0, 0) >= 0 ? hot.id(0, 0) : hot.id(0, 1);
  options.capacity = 5;
  on_devices(partly, world, options, [&](Rank& rank) {
    ASSERT_OK(rank.run(0, 1));
    rank.out();
    ASSERT_OK(rank.exchange.barrier());
    // Rank 0 alone has more for one rank than fits; that rank's message says so to all.
    const int64_t count = rank.exchange.rank() == 0 ? kTokens : 2;
    const Replay replay(rank, 0, count);
    ASSERT_OK(replay.status());
    ASSERT_OK(rank.exchange.barrier());
    for (int i = 0; i < 2; ++i) {
      const std::vector<uint8_t> out = replay.run(hot);
      EXPECT_TRUE(all_nan(hot, tokens_of(hot, out, 0, count)));
      EXPECT_EQ(tokens_of(hot, out, count, kTokens - count),
                std::vector<uint8_t>(hot.out_bytes() / kTokens * static_cast<size_t>(kTokens - count), 0xFF))
          << "beyond the batch";
    }
    const int64_t owner = rank.layer.placement().rank_of(rank.layer.placement().slot_of(expert, 0));
    EXPECT_EQ(rank.status().status().message(), too_many(kTokens, owner, 5, 2));
    const auto again = rank.status();  // what has been said is said once; the run itself counts its NaN
    ASSERT_OK(again);
    EXPECT_EQ(again->nonfinite_outputs, static_cast<uint64_t>(count * 64));
    ASSERT_OK(rank.exchange.barrier());
    const std::vector<uint8_t> out = replay.run(partly);
    EXPECT_EQ(difference(partly, tokens_of(partly, partly_one.out, 0, count), tokens_of(partly, out, 0, count)), "");
    EXPECT_OK(rank.status());
  });
}

TEST_P(CudaDispatch, WhatDoesNotGoIsNamedOnEveryRank) {
  const int world = GetParam(), last = world - 1;
  const CaseData data = made(spec_of(4, Routing::kUniform, kBf16));
  const OneRank one(data);
  for (const int64_t capacity : {0, 4}) {
    SCOPED_TRACE("capacity " + std::to_string(capacity));
    ExpertParallelOptions options;
    options.capacity = capacity;
    on_devices(data, world, options, [&](Rank& rank) {
      const bool mine = rank.exchange.rank() == last;
      const std::string named = "rank " + std::to_string(last) + ": ";
      Batch wrong = rank.batch.spec;
      if (mine) wrong.hidden = nullptr;
      EXPECT_EQ(rank.layer.run(wrong, rank.workspace.data(), rank.workspace_bytes, rank.stream).message(),
                named + "hidden: expected a pointer, got null");
      if (capacity == 0) {
        const Replay replay(rank, 0, 4);
        EXPECT_THAT(replay.status().message(), HasSubstr("rank 0: stream: expected one that is not captured"));
      } else if (world > 1) {
        ASSERT_OK(rank.exchange.barrier());
        const std::string message = mine ? rank.run(0, 4).message() : Replay(rank, 0, 4).status().message();
        EXPECT_EQ(message, "stream of rank " + std::to_string(last) +
                               ": expected one that is captured, as on rank 0, got one that is not");
      }
      ASSERT_OK(rank.exchange.barrier());
      ASSERT_OK(rank.run(0, 4));
      EXPECT_EQ(difference(data, one.out, rank.out()), "") << "after what did not go";
      ASSERT_OK(rank.exchange.barrier());
      // A rank that leaves ends the run on the others; what NCCL says ends all later ones.
      if (mine) {
        rank.exchange.abort(Status(Code::kIo, "killed"));
        rank.exchange.device()->abort(Status(Code::kIo, "nccl: a cable was pulled"));
        EXPECT_EQ(rank.run(0, 4).message(), "nccl: a cable was pulled");
      } else {
        EXPECT_THAT(rank.run(0, 4).message(), HasSubstr(named + "killed"));
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaDispatch, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace nvfp4_moe
