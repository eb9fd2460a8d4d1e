// Hopper's layer in one launch (sm90/decode.cuh): when a run is planned so, that its outputs and
// counts are the layer's, and that two of them and a load on three streams all end.
//
// The case table (tests/layer) runs through it too, where a case has few tokens.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/sm90/decode_runs.h"
#include "cases/cases.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "judge/judge.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

Case decode_case(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate,
                 int64_t tokens) {
  Case spec = sized_case(experts, top_k, hidden, intermediate, tokens);
  spec.options.activation_format = ActivationFormat::kBf16;
  return spec;
}
// The same layer with E4M3 activations, which has a kernel of its own.
Case with_fp8(Case spec) {
  spec.options.activation_format = ActivationFormat::kFp8;
  return spec;
}

bool planned_in_one_launch(const MoeConfig& config, const Case& spec, const Plan& plan) {
  const auto steps = kSm90Backend.describe_run(config, spec.range, plan, spec.tokens);
  return steps.size() == 1 && steps[0].step == "layer" &&
         steps[0].kernel.starts_with("one launch of ");
}

// ---- the plan, on any host

bool hopper_plans_one_launch(const Case& spec, const Limits& limits = {}) {
  DeviceFacts facts;
  facts.kind = DeviceKind::kCuda;
  facts.compute_units = 132;
  facts.compute_capability = 90;
  facts.cta_shared_bytes = 227 * 1024;
  const auto config = MoeConfig::make(spec.options);
  EXPECT_OK(config);
  Limits own = limits;
  own.max_tokens = spec.tokens;
  const auto plan = kSm90Backend.plan(*config, spec.range, {}, own, facts);
  EXPECT_OK(plan);
  return planned_in_one_launch(*config, spec, *plan);
}

TEST(Sm90DecodePlan, FewTokensOfLayersThatReadLittle) {
  struct Planned {
    const char* name;
    Case spec;
    bool one_launch;
  };
  const auto with = [](Case spec, const std::function<void(Case&)>& set) {
    set(spec);
    return spec;
  };
  const Case small = decode_case(128, 8, 2048, 768, 8);
  const Planned cases[] = {
      {"qwen30b", small, true},
      {"one token", decode_case(128, 8, 2048, 768, 1), true},
      {"nine tokens", decode_case(128, 8, 2048, 768, 9), false},
      {"512 experts of 512", decode_case(512, 10, 2048, 512, 8), true},
      {"630 MB of weights", decode_case(256, 6, 4096, 2048, 8), false},
      {"330 MB of weights", decode_case(256, 6, 4096, 2048, 4), true},
      {"more than 128 assignments", decode_case(256, 22, 1024, 512, 8), false},
      {"an intermediate longer than hidden", decode_case(8, 2, 512, 1024, 1), false},
      {"quantized activations",
       with(small, [](Case& c) { c.options.activation_format = ActivationFormat::kNvfp4; }), false},
      {"fp8 activations", with_fp8(decode_case(128, 8, 2048, 768, 2)), true},
      {"fp8 activations, four tokens", with_fp8(decode_case(128, 8, 2048, 768, 4)), true},
      {"fp8 activations, five tokens", with_fp8(decode_case(128, 8, 2048, 768, 5)), false},
      {"fp8 activations, 250 MB", with_fp8(decode_case(256, 6, 4096, 2048, 3)), false},
      {"fp8 activations, batch invariant",
       with(with_fp8(decode_case(128, 8, 2048, 768, 2)),
            [](Case& c) { c.options.batch_invariant = true; }),
       false},
      {"batch invariant", with(small, [](Case& c) { c.options.batch_invariant = true; }), false},
      {"a rank's experts",
       with(small,
            [](Case& c) {
              c.range = {32, 16};
            }),
       true},
      {"no gate", with(small, [](Case& c) { c.options.activation = Activation::kRelu2; }), true},
      {"a shared expert", with(small, [](Case& c) { c.options.shared_intermediate_size = 1024; }),
       true},
  };
  for (const Planned& of : cases) {
    EXPECT_EQ(hopper_plans_one_launch(of.spec), of.one_launch) << of.name;
    Limits forced;
    forced.gemm_config = 0;
    EXPECT_FALSE(hopper_plans_one_launch(of.spec, forced)) << of.name << ", forced";
  }
}

