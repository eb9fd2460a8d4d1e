// Quantizing a checkpoint: the written files, options, refusals.
#include "convert/quantize_checkpoint.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "quantize/models.h"
#include "support/read_tensor.h"

namespace nvfp4_moe::internal::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Contains;

std::string bytes_of(const TensorIndex& index, const std::string& name) {
  const TensorIndex::Ref ref = index.find(name);
  if (ref.info == nullptr) return "missing " + name;
  const std::vector<char> bytes = read_tensor<char>(*ref.file, *ref.info);
  return {bytes.begin(), bytes.end()};
}

float scalar_of(const TensorIndex& index, const std::string& name) {
  const std::string bytes = bytes_of(index, name);
  EXPECT_EQ(bytes.size(), 4u) << name;
  float value = 0;
  std::memcpy(&value, bytes.data(), std::min<size_t>(4, bytes.size()));
  return value;
}

json json_of(const std::string& path) { return json::parse(read_file(path)); }

class QuantizeCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(synthesize_checkpoint(in_, tiny_model(2, 4, 128, 64)));
    std::ofstream(in_ + "/tokenizer.json") << "{}";
    fs::create_directories(in_ + "/encoding");
    std::ofstream(in_ + "/encoding/a.py") << "pass";
    std::ofstream(in_ + "/pytorch_model.bin") << "weights";
  }
  TempDir dir_;
  const std::string in_ = dir_.file("in"), out_ = dir_.file("out");
};

TEST_F(QuantizeCheckpoint, WritesWhatTheQuantizerGivesAndCopiesTheRest) {
  for (const OutputFormat format : {OutputFormat::kModelOpt, OutputFormat::kCompressedTensors}) {
    const bool ct = format == OutputFormat::kCompressedTensors;
    const std::string out = dir_.file(ct ? "ct" : "mo");
    QuantizeOptions options;
    options.format = format;
    options.max_shard_bytes = 64 << 10;
    const auto result = must(quantize_checkpoint(in_, out, options));
    EXPECT_EQ(result->quantized_tensors, 2 * 4 * 3);
    EXPECT_GT(result->shards, 2);
    EXPECT_EQ(result->copied_files, (std::vector<std::string>{"encoding/a.py", "tokenizer.json"}));
    EXPECT_FALSE(result->notes.empty());
    EXPECT_TRUE(json::accept(to_json(*result)));

    const auto source = must(Checkpoint::open(in_)), target = must(Checkpoint::open(out));
    EXPECT_EQ(target->model().format,
              ct ? SourceFormat::kCompressedTensors : SourceFormat::kModelOpt);
    EXPECT_EQ(target->model().family, "deepseek_v4");
    for (const Finding& f : target->findings())
      EXPECT_NE(f.severity, Severity::kError) << to_string(f);
    const TensorIndex& index = target->index();
    QuantizationQuality gate;
    for (int64_t e = 0; e < 4; ++e) {
      expect_quantized(in_, out, 1, e, ScaleSearch::kMax, {}, {}, &gate);
      const auto loaded = must(target->expert(1, e));
      for (const auto& [word, view] : {std::pair("w1.", &loaded->source.gate),
                                       {"w3.", &loaded->source.up},
                                       {"w2.", &loaded->source.down}}) {
        const std::string base = "layers.1.ffn.experts." + std::to_string(e) + "." + word;
        const auto scale = index.find(base + (ct ? "weight_global_scale" : "weight_scale_2"));
        ASSERT_NE(scale.info, nullptr);
        EXPECT_EQ(describe(*scale.info), ct ? "(1) F32" : "() F32");
        const float stored = scalar_of(index, scale.info->name);
        EXPECT_FLOAT_EQ(ct ? 1 / stored : stored, view->tensor_scale);
        EXPECT_EQ(scalar_of(index, base + (ct ? "input_global_scale" : "input_scale")), 1.0f);
        EXPECT_NE(index.find(base + (ct ? "weight_packed" : "weight")).info, nullptr);
        EXPECT_EQ(index.find(base + (ct ? "weight" : "weight_packed")).info, nullptr);
      }
    }
    ASSERT_EQ(result->layers.size(), 2u);
    EXPECT_EQ(result->layers[1].experts, 4);
    EXPECT_NEAR(result->layers[1].gate.sqnr_db(), gate.sqnr_db(), 1e-9);
    EXPECT_GT(result->mean_sqnr_db(), 18.0);
    EXPECT_LT(result->mean_sqnr_db(), 24.0);

    int64_t copied = 0;
    for (const auto& [name, ref] : source->index().tensors()) {
      if (name.find(".experts.") != std::string::npos && name.find("shared") == std::string::npos)
        continue;
      ++copied;
      EXPECT_EQ(bytes_of(index, name), bytes_of(source->index(), name)) << name;
      EXPECT_EQ(describe(*index.find(name).info), describe(*ref.info));
    }
    EXPECT_EQ(result->copied_tensors, copied);
    EXPECT_EQ(read_file(out + "/tokenizer.json"), "{}");
    EXPECT_EQ(fs::exists(out + "/hf_quant_config.json"), !ct);
    EXPECT_FALSE(fs::exists(out + "/quantize.plan.json"));
    EXPECT_FALSE(fs::exists(out + "/pytorch_model.bin"))
        << "other weights would contradict the new ones";
  }
}

