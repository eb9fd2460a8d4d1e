// Quantizing ambiguous checkpoints.
#include <filesystem>
#include <fstream>

#include "checkpoint/experts.h"
#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"

namespace nvfp4_moe::internal::test::quantize_reading_test {
namespace {

namespace fs = std::filesystem;

// A value that only Python's json has is kept: null would be another model.
TEST(QuantizeConfig, AnInfinityStaysAsItIs) {
  TempDir dir;
  const std::string in = dir.file("in"), out = dir.file("out");
  SynthesizeOptions tiny{.layers = 1,
                         .num_experts = 2,
                         .top_k = 1,
                         .hidden_size = 64,
                         .intermediate_size = 32,
                         .vocab_size = 16};
  ASSERT_OK(synthesize_checkpoint(in, tiny));
  std::string config = read_file(in + "/config.json");
  config.insert(config.find('{') + 1, "\"time_step_limit\": [0.0, Infinity], \"jitter\": NaN,");
  std::ofstream(in + "/config.json", std::ios::trunc) << config;
  ASSERT_OK(quantize_checkpoint(in, out));
  const std::string written = read_file(out + "/config.json");
  EXPECT_NE(written.find("Infinity"), std::string::npos);
  EXPECT_NE(written.find("NaN"), std::string::npos);
  EXPECT_EQ(read_file(out + "/hf_quant_config.json").find("Infinity"), std::string::npos);
  EXPECT_OK(Checkpoint::open(out));
}

// With a separate tensor scale for each matrix, the result equals quantizing on load.
void expect_quantized(const CheckpointBuilder& plain_builder, CheckpointBuilder& stacked,
                      const CheckpointOptions& reading) {
  CheckpointBuilder builder = plain_builder;
  const Opened plain(builder);
  const TempDir dir;
  ASSERT_OK(stacked.write(dir.file("in")));
  QuantizeOptions options;
  options.reading = reading;
  options.share_gate_up_scale = false;
  const auto result = must(quantize_checkpoint(dir.file("in"), dir.file("out"), options));
  EXPECT_EQ(result->quantized_tensors, 2 * 8 * 3);
  const auto out = must(Checkpoint::open(dir.file("out")));
  EXPECT_EQ(out->model().format, SourceFormat::kModelOpt);
  for (const int64_t layer : {0, 1})
    for (int64_t e = 0; e < 8; ++e) expect_same(out->expert(layer, e), plain->expert(layer, e));
}

const BuilderOptions kFloats{.model_type = "qwen3_moe", .format = SourceFormat::kFloat};

// Fused Hugging Face experts: gate_up_proj [E, 2I, H] with gate first, down_proj [E, H, I].
TEST(QuantizeStacked, IsWrittenPerExpert) {
  BuilderOptions options = kFloats;
  options.stacked_floats = true;
  CheckpointBuilder stacked(options);
  expect_quantized(CheckpointBuilder(kFloats), stacked, {});
}

TEST(QuantizeStacked, RowsAreGatesAndUpsAsTheOrderSays) {
  for (const GateUpOrder order :
       {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
    SCOPED_TRACE(to_string(order));
    CheckpointBuilder stacked(kFloats);
    stack_experts(stacked, order);
    CheckpointOptions reading;
    if (order != GateUpOrder::kGateFirst) reading.gate_up_order = order;
    expect_quantized(CheckpointBuilder(kFloats), stacked, reading);
  }
}

TEST(QuantizeStacked, TensorsThatNoFormatHasAreRefusedOrLeftOut) {
  TempDir dir;
  const std::string in = dir.file("in");
  CheckpointBuilder builder(kFloats);
  stack_experts(builder, GateUpOrder::kGateFirst);
  builder.tensors()["model.layers.0.mlp.experts.output_scale"] = {
      DType::kF32, {1}, std::vector<uint8_t>(4)};
  ASSERT_OK(builder.write(in));
  const Status refused = quantize_checkpoint(in, dir.file("out")).status();
  EXPECT_NE(refused.message().find("output_scale"), std::string::npos) << refused.message();
  EXPECT_FALSE(fs::exists(dir.file("out")));
  QuantizeOptions options;
  options.reading.accept_tensors = {"*.output_scale"};
  const auto result = must(quantize_checkpoint(in, dir.file("out"), options));
  EXPECT_THAT(result->notes, testing::Contains(StartsWith("1 tensors of the quantized")));
  const auto out = must(Checkpoint::open(dir.file("out")));
  EXPECT_OK(out->expert(0, 1));
  EXPECT_EQ(out->index().find("model.layers.0.mlp.experts.output_scale").info, nullptr);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::quantize_reading_test