// The runs of a phase's warps go through all subtiles in order, and no warp has two more than
// another.
TEST(Sm90DecodePlan, RunsOfWarpsAreEqualToWithinASubtile) {
  struct Shape {
    int32_t rows, k_tiles, last_rows, last_k_tiles;
  };
  for (const Shape& of :
       {Shape{1, 1, 0, 0}, Shape{0, 3, 1, 5}, Shape{3, 5, 0, 0}, Shape{15, 1, 0, 0},
        Shape{17, 1, 1, 1}, Shape{5, 17, 0, 3}, Shape{6, 16, 0, 0}, Shape{64, 6, 1, 8},
        Shape{128, 4, 2, 3}, Shape{7, 33, 4, 2}, Shape{129, 11, 0, 0}, Shape{2, 3, 40, 7}}) {
    SCOPED_TRACE(testing::Message() << of.rows << " rows of " << of.k_tiles << ", " << of.last_rows
                                    << " of " << of.last_k_tiles);
    const sm90::DecodeLength length(of.k_tiles), last_length(of.last_k_tiles);
    int32_t row = 0, k_tile = 0, least = INT32_MAX, most = 0;
    for (int32_t warp = 0; warp < sm90::kDecodeWarps; ++warp) {
      const sm90::DecodeRun run(warp, of.rows, length, of.last_rows, last_length);
      least = std::min(least, run.last - run.first), most = std::max(most, run.last - run.first);
      for (sm90::DecodeRows at(run); at.more();) {
        EXPECT_EQ(at.row, row) << "warp " << warp;
        EXPECT_EQ(at.k_tile, k_tile) << "warp " << warp;
        const int32_t k_tiles = row < of.rows ? of.k_tiles : of.last_k_tiles, end = at.end(k_tiles);
        ASSERT_GT(end, at.k_tile) << "warp " << warp;
        k_tile = end < k_tiles ? end : 0, row += end == k_tiles;
        at.advance(end);
      }
    }
    EXPECT_EQ(k_tile, 0);
    EXPECT_EQ(row, of.rows + of.last_rows);
    EXPECT_LE(most - least, 1);
  }
}

// ---- the layer, on Hopper

class Sm90Decode : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not_here(kSm90Backend);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static void expect_layer(const Case& spec) {
    SCOPED_TRACE(testing::Message()
                 << spec.options.num_experts << " experts, top " << spec.options.top_k << ", "
                 << spec.options.hidden_size << " x " << spec.options.intermediate_size << ", "
                 << spec.tokens << " tokens, " << to_string(spec.options.activation_format) << ", "
                 << to_string(spec.data) << ", " << to_string(spec.routing));
    const auto data = must(make_case(spec));
    CaseRun own(kSm90Backend, *data), reference(kReferenceBackend, *data);
    ASSERT_TRUE(own.ok() && reference.ok());
    ASSERT_TRUE(planned_in_one_launch(data->config, spec, own.plan()));
    const std::vector<uint8_t> expected = reference.run(*data), out = own.run(*data);
    EXPECT_EQ(beyond_limits(*data, expected, out), "");
    expect_same_status(*reference.buffers().status, *own.buffers().status);
    EXPECT_EQ(own.broken_guard(), -1);
    EXPECT_EQ(own.run(*data), out) << "a repeat has other bits";
    expect_same_status(*reference.buffers().status, *own.buffers().status);
  }
};
using Sm90SmallDecode = Sm90Decode;  // with few and small layers
using Sm90Fp8Decode = Sm90Decode;    // with E4M3 activations

