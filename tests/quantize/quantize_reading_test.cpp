// Quantizing stacked and ambiguous checkpoints.
#include <filesystem>

#include "quantize/models.h"

namespace nvfp4_moe::internal::test::quantize_reading_test {
namespace {

const BuilderOptions kFloats{.model_type = "qwen3_moe", .format = SourceFormat::kFloat};

// With a separate tensor scale for each matrix, the result equals quantizing on load.
void expect_quantized_as_plain(CheckpointBuilder stacked, const CheckpointOptions& reading) {
  const Opened plain{CheckpointBuilder(kFloats)};
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

TEST(QuantizeStacked, IsWrittenPerExpertInTheOrderOfItsRows) {
  // Fused Hugging Face experts: gate_up_proj [E, 2I, H] with gate first, down_proj [E, H, I].
  BuilderOptions fused = kFloats;
  fused.stacked_floats = true;
  expect_quantized_as_plain(CheckpointBuilder(fused), {});
  for (const GateUpOrder order :
       {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
    SCOPED_TRACE(to_string(order));
    CheckpointBuilder stacked(kFloats);
    stack_experts(stacked, order);
    CheckpointOptions reading;
    if (order != GateUpOrder::kGateFirst) reading.gate_up_order = order;
    expect_quantized_as_plain(stacked, reading);
  }
}

TEST(QuantizeStacked, TensorsThatNoFormatHasAreRefusedOrLeftOut) {
  TempDir dir;
  const std::string in = dir.file("in"), name = "model.layers.0.mlp.experts.output_scale";
  CheckpointBuilder builder(kFloats);
  stack_experts(builder, GateUpOrder::kGateFirst);
  builder.tensors()[name] = {DType::kF32, {1}, std::vector<uint8_t>(4)};
  ASSERT_OK(builder.write(in));
  EXPECT_THAT(quantize_checkpoint(in, dir.file("out")).status().message(), HasSubstr(name));
  EXPECT_FALSE(std::filesystem::exists(dir.file("out")));
  QuantizeOptions options;
  options.reading.accept_tensors = {"*.output_scale"};
  const auto result = must(quantize_checkpoint(in, dir.file("out"), options));
  EXPECT_THAT(result->notes, testing::Contains(StartsWith("1 tensors of the quantized")));
  const auto out = must(Checkpoint::open(dir.file("out")));
  EXPECT_OK(out->expert(0, 1));
  EXPECT_EQ(out->index().find(name).info, nullptr);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::quantize_reading_test
