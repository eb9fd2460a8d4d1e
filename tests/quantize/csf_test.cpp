// quantize with scale_coding csf: the experts of the plain checkpoint, in fewer bytes, and
// resumable.
#include "core/csf.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "quantize/models.h"
#include "support/read_tensor.h"

namespace nvfp4_moe::internal::test::csf_quantize_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

QuantizeOptions csf() {
  QuantizeOptions options;
  options.scale_coding = ScaleCoding::kCsf;
  return options;
}

class QuantizeCsf : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    SynthesizeOptions model = tiny_model(2, 3, 128, 64);
    model.family = GetParam();
    ASSERT_OK(synthesize_checkpoint(in_, model));
  }
  TempDir dir_;
  const std::string in_ = dir_.file("in"), out_ = dir_.file("out"), plain_ = dir_.file("plain");
};

TEST_P(QuantizeCsf, HasTheExpertsOfThePlainOneInFewerBytes) {
  const auto theirs = must(quantize_checkpoint(in_, plain_));
  const auto ours = must(quantize_checkpoint(in_, out_, csf()));
  EXPECT_EQ(ours->scale_coding, ScaleCoding::kCsf);
  EXPECT_LT(ours->written_bytes, theirs->written_bytes);
  EXPECT_DOUBLE_EQ(ours->mean_sqnr_db(), theirs->mean_sqnr_db());
  EXPECT_THAT(ours->notes, testing::Contains(HasSubstr("weight_scale_encoding csf")));
  const auto coded = must(Checkpoint::open(out_)), plain = must(Checkpoint::open(plain_));
  EXPECT_TRUE(coded->model().csf);
  EXPECT_EQ(coded->findings().size(), plain->findings().size());
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (int64_t e = 0; e < 3; ++e) expect_same(coded->expert(layer, e), plain->expert(layer, e));
    EXPECT_EQ(must(coded->declared_activations(layer))->format,
              must(plain->declared_activations(layer))->format);
    EXPECT_EQ(find(*must(coded->validate(layer, {0, 3})), "csf_invalid"), nullptr);
  }
  // The streams are those of the plain scales.
  size_t matrices = 0, exceptions = 0;
  for (const auto& [name, ref] : plain->index().tensors()) {
    if (!name.ends_with(".weight_scale") || name.find(".experts.") == std::string::npos) continue;
    const auto streams = encode_csf(CsfCodec::kNvfp4, read_tensor<uint8_t>(*ref.file, *ref.info),
                                    ref.info->shape[0], ref.info->shape[1]);
    const auto fixed = coded->index().find(name + ".nvfp4_csf_fixed");
    const auto words = coded->index().find(name + ".nvfp4_csf_exceptions");
    ASSERT_NE(fixed.info, nullptr) << name;
    ASSERT_NE(words.info, nullptr) << name;
    EXPECT_EQ(fixed.info->dtype, DType::kU8);
    EXPECT_EQ(fixed.info->shape[0], ref.info->shape[0] / 16);
    EXPECT_EQ(read_tensor<uint8_t>(*fixed.file, *fixed.info), streams.fixed);
    EXPECT_EQ(read_tensor<uint32_t>(*words.file, *words.info), streams.exceptions);
    exceptions += streams.exceptions.size();
    ++matrices;
  }
  EXPECT_EQ(matrices, 18u);
  EXPECT_GT(exceptions, 0u);
}

TEST_P(QuantizeCsf, TheConfigsDeclareTheCoding) {
  ASSERT_OK(quantize_checkpoint(in_, out_, csf()));
  const json config = json::parse(read_file(out_ + "/config.json")).at("quantization_config");
  EXPECT_EQ(config.at("quant_algo"), "MIXED_PRECISION");
  const json& layers = config.at("quantized_layers");
  EXPECT_EQ(layers.size(), 2u);
  const json hf = json::parse(read_file(out_ + "/hf_quant_config.json")).at("quantization");
  EXPECT_EQ(hf.at("quant_algo"), "MIXED_PRECISION");
  EXPECT_EQ(hf.at("quantized_layers").size(), 18u);
  for (const json& declared : {layers, hf.at("quantized_layers")}) {
    for (const auto& [name, entry] : declared.items()) {
      EXPECT_EQ(entry.at("weight_scale_encoding"), "csf") << name;
      EXPECT_EQ(entry.at("quant_algo"), "NVFP4");
    }
  }
}

TEST_P(QuantizeCsf, AStoppedRunContinuesToTheSameBytes) {
  QuantizeOptions options = csf();
  options.max_shard_bytes = 8 << 10;
  ASSERT_OK(quantize_checkpoint(in_, plain_, options));
  int64_t counted = 0, stopped = 0, calls = 0;
  for (int64_t stop_after = 2;; stop_after += 3) {
    calls = 0;
    options.progress = [&](const Progress& p) {
      counted += p.item.ends_with(": scales");
      return ++calls < stop_after;
    };
    const auto result = quantize_checkpoint(in_, out_, options);
    if (result.ok()) break;
    ASSERT_THAT(result, Refused(Code::kCancelled, "quantize: cancelled"));
    EXPECT_FALSE(fs::exists(out_ + "/config.json"));
    ++stopped;
  }
  EXPECT_GT(stopped, 3);
  // Experts that were counted are not counted again; one report before each, and one that stopped.
  EXPECT_LE(counted, 6 + stopped);
  EXPECT_THAT(differing(read_files(out_), read_files(plain_)), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Families, QuantizeCsf, testing::Values("qwen3_moe", "deepseek_v4"));

TEST(QuantizeCsfOptions, OnlyModelOptsConfigCanDeclareIt) {
  const TempDir dir;
  ASSERT_OK(synthesize_checkpoint(dir.file("in"), tiny_model()));
  QuantizeOptions options = csf();
  options.format = OutputFormat::kCompressedTensors;
  EXPECT_THAT(quantize_checkpoint(dir.file("in"), dir.file("out"), options),
              Refused(Code::kInvalidArgument, "scale_coding csf: expected format modelopt"));
  // An intermediate size of 16 has one scale a row of down: no pair of codes.
  EXPECT_THAT(quantize_checkpoint(dir.file("in"), dir.file("out"), csf()),
              Refused(Code::kUnsupported, "an even number of columns"));
  EXPECT_FALSE(fs::exists(dir.file("out")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::csf_quantize_test