// Each adds something to a layer of plain SwiGLU.
const std::vector<std::function<void(Case&)>>& kinds_of_layers() {
  static const std::vector<std::function<void(Case&)>> kinds = {
      // All experts have rows: the biases of the last one are the last bytes of the weights.
      [](Case& c) {
        c.options.num_experts = c.range.count = 4;
        c.options.expert_biases = true;
      },
      [](Case& c) {
        c.options.num_experts = c.range.count = 4;
        c.options.activation = Activation::kRelu2;
        c.options.expert_biases = true;
      },
      [](Case& c) { c.options.activation = Activation::kRelu2; },
      [](Case& c) {
        c.options.activation = Activation::kSwigluOai;
        c.options.swiglu_limit = 7.0f;
        c.options.expert_biases = true;
      },
      [](Case& c) {
        c.options.activation = Activation::kGelu;
        c.options.expert_biases = true;
      },
      [](Case& c) {
        c.options.activation = Activation::kGeluTanh;
        c.options.router_weight = RouterWeight::kBeforeDown;
      },
      [](Case& c) {
        set_situ(c.options);
        c.options.shared_intermediate_size = 48;
      },
      [](Case& c) {
        c.options.shared_intermediate_size = 272;
        c.shared_weights = true;
      },
      [](Case& c) { c.options.shared_intermediate_size = 48; },
      [](Case& c) { c.options.router_weight = RouterWeight::kBeforeDown; },
      [](Case& c) { c.options.row_format = RowFormat::kFp32; },
      [](Case& c) {
        c.range = {5, 6};
      },
      [](Case& c) {
        c.range = {5, 6};
        c.options.shared_intermediate_size = 64;
      },
      [](Case& c) { c.ids_dtype = DType::kI64; },
      [](Case& c) { c.hidden_dtype = c.out_dtype = DType::kF32; },
      [](Case& c) { c.hidden_dtype = c.out_dtype = DType::kF16; },
  };
  return kinds;
}

// Every number of tokens: columns of one product, and rows that begin and end in any of the runs.
// A device with few multiprocessors has no room for the channels of a wider layer.
TEST_F(Sm90Decode, EveryNumberOfTokens) {
  const int64_t channels = 16 * must(device_facts("cuda:0"))->compute_units;
  for (int64_t tokens = 1; tokens <= 8; ++tokens) {
    expect_layer(decode_case(16, 4, 528, 144, tokens));
    expect_layer(decode_case(32, 16, std::min<int64_t>(1040, 3 * channels), 336, tokens));
    if (tokens % 3 == 1)
      expect_layer(decode_case(16, 8, std::min<int64_t>(2048, 12 * channels), 768, tokens));
  }
}
// A token of 8192 channels has more elements than a cta keeps in registers.
TEST_F(Sm90Fp8Decode, EveryNumberOfTokens) {
  const int64_t channels = 16 * must(device_facts("cuda:0"))->compute_units;
  for (const int64_t tokens : {1, 2, 3, 4}) {
    expect_layer(with_fp8(decode_case(16, 4, 528, 144, tokens)));
    expect_layer(with_fp8(decode_case(32, 16, std::min<int64_t>(1040, 3 * channels), 336, tokens)));
    const int64_t top_k = tokens <= 2 ? 32 : 16;
    expect_layer(
        with_fp8(decode_case(64, top_k, std::min<int64_t>(528, 3 * channels), 144, tokens)));
    expect_layer(with_fp8(decode_case(16, 8, std::min<int64_t>(2048, 12 * channels), 768, tokens)));
    if (channels >= 128 && tokens <= 2) expect_layer(with_fp8(decode_case(4, 2, 8192, 32, tokens)));
  }
}

// Neither K nor I is a multiple of a tile, and I is an odd number of 16.
TEST_F(Sm90SmallDecode, EveryKindOfLayer) {
  for (size_t i = 0; i < kinds_of_layers().size(); ++i)
    for (const int64_t tokens : {1, 5}) {
      SCOPED_TRACE(testing::Message() << "kind " << i);
      Case spec = decode_case(16, 4, 336, 208, tokens);
      kinds_of_layers()[i](spec);
      expect_layer(spec);
    }
}
TEST_F(Sm90Fp8Decode, EveryKindOfLayer) {
  for (size_t i = 0; i < kinds_of_layers().size(); ++i)
    for (const int64_t tokens : {1, 3}) {
      SCOPED_TRACE(testing::Message() << "kind " << i);
      Case spec = with_fp8(decode_case(16, 4, 336, 208, tokens));
      kinds_of_layers()[i](spec);
      expect_layer(spec);
    }
}