TEST_F(QuantizeCheckpoint, ConfigsAreWhatEnginesRead) {
  ASSERT_OK(quantize_checkpoint(in_, out_));
  json config = json_of(out_ + "/config.json");
  const json q = config.at("quantization_config");
  EXPECT_EQ(q.at("quant_method"), "fp8");
  EXPECT_EQ(q.at("moe_quant_algo"), "NVFP4");
  EXPECT_EQ(q.at("weight_block_size"), json({128, 128}));
  EXPECT_EQ(q.at("quantized_layers").at("layers.1.ffn.experts").at("quant_algo"), "NVFP4");
  for (const char* kept : {"layers.0.attn.wq_a", "layers.1.ffn.shared_experts.w2", "head"})
    EXPECT_THAT(q.at("modules_to_not_convert"), Contains(kept));
  config.erase("quantization_config");
  config.erase("expert_dtype");
  EXPECT_EQ(config, json_of(in_ + "/config.json")) << "the rest stays";
  const json hf = json_of(out_ + "/hf_quant_config.json").at("quantization");
  EXPECT_EQ(hf.at("quant_algo"), "MIXED_PRECISION");
  EXPECT_EQ(hf.at("group_size"), 16);
  EXPECT_TRUE(hf.at("kv_cache_quant_algo").is_null());
  EXPECT_TRUE(hf.at("quantized_layers").contains("layers.0.ffn.experts.3.w2"));
  EXPECT_EQ(hf.at("quantized_layers").size(), 24u);
}

