// Quantizing what leaves open how it is to be read: the order of gate and up, tensors that no format has, numbers that
// only Python's json has.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"
#include "core/float_formats.h"
#include "safetensors/safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::quantize_reading_test {
namespace {

namespace fs = std::filesystem;
using test::read_file;
using test::TempDir;

// What only Python's json has stays what it is: null would be another model.
TEST(QuantizeConfig, AnInfinityStaysAsItIs) {
  TempDir dir;
  const std::string in = dir.file("in"), out = dir.file("out");
  SynthesizeOptions tiny{
      .layers = 1, .num_experts = 2, .top_k = 1, .hidden_size = 64, .intermediate_size = 32, .vocab_size = 16};
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

// One stack under an engine's name, and a tensor that no format has. Returns the checkpoint's directory.
std::string write_w13(const TempDir& dir, GateUpOrder order, bool with_other) {
  const int64_t experts = 2, hidden = 64, inter = 32;
  std::vector<TensorInfo> infos(2);
  infos[0].name = "model.layers.0.mlp.experts.w13_weight";
  infos[0].shape = {experts, 2 * inter, hidden};
  infos[1].name = "model.layers.0.mlp.experts.w2_weight";
  infos[1].shape = {experts, hidden, inter};
  std::vector<float> data[3];
  for (size_t i = 0; i < 2; ++i) {
    infos[i].dtype = DType::kF32;
    data[i].resize(static_cast<size_t>(experts * 2 * inter * hidden / (i == 0 ? 1 : 2)));
    for (size_t j = 0; j < data[i].size(); ++j) data[i][j] = static_cast<float>(j % 97) - 48;
  }
  for (int64_t e = 0; e < experts; ++e) {  // gate is 1, up 2
    for (int64_t r = 0; r < 2 * inter; ++r) {
      const bool up =
          order == GateUpOrder::kInterleaved ? r % 2 == 1 : (r >= inter) != (order == GateUpOrder::kUpFirst);
      std::fill_n(data[0].begin() + (e * 2 * inter + r) * hidden, hidden, up ? 2.0f : 1.0f);
    }
  }
  if (with_other) {
    infos.emplace_back();
    infos[2].name = "model.layers.0.mlp.experts.output_scale";
    infos[2].shape = {1};
    infos[2].dtype = DType::kF32;
    data[2] = {3.0f};
  }
  for (size_t i = 0; i < infos.size(); ++i) infos[i].end = data[i].size() * 4;
  const std::string path = dir.file(std::string("in-") + to_string(order));
  fs::create_directories(path);
  auto writer = SafetensorsWriter::create(path + "/model.safetensors", infos, {});
  EXPECT_OK(writer);
  for (size_t i = 0; i < infos.size(); ++i) EXPECT_OK(writer->write(std::as_bytes(std::span(data[i]))));
  EXPECT_OK(writer->finish());
  std::ofstream(path + "/config.json") << R"({"architectures":["Qwen3MoeForCausalLM"],"model_type":"qwen3_moe",
    "hidden_size":64,"moe_intermediate_size":32,"num_experts":2,"num_experts_per_tok":2,"num_hidden_layers":1,
    "hidden_act":"silu","decoder_sparse_step":1,"mlp_only_layers":[],"norm_topk_prob":true})";
  return path;
}

double first_weight(const Nvfp4View& view) {
  return static_cast<double>(e2m1_to_float(low_code(view.row_codes(0)[0]))) *
         static_cast<double>(e4m3_to_float(view.row_scales(0)[0])) * static_cast<double>(view.tensor_scale);
}

TEST(QuantizeStacked, RowsAreGatesAndUpsAsTheOrderSays) {
  for (const GateUpOrder order : {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
    SCOPED_TRACE(to_string(order));
    TempDir dir;
    const std::string in = write_w13(dir, order, false);
    QuantizeOptions options;
    if (order != GateUpOrder::kGateFirst) options.reading.gate_up_order = order;
    ASSERT_OK(quantize_checkpoint(in, dir.file("out"), options));
    const auto out = Checkpoint::open(dir.file("out"));
    ASSERT_OK(out);
    for (const int64_t e : {0, 1}) {
      const auto loaded = out->expert(0, e);
      ASSERT_OK(loaded);
      EXPECT_NEAR(first_weight(loaded->source.gate), 1, 0.01);
      EXPECT_NEAR(first_weight(loaded->source.up), 2, 0.01);
    }
  }
}

TEST(QuantizeStacked, TensorsThatNoFormatHasAreRefusedOrLeftOut) {
  TempDir dir;
  const std::string in = write_w13(dir, GateUpOrder::kGateFirst, true);
  const Status refused = quantize_checkpoint(in, dir.file("out")).status();
  EXPECT_NE(refused.message().find("output_scale"), std::string::npos) << refused.message();
  EXPECT_FALSE(fs::exists(dir.file("out")));
  QuantizeOptions options;
  options.reading.accept_tensors = {"*.output_scale"};
  const auto result = quantize_checkpoint(in, dir.file("out"), options);
  ASSERT_OK(result);
  EXPECT_TRUE(std::any_of(result->notes.begin(), result->notes.end(),
                          [](const std::string& note) { return note.starts_with("1 tensors of the quantized"); }));
  const auto out = Checkpoint::open(dir.file("out"));
  ASSERT_OK(out);
  EXPECT_OK(out->expert(0, 1));
  EXPECT_EQ(out->index().find("model.layers.0.mlp.experts.output_scale").info, nullptr);
}

}  // namespace
}  // namespace nvfp4_moe::internal::quantize_reading_test