constexpr Routing kRoutings[] = {Routing::kOneExpert, Routing::kAllNone, Routing::kPartlyNone,
                                 Routing::kDuplicates, Routing::kBadIds};
constexpr DataKind kValues[] = {DataKind::kZeros, DataKind::kNan, DataKind::kHuge,
                                DataKind::kOutliers};

TEST_F(Sm90SmallDecode, EveryRoutingAndKindOfData) {
  // One warp routes 6 assignments, two route 48: a token's may belong to both.
  for (const Routing routing : kRoutings)
    for (const int64_t tokens : {1, 8}) {
      Case spec = decode_case(16, 6, 336, 208, tokens);
      spec.routing = routing;
      expect_layer(spec);
    }
  for (const DataKind values : kValues) {
    Case spec = decode_case(16, 4, 336, 208, 7);
    spec.data = values;
    spec.options.shared_intermediate_size = 48;
    expect_layer(spec);
  }
}
TEST_F(Sm90Fp8Decode, EveryRoutingAndKindOfData) {
  for (const int64_t tokens : {2, 4}) {
    Case spec = with_fp8(decode_case(16, 4, 336, 208, tokens));
    for (const Routing routing : kRoutings) {
      spec.routing = routing;
      expect_layer(spec);
    }
    spec.routing = Routing::kUniform;
    spec.options.shared_intermediate_size = 48;
    for (const DataKind values : kValues) {
      spec.data = values;
      expect_layer(spec);
    }
  }
}

// Row scales that no row decides.
TEST_F(Sm90SmallDecode, FixedRowScalesUnderFp8) {
  for (const int64_t tokens : {1, 2}) {
    Case spec = with_fp8(decode_case(16, 4, 336, 208, tokens));
    spec.options.activation_scale = ActivationScale::kStatic;
    spec.options.intermediate_scale = IntermediateScale::kFixed;
    spec.options.intermediate_fixed = 0.25f;
    expect_layer(spec);
  }
}

// Two streams of decode runs, and a third one whose kernels fill the device. A grid starts only if
// all of its ctas fit, so none waits for a cta that another stream keeps out. One stream replays a
// graph.
TEST_F(Sm90Decode, StreamsBesideALoadAllEnd) {
  const auto data = must(make_case(decode_case(64, 8, 2048, 768, 3)));
  Case large = decode_case(8, 2, 1024, 1024, 4096);
  const auto load = must(make_case(large));
  CaseRun runs[2] = {CaseRun(kSm90Backend, *data), CaseRun(kSm90Backend, *data)};
  CaseRun filler(kSm90Backend, *load);
  ASSERT_TRUE(runs[0].ok() && runs[1].ok() && filler.ok());
  ASSERT_TRUE(planned_in_one_launch(data->config, data->spec, runs[0].plan()));
  const std::vector<uint8_t> expected = runs[0].run(*data);
  ASSERT_EQ(runs[1].run(*data), expected);
  std::vector<uint8_t> outs[2] = {std::vector<uint8_t>(expected.size()),
                                  std::vector<uint8_t>(expected.size())},
                       load_out(load->out_bytes());
  const OwnStream streams[2], load_stream;
  Batch placed[2] = {runs[0].place(data->batch(outs[0].data())),
                     runs[1].place(data->batch(outs[1].data()))};
  const Batch placed_load = filler.place(load->batch(load_out.data()));
  const auto enqueue = [&](int i) {
    return runs[i].run_into(placed[i], serial_executor(), streams[i]);
  };
  const Graph graph(streams[1], [&] { return enqueue(1); });
  ASSERT_OK(graph.status());
  for (int i = 0; i < 2000; ++i) {
    if (i % 20 == 0) ASSERT_OK(filler.run_into(placed_load, serial_executor(), load_stream));
    ASSERT_OK(enqueue(0));
    graph.launch();
  }
  for (const cudaStream_t stream :
       {cudaStream_t(streams[0]), cudaStream_t(streams[1]), cudaStream_t(load_stream)})
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    runs[i].fetch(placed[i], outs[i].data());
    EXPECT_EQ(outs[i], expected) << "stream " << i;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