TEST_F(QuantizeCheckpoint, QwenConfigsNameWhatIsNotQuantized) {
  SynthesizeOptions qwen = tiny_model(2, 4, 128, 64);
  qwen.family = "qwen3_moe";
  ASSERT_OK(synthesize_checkpoint(dir_.file("qwen"), qwen));
  QuantizeOptions options;
  options.layers = {1};
  ASSERT_OK(quantize_checkpoint(dir_.file("qwen"), dir_.file("mo"), options));
  const json config = json_of(dir_.file("mo/config.json")).at("quantization_config");
  EXPECT_EQ(config.at("quant_method"), "modelopt");
  EXPECT_EQ(config.at("quant_algo"), "NVFP4");
  EXPECT_EQ(config.at("config_groups").at("group_0").at("weights").at("group_size"), 16);
  const json ignore = config.at("ignore");
  for (const char* name : {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj",
                           "model.layers.0.mlp.experts*"})
    EXPECT_THAT(ignore, Contains(name));
  for (const json& name : ignore)
    EXPECT_EQ(name.get<std::string>().find("layers.1.mlp.experts"), std::string::npos);
  EXPECT_EQ(json_of(dir_.file("mo/hf_quant_config.json")).at("quantization").at("exclude_modules"),
            ignore);

  options.format = OutputFormat::kCompressedTensors;
  ASSERT_OK(quantize_checkpoint(dir_.file("qwen"), dir_.file("ct"), options));
  const json ct = json_of(dir_.file("ct/config.json")).at("quantization_config");
  EXPECT_EQ(ct.at("quant_method"), "compressed-tensors");
  EXPECT_EQ(ct.at("format"), "nvfp4-pack-quantized");
  const json group = ct.at("config_groups").at("group_0");
  EXPECT_EQ(group.at("weights").at("strategy"), "tensor_group");
  EXPECT_EQ(group.at("weights").at("dynamic"), false);
  EXPECT_EQ(group.at("input_activations").at("dynamic"), "local");
  EXPECT_THAT(ct.at("ignore"), Contains("re:^model\\.layers\\.0\\.mlp\\.experts.*"));

  // The excluded layer is byte for byte the source's.
  const auto a = must(TensorIndex::open(dir_.file("qwen"))),
             b = must(TensorIndex::open(dir_.file("mo")));
  const std::string name = "model.layers.0.mlp.experts.2.up_proj.weight";
  EXPECT_EQ(bytes_of(*a, name), bytes_of(*b, name));
  EXPECT_NE(b->find("model.layers.1.mlp.experts.2.up_proj.weight_scale_2").info, nullptr);
}

// A value that only Python's json has is kept: null would be another model.
TEST_F(QuantizeCheckpoint, AnInfinityOfTheConfigStaysAsItIs) {
  std::string config = read_file(in_ + "/config.json");
  config.insert(config.find('{') + 1, "\"time_step_limit\": [0.0, Infinity], \"jitter\": NaN,");
  std::ofstream(in_ + "/config.json", std::ios::trunc) << config;
  ASSERT_OK(quantize_checkpoint(in_, out_));
  EXPECT_THAT(read_file(out_ + "/config.json"), AllOf(HasSubstr("Infinity"), HasSubstr("NaN")));
  EXPECT_EQ(read_file(out_ + "/hf_quant_config.json").find("Infinity"), std::string::npos);
  EXPECT_OK(Checkpoint::open(out_));
}

TEST_F(QuantizeCheckpoint, RefusesWhatItCannotDo) {
  const auto code = [&](const std::string& from, const std::string& to, auto change) {
    QuantizeOptions options;
    change(options);
    return quantize_checkpoint(from, to, options).status().code();
  };
  const auto nothing = [](QuantizeOptions&) {};
  EXPECT_EQ(code(in_, in_, nothing), Code::kInvalidArgument);
  EXPECT_EQ(code(in_, in_ + "/inside", nothing), Code::kInvalidArgument);
  EXPECT_NE(code(dir_.file("nowhere"), out_, nothing), Code::kOk);
  const auto layer = [](QuantizeOptions& o) { o.layers = {7}; };
  EXPECT_EQ(code(in_, out_, layer), Code::kInvalidArgument);
  const auto scale = [](QuantizeOptions& o) { o.input_scales[0] = {0.0f, 1.0f}; };
  EXPECT_EQ(code(in_, out_, scale), Code::kInvalidArgument);
  const auto no_layer = [](QuantizeOptions& o) { o.input_scales[2] = {0.5f, 0.5f}; };
  EXPECT_EQ(code(in_, out_, no_layer), Code::kInvalidArgument);
  EXPECT_FALSE(fs::exists(out_));
  ASSERT_EQ(code(in_, out_, nothing), Code::kOk);
  EXPECT_EQ(code(in_, out_, nothing), Code::kInvalidArgument) << "finished";
  EXPECT_EQ(code(out_, dir_.file("again"), nothing), Code::kUnsupported) << "NVFP4 already";
}

TEST_F(QuantizeCheckpoint, NonFiniteWeightIsNamed) {
  const auto index = must(TensorIndex::open(in_));
  const TensorIndex::Ref ref = index->find("layers.1.ffn.experts.2.w3.weight");
  {
    std::fstream file(ref.file->path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(ref.file->data_offset() + ref.info->begin +
                                           2 * (40 * 128 + 17)));
    file.write("\x80\x7f", 2);  // +Inf
  }
  EXPECT_THAT(quantize_checkpoint(in_, out_),
              Refused(Code::kBadInput, "layers.1.ffn.experts.2.w3.weight (40, 17)"));
}

TEST_F(QuantizeCheckpoint, OptionsChangeWhatTheySayAndThreadsNothing) {
  QuantizeOptions options;
  const auto max = must(quantize_checkpoint(in_, dir_.file("max"), options));
  const auto pool = make_thread_pool(3);
  options.executor = pool.get();
  ASSERT_OK(quantize_checkpoint(in_, dir_.file("threads"), options));
  EXPECT_THAT(differing(read_files(dir_.file("max")), read_files(dir_.file("threads"))), IsEmpty());
  options.search = ScaleSearch::kMse;
  options.share_gate_up_scale = false;
  options.input_scales[1] = {0.25f, 0.125f};
  const auto mse = must(quantize_checkpoint(in_, dir_.file("mse"), options));
  EXPECT_GT(mse->mean_sqnr_db(), max->mean_sqnr_db() + 0.2);
  const auto b = must(TensorIndex::open(dir_.file("mse")));
  const std::string base = "layers.1.ffn.experts.0.";
  EXPECT_NE(scalar_of(*b, base + "w1.weight_scale_2"), scalar_of(*b, base + "w3.weight_scale_2"));
  EXPECT_EQ(scalar_of(*b, base + "w1.input_scale"), 0.25f);
  EXPECT_EQ(scalar_of(*b, base + "w3.input_scale"), 0.25f);
  EXPECT_EQ(scalar_of(*b, base + "w2.input_scale"), 0.125f);
  EXPECT_EQ(scalar_of(*b, "layers.0.ffn.experts.0.w2.input_scale"), 1.0f);
}

TEST_F(QuantizeCheckpoint, InputScalesAreReplacedInACopy) {
  for (const OutputFormat format : {OutputFormat::kModelOpt, OutputFormat::kCompressedTensors}) {
    const std::string from = dir_.file(to_string(format)), to = from + "-scaled";
    QuantizeOptions options;
    options.format = format;
    ASSERT_OK(quantize_checkpoint(in_, from, options));
    const auto before = read_files(from);
    ASSERT_OK(write_input_scales(from, to, {{1, {0.5f, 0.0625f}}}, 64 << 10));
    EXPECT_EQ(read_files(from), before) << "the source is never written to";
    const auto a = must(Checkpoint::open(from)), b = must(Checkpoint::open(to));
    ASSERT_EQ(a->index().tensors().size(), b->index().tensors().size());
    int64_t changed = 0;
    for (const auto& [name, ref] : a->index().tensors()) {
      if (bytes_of(a->index(), name) == bytes_of(b->index(), name)) continue;
      ++changed;
      EXPECT_TRUE(name.starts_with("layers.1.") && name.find("input_") != std::string::npos)
          << name;
    }
    EXPECT_EQ(changed, 4 * 3);
    const auto scales = must(b->layer_scales(1));
    EXPECT_EQ(scales->hidden, 0.5f);
    EXPECT_EQ(scales->intermediate, 0.0625f);
    for (const auto& [target, layer] : {std::pair(to, 1), {from, 1}, {dir_.file("x"), 9}})
      EXPECT_EQ(write_input_scales(from, target, {{layer, {0.5f, 0.5f}}}).code(),
                Code::kInvalidArgument);
  }
  EXPECT_EQ(write_input_scales(in_, dir_.file("x"), {}).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
